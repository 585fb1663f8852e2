"""What the two LMCache adapters share: keys, the form of a memory object in a header, counted pins.

LMCache 0.5.6. Of LMCache only its memory objects and keys are used here.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from kvcachepool.calls import Calls
from kvcachepool.client import Client, Header
from kvcachepool.object_bytes import bounded
from kvcachepool.place import socket_path

logger = logging.getLogger("kvcachepool")
T = TypeVar("T")

#: Longer keys are replaced by their hash. The client takes 64 KiB.
_KEY_BYTES = 32 << 10
#: Entries of the table of pins at which expired ones are first removed.
_PRUNE_FROM = 4096
#: Bytes of one request, unless one object is larger. LMCache gets its buffers back request by request, and a list that
#: is loaded in parts may exceed the memory tier.
_REQUEST_BYTES = 64 << 20
#: Ranges of the settings in seconds.
_SECONDS: dict[str, tuple[float, float, Any, str]] = {
    "timeout_s": (0.001, 60, (int, float), "seconds"),
    "pin_ttl_s": (1, 86_400, int, "whole seconds"),
    "ttl_s": (0, 10 * 365 * 86_400, int, "whole seconds"),
}


@dataclass(frozen=True)
class Settings:
    """The settings of an adapter."""

    #: Path of the sidecar's socket, or remote servers (`tls://host:port`).
    socket: str
    #: Keeps objects apart from those of other namespaces.
    namespace: str = ""
    #: Deadline of each operation, in seconds.
    timeout_s: float = 5.0
    #: Longest time that a lookup pins an object, in seconds. LMCache unpins it earlier.
    pin_ttl_s: int = 300
    #: Age at which stored objects expire, in seconds. 0: never.
    ttl_s: int = 0

    @classmethod
    def parse(cls, given: dict[str, Any], where: str) -> Settings:
        """Raises `ValueError` for an unknown key or a wrong value; `where` names the place in the error."""
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"{where}: unknown key {sorted(unknown)[0]!r}, expected one of {known}")
        for key in ("socket", "namespace"):
            if not isinstance(given.get(key, ""), str):
                raise ValueError(f"{where}: {key}: expected a string, got {given[key]!r}")
        for key, (least, most, kinds, what) in _SECONDS.items():
            value = given.get(key, least)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ValueError(f"{where}: {key}: expected {what} from {least} to {most}, got {value!r}")
        return cls(**{"socket": socket_path(), **given})

    def client(self, name: str) -> Client:
        """A client, connected if the sidecar is there by the deadline."""
        client = Client(self.socket, namespace=self.namespace, timeout_s=self.timeout_s, name=name)
        if not client.wait_connected(self.timeout_s):
            logger.warning("%s: no sidecar at %s yet, misses until there is", name, self.socket)
        return client


def chunk_key(key: Any) -> bytes:
    """The key of a `CacheEngineKey`.

    LMCache's own string joins the fields with `@` and `%`, so a tag's value can imitate another tag. This one cannot.
    """
    tags = [[name, f"{value}"] for name, value in key.tags or ()]
    return _key("chunk", key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, key._dtype_str, tags)


def object_key(key: Any) -> bytes:
    """The key of an `ObjectKey` of LMCache's server."""
    return _key("object", key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt)


def _key(*fields: Any) -> bytes:
    encoded = b"lmcache:" + msgspec.msgpack.encode(fields)
    if len(encoded) <= _KEY_BYTES:
        return encoded
    return b"lmcache#" + hashlib.sha256(encoded).digest()


def view(obj: MemoryObj) -> Any:
    """The object's bytes in LMCache's buffer as a writable array of uint8, without a copy."""
    return np.frombuffer(obj.byte_array, dtype=np.uint8)


