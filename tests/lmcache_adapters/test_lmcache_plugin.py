"""The storage plugin in LMCache's own StorageManager, over a real sidecar."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache")

import torch
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvcachepool import lmcache as plugin_module
from kvcachepool.client import Client, Header, Item, Leased, Put, Unavailable
from kvcachepool.lmcache import KVCachePoolBackend
from kvcachepool.lmcache_objects import Layout, Settings, chunk_key
from lmcache_adapters.engine import CHUNK_BYTES, DTYPE, NAME, SHAPE, Engine, contents, key, keys
from servers.paths import ROOT
from servers.remote import RemoteServer
from servers.sidecar import Sidecar
from servers.waiting import wait_for

MIB = 1 << 20


@pytest.fixture
def new_engine(namespace: str) -> Iterator[Callable[..., Engine]]:
    """Engines in the namespace of the test."""
    made: list[Engine] = []

    def make(sidecar: Sidecar, **settings: Any) -> Engine:
        made.append(Engine(sidecar.socket, **{"namespace": namespace, **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(sidecar: Sidecar, new_engine: Callable[..., Engine]) -> Engine:
    return new_engine(sidecar)


def on_loop(engine: Engine, call: Any, seconds: float = 10) -> Any:
    """A coroutine's result on LMCache's event loop."""
    return asyncio.run_coroutine_threadsafe(call, engine.manager.loop).result(seconds)


def putting(sidecar: Sidecar, namespace: str, first: int, last: int) -> subprocess.Popen[bytes]:
    """Another engine process, which stores chunks."""
    arguments = [str(sidecar.socket), namespace, str(first), str(last)]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "sidecar/connector")])
    command = [sys.executable, "-m", "lmcache_adapters.engine", *arguments]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})


# What LMCache asks for


def test_lmcache_loads_the_plugin_and_its_chunks_come_back(engine: Engine) -> None:
    assert engine.manager.list_backends() == {"LocalCPUBackend": "LocalCPUBackend", NAME: "KVCachePoolBackend"}
    assert engine.found(range(4)) == 0
    engine.put(range(4))
    assert engine.found(range(8)) == 4
    assert engine.get(range(5)) == [True] * 4 + [False]
    assert engine.in_use() == 0, "memory objects of LMCache's buffer were kept"


def test_chunks_are_kept_by_a_remote_server(remote: RemoteServer, namespace: str) -> None:
    engine = Engine(remote.target, namespace=namespace)
    try:
        engine.put(range(4))
        assert engine.get(range(5)) == [True] * 4 + [False]
        remote.kill()
        assert engine.found(range(4)) == 0
        assert engine.in_use() == 0, "memory objects of LMCache's buffer were kept"
    finally:
        engine.close()


def test_a_chunk_keeps_its_shape_dtype_and_format(engine: Engine) -> None:
    engine.put([1], tokens=100)
    obj = engine.plugin.get_blocking(key(1))
    assert obj is not None
    assert (tuple(obj.get_shape()), obj.get_dtype(), obj.get_memory_format()) == (
        (2, 4, 100, 128),
        DTYPE,
        MemoryFormat.KV_2LTD,
    )
    assert torch.equal(obj.tensor, contents(1, 100))
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_bytes_without_a_shape_come_back(engine: Engine) -> None:
    packed = BytesBufferMemoryObj(bytearray(b"packed by a codec"))
    futures = engine.plugin.batched_submit_put_task([key(1)], [packed])
    assert futures is not None
    futures[0].result(10)
    loaded = wait_for(lambda: engine.plugin.get_blocking(key(1)), 10, "the bytes")
    assert bytes(loaded.byte_array) == b"packed by a codec"


def test_the_shared_cache_of_lmcache_gets_what_the_plugin_loads(sidecar: Sidecar, namespace: str) -> None:
    engine = Engine(sidecar.socket, namespace=namespace)
    engine.put([1])
    engine.manager.set_hot_cache(True)
    assert engine.get([1]) == [True]
    assert engine.manager.contains(key(1)) == "LocalCPUBackend"
    engine.close()


def test_a_lookup_of_many_chunks_is_one_round_trip(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put(range(3))
    calls: list[int] = []
    exists = engine.plugin._client.exists

    def counted(names: Any, **options: Any) -> int:
        calls.append(len(names))
        return int(exists(names, **options))

    monkeypatch.setattr(engine.plugin._client, "exists", counted)
    assert engine.plugin.batched_contains(keys(range(64))) == 3
    assert calls == [64]


def test_remove_takes_chunks_from_the_cache(engine: Engine) -> None:
    engine.put(range(4))
    assert engine.manager.remove(key(0)) == 1
    assert not engine.plugin.remove(key(0))
    assert engine.plugin.pin(key(1))
    assert not engine.plugin.remove(key(1), force=False), "a pinned chunk is kept without `force`"
    assert engine.plugin.batched_remove(keys(range(4))) == 3
    assert engine.found(range(1, 4)) == 0


def test_keys_of_any_length_and_of_any_tags_are_apart(engine: Engine) -> None:
    long = "m" * 100_000
    tags: list[dict[str, Any]] = [{}, {"a": "1@b%2"}, {"a": "1", "b": "2"}]
    wanted = [key(1, request_configs={f"lmcache.tag.{name}": value for name, value in each.items()}) for each in tags]
    wanted += [
        key(1, model_name=long),
        key(1, model_name=long + "x"),
        key(1, worker_id=1),
        key(-1),
        key(1, dtype=torch.half),
    ]
    assert len({chunk_key(each) for each in wanted}) == len(wanted)
    assert len({each.to_string() for each in wanted[1:3]}) == 1, "LMCache's own string cannot tell these two apart"
    for number, each in enumerate(wanted):
        futures = engine.plugin.batched_submit_put_task([each], [obj := engine.chunk(number)])
        assert futures is not None
        futures[0].result(10)
        obj.ref_count_down()
    for number, each in enumerate(wanted[:-1]):
        loaded = wait_for(partial(engine.plugin.get_blocking, each), 10, "the chunk")
        assert loaded is not None
        assert torch.equal(loaded.tensor, contents(number))
        loaded.ref_count_down()


def test_the_scheduler_of_lmcache_looks_up_without_a_buffer(sidecar: Sidecar, engine: Engine, namespace: str) -> None:
    engine.put(range(2))
    plugin = KVCachePoolBackend(config=engine.config, metadata=engine.metadata)
    assert plugin.batched_contains(keys(range(3))) == 2
    assert plugin.batched_get_blocking(keys(range(2))) == [None, None]
    with pytest.raises(RuntimeError, match="only looks chunks up"):
        plugin.get_allocator_backend()
    plugin.close()


class _Values(MockGPUConnector):
    """What LMCache's engine copies to and from instead of a GPU: a number per chunk."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.loaded: list[float] = []

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for obj, start in zip(memory_objs, starts, strict=True):
            obj.tensor.fill_(start)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        self.loaded += [float(obj.tensor.float().mean()) for obj in memory_objs]


