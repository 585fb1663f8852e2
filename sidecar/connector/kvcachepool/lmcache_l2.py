"""An L2 adapter of LMCache's server (`lmcache server`, LMCache 0.5.6) that keeps its objects in the sidecar.

    --l2-adapter '{"type": "plugin", "module_path": "kvcachepool.lmcache_l2", "class_name": "KVCachePoolL2Adapter",
                   "adapter_params": {"socket": "/run/kvcachepool/sidecar.sock"}}'

Objects are copied between LMCache's L1 memory and the sidecar's arena, once in each direction. A lock is a pin of
the sidecar that expires. A sidecar that is gone, late or refuses fails stores and makes misses; every task ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvcachepool.calls import Calls
from kvcachepool.client import Error, Item, Put
from kvcachepool.lmcache_objects import Layout, Pins, Settings, grouped, object_key, view

logger = logging.getLogger("kvcachepool")

#: Longest time that a task waits for a thread, in seconds. LMCache's locks on the buffers of a task expire, by default
#: after 300 s. A task that began later could store or overwrite bytes of another object.
_QUEUE_S = 60.0
#: Objects whose bytes are remembered, about 230 bytes each.
_SIZES_MAX = 1_000_000


class KVCachePoolL2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params` of the adapter."""

    def __init__(self, settings: Settings, max_capacity_gb: float = 0) -> None:
        self.settings = settings
        self.max_capacity_gb = max_capacity_gb

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KVCachePoolL2AdapterConfig:
        """Raises `ValueError` for an unknown key or a wrong value."""
        given = dict(d)
        capacity = given.pop("max_capacity_gb", 0)
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0 <= capacity < float("inf"):
            raise ValueError(f"adapter_params: max_capacity_gb: expected a number from 0, got {capacity!r}")
        return cls(Settings.parse(given, "adapter_params"), capacity)

    @classmethod
    def help(cls) -> str:
        """The fields, for LMCache's messages."""
        return (
            "kvcachepool L2 adapter, adapter_params:\n"
            "- socket (str): path of sidecar.sock, or tls://host:port (default: that beside the package)\n"
            "- namespace (str): keeps objects apart from those of other namespaces (default empty)\n"
            "- timeout_s (float): deadline of each task in seconds (default 5)\n"
            "- pin_ttl_s (float): longest time that a lookup locks an object in seconds (default 300)\n"
            "- ttl_s (float): age at which objects expire in seconds (default 0: never)\n"
            "- max_capacity_gb (float): bytes at which LMCache evicts (default 0: only the sidecar evicts)"
        )


