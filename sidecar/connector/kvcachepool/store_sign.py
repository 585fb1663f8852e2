"""Checks signatures of requests (AWS Signature Version 4) with a key from the files of a mounted Secret."""

from __future__ import annotations

import calendar
import hashlib
import hmac
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from .store_errors import Refused

_ID, _SECRET = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
_ALGORITHM = "AWS4-HMAC-SHA256"
#: Largest difference of the clocks of client and server.
_SKEW_S = 900
#: The files are read again after this long.
_FRESH_S = 1.0
_MUST_BE_SIGNED = {"host", "x-amz-date", "x-amz-content-sha256"}


class BadKey(Exception):
    """The key cannot be read."""


class Keys:
    """The access key of a folder, as `s3.auth` of the sidecar names it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._pair = self._read()
        self._read_at = time.monotonic()

    def _read(self) -> tuple[str, str]:
        try:
            key_id, secret = ((self._folder / name).read_text().strip() for name in (_ID, _SECRET))
        except (OSError, UnicodeDecodeError) as error:
            raise BadKey(f"--auth needs the files {_ID} and {_SECRET} in {self._folder}: {error}") from error
        if not key_id or not secret:
            raise BadKey(f"{_ID} or {_SECRET} in {self._folder} is empty")
        return key_id, secret

    def pair(self) -> tuple[str, str]:
        """The current access key and its secret; the last one if the files cannot be read."""
        with self._lock:
            if time.monotonic() - self._read_at >= _FRESH_S:
                self._read_at = time.monotonic()
                try:
                    self._pair = self._read()
                except BadKey:
                    return self._pair
            return self._pair


def _encoded(text: str) -> str:
    return quote(unquote(text), safe="-_.~")


def _canonical_query(query: str) -> str:
    pairs = (item.partition("=") for item in query.split("&") if item)
    return "&".join(sorted(f"{_encoded(name)}={_encoded(value)}" for name, _, value in pairs))


def _fields(header: str) -> dict[str, str]:
    scheme, _, rest = header.partition(" ")
    if scheme != _ALGORITHM:
        raise Refused(403, "AccessDenied", f"expected a header Authorization with {_ALGORITHM}")
    pairs = (part.strip().partition("=") for part in rest.split(","))
    return {name: value for name, _, value in pairs}


def check(keys: Keys, method: str, target: str, headers: Mapping[str, str], now_s: float) -> None:
    """Raises `Refused` unless the request is signed with the key. `headers` have lower-case names, `target` is the
    request's path and query as sent.
    """
    fields = _fields(headers.get("authorization", ""))
    scope = fields.get("Credential", "").split("/")
    names = fields.get("SignedHeaders", "").split(";")
    signs_enough = set(names) & headers.keys() >= _MUST_BE_SIGNED
    if len(scope) != 5 or scope[4] != "aws4_request" or not signs_enough:
        raise Refused(403, "AccessDenied", f"expected a signature of the headers {', '.join(sorted(_MUST_BE_SIGNED))}")
    key_id, secret = keys.pair()
    if not hmac.compare_digest(scope[0].encode(), key_id.encode()):
        raise Refused(403, "InvalidAccessKeyId", "the access key is not the one of --auth")
    date = headers.get("x-amz-date", "")
    try:
        sent_s = calendar.timegm(time.strptime(date, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        raise Refused(403, "AccessDenied", "x-amz-date is not a date") from None
    if abs(sent_s - now_s) > _SKEW_S or not date.startswith(scope[1]):
        raise Refused(403, "RequestTimeTooSkewed", f"the clocks differ by more than {_SKEW_S} s: set them")
    path, _, query = target.partition("?")
    signed = "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names)
    body = headers.get("x-amz-content-sha256", "")
    request = "\n".join([method, path, _canonical_query(query), signed, ";".join(names), body])
    digest = hashlib.sha256(request.encode()).hexdigest()
    to_sign = "\n".join([_ALGORITHM, date, "/".join(scope[1:]), digest])
    key = f"AWS4{secret}".encode()
    for part in (*scope[1:], to_sign):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(key.hex().encode(), fields.get("Signature", "").encode()):
        raise Refused(403, "SignatureDoesNotMatch", "the secret is not the one of --auth")