def test_lmcaches_engine_stores_looks_up_and_retrieves(engine: Engine) -> None:
    values = _Values()
    tokens = ChunkedTokenDatabase(engine.config, engine.metadata)
    lmcache = LMCacheEngine(engine.config, engine.metadata, tokens, values, lambda *_: None, lambda *_: None)
    lmcache.post_init()
    prompt = list(range(4 * SHAPE[2]))
    lmcache.store(prompt)
    plugin = lmcache.storage_manager.storage_backends[NAME]
    wait_for(lambda: lmcache.lookup(prompt) == len(prompt), 10, "the chunks")
    assert lmcache.lookup(prompt, lookup_id="request", pin=True) == len(prompt)
    assert len(plugin._pins) == 4
    assert int(lmcache.retrieve(prompt, req_id="request").sum()) == len(prompt)
    assert values.loaded == [0, SHAPE[2], 2 * SHAPE[2], 3 * SHAPE[2]]
    lmcache.lookup_unpin("request")
    assert len(plugin._pins) == 0
    assert lmcache.storage_manager.batched_remove([each for _, _, each in tokens.process_tokens(prompt)]) == 4
    assert lmcache.lookup(prompt) == 0
    lmcache.close()


# Stores in the background


def test_stores_call_back_once_per_key(engine: Engine) -> None:
    done: list[Any] = []
    objs = [engine.chunk(number) for number in range(3)]
    for _ in range(2):
        futures = engine.plugin.batched_submit_put_task(keys(range(3)), objs, on_complete_callback=done.append)
        for future in futures or []:
            future.result(10)
    assert done == keys(range(3)) * 2, "the second time the sidecar has them already"
    for obj in objs:
        obj.ref_count_down()
    assert engine.in_use() == 0


