"""Uploads in parts. Parts are in this process's memory until the upload is complete, and expire with it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence

from .store_calls import Budget
from .store_errors import Refused
from .store_objects import etag_of

_UPLOADS_MOST = 256
_PARTS_MOST = 10_000
#: An upload without a request for this long has lost its client.
_IDLE_S = 120.0


class _Upload:
    def __init__(self, key: str) -> None:
        self.key = key
        self.parts: dict[int, tuple[str, bytearray]] = {}
        self.used_at = time.monotonic()

    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.parts.values())


class Uploads:
    """Uploads that have begun."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()
        self._joining = threading.Lock()

    def begin(self, key: str) -> str:
        """Returns the id of a new upload."""
        with self._lock:
            if len(self._uploads) >= _UPLOADS_MOST:
                raise Refused(503, "SlowDown", f"{_UPLOADS_MOST} uploads are running")
            upload_id = secrets.token_hex(16)
            self._uploads[upload_id] = _Upload(key)
            return upload_id

    def part(self, upload_id: str, key: str, number: int, data: bytearray) -> str:
        """Keeps a part, and returns its ETag. The caller has taken its bytes from the budget; this gives them back with
        the upload.
        """
        if not 1 <= number <= _PARTS_MOST:
            raise Refused(400, "InvalidArgument", f"expected a part number from 1 to {_PARTS_MOST}, got {number}")
        # Parts differ in their bytes, not only in their first ones.
        etag = etag_of(len(data), memoryview(secrets.token_bytes(16)))
        with self._lock:
            upload = self._at(upload_id, key)
            replaced = upload.parts.get(number)
            upload.parts[number] = (etag, data)
        if replaced:
            self._budget.give(len(replaced[1]))
        return etag

    @contextlib.contextmanager
    def joined(self, upload_id: str, key: str, wanted: Sequence[tuple[int, str]]) -> Iterator[bytearray]:
        """The bytes of these parts, which must be those that were uploaded. The upload has ended, whatever follows."""
        numbers = [number for number, _ in wanted]
        if not wanted or numbers != sorted(set(numbers)):
            raise Refused(400, "InvalidPartOrder", "expected part numbers in ascending order")
        with self._lock:
            upload = self._at(upload_id, key)
            for number, etag in wanted:
                have, _ = upload.parts.get(number, ("", b""))
                if have.strip('"') != etag.strip('"'):
                    raise Refused(400, "InvalidPart", f"part {number} was not uploaded with this ETag")
            del self._uploads[upload_id]
        nbytes = upload.nbytes()
        try:
            # The parts keep their room, and take no more: uploads that fill the memory could not be completed then. A
            # part exists twice while it is appended, so one upload at a time exceeds the memory by one part.
            with self._joining:
                whole = upload.parts.pop(numbers[0])[1]
                for number in numbers[1:]:
                    whole += upload.parts.pop(number)[1]
            yield whole
        finally:
            self._budget.give(nbytes)

    def drop(self, upload_id: str) -> None:
        """Ends an upload; an unknown one is no error."""
        with self._lock:
            upload = self._uploads.pop(upload_id, None)
        if upload is not None:
            self._budget.give(upload.nbytes())

    def _at(self, upload_id: str, key: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise Refused(404, "NoSuchUpload", "the upload expired, or was begun at another server")
        upload.used_at = time.monotonic()
        return upload

    def expire(self) -> None:
        """Ends uploads that were not used for too long."""
        before = time.monotonic() - _IDLE_S
        with self._lock:
            old = [name for name, upload in self._uploads.items() if upload.used_at < before]
        for upload_id in old:
            self.drop(upload_id)
