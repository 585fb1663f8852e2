"""The L2 adapter in the storage manager of LMCache's server, over a real sidecar."""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

pytest.importorskip("lmcache")

import torch
from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode as check_l2_adapter
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.serde import SerdeConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

from kvcachepool import lmcache_l2, lmcache_objects
from kvcachepool.client import Item, Leased, Put, Unavailable
from kvcachepool.lmcache_l2 import KVCachePoolL2Adapter, KVCachePoolL2AdapterConfig
from kvcachepool.lmcache_objects import object_key
from servers.remote import RemoteServer
from servers.sidecar import Sidecar
from servers.waiting import wait_for

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 128, 128])], [torch.bfloat16])
OBJECT_BYTES = 256 << 10
PLUGIN = {"module_path": "kvcachepool.lmcache_l2", "class_name": "KVCachePoolL2Adapter"}


def object_keys(numbers: Sequence[int], **fields: Any) -> list[ObjectKey]:
    """Keys of several objects."""
    return [
        ObjectKey(**{"chunk_hash": number.to_bytes(32, "big"), "model_name": "m", "kv_rank": 1} | fields)
        for number in numbers
    ]


def contents(number: int) -> torch.Tensor:
    """What object `number` holds."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tuple(LAYOUT.shapes[0]), generator=generator).to(torch.bfloat16)


def buffer(number: int | None = None, layout: MemoryLayoutDesc = LAYOUT) -> MemoryObj:
    """A memory object of its own, with what object `number` holds or zeros."""
    shape, dtype = layout.shapes[0], layout.dtypes[0]
    raw = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    if number is not None:
        raw = contents(number).reshape(-1).view(torch.uint8).clone()
    meta = MemoryObjMetadata(shape, dtype, 0, raw.numel(), 1, 0, MemoryFormat.KV_2LTD, None, [shape], [dtype])
    return TensorMemoryObj(raw, meta, None)


class Server:
    """What LMCache's server has inside: L1, its controllers, and the adapter as its plugin."""

    def __init__(self, sidecar: Sidecar, *, serde: str | None = None, **settings: Any) -> None:
        self._closed = False
        # Whether what came back is what was stored.
        self._same: Callable[..., bool] = torch.equal if serde is None else partial(torch.allclose, rtol=0.1, atol=0.05)
        spec = {**PLUGIN, "adapter_params": {"socket": str(sidecar.socket), **settings}}
        adapter = get_l2_adapter_config_class("plugin").from_dict(spec)
        adapter.serde_config = serde and SerdeConfig(serde)
        memory = L1MemoryManagerConfig(32 << 20, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig("LRU"), l2_adapter_config=L2AdaptersConfig([adapter])
            )
        )

    @property
    def adapter(self) -> KVCachePoolL2Adapter:
        """The adapter that LMCache created."""
        ((_, adapter),) = self.manager.l2_adapters()
        adapter = getattr(adapter, "inner_adapter", adapter)
        assert isinstance(adapter, KVCachePoolL2Adapter)
        return adapter

    def store(self, numbers: Sequence[int]) -> None:
        """Writes objects to L1, from which LMCache stores them to L2 in the background."""
        keys = object_keys(numbers)
        reserved = self.manager.reserve_write(keys, LAYOUT)
        assert len(reserved) == len(keys)
        for number, key in zip(numbers, keys, strict=True):
            reserved[key].tensor.copy_(contents(number))
        self.manager.finish_write(keys)

    def settle(self) -> None:
        """Until LMCache has no store under way."""
        wait_for(lambda: not self._stores(), 20, "all stores to end")

    def _stores(self) -> int:
        status = self.manager.report_status()
        return int(status["store_controller"]["in_flight_task_count"]) + int(
            status["store_controller"]["pending_keys_count"]
        )

    def load(self, numbers: Sequence[int], seconds: float = 20) -> tuple[int, int]:
        """Loads a prefix as for a request. Returns hits of L1 and of L2; what hits must be right."""
        keys = object_keys(numbers)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
        assert self.manager.wait_prefetch_status(handle, seconds), "the prefetch hangs"
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        hits = keys[: result.l1_hit_count + result.l2_hit_count]
        with self.manager.read_prefetched_results(hits) as objs:
            assert objs is not None
            for number, obj in zip(numbers, objs, strict=False):
                assert self._same(obj.tensor, contents(number)), f"object {number} has other bytes"
        self.manager.finish_read_prefetched(hits)
        return result.l1_hit_count, result.l2_hit_count

    def in_l2(self, numbers: Sequence[int]) -> bool:
        """Whether the sidecar has them all."""
        return all(self.adapter._client.contains([object_key(key) for key in object_keys(numbers)]))

    def close(self) -> None:
        """As at the end of LMCache's server. May be called twice."""
        if not self._closed:
            self._closed = True
            self.manager.close()


