"""A storage plugin of LMCache 0.5.6 that keeps chunks in the sidecar: memory, disk, Redis and S3 of a pool.

LMCache loads it by its `storage_plugins`:

    storage_plugins: [kvcachepool]
    extra_config:
      storage_plugin.kvcachepool.module_path: kvcachepool.lmcache
      storage_plugin.kvcachepool.class_name: KVCachePoolBackend
      kvcachepool.socket: /run/kvcachepool/sidecar.sock

Every chunk carries its shapes, dtypes and memory format, so another process can load it. Values are copied between
LMCache's CPU buffer and the sidecar's arena, once in each direction. A sidecar that is gone, late or refuses makes
misses, never errors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from kvcachepool.calls import Calls
from kvcachepool.client import Error, Item, Leased, Put
from kvcachepool.lmcache_objects import Layout, Pins, Settings, chunk_key, grouped, view

logger = logging.getLogger("kvcachepool")

_PREFIX = "kvcachepool."
_READERS = 4
#: Objects under lease at a time. A longer list is loaded in parts, so that it may exceed the memory tier.
_LEASE_OBJECTS = 16
#: Formats of whole chunks, whose shapes LMCache's metadata give.
_CHUNK_FORMATS = (MemoryFormat.KV_2LTD, MemoryFormat.KV_MLA_FMT)


@dataclass(frozen=True)
class _Store:
    """A chunk on its way to the sidecar. It holds a reference of LMCache's memory object."""

    key: Any
    name: bytes
    obj: MemoryObj
    layout: Layout