def test_a_failing_callback_and_an_awaited_store(engine: Engine) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("LMCache's callback")

    obj = engine.chunk(1)
    on_loop(engine, engine.plugin.async_batched_submit_put_task([key(1)], [obj], on_complete_callback=fail))
    obj.ref_count_down()
    wait_for(lambda: engine.found([1]) == 1, 10, "the chunk")
    assert engine.in_use() == 0


def test_stores_to_a_frozen_sidecar_neither_block_nor_fill_the_buffer(
    sidecar: Sidecar, new_engine: Callable[..., Engine]
) -> None:
    engine = new_engine(sidecar, buffer_gb=8 / 1024, timeout_s=1)
    sidecar.freeze()
    started = time.monotonic()
    for first in range(0, 14, 2):
        numbers = range(first, first + 2)
        engine.manager.batched_put(keys(numbers), [engine.chunk(number) for number in numbers])
    assert time.monotonic() - started < 0.9, "stores must not wait for the sidecar"
    assert engine.plugin.exists_in_put_tasks(key(0))
    assert not engine.plugin.exists_in_put_tasks(key(13)), "more than half of LMCache's buffer waits for the sidecar"
    assert engine.in_use() * CHUNK_BYTES <= 4 * MIB
    wait_for(lambda: engine.in_use() == 0, 10, "stores to end at their deadline")
    sidecar.thaw()
    wait_for(lambda: engine.plugin._client.connected, 10, "the sidecar again")
    engine.put([20])