@pytest.fixture
def new_server(namespace: str) -> Iterator[Callable[..., Server]]:
    """Servers in the namespace of the test."""
    made: list[Server] = []

    def make(sidecar: Sidecar, **settings: Any) -> Server:
        made.append(Server(sidecar, **{"namespace": namespace, **settings}))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def new_adapter(namespace: str) -> Iterator[Callable[..., KVCachePoolL2Adapter]]:
    """Adapters without LMCache's controllers, in the namespace of the test."""
    made: list[KVCachePoolL2Adapter] = []

    def make(sidecar: Sidecar, **settings: Any) -> KVCachePoolL2Adapter:
        params = {"socket": str(sidecar.socket), "namespace": namespace, **settings}
        made.append(KVCachePoolL2Adapter(KVCachePoolL2AdapterConfig.from_dict(params)))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()


def taken(fd: int, query: Callable[[], Any], seconds: float = 10) -> Any:
    """Waits for an event descriptor as LMCache does, and takes a result."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(seconds * 1000), "the task does not end"
    os.read(fd, 8)
    return query()


def stored(adapter: KVCachePoolL2Adapter, keys: Sequence[ObjectKey], objs: Sequence[MemoryObj]) -> Any:
    """A store's result."""
    task = adapter.submit_store_task(list(keys), list(objs))
    return taken(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]


