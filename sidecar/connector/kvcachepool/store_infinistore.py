"""InfiniStore, by its Python client over TCP: `python -m kvcachepool.store kvcachepool.store_infinistore:InfiniStore`.

InfiniStore reports no sizes, reads no ranges and lists nothing. So an object is several values: segments `<key>#0`,
`<key>#1` and so on, and its size `<key>#size`, which is written last and removed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
from collections.abc import Iterator, Sequence
from typing import Any

from .store_api import Stat, Store


def _size_key(key: str) -> str:
    return f"{key}#size"


class InfiniStore(Store):
    """A pool of connections to one server.

    Args:
        host: the server.
        port: its service port.
        connections: connections, which is the number of concurrent operations.
        segment_bytes: bytes of a value; all clients of a server must use the same.
    """

    def __init__(self, host: str, port: int = 22345, *, connections: int = 16, segment_bytes: int = 4 << 20) -> None:
        if min(connections, segment_bytes) <= 0:
            raise ValueError("connections and segment_bytes must be above 0")
        self._host, self._port = host, port
        self._count, self._segment_bytes = connections, segment_bytes
        # None: a connection that has to be opened.
        self._connections: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open(self) -> None:
        """Opens one connection now, and the others when they are used."""
        for _ in range(self._count):
            self._connections.put(None)
        with self._connection():
            return

    def close(self) -> None:
        """Closes the connections that are not in use."""
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self._connections.get_nowait()
                if connection is not None:
                    connection.close()

    def stat(self, key: str) -> Stat | None:
        """See `Store`."""
        with self._connection() as connection:
            size = self._read(connection, _size_key(key))
            return None if size is None else Stat(int.from_bytes(size, "little"))

    def get(self, key: str, offset: int, length: int) -> bytearray | None:
        """See `Store`. Reads the segments that have these bytes; an object that lacks one of them becomes absent."""
        data = bytearray()
        with self._connection() as connection:
            first, last = offset // self._segment_bytes, (offset + length - 1) // self._segment_bytes
            for number in range(first, last + 1):
                segment = self._read(connection, f"{key}#{number}")
                if segment is None:
                    # It was evicted. Without its size the object is absent for `stat` too, so it is stored again.
                    connection.delete_keys([_size_key(key)])
                    return None
                begin = number * self._segment_bytes
                data += memoryview(segment)[max(0, offset - begin) : offset + length - begin]
        return data

    def put(self, key: str, data: memoryview) -> None:
        """See `Store`."""
        with self._connection() as connection:
            connection.delete_keys([_size_key(key)])
            for number in range(self._segments(len(data))):
                begin = number * self._segment_bytes
                self._write(connection, f"{key}#{number}", data[begin : begin + self._segment_bytes])
            self._write(connection, _size_key(key), memoryview(len(data).to_bytes(8, "little")))

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store`."""
        with self._connection() as connection:
            sizes = [self._read(connection, _size_key(key)) for key in keys]
            connection.delete_keys([_size_key(key) for key in keys])
            names = [
                f"{key}#{number}"
                for key, size in zip(keys, sizes, strict=True)
                if size is not None
                for number in range(self._segments(int.from_bytes(size, "little")))
            ]
            if names:
                connection.delete_keys(names)

    def _segments(self, size: int) -> int:
        return -(-size // self._segment_bytes)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection for one operation. After an error it is not used again: its next reply may be of this one."""
        connection = self._connections.get()
        try:
            if connection is None:
                connection = self._connect()
            yield connection
        except BaseException:
            broken, connection = connection, None
            if broken is not None:
                broken.close()
            raise
        finally:
            self._connections.put(connection)

    def _connect(self) -> Any:
        import infinistore

        settings = infinistore.ClientConfig(
            host_addr=self._host, service_port=self._port, connection_type=infinistore.TYPE_TCP
        )
        connection = infinistore.InfinityConnection(settings)
        connection.connect()
        return connection

    def _read(self, connection: Any, name: str) -> bytes | None:
        # The client ends the process if it reads an absent key.
        if not connection.check_exist(name):
            return None
        return bytes(memoryview(connection.tcp_read_cache(name)))

    def _write(self, connection: Any, name: str, data: memoryview) -> None:
        # The client takes an address, also of memory that is only read.
        copied = (ctypes.c_char * len(data)).from_buffer_copy(data)
        connection.tcp_write_cache(name, ctypes.addressof(copied), len(data))
