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

_KEY_BYTES = 1024
_BUCKET = re.compile(r"[a-z0-9][-a-z0-9.]{1,61}[a-z0-9]$", re.ASCII)
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


def target(sent: str) -> Target:
    """Parses a path and its query."""
    path, _, query = sent.partition("?")
    try:
        decoded = unquote(path, errors="strict")
        pairs = dict(parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=32))
    except ValueError as error:
        raise Refused(400, "InvalidURI", f"the address is invalid: {error}") from error
    bucket, _, name = decoded.removeprefix("/").partition("/")
    if not decoded.startswith("/") or not _BUCKET.match(bucket):
        raise Refused(400, "InvalidBucketName", "expected /bucket/key: set s3.addressingStyle to Path")
    parsed = Target(bucket, name, pairs)
    if not parsed.key.isascii() or not parsed.key.isprintable() or len(parsed.key) > _KEY_BYTES:
        raise Refused(400, "InvalidArgument", f"expected a key of at most {_KEY_BYTES} printable ASCII characters")
    return parsed


def check_headers(headers: Message) -> None:
    """Raises `Refused` if a proxy in front or a signature could have another reading of the headers."""
    # A folded line is none, but servers differ about it.
    if headers.defects or any("\n" in value or "\r" in value for value in headers.values()):
        raise Refused(400, "InvalidRequest", "expected header lines of the form NAME: VALUE, found another one")
    names = [name.lower() for name in headers]
    for name in names:
        if _SINGLE.match(name) and names.count(name) > 1:
            raise Refused(400, "InvalidRequest", f"the header {name} is repeated: send it once")


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