class KVCachePoolBackend(StoragePluginInterface):
    """LMCache's chunks in the sidecar. Stores run in the background, and all calls end by `kvcachepool.timeout_s`."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config and config.use_layerwise:
            # LMCache reports tokens as loaded before it loads their layers, and ignores a layer that is missing.
            raise ValueError("kvcachepool does not support LMCache's use_layerwise: set it to false")
        extra: dict[str, Any] = (config and config.extra_config) or {}
        given = {key.removeprefix(_PREFIX): value for key, value in extra.items() if key.startswith(_PREFIX)}
        self._settings = Settings.parse(given, f"LMCache's extra_config ({_PREFIX}*)")
        self._client = self._settings.client("lmcache")
        self._calls = Calls("LMCache's plugin")
        self._writer = ThreadPoolExecutor(1, "kvcachepool-put")
        self._pins = Pins(self._client, self._calls, self._settings.pin_ttl_s, self._writer.submit)
        self._readers = ThreadPoolExecutor(_READERS, "kvcachepool-get")
        self._lock = threading.Lock()
        self._closed = False
        # Chunks on their way to the sidecar, and their bytes.
        self._storing: set[bytes] = set()
        self._storing_bytes = 0
        # LMCache waits for room in its buffer when it loads. Stores that a slow sidecar delays must leave some.
        self._storing_limit = config.max_local_cpu_size * (1 << 30) / 2 if config else float("inf")
        # What asynchronous lookups pinned and no load has released, with the time at which the pins expire.
        self._lookups: OrderedDict[str, tuple[float, set[bytes]]] = OrderedDict()
        if local_cpu_backend is not None:
            self._close_before(local_cpu_backend)

    def __str__(self) -> str:
        return type(self).__name__

    def _close_before(self, local_cpu_backend: Any) -> None:
        """Ends all copies before LMCache frees the buffer they copy from. LMCache closes the buffer's backend first."""
        free = local_cpu_backend.close

        def close() -> None:
            self.close()
            free()

        local_cpu_backend.close = close

    # Lookups

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether a tier holds the chunk."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        """How many chunks from the front a tier holds. One round trip, and a second one for the pins."""
        names = [chunk_key(key) for key in keys]
        found = self._exists(names)
        return found if not pin or self._pins.pin(names[:found]) else 0

    def _exists(self, names: Sequence[bytes]) -> int:
        return self._calls.ask(lambda: self._client.exists(names), 0) if names else 0

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """`batched_contains` off the event loop. The load of this lookup releases its pins."""

        def look() -> int:
            found = self.batched_contains(keys, pin)
            if pin and found:
                self._remember(lookup_id, {chunk_key(key) for key in keys[:found]})
            return found

        return await self._in_reader(look, 0)

    def _remember(self, lookup_id: str, names: set[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            self._lookups[lookup_id] = (now + self._settings.pin_ttl_s, names)
            self._lookups.move_to_end(lookup_id)
            while next(iter(self._lookups.values()))[0] <= now:
                self._lookups.popitem(last=False)

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Whether the chunk is on its way to the sidecar."""
        with self._lock:
            return chunk_key(key) in self._storing

    def pin(self, key: Any) -> bool:
        """Keeps the chunk in memory until `unpin`, at most for `kvcachepool.pin_ttl_s`. False if it is absent."""
        return self.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:
        """Takes one pin back, without waiting for the sidecar. False without a pin of this process."""
        return self._pins.unpin([chunk_key(key)]) == 1

    def touch_cache(self) -> None:
        """Nothing: the sidecar itself orders its chunks by their use."""

    # Stores

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]] | None:
        """Starts to store chunks that are not on their way already.

        Returns the futures of the requests, which end without an exception also if the sidecar stores nothing. The
        callback gets each key that the sidecar has. If half of LMCache's buffer waits for the sidecar, the rest of
        the chunks is not stored.
        """
        futures = []
        for stores in grouped(self._admit(keys, objs), lambda store: store.obj.get_size()):
            try:
                future = self._writer.submit(self._store, stores, on_complete_callback)
            except RuntimeError:  # Closed meanwhile.
                self._release(stores)
                continue
            future.add_done_callback(partial(self._release_cancelled, stores))
            futures.append(future)
        return futures or None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """`batched_submit_put_task`, and waits for it."""
        futures = self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback) or []
        await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    def _admit(self, keys: Sequence[Any], objs: Sequence[MemoryObj]) -> list[_Store]:
        stores: list[_Store] = []
        with self._lock:
            if self._closed:
                return stores
            for key, obj in zip(keys, objs, strict=True):
                name, layout = chunk_key(key), Layout.of(obj)
                if name in self._storing or not obj.get_size():
                    continue
                if self._storing and self._storing_bytes + obj.get_size() > self._storing_limit:
                    logger.debug("the sidecar is behind by %d bytes: not storing more", self._storing_bytes)
                    break
                obj.ref_count_up()
                self._storing.add(name)
                self._storing_bytes += obj.get_size()
                stores.append(_Store(key, name, obj, layout))
        return stores

    def _store(self, stores: Sequence[_Store], on_complete_callback: Callable[[Any], None] | None) -> None:
        nothing: list[Put] = []
        try:
            items = [Item(store.name, view(store.obj), store.layout.header()) for store in stores]
            results = self._calls.ask(lambda: self._client.put(items, ttl_s=self._settings.ttl_s), nothing)
        finally:
            self._release(stores)
        for store, result in zip(stores, results, strict=False):
            if result not in (Put.STORED, Put.EXISTS):
                logger.debug("a chunk of %d bytes is not stored: %s", store.layout.nbytes, result.name)
            elif on_complete_callback is not None:
                try:
                    on_complete_callback(store.key)
                except Exception:
                    logger.exception("LMCache's callback for a stored chunk failed")

    def _release_cancelled(self, stores: Sequence[_Store], future: Future[None]) -> None:
        if future.cancelled():
            self._release(stores)

    def _release(self, stores: Sequence[_Store]) -> None:
        with self._lock:
            self._storing.difference_update(store.name for store in stores)
            self._storing_bytes -= sum(store.obj.get_size() for store in stores)
        for store in stores:
            store.obj.ref_count_down()

    # Loads

    def get_blocking(self, key: Any) -> MemoryObj | None:
        """The chunk in a new memory object of LMCache's CPU buffer. None: absent, or no room there."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[MemoryObj | None]:
        """One entry per key, as `get_blocking`."""
        try:
            return self._readers.submit(self._load, keys).result()
        except (CancelledError, RuntimeError):  # Closed meanwhile.
            return [None] * len(keys)

    def get_non_blocking(self, key: Any, location: str | None = None) -> Future[MemoryObj | None] | None:
        """A future of `get_blocking`. None after `close`."""
        try:
            return self._readers.submit(lambda: self._load([key])[0])
        except RuntimeError:
            return None

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The chunks before the first one that is absent. Releases what `batched_async_contains` pinned of them."""

        def load() -> list[MemoryObj]:
            try:
                return self._prefix(self._load(keys))
            finally:
                with self._lock:
                    _, pinned = self._lookups.pop(lookup_id, (0.0, set[bytes]()))
                self._pins.unpin(pinned.intersection(chunk_key(key) for key in keys))

        return await self._in_reader(load, [], dropped=lambda objs: [obj.ref_count_down() for obj in objs])

    @staticmethod
    def _prefix(objs: Sequence[MemoryObj | None]) -> list[MemoryObj]:
        prefix: list[MemoryObj] = []
        for obj in objs:
            if obj is None:
                break
            prefix.append(obj)
        for obj in objs[len(prefix) :]:
            if obj is not None:
                obj.ref_count_down()
        return prefix

    async def _in_reader(
        self, call: Callable[[], Any], otherwise: Any, dropped: Callable[[Any], object] = lambda _: None
    ) -> Any:
        """Awaits a call in a reader. `dropped` gets the result if nobody waits any more."""
        try:
            future = self._readers.submit(call)
        except RuntimeError:
            return otherwise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: None if done.cancelled() else dropped(done.result()))
            if self._closed:
                return otherwise
            raise

    def _load(self, keys: Sequence[Any]) -> list[MemoryObj | None]:
        loaded: list[MemoryObj | None] = []
        if self.local_cpu_backend is not None:
            deadline = time.monotonic() + self._settings.timeout_s
            names = [chunk_key(key) for key in keys]
            try:
                for start in range(0, len(names), _LEASE_OBJECTS):
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    with self._client.lease(names[start : start + _LEASE_OBJECTS], timeout_s=left) as lease:
                        for leased in lease:
                            loaded.append(None if leased is None or self._closed else self._copied(leased))
                self._calls.succeeded()
            except Error as error:
                self._calls.failed(error)
        return loaded + [None] * (len(keys) - len(loaded))

    def _copied(self, leased: Leased) -> MemoryObj | None:
        layout = Layout.read(leased.header, leased.nbytes)
        if layout is None or not leased.nbytes or not self._fits(layout):
            logger.debug("a stored value is not a chunk of this engine: %s, %d bytes", leased.header, leased.nbytes)
            return None
        shapes = [torch.Size(shape) for shape in layout.shapes]
        try:
            # Waiting for room could last for ever: what holds the buffer may wait for this load.
            obj = self.local_cpu_backend.allocate(shapes, list(layout.dtypes), layout.format, busy_loop=False)
        except ValueError as error:
            logger.debug("LMCache has no memory for a stored value: %s", error)
            return None
        if obj is None:
            return None
        copied = False
        try:
            copied = leased.read_into(view(obj))
        finally:
            if not copied:
                obj.ref_count_down()
        return obj if copied else None

    def _fits(self, layout: Layout) -> bool:
        """Whether a whole chunk has the shapes of this engine's. Its key does not say how many layers the model has."""
        if self.metadata is None or layout.format not in _CHUNK_FORMATS:
            return True
        if any(len(shape) != 4 for shape in layout.shapes):
            return False
        shapes = tuple(tuple(shape) for shape in self.metadata.get_shapes(layout.shapes[0][2]))
        return layout.shapes == shapes and layout.dtypes == tuple(self.metadata.get_dtypes())

    # The rest

    def remove(self, key: Any, force: bool = True) -> bool:
        """Removes the chunk from all tiers. Without `force` a chunk that this process has pinned stays."""
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: Sequence[Any], force: bool = True) -> int:
        """`remove` of several chunks in one round trip. Returns how many there were."""
        names = [name for name in map(chunk_key, keys) if force or not self._pins.held(name)]
        return self._calls.ask(lambda: self._client.remove(names), 0) if names else 0

    def get_allocator_backend(self) -> Any:
        """LMCache's CPU buffer, from which loads get their memory objects."""
        if self.local_cpu_backend is None:
            raise RuntimeError("LMCache has no CPU buffer here: the scheduler's process only looks chunks up")
        return self.local_cpu_backend

    def close(self) -> None:
        """Stores what is on its way, at most for `kvcachepool.timeout_s`, and ends all copies. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if wait([self._writer.submit(lambda: None)], self._settings.timeout_s).not_done:
            logger.warning("the sidecar did not take all chunks of LMCache in time")
        # Ends the calls under way. Without it they last up to their deadline.
        self._client.close()
        for executor in (self._writer, self._readers):
            executor.shutdown(wait=True, cancel_futures=True)
