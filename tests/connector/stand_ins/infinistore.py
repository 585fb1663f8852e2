"""A stand-in for the package `infinistore` 0.2.35, whose server needs an RDMA device.

It has the names and signatures that `kvcachepool.store_infinistore` uses, and the behaviour of its server's source: a
write replaces, and a read of an absent key ends the process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np

TYPE_TCP = "TCP"
_values: dict[str, bytes] = {}
_lock = threading.Lock()


class ClientConfig:
    """Settings of a connection."""

    def __init__(self, **kwargs: Any) -> None:
        self.host_addr = kwargs["host_addr"]
        self.service_port = kwargs["service_port"]
        assert kwargs["connection_type"] == TYPE_TCP


class InfinityConnection:
    """One connection. It serves one call at a time."""

    def __init__(self, config: ClientConfig) -> None:
        self._port = config.service_port
        self._busy = threading.Lock()
        self._open = False

    def connect(self) -> None:
        """Raises if there is no server; here port 1 has none."""
        if self._port == 1:
            raise Exception("Failed to initialize remote connection")
        self._open = True

    def close(self) -> None:
        """Ends it."""
        self._open = False

    def _alone(self) -> threading.Lock:
        assert self._open, "the connection is closed"
        assert not self._busy.locked(), "two calls at once on one connection"
        return self._busy

    def tcp_read_cache(self, key: str, **kwargs: Any) -> np.ndarray:
        """The value of a key that exists."""
        with self._alone(), _lock:
            if key not in _values:
                os._exit(139)
            return np.frombuffer(_values[key], dtype=np.uint8)

    def tcp_write_cache(self, key: str, ptr: int, size: int, **kwargs: Any) -> None:
        """Stores the bytes at an address."""
        if key == "" or size == 0 or ptr == 0:
            raise Exception("key, size or ptr is empty")
        with self._alone(), _lock:
            _values[key] = ctypes.string_at(ptr, size)

    def check_exist(self, key: str) -> bool:
        """Whether a key exists."""
        with self._alone(), _lock:
            return key in _values

    def delete_keys(self, keys: list[str]) -> int:
        """The number of keys that existed."""
        with self._alone(), _lock:
            return sum(_values.pop(key, None) is not None for key in keys)
