"""Storage backend of SGLang's hierarchical cache (HiCache): pages of host pools are objects of the sidecar.

SGLang loads it with `--hicache-storage-backend dynamic`; docs/guides/sglang.md has the arguments. Bytes are copied
between the sidecar's arena and the host pools, without a tensor in between. A sidecar that is gone is a miss for every
call, and no call takes longer than `timeout_s`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvcachepool.calls import Calls
from kvcachepool.client import Client, Item, Leased, Put
from kvcachepool.object_bytes import bounded
from kvcachepool.sglang_model import Epochs, ModelIdentity, clear_at_updates
from kvcachepool.sglang_pages import Form, PagePool, Shard, bytes_of
from kvcachepool.sglang_settings import Options, server_args

logger = logging.getLogger("kvcachepool")

#: Bytes of one request. A lease or a grant holds this much of the arena at once.
_BATCH_BYTES = 256 << 20


class _Object(NamedTuple):
    """One object of one page: its key, its pool, the page's host indices and the object's place in the page."""

    key: str
    pool: PagePool
    page: torch.Tensor
    part: int


class KVCachePoolStorage(HiCacheStorage):
    """HiCache's third level in the sidecar. Thread safe, as SGLang calls it from several threads.

    With `interface_v1`, KV pages are copied in place, in the order of the host pool's addresses. Without it, SGLang
    passes flat copies of pages to `get`, `set` and their batches. Both have keys of their own. The calls of version 2
    (hybrid models) copy in place.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, backend_options: dict[str, Any] | None = None) -> None:
        """Called by SGLang in each rank. Does not wait for the sidecar. Raises `ValueError` for bad settings."""
        self._options = Options.of(storage_config.extra_config)
        self._replicated = bool(storage_config.is_mla_model)
        self._shard = Shard.of(storage_config)
        self._heads_of: int | None = storage_config.tp_lcm_size
        self._identity = ModelIdentity(
            server_args(),
            storage_config.model_name,
            self._options.model_id,
            trust_mm_hashes=self._options.trust_mm_hashes,
        )
        self._model: str | None = None
        self._pools: dict[str, PagePool] = {}
        self._flat: PagePool | None = None
        self._lock = threading.Lock()
        self._cleared = Epochs.last
        self._epoch = Epochs.name(Epochs.of_weights)
        self._prefetched, self._backed_up = _Copies(), _Copies()
        self._with_metrics = bool(storage_config.enable_storage_metrics)
        self._calls = Calls("HiCache's storage")
        clear_at_updates(self)
        self._client = Client(self._options.socket, namespace=self._options.namespace, name="sglang")

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of KV, which the calls without a pool name mean."""
        super().register_mem_pool_host(mem_pool_host)
        made = self._add("kv", mem_pool_host, flat=not self._options.interface_v1)
        self._flat = None if self._options.interface_v1 else made

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """A pool that `PoolTransfer` names."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == "kv" and host_pool is getattr(self, "mem_pool_host", None):
            return
        self._add(name, host_pool)

    def _add(self, name: str, host_pool: Any, *, flat: bool = False, key: str | None = None) -> PagePool:
        """Makes the pool usable. `key`: its place among the pools, if not its name."""
        made = PagePool(
            name,
            host_pool,
            self._shard,
            page_tokens=int(getattr(self, "mem_pool_host", host_pool).page_size),
            replicated=self._replicated,
            flat=flat,
            heads_of=self._heads_of if name == "kv" else None,
        )
        with self._lock:
            if self._model is not None:
                made.rename(self._model, self._epoch)
            self._pools[key or name] = made
        return made

    def _flat_pool(self) -> PagePool | None:
        """The pool of KV as flat pages."""
        if self._flat is None and "kv" in self._pools:
            self._flat = self._add("kv", self.mem_pool_host, flat=True, key="flat")
        return self._flat

    def _ready(self) -> bool:
        """Whether pages have names: the model's identity is known."""
        if self._model is None:
            model = self._identity.poll()
            if model is None:
                return False
            with self._lock:
                self._rename(model)
        return True

    def _rename(self, model: str) -> None:
        for pool in self._pools.values():
            pool.rename(model, self._epoch)
        self._model = model

    # Pages of KV

    def exists(self, key: str) -> bool:
        """Whether this page exists."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of these pages exist from the front."""
        return self._prefix(self._pools.get("kv"), keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads pages into the host pool. Whether each page is there; all behind the first miss are misses."""
        return self._load([(self._pools.get("kv"), keys, host_indices)], prefix=True)[0]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of the host pool. Whether each page is stored, by this call or an earlier one."""
        return self._store([(self._pools.get("kv"), keys, host_indices)])[0]

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Loads a flat page into a contiguous host tensor, which is returned. None is a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Loads flat pages into contiguous host tensors, until the first miss."""
        targets = list(target_locations or [None] * len(keys))
        pool = self._flat_pool()
        if pool is not None and pool.form is Form.LOGICAL:
            return targets
        found: list[torch.Tensor | None] = [None] * len(keys)
        if pool is None or not self._ready():
            return found
        # Without a target there is nowhere to copy to.
        wanted = next((i for i, target in enumerate(targets) if target is None), len(keys))
        views = [bytes_of(target) for target in targets[:wanted] if target is not None]
        sizes = [view.nbytes for view in views]
        copied = self._copy_out(pool.keys(keys[:wanted]), sizes, lambda i, leased: leased.read_into([views[i]]), True)
        for index in range(wanted):
            found[index] = targets[index] if copied[index] else None
        return found

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores a flat page. Whether it is stored, by this call or an earlier one."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores flat pages. Whether all are stored, by this call or an earlier one."""
        pages = list(values or [])
        pool = self._flat_pool()
        if pool is not None and pool.form is Form.LOGICAL:
            return True
        if pool is None or len(pages) != len(keys) or any(page is None for page in pages) or not self._ready():
            return False
        views = [bytes_of(page.contiguous()) for page in pages if page is not None]
        names, header = pool.keys(keys), pool.header
        return all(self._copy_in([view.nbytes for view in views], lambda i: Item(names[i], [views[i]], header)))

    # Pages of several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The usable prefix of KV pages, with what each pool has of it. `restorable_prefix_pages` has all lengths at
        which every pool has the pages that it must have.
        """
        pages = self._prefix(self._pools.get("kv"), keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        # A second form of the same pages does not limit the prefix. Its name is new in SGLang 0.5.22.
        needed = [one for one in pool_transfers or [] if one.hit_policy != "block_groups"]
        usable = set(range(1, pages + 1))
        for transfer, there in zip(needed, self._there(needed, keys[:pages]), strict=True):
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or []))
                lengths = [n for n in range(1, pages + 1) if all(there[max(0, n - window) : n])]
            else:
                lengths = list(range(1, (there.index(False) if False in there else pages) + 1))
            if lengths:
                hits[transfer.name] = lengths[-1]
            usable &= set(lengths)
        result = PoolTransferResult(max(usable, default=0), hits)
        result.restorable_prefix_pages = sorted(usable)
        return result

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Loads pages of several pools. Per pool, whether each page is there."""
        jobs = [(self._pools.get(str(one.name)), one.keys or [], one.host_indices) for one in transfers]
        return dict(zip([one.name for one in transfers], self._load(jobs, prefix=False), strict=True))

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Stores pages of several pools. Per pool, whether each page is stored, by this call or an earlier one."""
        jobs = [(self._pools.get(str(one.name)), one.keys or [], one.host_indices) for one in transfers]
        return dict(zip([one.name for one in transfers], self._store(jobs), strict=True))

    # The rest of the interface

    def clear(self) -> bool:
        """What was stored before is not found any more by this server. Other servers still find it; the sidecar evicts
        it when its room is needed.
        """
        with self._lock:
            self._cleared += 1
            Epochs.last = max(Epochs.last, self._cleared)
            self._epoch = Epochs.name(self._cleared)
            if self._model is not None:
                self._rename(self._model)
        return True

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` since the last call, or None without `--enable-metrics`."""
        if not self._with_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        (pages, bandwidth), (stored, store_bandwidth) = self._prefetched.take(), self._backed_up.take()
        return StorageMetrics(
            prefetch_pgs=pages, prefetch_bandwidth=bandwidth, backup_pgs=stored, backup_bandwidth=store_bandwidth
        )

    def close(self) -> None:
        """Ends the connection. Later calls are misses."""
        self._client.close()

    # Requests

    def _prefix(self, pool: PagePool | None, keys: list[str]) -> int:
        if pool is None or not keys or pool.form is Form.LOGICAL:
            return len(keys) if pool is not None else 0
        if pool.form is Form.UNSUPPORTED or not self._ready():
            return 0
        names = pool.keys(keys)
        return self._calls.ask(lambda: self._client.exists(names, timeout_s=self._options.timeout_s), 0) // pool.objects

    def _there(self, transfers: list[PoolTransfer], keys: list[str]) -> list[list[bool]]:
        """Per transfer, which of these pages its pool has."""
        pools = [self._pools.get(str(one.name)) for one in transfers]
        names: list[str] = []
        if keys and self._ready():
            names = [key for pool in pools if pool is not None and _stores(pool) for key in pool.keys(keys)]
        found: list[bool] = []
        if names:
            found = self._calls.ask(lambda: self._client.contains(names, timeout_s=self._options.timeout_s), found)
        states, there = iter(found), []
        for pool in pools:
            if pool is not None and pool.form is Form.LOGICAL:
                there.append([True] * len(keys))
            elif pool is None or not found or not _stores(pool):
                there.append([False] * len(keys))
            else:
                there.append([all([next(states) for _ in range(pool.objects)]) for _ in keys])
        return there

    def _load(self, jobs: Sequence[tuple[PagePool | None, list[str], Any]], *, prefix: bool) -> list[list[bool]]:
        objects, answers = self._objects(jobs)

        def read(index: int, leased: Leased) -> bool:
            _, pool, page, part = objects[index]
            target = pool.target(page, part)
            if not leased.read_into(target.buffers):
                return False
            if target.finish is not None:
                target.finish()
            return True

        sizes = [one.pool.nbytes for one in objects]
        return _per_page(jobs, answers, self._copy_out([one.key for one in objects], sizes, read, prefix))

    def _store(self, jobs: Sequence[tuple[PagePool | None, list[str], Any]]) -> list[list[bool]]:
        objects, answers = self._objects(jobs)

        def item(index: int) -> Item:
            key, pool, page, part = objects[index]
            return Item(key, pool.source(page, part), pool.header)

        return _per_page(jobs, answers, self._copy_in([one.pool.nbytes for one in objects], item))

    def _objects(
        self, jobs: Sequence[tuple[PagePool | None, list[str], Any]]
    ) -> tuple[list[_Object], list[bool | None]]:
        """The objects of all jobs, and for each job: None where its pages are among them, otherwise the answer."""
        objects: list[_Object] = []
        answers: list[bool | None] = []
        ready = self._ready()
        for pool, keys, indices in jobs:
            if pool is not None and pool.form is Form.LOGICAL:
                answers.append(True)
                continue
            pages = pool.pages(indices, len(keys)) if pool is not None and _stores(pool) and ready else None
            answers.append(None if pages is not None else False)
            if pool is None or pages is None:
                if pool is not None and _stores(pool) and ready:
                    logger.error(
                        "pool %s: expected %d host indices for %d pages, got %s",
                        *(pool.name, len(keys) * pool.slots, len(keys), None if indices is None else indices.numel()),
                    )
                continue
            names = iter(pool.keys(keys))
            objects.extend(_Object(next(names), pool, page, part) for page in pages for part in range(pool.objects))
        return objects, answers

    def _copy_out(
        self, names: list[str], sizes: list[int], read: Callable[[int, Leased], bool], prefix: bool
    ) -> list[bool]:
        """Leases objects and copies them with `read`. With `prefix`, everything behind the first miss is a miss."""
        found = [False] * len(names)
        began = time.monotonic()

        def copy(batch: list[int], left_s: float) -> bool:
            with self._client.lease([names[index] for index in batch], prefix=prefix, timeout_s=left_s) as lease:
                for index, leased in zip(batch, lease, strict=True):
                    found[index] = leased is not None and leased.nbytes == sizes[index] and read(index, leased)
                    if prefix and not found[index]:
                        return False
            return True

        for batch in _batches(sizes):
            left_s = began + self._options.timeout_s - time.monotonic()
            if left_s <= 0 or not self._calls.ask(partial(copy, batch, left_s), False):
                break
        self._prefetched.add(sizes, found, began)
        return found

    def _copy_in(self, sizes: list[int], item: Callable[[int], Item]) -> list[bool]:
        """Stores objects. Whether each is stored, by this call or an earlier one."""
        stored: list[bool] = []
        began = time.monotonic()
        for batch in _batches(sizes):
            left_s = began + self._options.timeout_s - time.monotonic()
            if left_s <= 0:
                break
            items = [item(index) for index in batch]
            results: list[Put] = self._calls.ask(partial(self._client.put, items, timeout_s=left_s), [])
            if not results:
                break
            stored += [one in (Put.STORED, Put.EXISTS) for one in results]
        stored += [False] * (len(sizes) - len(stored))
        self._backed_up.add(sizes, stored, began)
        return stored


class _Copies:
    """Objects and GB/s of the latest calls in one direction, for SGLang's histograms."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=1024)

    def add(self, sizes: list[int], done: list[bool], began: float) -> None:
        nbytes = sum(size for size, ok in zip(sizes, done, strict=True) if ok)
        if nbytes:
            self._calls.append((sum(done), nbytes / 1e9 / max(time.monotonic() - began, 1e-9)))

    def take(self) -> tuple[list[int], list[float]]:
        """Those since the last call."""
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        return [objects for objects, _ in calls], [speed for _, speed in calls]


def _stores(pool: PagePool) -> bool:
    return pool.form in (Form.ADDRESSES, Form.FLAT)


def _batches(sizes: list[int]) -> Iterator[list[int]]:
    """The numbers of the objects of each request."""
    return bounded(range(len(sizes)), sizes.__getitem__, _BATCH_BYTES)


def _per_page(
    jobs: Sequence[tuple[PagePool | None, list[str], Any]], answers: list[bool | None], done: list[bool]
) -> list[list[bool]]:
    """Per job, whether all objects of each page are done."""
    states, pages = iter(done), []
    for (pool, keys, _), answer in zip(jobs, answers, strict=True):
        if answer is not None or pool is None:
            pages.append([bool(answer)] * len(keys))
        else:
            pages.append([all([next(states) for _ in range(pool.objects)]) for _ in keys])
    return pages
