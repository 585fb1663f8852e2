"""Objects in this process's memory: the example of the guide, and a store for tests."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from .store_api import Entry, Full, Stat, Store


class _Object(NamedTuple):
    data: bytes
    modified_s: float


class MemoryStore(Store):
    """Keeps at most `capacity_bytes`."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self._capacity = capacity_bytes
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()

    def stat(self, key: str) -> Stat | None:
        """See `Store`."""
        found = self._objects.get(key)
        return Stat(len(found.data), found.modified_s) if found else None

    def get(self, key: str, offset: int, length: int) -> memoryview | None:
        """See `Store`."""
        found = self._objects.get(key)
        return memoryview(found.data)[offset : offset + length] if found else None

    def put(self, key: str, data: memoryview) -> None:
        """See `Store`."""
        with self._lock:
            used = sum(len(other.data) for name, other in self._objects.items() if name != key)
            if used + len(data) > self._capacity:
                raise Full(f"{used} of {self._capacity} bytes are used")
            self._objects[key] = _Object(bytes(data), time.time())

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store`."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def list(self, prefix: str, after: str, limit: int) -> list[Entry]:
        """See `Store`."""
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
            page = keys[bisect.bisect_right(keys, after) :][:limit]
            return [Entry(key, len(self._objects[key].data), self._objects[key].modified_s) for key in page]
