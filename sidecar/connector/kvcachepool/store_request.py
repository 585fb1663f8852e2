"""Requests as they arrive: bytes with deadlines, and what a request is about."""

from __future__ import annotations

import io
import re
import socket
import time
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from .store_errors import Refused

#: A body that the signature does not cover.
UNSIGNED = "UNSIGNED-PAYLOAD"
_SHA256 = re.compile(r"[0-9a-f]{64}$", re.ASCII)
_KEY_BYTES = 1024
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?$", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][-a-z0-9.]{1,61}[a-z0-9]$", re.ASCII)
#: Names of a query, by method. Others would mean another operation, or a condition that is not checked.
_OBJECT_QUERY = {
    "PUT": frozenset({"uploadId", "partNumber"}),
    "POST": frozenset({"uploadId", "uploads"}),
    "DELETE": frozenset({"uploadId"}),
}
_BUCKET_QUERY = {
    "GET": frozenset({"list-type", "prefix", "max-keys", "continuation-token"})
    | {"uploads", "max-uploads", "key-marker", "upload-id-marker"},
    "POST": frozenset({"delete"}),
}
#: Headers that mean something here.
_SINGLE = re.compile(r"host$|authorization$|range$|(?:content|if|x-amz)-", re.IGNORECASE | re.ASCII)


class Target(NamedTuple):
    """What a request is about."""

    bucket: str
    #: Empty for the bucket itself.
    name: str
    query: dict[str, str]

    @property
    def key(self) -> str:
        """The key in the store."""
        return f"{self.bucket}/{self.name}"


def target(method: str, sent: str) -> Target:
    """Parses a path and its query."""
    path, _, query = sent.partition("?")
    try:
        decoded = unquote(path, errors="strict")
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=32)
    except ValueError as error:
        raise Refused(400, "InvalidURI", f"the address is invalid: {error}") from error
    bucket, _, name = decoded.removeprefix("/").partition("/")
    if not decoded.startswith("/") or not _BUCKET.match(bucket):
        raise Refused(400, "InvalidBucketName", "expected /bucket/key: set s3.addressingStyle to Path")
    if name:
        check_key(bucket, name)
    parsed = Target(bucket, name, dict(pairs))
    if len(parsed.query) != len(pairs):
        raise Refused(400, "InvalidURI", "expected each name of the query once")
    known = (_OBJECT_QUERY if name else _BUCKET_QUERY).get(method, frozenset())
    unknown = [field for field in parsed.query if field not in known and field != "x-id"]
    if "partNumber" in parsed.query and "uploadId" not in parsed.query:
        unknown.append("partNumber")
    if unknown:
        raise Refused(501, "NotImplemented", f"{method} with {unknown[0]} in the query is not supported")
    return parsed


def check_key(bucket: str, name: str) -> None:
    """Raises `Refused` unless it is a key that classes can use as the path of a file."""
    key = f"{bucket}/{name}"
    if not key.isascii() or not key.isprintable() or len(key) > _KEY_BYTES:
        raise Refused(400, "InvalidArgument", f"expected a key of at most {_KEY_BYTES} printable ASCII characters")
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise Refused(400, "InvalidArgument", "expected a key without the segments '.' and '..' and without empty ones")


def check_prefix(bucket: str, prefix: str) -> None:
    """Raises `Refused` unless keys can begin with it. It may end with a slash."""
    if prefix:
        check_key(bucket, prefix.removesuffix("/"))


def byte_range(header: str | None, size: int) -> tuple[int, int]:
    """First byte and end of what a header Range wants of an object of `size` bytes."""
    if header is None:
        return 0, size
    parsed = _RANGE.match(header)
    if parsed is None:
        raise Refused(400, "InvalidArgument", "expected Range: bytes=FIRST-LAST")
    start, end = int(parsed[1]), min(int(parsed[2]) + 1, size) if parsed[2] else size
    if start >= end:
        raise Refused(416, "InvalidRange", f"the object has {size} bytes")
    return start, end


def check_headers(headers: Message) -> None:
    """Raises `Refused` if a proxy in front or a signature could have another reading of the headers."""
    # A folded line is none, but servers differ about it.
    if headers.defects or any("\n" in value or "\r" in value for value in headers.values()):
        raise Refused(400, "InvalidRequest", "expected header lines of the form NAME: VALUE, found another one")
    names = [name.lower() for name in headers]
    for name in names:
        if _SINGLE.match(name) and names.count(name) > 1:
            raise Refused(400, "InvalidRequest", f"the header {name} is repeated: send it once")
    digest = headers.get("x-amz-content-sha256", UNSIGNED)
    if digest != UNSIGNED and not _SHA256.match(digest):
        why = f"expected x-amz-content-sha256 with a hex digest or {UNSIGNED}: set s3.checksums to WhenRequired"
        raise Refused(400, "InvalidRequest", why)
    if "x-amz-copy-source" in names:
        raise Refused(501, "NotImplemented", "objects are not copied: read the object and store it")


class Receiver(io.RawIOBase):
    """The bytes that a client sends. A client that sends one byte now and then does not keep its connection."""

    def __init__(self, connection: socket.socket, idle_s: float) -> None:
        self._connection, self._idle_s = connection, idle_s
        self._head_s = idle_s
        self._deadline_s: float | None = None

    def await_request(self, head_s: float) -> None:
        """The next byte arrives within the idle time, and all others within `head_s` after it."""
        self._head_s, self._deadline_s = head_s, None

    def within(self, seconds: float) -> None:
        """All bytes from now on arrive within this time."""
        self._deadline_s = time.monotonic() + seconds

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`. Raises `TimeoutError`."""
        timeout_s = self._idle_s if self._deadline_s is None else self._deadline_s - time.monotonic()
        if timeout_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(timeout_s)
        try:
            got = self._connection.recv_into(buffer)
            if self._deadline_s is None:
                self.within(self._head_s)
            return got
        finally:
            # Responses have the idle time.
            self._connection.settimeout(self._idle_s)
