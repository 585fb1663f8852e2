"""Classes that tests serve as tiers: objects in a folder, so that they survive the process, and faults by file."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from kvcachepool.store_api import Entry, Stat, Store


class FolderStore(Store):
    """Files of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def stat(self, key: str) -> Stat | None:
        try:
            found = self._path(key).stat()
        except FileNotFoundError:
            return None
        return Stat(found.st_size, found.st_mtime)

    def get(self, key: str, offset: int, length: int) -> bytes | None:
        try:
            with self._path(key).open("rb") as opened:
                opened.seek(offset)
                return opened.read(length)
        except FileNotFoundError:
            return None

    def put(self, key: str, data: memoryview) -> None:
        new = self._folder / f".{threading.get_ident()}"
        new.write_bytes(data)
        new.replace(self._path(key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def list(self, prefix: str, after: str, limit: int) -> list[Entry]:
        files = [file for file in self._folder.iterdir() if not file.name.startswith(".")]
        named = sorted((unquote(file.name), file) for file in files)
        page = [(key, file.stat()) for key, file in named if key.startswith(prefix) and key > after][:limit]
        return [Entry(key, found.st_size, found.st_mtime) for key, found in page]


class FaultyStore(FolderStore):
    """With a fault in the file `fault`, reads of objects of the cache go wrong."""

    def __init__(self, folder: str, faults: str) -> None:
        super().__init__(folder)
        self._faults = Path(faults)

    def get(self, key: str, offset: int, length: int) -> bytes | None:
        data = super().get(key, offset, length)
        fault = self._faults.read_text() if key.endswith(".kv") and self._faults.exists() else ""
        if fault == "raise":
            raise ConnectionResetError("the store hung up")
        if fault == "short" and data is not None:
            return data[:-1]
        if fault == "long" and data is not None:
            return data + b"x"
        if fault == "flip" and data is not None and len(data) > 8192:
            return data[:-1] + bytes([data[-1] ^ 1])
        if fault == "other":
            others = [e.key for e in self.list("", "", 1000) if e.key.endswith(".kv") and e.key != key]
            same = [other for other in others if self.stat(other)[0] == self.stat(key)[0]]  # type: ignore[index]
            return super().get(same[0], offset, length)
        if fault == "slow":
            threading.Event().wait(1)
        if fault == "hang":
            while self._faults.read_text() == "hang":
                threading.Event().wait(0.05)
        return data


class AsyncStore(Store):
    """The same with coroutines, and without a listing."""

    def __init__(self, folder: str) -> None:
        self._inner = FolderStore(folder)
        self.opened_on: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        self.opened_on = asyncio.get_running_loop()

    async def stat(self, key: str) -> Stat | None:
        assert asyncio.get_running_loop() is self.opened_on
        return self._inner.stat(key)

    async def get(self, key: str, offset: int, length: int) -> bytes | None:
        await asyncio.sleep(0)
        return self._inner.get(key, offset, length)

    async def put(self, key: str, data: memoryview) -> None:
        self._inner.put(key, data)

    async def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)
