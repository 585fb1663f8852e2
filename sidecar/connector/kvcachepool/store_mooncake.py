"""Mooncake Store, by its Python client: `python -m kvcachepool.store kvcachepool.store_mooncake:MooncakeStore`.

The package is `mooncake-transfer-engine`. Mooncake evicts by itself and lists nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Sequence
from typing import Any

from .store_api import Full, Stat, Store

#: Error codes of Mooncake.
_NO_ROOM = -200
_NOT_READY = -703
_NOT_FOUND = -704
#: Codes of an object that readers cannot have: there is none, or its first replica is being written.
_ABSENT = (_NOT_READY, _NOT_FOUND)


class MooncakeError(Exception):
    """Mooncake refused an operation."""


def _failed(operation: str, code: int) -> MooncakeError:
    return MooncakeError(f"{operation} failed with Mooncake's error {code}: see its log, and the state of its master")


class MooncakeStore(Store):
    """A client that also contributes memory to the store.

    Args:
        master: host:port of `mooncake_master`.
        hostname: name or address of this host for the other clients.
        metadata: metadata server of Mooncake; P2PHANDSHAKE needs none.
        segment_bytes: memory that this process contributes; 0 for none.
        buffer_bytes: memory of the client's transfers; an object must fit into it.
        protocol: tcp or rdma.
        devices: names of RDMA devices.
        range_bytes: size of a buffer for reads.
        ranges: number of these buffers, which is the number of concurrent reads.
    """

    def __init__(
        self,
        master: str,
        hostname: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        segment_bytes: int = 4 << 30,
        buffer_bytes: int = 1 << 30,
        protocol: str = "tcp",
        devices: str = "",
        range_bytes: int = 8 << 20,
        ranges: int = 16,
    ) -> None:
        if min(buffer_bytes, range_bytes, ranges) <= 0:
            raise ValueError("buffer_bytes, range_bytes and ranges must be above 0")
        self._setup = (hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, master)
        self._range_bytes, self._ranges = range_bytes, ranges
        self._client: Any = None
        self._buffers: queue.SimpleQueue[tuple[mmap.mmap, int]] = queue.SimpleQueue()

    def open(self) -> None:
        """Joins the store, and registers the buffers of reads."""
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        code = self._client.setup(*self._setup)
        if code != 0:
            raise _failed("setup", code)
        for _ in range(self._ranges):
            buffer = mmap.mmap(-1, self._range_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            code = self._client.register_buffer(address, self._range_bytes)
            if code != 0:
                raise _failed("register_buffer", code)
            self._buffers.put((buffer, address))

    def close(self) -> None:
        """Leaves the store. The memory that this process contributed, and its objects, are gone."""
        self._client.close()

    def stat(self, key: str) -> Stat | None:
        """See `Store`."""
        size = self._client.get_size(key)
        if size in _ABSENT:
            return None
        if size < 0:
            raise _failed("get_size", size)
        return Stat(size)

    def get(self, key: str, offset: int, length: int) -> bytearray | None:
        """See `Store`. A range goes through registered memory, so that only its bytes are transferred."""
        data = bytearray(length)
        buffer, address = self._buffers.get()
        try:
            for at in range(0, length, self._range_bytes):
                wanted = min(self._range_bytes, length - at)
                got = self._client.get_into_ranges([address], [[key]], [[[0]]], [[[offset + at]]], [[[wanted]]])[0][0][
                    0
                ]
                if got in _ABSENT:
                    return None
                if got != wanted:
                    raise _failed("get_into_ranges", got)
                data[at : at + wanted] = memoryview(buffer)[:wanted]
        finally:
            self._buffers.put((buffer, address))
        return data

    def put(self, key: str, data: memoryview) -> None:
        """See `Store`."""
        code = self._client.upsert(key, data)
        if code == _NO_ROOM:
            raise Full("no segment of Mooncake has room: mount more, or lower eviction_high_watermark_ratio")
        if code != 0:
            raise _failed("upsert", code)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store`. Without `force` Mooncake keeps an object that was read within its lease."""
        codes = self._client.batch_remove(list(keys), True)
        for code in codes:
            if code not in (0, *_ABSENT):
                raise _failed("batch_remove", code)