class KVCachePoolL2Adapter(L2AdapterInterface):
    """LMCache's L2 objects in the sidecar. Tasks run in threads and end by `timeout_s` each."""

    def __init__(self, config: KVCachePoolL2AdapterConfig, l1_memory_desc: object = None) -> None:
        super().__init__(max_capacity_bytes=int(config.max_capacity_gb * (1 << 30)))
        self._settings = config.settings
        self._client = self._settings.client("lmcache-l2")
        self._calls = Calls("LMCache's L2 adapter")
        # Bytes of the objects that this server stored and has not missed since: the sidecar evicts without a word.
        self._sizes: OrderedDict[ObjectKey, int] = OrderedDict()
        self._sizes_lock = threading.Lock()
        self._stores = _Tasks("store", 1)
        self._lookups = _Tasks("lookup", 1)
        self._loads = _Tasks("load", 4)
        self._pins = Pins(self._client, self._calls, self._settings.pin_ttl_s, self._lookups.run)

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return self._loads.fileno()

    # Stores

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Starts to store objects. LMCache keeps them unchanged until the task has ended."""
        failed = L2StoreResult(False, 0)
        return self._stores.submit(lambda: self._store(list(keys), list(objects)), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Stores that have ended. One succeeded if the sidecar has all its objects; its bytes are the new ones."""
        return self._stores.pop_all()

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        deadline = time.monotonic() + self._settings.timeout_s
        stored: list[tuple[ObjectKey, int]] = []
        nothing: list[Put] = []
        complete = True
        for group in grouped(zip(keys, objects, strict=True), lambda pair: pair[1].get_size()):
            items = [Item(object_key(key), view(obj), _layout(obj).header()) for key, obj in group]
            results = self._calls.ask(partial(self._put, items, deadline), nothing)
            for (key, obj), result in zip(group, results, strict=False):
                if result is Put.STORED:
                    stored.append((key, obj.get_size()))
            complete = complete and len(results) == len(group) and {*results} <= {Put.STORED, Put.EXISTS}
            if len(results) < len(group) or not {*results} <= {Put.STORED, Put.EXISTS, Put.UNAVAILABLE}:
                break
        self._remember(stored)
        return L2StoreResult(complete, sum(size for _, size in stored))

    def _put(self, items: Sequence[Item], deadline: float) -> list[Put]:
        left = deadline - time.monotonic()
        return self._client.put(items, ttl_s=self._settings.ttl_s, timeout_s=left) if left > 0 else []

    # Lookups

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]) -> int:
        """Starts to look objects up and to pin those that a tier holds."""
        return self._lookups.submit(lambda: self._lookup(list(keys)), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A bit per key: pinned. None until the lookup has ended and when it was taken."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Takes one pin of each key back. If the sidecar does not answer, the pin expires."""
        self._pins.unpin([object_key(key) for key in keys])

    def _lookup(self, keys: Sequence[ObjectKey]) -> Bitmap:
        bits = Bitmap(len(keys))
        there = self._pins.pin_existing([object_key(key) for key in keys])
        for index, yes in enumerate(there):
            if yes:
                bits.set(index)
        self._forget([key for key, yes in zip(keys, there, strict=False) if not yes])
        return bits

    # Loads

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Starts to copy objects into LMCache's buffers. After the task has ended nothing writes there."""
        return self._loads.submit(lambda: self._load(list(keys), list(objects)), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A bit per key: its buffer holds the object. None until the load has ended and when it was taken."""
        return self._loads.pop(task_id)

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        deadline = time.monotonic() + self._settings.timeout_s
        bits = Bitmap(len(keys))
        names = [object_key(key) for key in keys]
        loaded: list[ObjectKey] = []
        try:
            for group in grouped(range(len(keys)), lambda index: objects[index].get_size()):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                with self._client.lease([names[index] for index in group], timeout_s=left) as lease:
                    for index, leased in zip(group, lease, strict=True):
                        obj = objects[index]
                        if leased is None or leased.nbytes != obj.get_size():
                            continue
                        layout = Layout.read(leased.header, leased.nbytes)
                        if layout == _layout(obj) and leased.read_into(view(obj)):
                            bits.set(index)
                            loaded.append(keys[index])
            self._calls.succeeded()
        except Error as error:
            self._calls.failed(error)
        if loaded:
            self._notify_keys_accessed(loaded)
        return bits

    # The rest

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes objects from all tiers, except those that a lookup of this server holds."""
        left = [key for key in keys if not self._pins.held(object_key(key))]
        if left and self._calls.ask(lambda: self._client.remove([object_key(key) for key in left]), -1) >= 0:
            self._forget(left)

    def _remember(self, stored: Sequence[tuple[ObjectKey, int]]) -> None:
        with self._sizes_lock:
            new = {key: size for key, size in stored if key not in self._sizes}
            self._sizes |= new
            oldest = [self._sizes.popitem(last=False) for _ in range(len(self._sizes) - _SIZES_MAX)]
        if new:
            self._notify_keys_stored(list(new), list(new.values()))
        if oldest:
            self._notify_keys_deleted([key for key, _ in oldest], [size for _, size in oldest])

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        with self._sizes_lock:
            gone = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
        if gone:
            self._notify_keys_deleted(list(gone), list(gone.values()))

    def report_status(self) -> dict[str, Any]:
        """For `/status` of LMCache's server. Healthy while the sidecar is connected."""
        return {
            "is_healthy": self._client.connected,
            "type": type(self).__name__,
            "socket": self._settings.socket,
            "namespace": self._settings.namespace,
            "locked_key_count": len(self._pins),
        }

    def close(self) -> None:
        """Ends all tasks. Nothing touches LMCache's memory after it."""
        # Ends the calls under way. Without it they last up to their deadline.
        self._client.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()


def _layout(obj: MemoryObj) -> Layout:
    """The object's layout, or that of its bytes if LMCache narrowed it to the ones in use."""
    layout = Layout.of(obj)
    if layout.nbytes == obj.get_size():
        return layout
    return Layout(((obj.get_size(),),), (torch.uint8,), layout.format)


class _Tasks:
    """Tasks of one kind: threads, results by task id, and the descriptor that says that one has ended."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, f"kvcachepool-{name}")
        self._ended = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}
        self._next = 0

    def fileno(self) -> int:
        """Readable when a task has ended."""
        return int(self._ended.fileno())

    def submit(self, call: Callable[[], Any], otherwise: Any) -> int:
        """Starts a task. Its result is `otherwise` if the call raises, or did not begin in time."""
        submitted = time.monotonic()
        with self._lock:
            task_id = self._next
            self._next += 1

        def task() -> None:
            result = otherwise
            try:
                if time.monotonic() - submitted <= _QUEUE_S:
                    result = call()
            except Exception:
                logger.exception("a task of LMCache's L2 adapter failed")
            finally:
                with self._lock:
                    self._results[task_id] = result
                self._ended.notify()

        self._threads.submit(task)
        return task_id

    def run(self, call: Callable[[], object]) -> None:
        """Starts a call without a result. Raises `RuntimeError` after `close`."""
        self._threads.submit(call)

    def pop(self, task_id: int) -> Any:
        """The result of a task that has ended, once."""
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, Any]:
        """The results of all tasks that have ended, once."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Waits for the tasks under way and drops the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._ended.close()