@pytest.mark.parametrize("result", [Put.NO_ROOM, Put.QUOTA, Put.TOO_LARGE])
def test_a_store_that_the_sidecar_refuses_is_a_miss(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, result: Put
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(engine.plugin._client, "put", lambda items, **_: [result] * len(items))
    obj = engine.chunk(1)
    for future in engine.plugin.batched_submit_put_task([key(1)], [obj], on_complete_callback=done.append) or []:
        future.result(10)
    obj.ref_count_down()
    assert not done
    assert engine.found([1]) == 0
    assert engine.in_use() == 0


# Pins


def test_a_pinned_chunk_outlives_pressure(
    new_sidecar: Callable[..., Sidecar], new_engine: Callable[..., Engine]
) -> None:
    sidecar = new_sidecar(memory="64Mi")
    engine = new_engine(sidecar)
    engine.put(range(8))
    assert engine.found(range(4), pin=True) == 4
    for first in range(100, 260, 40):
        engine.put(range(first, first + 40))
    assert engine.found(range(4)) == 4
    assert engine.found([4]) == 0, "what nobody pinned is evicted"
    engine.manager.batched_unpin(keys(range(4)))
    for first in range(300, 460, 40):
        engine.put(range(first, first + 40))
    assert engine.found([0]) == 0


def test_pins_are_counted_and_expire(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put(range(2))
    pins, now = engine.plugin._pins, time.monotonic()
    assert engine.plugin.contains(key(0), pin=True)
    assert engine.plugin.pin(key(0))
    assert not engine.plugin.pin(key(9)), "an absent chunk cannot be pinned"
    assert engine.plugin.unpin(key(0))
    assert pins.held(chunk_key(key(0))), "one of two pins is left"
    assert engine.plugin.unpin(key(0))
    assert not pins.held(chunk_key(key(0)))
    assert not engine.plugin.unpin(key(0)), "it is not pinned any more"
    assert engine.plugin.pin(key(1))
    monkeypatch.setattr("kvcachepool.lmcache_objects.time.monotonic", lambda: now + 301)
    assert not pins.held(chunk_key(key(1)))
    assert not engine.plugin.unpin(key(1))


def test_a_lookup_pins_only_the_prefix_that_it_reports(engine: Engine) -> None:
    engine.put([0, 1, 3])
    assert engine.plugin.batched_contains(keys(range(5)), pin=True) == 2
    assert [engine.plugin._pins.held(chunk_key(key(number))) for number in range(4)] == [True, True, False, False]


# The asynchronous half of LMCache


def test_asynchronous_lookup_and_load_release_their_pins(engine: Engine) -> None:
    engine.put([0, 1, 3])
    plugin = engine.plugin
    assert on_loop(engine, plugin.batched_async_contains("lookup", keys(range(5)), pin=True)) == 2
    assert len(plugin._pins) == 2
    loaded = on_loop(engine, plugin.batched_get_non_blocking("lookup", keys([0, 1, 2, 3])))
    assert len(loaded) == 2, "the chunks before the first absent one"
    assert len(plugin._pins) == 0
    for number, obj in enumerate(loaded):
        assert torch.equal(obj.tensor, contents(number))
        obj.ref_count_down()
    assert engine.in_use() == 0
    future = plugin.get_non_blocking(key(1))
    assert future is not None
    obj = future.result(10)
    assert obj is not None
    obj.ref_count_down()


def test_a_cancelled_load_gives_its_memory_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put([0])
    reading, go_on = threading.Event(), threading.Event()
    read_into = Leased.read_into

    def slow(leased: Leased, *arguments: Any) -> bool:
        reading.set()
        assert go_on.wait(10)
        return read_into(leased, *arguments)

    monkeypatch.setattr(Leased, "read_into", slow)
    load = asyncio.run_coroutine_threadsafe(
        engine.plugin.batched_get_non_blocking("lookup", keys([0])), engine.manager.loop
    )
    assert reading.wait(10)
    load.cancel()
    assert engine.in_use() == 1, "the copy goes on in memory that is still taken"
    go_on.set()
    wait_for(lambda: engine.in_use() == 0, 10, "the memory of the cancelled load")


# Failures


def test_foreign_and_short_values_are_misses(sidecar: Sidecar, engine: Engine, namespace: str) -> None:
    good = Layout(((2, 4, 256, 128),), (DTYPE,), MemoryFormat.KV_2LTD).header()
    value = bytes(CHUNK_BYTES)
    foreign = [
        (None, value),
        (good, value[:-1]),
        (good, b""),
        (good._replace(format="KV_OTHER"), value),
        (good._replace(dtype="bfloat15"), value),
        (good._replace(dtype="nn"), value),
        (good._replace(dtype="", shape=(CHUNK_BYTES, 0, 0, 0)), value),
        (good._replace(format="UNDEFINED"), value),
        (good._replace(format="BINARY"), value),
        (good._replace(format="BINARY_BUFFER"), value),
        (good._replace(shape=(2, 4, -256, -128)), value),
        (good._replace(metadata={"more": [[[2], "float16", 1]]}), value),
        # A model with other layers, tokens before layers, and another dtype of the same size.
        (good._replace(shape=(2, 8, 256, 64)), value),
        (good._replace(shape=(2, 256, 4, 128)), value),
        (good._replace(dtype="float16"), value),
        (Header(), value),
    ]
    client = Client(str(sidecar.socket), namespace=namespace, name="foreign")
    assert client.wait_connected(10)
    items = [Item(chunk_key(key(number)), value, header) for number, (header, value) in enumerate(foreign)]
    assert set(client.put(items)) == {Put.STORED}
    wait_for(lambda: engine.found(range(len(foreign))) == len(foreign), 10, "the foreign values")
    assert engine.get(range(len(foreign))) == [False] * len(foreign)
    assert engine.in_use() == 0
    client.close()


def test_a_full_buffer_of_lmcache_is_a_miss(engine: Engine) -> None:
    engine.put([1])
    taken = []
    while (obj := engine.manager.allocate(torch.Size([MIB]), torch.uint8, busy_loop=False)) is not None:
        taken.append(obj)
    assert engine.get([1]) == [False]
    for obj in taken:
        obj.ref_count_down()
    assert engine.get([1]) == [True]


def test_memory_that_the_sidecar_took_back_is_a_miss(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put([1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(Leased, "read_into", lambda *_: False)
        assert engine.get([1, 2]) == [False, False]
    assert engine.in_use() == 0

    def gone(*_: Any) -> bool:
        raise Unavailable("restart")

    monkeypatch.setattr(Leased, "read_into", gone)
    assert engine.get([1, 2]) == [False, False]
    assert engine.in_use() == 0


def test_several_processes_share_their_chunks(sidecar: Sidecar, engine: Engine, namespace: str) -> None:
    writers = [putting(sidecar, namespace, 0, 20), putting(sidecar, namespace, 10, 30)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert engine.get(range(30)) == [True] * 30


def test_chunks_survive_a_restart_of_the_sidecars_engine(
    new_sidecar: Callable[..., Sidecar], new_engine: Callable[..., Engine]
) -> None:
    sidecar = new_sidecar(memory="64Mi")
    engine = new_engine(sidecar)
    engine.put(range(8))
    sidecar.kill_engine()
    wait_for(lambda: engine.found(range(8)) == 8, 20, "the chunks of before")
    assert engine.get(range(8)) == [True] * 8
    engine.put(range(8, 12))


def test_without_a_sidecar_everything_is_a_miss_and_nothing_waits(
    new_sidecar: Callable[..., Sidecar], new_engine: Callable[..., Engine]
) -> None:
    sidecar = new_sidecar(memory="64Mi")
    engine = new_engine(sidecar, timeout_s=2)
    engine.put(range(2))
    assert engine.plugin.pin(key(0))
    sidecar.kill_tree()
    wait_for(lambda: engine.found([0]) == 0, 5, "a miss")
    started = time.monotonic()
    assert engine.get(range(2)) == [False, False]
    engine.manager.batched_put(keys([5]), [engine.chunk(5)])
    assert not engine.plugin.pin(key(0))
    assert engine.plugin.unpin(key(0))
    assert engine.plugin.batched_remove(keys(range(2))) == 0
    assert on_loop(engine, engine.plugin.batched_async_contains("lookup", keys(range(2)), pin=True)) == 0
    assert on_loop(engine, engine.plugin.batched_get_non_blocking("lookup", keys(range(2)))) == []
    assert time.monotonic() - started < 1.5
    wait_for(lambda: engine.in_use() == 0, 10, "the store to end")
    sidecar.start()
    wait_for(lambda: engine.plugin._client.connected, 20, "the new sidecar")
    engine.put(range(4))
    assert engine.get(range(4)) == [True] * 4


def test_a_frozen_sidecar_costs_one_deadline(sidecar: Sidecar, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(sidecar, timeout_s=0.5)
    engine.put(range(20))
    assert engine.found(range(20), pin=True) == 20
    sidecar.freeze()
    # LMCache unpins key by key, in vLLM's thread.
    started = time.monotonic()
    engine.manager.batched_unpin(keys(range(20)))
    assert time.monotonic() - started < 1
    for call in (lambda: engine.found(range(2)), lambda: sum(engine.get(range(2)))):
        started = time.monotonic()
        assert call() == 0
        assert time.monotonic() - started < 2
    sidecar.thaw()
    wait_for(lambda: engine.found(range(2)) == 2, 10, "the chunks again")
    assert engine.get(range(2)) == [True, True]


def test_unpins_are_sent_together_and_a_new_pin_stays(
    sidecar: Sidecar, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.put(range(20))
    assert engine.found(range(20), pin=True) == 20
    plugin, sent, go_on = engine.plugin, list[int](), threading.Event()
    unpin = plugin._client.unpin

    def counted(names: Sequence[bytes]) -> int:
        sent.append(len(names))
        return int(unpin(names))

    monkeypatch.setattr(plugin._client, "unpin", counted)
    plugin._writer.submit(go_on.wait, 10)
    engine.manager.batched_unpin(keys(range(20)))
    assert not plugin._pins.held(chunk_key(key(0)))
    assert plugin.pin(key(0))
    go_on.set()
    plugin._writer.submit(lambda: None).result(10)
    assert sent == [19]
    stats = plugin._client.stat([chunk_key(each) for each in keys(range(20))])
    assert [stat and stat.pinned for stat in stats] == [True] + [False] * 19


# The end


@pytest.mark.parametrize("copy", ["store", "load"])
def test_lmcache_frees_its_buffer_only_after_the_last_copy(
    sidecar: Sidecar, namespace: str, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    engine = Engine(sidecar.socket, namespace=namespace, timeout_s=5)
    engine.put([0])
    copying, go_on, events = threading.Event(), threading.Event(), []
    allocator = engine.manager.allocator_backend.memory_allocator
    free, put, read_into = allocator.close, engine.plugin._client.put, Leased.read_into

    def freed() -> None:
        events.append("freed")
        free()

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            copying.set()
            assert go_on.wait(10)
            try:
                return call(*arguments, **options)
            finally:
                events.append("copied")

        return run

    monkeypatch.setattr(allocator, "close", freed)
    if copy == "store":
        monkeypatch.setattr(engine.plugin._client, "put", held(put))
        engine.manager.batched_put(keys([1]), [engine.chunk(1)])
    else:
        monkeypatch.setattr(Leased, "read_into", held(read_into))
        engine.plugin.get_non_blocking(key(0))
    assert copying.wait(10)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_for(lambda: engine.plugin._closed, 10, "LMCache to close")
    closing.join(0.3)
    assert events == [], "the buffer was freed under a copy"
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert events[:2] == ["copied", "freed"]


def test_close_stores_what_is_on_its_way(sidecar: Sidecar, engine: Engine, namespace: str) -> None:
    other = Engine(sidecar.socket, namespace=namespace)
    other.manager.batched_put(keys(range(50, 80)), [other.chunk(number) for number in range(50, 80)])
    other.close()
    wait_for(lambda: engine.found(range(50, 80)) == 30, 10, "all chunks")
    plugin = other.plugin
    plugin.close()
    assert plugin.batched_get_blocking(keys(range(2))) == [None, None]
    assert plugin.get_non_blocking(key(50)) is None
    assert plugin.batched_contains(keys([50])) == 0
    assert plugin.batched_submit_put_task(keys([1]), [engine.chunk(1)]) is None


# Settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sockets": "x"}, "unknown key 'sockets'"),
        ({"socket": 3}, "socket: expected a string, got 3"),
        ({"timeout_s": 0}, "timeout_s: expected seconds from 0.001 to 60, got 0"),
        ({"timeout_s": True}, "timeout_s: expected seconds"),
        ({"timeout_s": float("nan")}, "timeout_s: expected seconds"),
        ({"pin_ttl_s": 1.5}, "pin_ttl_s: expected whole seconds from 1"),
        ({"ttl_s": "1h"}, "ttl_s: expected whole seconds from 0"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.parse(given, "here")


@pytest.mark.parametrize("given", [{"timeout_s": "soon"}, {"use_layerwise": True}])
def test_lmcache_goes_on_without_a_plugin_that_cannot_start(sidecar: Sidecar, given: dict[str, Any]) -> None:
    engine = Engine(sidecar.socket, **given)
    assert NAME not in engine.manager.list_backends()
    engine.close()


def test_lmcache_starts_without_a_sidecar(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "no.sock", timeout_s=0.2)
    assert engine.found(range(2)) == 0
    assert engine.get(range(2)) == [False, False]
    engine.close()


def test_shapes_of_the_test_are_those_of_lmcache(engine: Engine) -> None:
    assert engine.metadata.get_shapes(7) == [torch.Size([SHAPE[1], SHAPE[0], 7, SHAPE[3] * SHAPE[4]])]
    assert plugin_module._CHUNK_FORMATS == (MemoryFormat.KV_2LTD, MemoryFormat.KV_MLA_FMT)