@dataclass(frozen=True)
class Layout:
    """Shapes, dtypes and memory format of a memory object."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype | None, ...]
    format: MemoryFormat

    @classmethod
    def of(cls, obj: MemoryObj) -> Layout:
        """That of an object of LMCache."""
        meta = obj.metadata
        shapes = obj.get_shapes() if meta.shapes is not None or meta.dtype is None else [obj.get_shape()]
        dtypes = obj.get_dtypes() if meta.dtypes is not None or meta.dtype is None else [obj.get_dtype()]
        return cls(tuple(tuple(shape) for shape in shapes), tuple(dtypes), meta.fmt)

    @classmethod
    def read(cls, header: Header, nbytes: int) -> Layout | None:
        """That of a stored object of `nbytes`. None if these adapters did not write its header, or it does not fit."""
        try:
            more = header.metadata.get("more", [])
            parts = [(tuple(header.shape), header.dtype), *((tuple(shape), dtype) for shape, dtype in more)]
            shapes = tuple(shape for shape, _ in parts)
            dtypes = tuple(_dtype(name) for _, name in parts)
            form = MemoryFormat[header.format]
            layout = cls(shapes, dtypes, form)
            if any(type(size) is not int or size < 0 for shape in shapes for size in shape):
                return None
            if any((dtype is None) != (form is MemoryFormat.BINARY_BUFFER) for dtype in dtypes):
                return None
            return layout if layout.nbytes == nbytes else None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None

    @property
    def nbytes(self) -> int:
        """Bytes of a value. Objects without a dtype are bytes, and their first dimension counts them."""
        total = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            total += shape[0] if dtype is None else math.prod(shape) * dtype.itemsize
        return total

    def header(self) -> Header:
        """The header for a stored object."""
        names = ["" if dtype is None else str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        metadata: dict[str, Any] = {}
        if len(self.shapes) > 1:
            metadata["more"] = [[list(shape), name] for shape, name in zip(self.shapes[1:], names[1:], strict=True)]
        return Header(self.shapes[0], names[0], self.format.name, metadata)


def _dtype(name: str) -> torch.dtype | None:
    if not name:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"not a dtype of torch: {name!r}")
    return found


def grouped(things: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """The things in order in groups of one request each."""
    return bounded(things, nbytes, _REQUEST_BYTES)


class Pins:
    """Counted pins. The sidecar keeps an object in memory while its count is above zero, at most `ttl_s` after the
    last pin. An object that only a lower tier holds is counted as well: there is nothing to keep of it.
    """

    def __init__(
        self, client: Client, calls: Calls, ttl_s: int, start: Callable[[Callable[[], object]], object]
    ) -> None:
        """start: runs a call in another thread. Raises `RuntimeError` once that has ended."""
        self._client = client
        self._calls = calls
        self._ttl_s = ttl_s
        self._start = start
        # Held during a call, so that the pin of one thread does not pass the unpin of another one.
        self._order = threading.Lock()
        # Never held during a call.
        self._lock = threading.Lock()
        # The count of each key, and when its pin expires (monotonic).
        self._held: dict[bytes, tuple[int, float]] = {}
        # Keys whose last pin was taken back, which the sidecar has not heard yet.
        self._ended: set[bytes] = set()
        self._prune_at = _PRUNE_FROM

    def pin(self, keys: Sequence[bytes]) -> bool:
        """Pins objects that exist. False if the sidecar does not answer."""
        if not keys:
            return True
        with self._order:
            if self._calls.ask(lambda: self._client.pin(keys, self._ttl_s), -1) < 0:
                return False
            self._hold(keys)
            return True

    def pin_existing(self, keys: Sequence[bytes]) -> list[bool]:
        """Pins the objects that exist. Returns for each key whether it does; nothing if the sidecar does not answer.

        Pins before it looks: if all are in memory, one round trip is enough. Pins of a failed call expire.
        """
        with self._order:
            pinned = self._calls.ask(lambda: self._client.pin(keys, self._ttl_s), -1)
            if pinned < 0:
                return []
            silent: list[bool] = []
            if pinned == len(keys):
                there = [True] * len(keys)
            else:
                there = self._calls.ask(lambda: self._client.contains(keys), silent)
            self._hold([key for key, yes in zip(keys, there, strict=False) if yes])
            return there

    def _hold(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            now = time.monotonic()
            self._prune(now)
            for key in keys:
                self._held[key] = (self._count(key, now) + 1, now + self._ttl_s)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Takes one pin of each key back. Returns how many keys were pinned. One that is not is left alone.

        Another thread tells the sidecar: LMCache unpins key by key, in vLLM's thread.
        """
        with self._lock:
            now = time.monotonic()
            known, last = 0, []
            for key in keys:
                if not (count := self._count(key, now)):
                    self._held.pop(key, None)
                    continue
                known += 1
                if count > 1:
                    self._held[key] = (count - 1, self._held[key][1])
                else:
                    del self._held[key]
                    last.append(key)
            starts = bool(last) and not self._ended
            self._ended.update(last)
        if starts:
            try:
                self._start(self._send_ended)
            except RuntimeError:
                logger.debug("LMCache's adapter is closed: %d pins expire", len(last))
        return known

    def _send_ended(self) -> None:
        with self._order:
            with self._lock:
                now = time.monotonic()
                ended = [key for key in self._ended if not self._count(key, now)]
                self._ended.clear()
            if ended:
                self._calls.ask(lambda: self._client.unpin(ended), 0)

    def held(self, key: bytes) -> bool:
        """Whether the key is pinned."""
        with self._lock:
            return self._count(key, time.monotonic()) > 0

    def __len__(self) -> int:
        with self._lock:
            now = time.monotonic()
            return sum(now < until for _, until in self._held.values())

    def _count(self, key: bytes, now: float) -> int:
        count, until = self._held.get(key, (0, 0.0))
        return count if now < until else 0

    def _prune(self, now: float) -> None:
        if len(self._held) >= self._prune_at:
            self._held = {key: held for key, held in self._held.items() if now < held[1]}
            self._prune_at = max(_PRUNE_FROM, 2 * len(self._held))