def looked_up(adapter: KVCachePoolL2Adapter, keys: Sequence[ObjectKey]) -> list[int]:
    """Which of the keys a lookup locked."""
    task = adapter.submit_lookup_and_lock_task(list(keys), {0: LAYOUT})
    bits = taken(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None, "a result is there only once"
    return list(bits.get_indices_list())


def loaded(adapter: KVCachePoolL2Adapter, keys: Sequence[ObjectKey], objs: Sequence[MemoryObj]) -> list[int]:
    """Which of the buffers a load filled."""
    task = adapter.submit_load_task(list(keys), list(objs))
    bits = taken(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None, "a result is there only once"
    return list(bits.get_indices_list())


def wait_readable(adapter: KVCachePoolL2Adapter, keys: Sequence[ObjectKey]) -> None:
    """Until the sidecar has the digests."""
    wait_for(lambda: all(adapter._client.contains([object_key(key) for key in keys])), 10, "objects readable")


def spy(notify: Callable[..., None], heard: list[ObjectKey]) -> Callable[..., None]:
    """Notes keys, and passes them on."""

    def run(keys: list[ObjectKey], sizes: list[int]) -> None:
        heard.extend(keys)
        notify(keys, sizes)

    return run


# In LMCache's storage manager


def test_what_l1_lost_comes_back_from_l2(sidecar: Sidecar, new_server: Callable[..., Server]) -> None:
    server = new_server(sidecar)
    server.store(range(8))
    assert server.load(range(10)) == (8, 0)
    wait_for(lambda: server.in_l2(range(8)), 20, "the objects in L2")
    server.settle()
    server.manager.clear()
    assert server.load(range(10)) == (0, 8)
    wait_for(lambda: len(server.adapter._pins) == 0, 10, "LMCache to unlock what it loaded")
    (status,) = server.manager.report_status()["l2_adapters"]
    assert status["is_healthy"]
    assert server.manager.memcheck()


def test_objects_are_kept_by_a_remote_server(
    remote: RemoteServer, sidecar: Sidecar, new_server: Callable[..., Server]
) -> None:
    server = new_server(sidecar, socket=remote.target)
    server.store(range(8))
    wait_for(lambda: server.in_l2(range(8)), 20, "the objects in L2")
    server.settle()
    server.manager.clear()
    assert server.load(range(10)) == (0, 8)
    remote.kill()
    wait_for(lambda: not server.adapter.report_status()["is_healthy"], 20, "the end of the connection")


def test_a_server_that_is_gone_does_not_keep_the_objects_of_others(
    new_adapter: Callable[..., KVCachePoolL2Adapter], sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = new_adapter(sidecar)
    monkeypatch.setattr(lmcache_objects, "_REQUEST_BYTES", OBJECT_BYTES)
    put = adapter._client.put

    def gone(items: Sequence[Item], **options: Any) -> list[Put]:
        first = object_key(object_keys([0])[0])
        return [Put.UNAVAILABLE] if items[0].key == first else put(items, **options)

    monkeypatch.setattr(adapter._client, "put", gone)
    adapter.submit_store_task(object_keys(range(3)), [buffer(number) for number in range(3)])
    results = taken(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert [one.is_successful() for one in results.values()] == [False]
    names = [object_key(key) for key in object_keys(range(3))]
    wait_for(lambda: adapter._client.contains(names) == [False, True, True], 20, "the objects of the other servers")


def test_a_serializer_of_lmcache_goes_before_the_adapter(sidecar: Sidecar, new_server: Callable[..., Server]) -> None:
    server = new_server(sidecar, serde="fp8")
    server.store(range(4))
    wait_for(lambda: server.in_l2(range(4)), 20, "the objects in L2")
    server.settle()
    server.manager.clear()
    assert server.load(range(4)) == (0, 4)
    assert server.adapter.get_usage().total_bytes_used == 4 * OBJECT_BYTES // 2


def test_another_server_finds_what_the_first_one_stored(sidecar: Sidecar, new_server: Callable[..., Server]) -> None:
    first = new_server(sidecar)
    first.store(range(4))
    wait_for(lambda: first.in_l2(range(4)), 20, "the objects in L2")
    assert new_server(sidecar).load(range(4)) == (0, 4)


def test_objects_survive_a_restart_of_everything(
    new_sidecar: Callable[..., Sidecar], new_server: Callable[..., Server], tmp_path: Any
) -> None:
    tiers = {"disk": {"path": str(tmp_path), "size": "1Gi"}}
    sidecar = new_sidecar(memory="64Mi", config=tiers)
    wait_for(sidecar.tiers_ready, 20, "the disk tier")
    server = new_server(sidecar)
    server.store(range(8))
    wait_for(lambda: server.in_l2(range(8)), 20, "the objects in L2")
    wait_for(lambda: sidecar.written_to("disk"), 20, "the objects on disk")
    server.close()
    sidecar.stop()
    sidecar.start()
    wait_for(sidecar.tiers_ready, 20, "the disk tier")
    assert new_server(sidecar).load(range(8)) == (0, 8)


@pytest.mark.parametrize("during", ["store", "lookup"])
def test_lmcache_goes_on_while_the_sidecar_is_frozen_and_killed(
    new_sidecar: Callable[..., Sidecar], new_server: Callable[..., Server], during: str
) -> None:
    sidecar = new_sidecar(memory="64Mi")
    server = new_server(sidecar, timeout_s=1)
    server.store(range(4))
    wait_for(lambda: server.in_l2(range(4)), 20, "the objects in L2")
    server.settle()
    server.manager.clear()
    sidecar.freeze()
    if during == "store":
        server.store(range(10, 14))
        server.settle()
        assert server.load(range(10, 14)) == (4, 0), "L1 has them"
    else:
        assert server.load(range(4)) == (0, 0), "a sidecar that does not answer is a miss"
        asked = threading.Thread(target=lambda: server.load(range(4)))
        asked.start()
        sidecar.kill_tree()
        asked.join(20)
        assert not asked.is_alive()
        sidecar.start()
    sidecar.thaw()
    wait_for(lambda: server.adapter._client.connected, 20, "the sidecar")
    server.store(range(20, 24))
    wait_for(lambda: server.in_l2(range(20, 24)), 20, "new objects in L2")
    server.settle()
    server.manager.clear()
    assert server.load(range(20, 24)) == (0, 4)
    assert server.manager.memcheck()


def test_the_sidecars_engine_restarts_under_the_server(
    new_sidecar: Callable[..., Sidecar], new_server: Callable[..., Server]
) -> None:
    sidecar = new_sidecar(memory="64Mi")
    server = new_server(sidecar)
    server.store(range(4))
    wait_for(lambda: server.in_l2(range(4)), 20, "the objects in L2")
    server.settle()
    server.manager.clear()
    sidecar.kill_engine()
    wait_for(lambda: server.adapter._client.connected, 20, "the sidecar")
    wait_for(lambda: server.load(range(4))[1] == 4, 20, "the objects of before")


# The interface by itself


def test_lmcaches_own_check_of_an_adapter_passes(
    sidecar: Sidecar, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    params = {"socket": str(sidecar.socket), "namespace": namespace}
    spec = json.dumps({"type": "plugin", **PLUGIN, "adapter_params": params})
    asyncio.run(check_l2_adapter("m", l2_adapter=[spec], num_keys=5, settle_time=0.5))
    said = capsys.readouterr().out
    for line in ("5/5 correctly absent", "Batch store OK", "5/5 found", "(loaded): 5/5", "(content): 5/5"):
        assert line in said, said


def test_the_descriptors_are_apart(sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]) -> None:
    adapter = new_adapter(sidecar)
    fds = [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]
    assert len(set(fds)) == 3


def test_stores_lookups_and_loads(sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]) -> None:
    adapter, keys = new_adapter(sidecar), object_keys(range(3))
    assert looked_up(adapter, keys) == []
    result = stored(adapter, keys[::2], [buffer(0), buffer(2)])
    assert result.is_successful()
    assert result.bytes_transferred() == 2 * OBJECT_BYTES
    assert stored(adapter, keys[:1], [buffer(0)]) == 0, "a stored chunk is not written again"
    wait_readable(adapter, keys[::2])
    assert looked_up(adapter, keys) == [0, 2], "each key counts for itself"
    targets = [buffer() for _ in keys]
    assert loaded(adapter, keys, targets) == [0, 2]
    for number in (0, 2):
        assert torch.equal(targets[number].tensor, contents(number))
    assert looked_up(adapter, []) == []
    assert loaded(adapter, [], []) == []


def test_a_lookup_of_objects_in_memory_is_one_request(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys(range(3))
    names = [object_key(key) for key in keys]
    stored(adapter, keys[:2], [buffer(0), buffer(1)])
    wait_readable(adapter, keys[:2])
    contains, asked = adapter._client.contains, list[int]()

    def counted(names: Sequence[bytes]) -> list[bool]:
        asked.append(len(names))
        return contains(names)

    monkeypatch.setattr(adapter._client, "contains", counted)
    assert looked_up(adapter, keys[:2]) == [0, 1]
    assert asked == []
    assert [stat and stat.pinned for stat in adapter._client.stat(names)] == [True, True, None]
    assert looked_up(adapter, keys) == [0, 1]
    assert asked == [3], "one of them is not in memory"
    assert len(adapter._pins) == 2
    stored(adapter, keys[2:], [buffer(2)])
    wait_for(lambda: adapter._client.stat(names[2:])[0], 10, "the third object")
    assert [stat and stat.pinned for stat in adapter._client.stat(names)] == [True, True, False]
    adapter.submit_unlock(keys)
    adapter.submit_unlock(keys)
    assert len(adapter._pins) == 0, "both locks of each object have ended"

    def pinned() -> list[Any]:
        return [stat and stat.pinned for stat in adapter._client.stat(names)]

    wait_for(lambda: pinned() == [False] * 3, 10, "the end of the pins")


def test_a_lookup_that_the_sidecar_answers_by_half_locks_nothing(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys(range(2))
    stored(adapter, keys[:1], [buffer(0)])
    wait_readable(adapter, keys[:1])

    def fail(*_: Any) -> Any:
        raise Unavailable("restart")

    with monkeypatch.context() as patched:
        patched.setattr(adapter._client, "contains", fail)
        assert looked_up(adapter, keys) == []
    assert len(adapter._pins) == 0
    assert adapter.get_usage().total_bytes_used == OBJECT_BYTES, "silence is not an eviction"


def test_a_load_is_cut_into_leases_of_limited_size(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is larger than the memory tier could not be under lease as a whole."""
    adapter, keys = new_adapter(sidecar), object_keys(range(5))
    stored(adapter, keys[:4], [buffer(number) for number in range(4)])
    wait_readable(adapter, keys[:4])
    leases, lease = [], adapter._client.lease

    def counted(names: Sequence[bytes], **options: Any) -> Any:
        leases.append(len(names))
        return lease(names, **options)

    monkeypatch.setattr(adapter._client, "lease", counted)
    monkeypatch.setattr(lmcache_objects, "_REQUEST_BYTES", 2 * OBJECT_BYTES)
    targets = [buffer() for _ in keys]
    assert loaded(adapter, keys, targets) == [0, 1, 2, 3]
    assert leases == [2, 2, 1]
    assert all(torch.equal(targets[number].tensor, contents(number)) for number in range(4))
    monkeypatch.setattr(lmcache_objects, "_REQUEST_BYTES", 1)
    assert loaded(adapter, keys[:2], targets[:2]) == [0, 1], "one object may be larger than the limit"


def test_salts_ranks_groups_and_models_are_apart() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"kv_rank": 2},
        {"object_group_id": 1},
        {"model_name": "n"},
        {"model_name": "m/1"},
        {"chunk_hash": b"\0" * 31},
    ]
    assert len({object_key(object_keys([0], **fields)[0]) for fields in variants}) == len(variants)


def test_a_buffer_of_another_layout_is_not_filled(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys([1])
    stored(adapter, keys, [buffer(1)])
    wait_readable(adapter, keys)
    for layout in (
        MemoryLayoutDesc([torch.Size([2, 8, 64, 128])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, 4, 128, 128])], [torch.float16]),
        MemoryLayoutDesc([torch.Size([2, 4, 64, 128])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, 4, 256, 128])], [torch.bfloat16]),
    ):
        assert loaded(adapter, keys, [target := buffer(layout=layout)]) == []
        assert not target.raw_tensor.any()


def test_a_narrowed_buffer_comes_back_as_its_bytes(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys([1])
    source = buffer(1)
    source.set_used_size(1000)
    assert stored(adapter, keys, [source]).bytes_transferred() == 1000
    wait_readable(adapter, keys)
    target = buffer()
    target.set_used_size(1000)
    assert loaded(adapter, keys, [target]) == [0]
    assert bytes(target.byte_array) == bytes(source.byte_array)


def test_locks_keep_objects_from_deletion(sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]) -> None:
    adapter, keys = new_adapter(sidecar, max_capacity_gb=1), object_keys(range(3))
    stored(adapter, keys, [buffer(number) for number in range(3)])
    wait_readable(adapter, keys)
    usage = adapter.get_usage()
    assert (usage.total_bytes_used, usage.total_capacity_bytes) == (3 * OBJECT_BYTES, 1 << 30)
    assert looked_up(adapter, keys[:1]) == [0]
    adapter.delete(keys)
    assert adapter.get_usage().total_bytes_used == OBJECT_BYTES
    assert looked_up(adapter, keys) == [0]
    adapter.submit_unlock(keys[:1])
    adapter.submit_unlock(keys[:1])
    wait_for(lambda: len(adapter._pins) == 0, 10, "the lock to end")
    adapter.delete(keys)
    adapter.delete(keys)
    assert looked_up(adapter, keys) == []
    assert adapter.get_usage().total_bytes_used == 0


def test_a_lookup_that_misses_corrects_the_usage(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys(range(2))
    assert adapter.get_usage().usage_fraction == -1, "only the sidecar evicts"
    stored(adapter, keys, [buffer(0), buffer(1)])
    wait_readable(adapter, keys)
    adapter._client.remove([object_key(keys[0])])
    assert looked_up(adapter, keys) == [1]
    assert adapter.get_usage().total_bytes_used == OBJECT_BYTES


def test_the_adapter_says_that_it_cannot_list(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter]
) -> None:
    with pytest.raises(NotImplementedError):
        new_adapter(sidecar).list_l2_keys()


def test_the_usage_of_more_objects_than_it_remembers_forgets_the_oldest(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_l2, "_SIZES_MAX", 3)
    adapter, keys, deleted = new_adapter(sidecar), object_keys(range(5)), list[ObjectKey]()
    monkeypatch.setattr(adapter, "_notify_keys_deleted", spy(adapter._notify_keys_deleted, deleted))
    stored(adapter, keys, [buffer(number) for number in range(5)])
    assert adapter.get_usage().total_bytes_used == 3 * OBJECT_BYTES
    assert deleted == keys[:2]
    adapter.delete(keys)
    assert adapter.get_usage().total_bytes_used == 0


@pytest.mark.parametrize("result", [Put.NO_ROOM, Put.QUOTA, Put.TOO_LARGE])
def test_a_store_without_room_fails(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch, result: Put
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys(range(2))
    monkeypatch.setattr(adapter._client, "put", lambda items, **_: [Put.STORED, result])
    assert not stored(adapter, keys, [buffer(0), buffer(1)]).is_successful()
    assert adapter.get_usage().total_bytes_used == OBJECT_BYTES


def test_every_task_ends_whatever_the_client_does(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, keys = new_adapter(sidecar), object_keys([1])
    stored(adapter, keys, [buffer(1)])
    wait_readable(adapter, keys)
    with monkeypatch.context() as patched:
        patched.setattr(Leased, "read_into", lambda *_: False)
        assert loaded(adapter, keys, [buffer()]) == []
    for error in (Unavailable("restart"), ZeroDivisionError("a mistake")):

        def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        with monkeypatch.context() as patched:
            for name in ("put", "contains", "lease", "pin", "remove"):
                patched.setattr(adapter._client, name, fail)
            assert not stored(adapter, keys, [buffer(1)]).is_successful()
            assert looked_up(adapter, keys) == []
            assert loaded(adapter, keys, [buffer()]) == []
    assert looked_up(adapter, keys) == [0]
    assert adapter.get_usage().total_bytes_used == OBJECT_BYTES, "errors are not evictions"


def test_a_task_that_waited_too_long_touches_nothing(
    sidecar: Sidecar, new_adapter: Callable[..., KVCachePoolL2Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's locks on the buffers of a task expire."""
    monkeypatch.setattr(lmcache_l2, "_QUEUE_S", 0.2)
    adapter, keys = new_adapter(sidecar), object_keys([1, 2])
    go_on, put = threading.Event(), adapter._client.put

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(10)
        return put(*arguments, **options)

    monkeypatch.setattr(adapter._client, "put", slow)
    tasks = [adapter.submit_store_task([key], [buffer(number)]) for number, key in enumerate(keys, 1)]
    submitted = time.monotonic()
    wait_for(lambda: time.monotonic() - submitted > 0.3, 5, "the second task to be late")
    go_on.set()
    results: dict[int, Any] = {}

    def ended() -> bool:
        results.update(adapter.pop_completed_store_tasks())
        return len(results) == 2

    wait_for(ended, 10, "both stores to end")
    assert [results[task].is_successful() for task in tasks] == [True, False]
    wait_readable(adapter, keys[:1])
    assert not adapter._client.contains([object_key(keys[1])])[0]


def test_close_waits_for_the_last_copy(sidecar: Sidecar, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"socket": str(sidecar.socket), "namespace": namespace}
    adapter, keys = KVCachePoolL2Adapter(KVCachePoolL2AdapterConfig.from_dict(params)), object_keys([1])
    stored(adapter, keys, [buffer(1)])
    wait_readable(adapter, keys)
    reading, go_on, events = threading.Event(), threading.Event(), []

    def slow(*_: Any) -> bool:
        reading.set()
        assert go_on.wait(10)
        events.append("copied")
        return True

    monkeypatch.setattr(Leased, "read_into", slow)
    adapter.submit_load_task(keys, [buffer()])
    assert reading.wait(10)

    def close() -> None:
        adapter.close()
        events.append("closed")

    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.3)
    assert events == []
    go_on.set()
    closing.join(10)
    assert events == ["copied", "closed"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sockt": "x"}, "adapter_params: unknown key 'sockt'"),
        ({"max_capacity_gb": -1}, "max_capacity_gb: expected a number from 0, got -1"),
        ({"timeout_s": 600}, "timeout_s: expected seconds from 0.001 to 60, got 600"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCachePoolL2AdapterConfig.from_dict(params)
    assert "timeout_s" in KVCachePoolL2AdapterConfig.help()
