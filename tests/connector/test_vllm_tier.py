"""The tier for vLLM's own tiered offloading, below vLLM's manager and host memory, above a sidecar or a fake client."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import Store
from offload_engine import OffloadEngine, config_of, content_of, key_of
from stub_remote import StubRemote
from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.file_mapper import FileMapper

from gpu.test_vllm_tier import transfer_config
from kvcachepool import tier_keys, vllm_tier
from kvcachepool.client import Header, Put
from kvcachepool.tier_keys import Keys
from servers import models, paths
from servers.sidecar import Sidecar
from servers.waiting import wait_for

NAMES = [f"chunk {i}" for i in range(5)]
BYTES = [content_of(name) for name in NAMES]
MISSES: list[bytes | None] = [None] * len(NAMES)
#: The user's name for the weights, so that no files are read, and what the plugin adds.
NAMED: dict[str, Any] = {"identity": "weights 1", "model": {"settings": "s", "unshared": ""}}

Engines = Callable[..., OffloadEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Creates engines, which all end with the test."""
    made: list[OffloadEngine] = []

    def make(connected: bool = True, **tier: Any) -> OffloadEngine:
        options = tier.pop("options", {})
        made.append(OffloadEngine({**NAMED, **tier}, **options))
        client = made[-1].tier._client
        if connected and hasattr(client, "wait_connected"):
            assert client.wait_connected(20)
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A fake behind all tiers of the test."""
    fake = Store()
    monkeypatch.setattr(vllm_tier, "Client", fake.client)
    yield fake
    for one in fake.open.values():
        one.set()


def blocked(fake: Store, operation: str) -> threading.Event:
    fake.open[operation].clear()
    return fake.open[operation]


# -- With the real sidecar


def test_stored_chunks_are_loaded_with_equal_bytes_after_host_memory_was_reset(pool: Sidecar, engines: Engines) -> None:
    first = engines()
    first.store(NAMES)
    second = engines()
    assert wait_for(lambda: second.load(NAMES) == BYTES, 20, "all chunks readable")
    assert second.load(["never stored", *NAMES]) == [None, *BYTES]


def test_a_second_process_hits(pool: Sidecar, engines: Engines) -> None:
    engine = engines()
    engine.store(NAMES)
    assert wait_for(lambda: engines().load(NAMES) == BYTES, 20, "all chunks readable")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    command = [sys.executable, str(here / "offload_engine.py"), json.dumps(NAMED), *NAMES, "never stored"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [*(hashlib.sha256(one).hexdigest() for one in BYTES), None]


def test_chunks_are_kept_by_remote_servers(
    remote: StubRemote, certificates: Path, credentials: None, engines: Engines
) -> None:
    other = StubRemote(certificates)
    try:
        target = f"{remote.target},{other.target}"
        engines(socket=target).store(NAMES)
        assert len(remote.objects) + len(other.objects) == len(NAMES)
        assert engines(socket=target).load(NAMES) == BYTES
    finally:
        other.close()
    engine = engines(socket=target)
    left = engine.load(NAMES)
    assert sum(one is not None for one in left) == len(remote.objects)
    engine.store([f"later {at}" for at in range(20)])
    chunks = engine.chunks()
    assert chunks["store", "stored"] + chunks["store", "ServerUnavailable"] == 20
    assert chunks["store", "ServerUnavailable"] > 0


def test_chunks_that_exist_are_not_stored_again(pool: Sidecar, engines: Engines) -> None:
    engines().store(NAMES)
    again = engines()
    wait_for(lambda: engines().load(NAMES) == BYTES, 20, "all chunks readable")
    again.store(NAMES)
    assert again.chunks() == {("store", "exists"): len(NAMES)}


def test_another_model_name_and_another_identity_find_nothing(pool: Sidecar, engines: Engines) -> None:
    engines().store(NAMES)
    wait_for(lambda: engines().load(NAMES) == BYTES, 20, "all chunks readable")
    assert engines(identity="weights 2").load(NAMES) == MISSES
    assert engines(namespace="other").load(NAMES) == MISSES


def test_the_tier_goes_on_after_a_restart_of_the_sidecar(pool: Sidecar, engines: Engines) -> None:
    engine = engines()
    engine.store(NAMES)
    pool.kill_tree()
    wait_for(lambda: not engine.tier._client.connected, 20, "the end of the connection")
    began = time.monotonic()
    assert engine.load(["other 1", "other 2"]) == [None, None]
    engine.store(["lost"])
    assert time.monotonic() - began < 5, "without a sidecar nothing waits"
    assert {("lookup", "NotConnected"), ("store", "NotConnected")} <= engine.chunks().keys()
    pool.start()
    assert engine.tier._client.wait_connected(30)
    engine.store([*NAMES, "new"])
    engine.store(["new 2"])
    other = engines()
    assert wait_for(lambda: other.load(["new 2"]) == [content_of("new 2")], 20, "a chunk after the restart")


def test_a_restart_of_the_engine_process_loses_nothing(pool: Sidecar, engines: Engines) -> None:
    engines().store(NAMES)
    wait_for(lambda: engines().load(NAMES) == BYTES, 20, "all chunks readable")
    pool.kill_engine()
    pool.wait_ready()
    later = engines()
    assert wait_for(lambda: later.load(NAMES) == BYTES, 20, "the chunks that were adopted")


def test_damaged_bytes_are_misses(pool: Sidecar, engines: Engines) -> None:
    engines().store(NAMES)
    wait_for(lambda: engines().load(NAMES) == BYTES, 20, "all chunks readable")
    assert pool.flip_memory() > 0
    pool.kill_engine()
    pool.wait_ready()
    later = engines()
    assert wait_for(lambda: later.load(NAMES) == MISSES, 20, "misses instead of damaged bytes")


def test_a_sidecar_that_does_not_answer_costs_a_deadline(pool: Sidecar, engines: Engines) -> None:
    engine = engines(lookup_timeout_s=0.5, load_timeout_s=1.0, store_timeout_s=1.0)
    engine.store(NAMES)
    other = engines(lookup_timeout_s=0.5, load_timeout_s=1.0, store_timeout_s=1.0)
    wait_for(lambda: other.load(NAMES[:1]) == BYTES[:1], 20, "a readable chunk")
    pool.freeze()
    try:
        began = time.monotonic()
        assert other.load(NAMES[1:]) == MISSES[1:]
        other.store(["new"])
        assert time.monotonic() - began < 10
        assert other.chunks()["store", "Deadline"] == 1
    finally:
        pool.thaw()


def test_while_the_sidecar_evicts_and_restarts_every_loaded_byte_is_right(pool: Sidecar, engines: Engines) -> None:
    """Two engines store twice what the sidecar's memory holds, and load what either of them stored."""
    both = [engines(), engines()]
    chosen = random.Random(1)
    found = 0
    for round_number in range(24):
        engine = both[round_number % 2]
        engine.store([f"{round_number} {i}" for i in range(50)])
        wanted = [f"{chosen.randint(0, round_number)} {i}" for i in chosen.sample(range(50), 20)]
        for name, loaded in zip(wanted, both[chosen.randrange(2)].load(wanted), strict=True):
            assert loaded in (None, content_of(name)), name
            found += loaded is not None
        if round_number == 12:
            pool.kill_engine()
    assert found > 0


@pytest.mark.parametrize(
    ("value", "header"),
    [
        (b"x" * 100, Header(shape=(102_400,), dtype="uint8", format="vllm-offload-1")),
        (b"x" * 200_000, Header(shape=(102_400,), dtype="uint8", format="vllm-offload-1")),
        (b"x" * 102_400, Header(shape=(51_200, 2), dtype="uint8", format="vllm-offload-1")),
        (b"x" * 102_400, Header(shape=(102_400,), dtype="uint8", format="something else")),
        (b"x" * 102_400, Header()),
    ],
    ids=["shorter", "longer", "shape", "format", "no header"],
)
def test_a_value_of_another_form_is_a_miss(pool: Sidecar, engines: Engines, value: bytes, header: Header) -> None:
    from kvcachepool.client import Client, Item

    engine = engines()
    key = engine.tier._keys.make(key_of("foreign"))
    writer = Client(str(pool.socket), namespace="vllm-tier")
    assert writer.wait_connected(20)
    assert writer.put([Item(key, value, header)]) == [Put.STORED]
    wait_for(lambda: writer.contains([key]) == [True] and writer.get([key])[0], 20, "the foreign value")
    writer.close()
    assert engine.load(["foreign"]) == [None]
    assert engine.chunks()["load", "DifferentShape"] == 1


def test_without_a_sidecar_everything_is_a_miss_at_once(volume: Path, engines: Engines) -> None:
    engine = engines(connected=False, socket=str(volume / "none.sock"))
    began = time.monotonic()
    assert engine.load(NAMES) == MISSES
    engine.store(NAMES)
    assert time.monotonic() - began < 5
    assert engine.chunks() == {("lookup", "NotConnected"): 5, ("store", "NotConnected"): 5}


# -- The scheduler's thread


def test_a_lookup_never_waits(store: Store, engines: Engines) -> None:
    engine = engines()
    engine.store(NAMES)
    other = engines()
    gate = blocked(store, "contains")
    began = time.monotonic()
    for _ in range(50):
        assert other.lookups(NAMES) == [LookupResult.RETRY] * 5
        other.step()
    assert time.monotonic() - began < 5
    gate.set()
    assert other.load(NAMES) == BYTES


def test_the_lookups_of_a_step_are_one_question(store: Store, engines: Engines) -> None:
    engine = engines()
    for request in ("a", "b", "c"):
        engine.lookups(NAMES, request)
    engine.lookups(["another"], "c")
    assert store.asked == []
    engine.step()
    wait_for(lambda: store.asked, 10, "the question")
    assert [len(keys) for keys in store.asked] == [6]
    misses = [LookupResult.MISS] * 5
    wait_for(lambda: all(engine.lookups(NAMES, one) == misses for one in ("a", "b", "c")), 10, "the answers")
    for request in ("a", "b", "c"):
        engine.finish(request)
    assert engine.tier._lookups._verdicts == {}


def test_a_lookup_that_raises_is_a_miss(store: Store, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    monkeypatch.setattr(engine.tier._client, "contains", lambda keys, timeout_s: 1 / 0)
    assert engine.load(NAMES) == MISSES
    assert engine.load(NAMES) == MISSES


def test_submitting_never_waits_for_copies(store: Store, engines: Engines) -> None:
    engine = engines()
    gate = blocked(store, "put")
    began = time.monotonic()
    engine.offer(NAMES)
    for _ in range(50):
        engine.step()
    assert time.monotonic() - began < 5
    assert engine.manager.has_pending_work()
    gate.set()
    engine.settle()
    assert len(store.objects) == 5


# -- Failures


def test_an_object_that_is_gone_before_its_load_is_a_miss_once(store: Store, engines: Engines) -> None:
    engines().store(NAMES)
    engine = engines()
    engine.lookups(NAMES)
    engine.step()
    pending = [LookupResult.HIT_PENDING] * 5
    wait_for(lambda: engine.lookups(NAMES) == pending, 10, "the lookups' answers")
    kept = store.objects.copy()
    store.objects = {key: kept[key] for key in list(kept)[:2]}
    assert engine.load(NAMES) == [*BYTES[:2], None, None, None], "present chunks are loaded"
    store.objects = kept
    assert engine.load(NAMES) == BYTES, "a later request asks again"


def test_a_request_that_missed_sees_what_another_one_stored(store: Store, engines: Engines) -> None:
    engine = engines()
    assert engine.lookups(NAMES, "early") == [LookupResult.RETRY] * 5
    engine.step()
    wait_for(lambda: engine.lookups(NAMES, "early") == [LookupResult.MISS] * 5, 10, "misses")
    engine.store(NAMES)
    engine.manager.primary_tier.reset_cache()
    assert engine.load(NAMES) == BYTES
    engine.finish("early")


def test_memory_that_the_sidecar_takes_back_during_the_copy_is_a_miss(store: Store, engines: Engines) -> None:
    engines().store(NAMES)
    store.reads = False
    engine = engines()
    assert engine.load(NAMES) == MISSES
    assert engine.chunks()["load", "TakenBack"] == 5


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Put.NO_ROOM, "NoRoom"),
        (Put.QUOTA, "QuotaExceeded"),
        (Put.TOO_LARGE, "ValueTooLarge"),
        (Put.UNAVAILABLE, "ServerUnavailable"),
    ],
)
def test_a_refused_store_has_a_name(
    store: Store, engines: Engines, caplog: pytest.LogCaptureFixture, result: Put, reason: str
) -> None:
    store.put_result = result
    engine = engines()
    engine.store(NAMES)
    engine.store(["again"])
    assert engine.chunks() == {("store", reason): 6}
    lines = [one.getMessage() for one in caplog.records if "the tier refused" in one.getMessage()]
    assert lines == [f"the tier refused: operation=store reason={reason} chunks=5"], "one line a minute"


def test_jobs_that_wait_longer_than_their_deadline_fail(store: Store, engines: Engines) -> None:
    engine = engines(store_timeout_s=0.3, write_threads=1)
    gate = blocked(store, "put")
    engine.offer(["first"])
    engine.offer(["second"])
    limit = time.monotonic() + 0.5
    wait_for(lambda: time.monotonic() > limit, 5, "the deadline")
    gate.set()
    engine.settle()
    assert engine.chunks() == {("store", "stored"): 1, ("store", "Deadline"): 1}


# -- Back-pressure


def test_stores_beyond_the_limit_are_refused_by_name_and_release_host_memory(store: Store, engines: Engines) -> None:
    row = 102_400
    engine = engines(max_bytes_in_flight=3 * row, options={"chunks": 8})
    gate = blocked(store, "put")
    engine.offer(NAMES)
    assert engine.tier._transfers.bytes_in_flight("store") == 3 * row
    assert engine.chunks() == {("store", "TooManyBytesInFlight"): 2}
    engine.offer(["one more"])
    engine.step()
    assert engine.chunks() == {("store", "TooManyBytesInFlight"): 1}
    gate.set()
    engine.settle()
    assert engine.chunks() == {("store", "stored"): 3}
    assert sorted(store.objects) == sorted(engine.tier._keys.make(key_of(name)) for name in NAMES[:3])
    assert engine.tier._transfers.bytes_in_flight("store") == 0
    engine.finish("storing")
    for i in range(4):
        engine.store([f"later {i} {j}" for j in range(3)])
    assert len(store.objects) == 15, "no row of host memory stayed in use"


def test_loads_beyond_the_limit_are_misses(store: Store, engines: Engines) -> None:
    engines().store(NAMES)
    engine = engines(max_bytes_in_flight=2 * 102_400)
    assert engine.load(NAMES) == [*BYTES[:2], None, None, None]
    assert engine.chunks()["load", "TooManyBytesInFlight"] == 3


def test_vllms_detector_of_back_pressure_sees_the_stores(store: Store, engines: Engines) -> None:
    engine = engines(backpressure={"backpressure_cls": "EMABackpressureDetector"})
    for i in range(12):
        engine.store([f"{i}"])
    assert engine.tier.bp_detector.stats["store_latency_ema"] > 0


# -- Resets and the end


def test_after_a_reset_nothing_of_before_is_found(store: Store, engines: Engines) -> None:
    engine = engines()
    engine.store(NAMES)
    engine.manager.reset_cache()
    assert engine.load(NAMES) == MISSES, "the weights may have changed"
    engine.store(NAMES)
    engine.manager.primary_tier.reset_cache()
    assert engine.load(NAMES) == BYTES


def test_a_reset_waits_for_copies_and_drops_those_that_have_not_begun(store: Store, engines: Engines) -> None:
    engine = engines(write_threads=1)
    gate = blocked(store, "put")
    engine.offer(["first"])
    wait_for(lambda: not engine.tier._transfers._queues["store"], 10, "the begin of the copy")
    engine.offer(["second"])
    done = threading.Event()

    def run() -> None:
        engine.manager.reset_cache()
        done.set()

    reset = threading.Thread(target=run)
    reset.start()
    assert not done.wait(0.2), "a copy reads host memory"
    gate.set()
    assert done.wait(10)
    reset.join()
    assert engine.chunks() == {("store", "stored"): 1, ("store", "Drained"): 1}
    assert not engine.manager.has_pending_work()


def test_the_end_leaves_no_thread_and_no_memory(store: Store) -> None:
    before = set(threading.enumerate())
    engine = OffloadEngine(NAMED)
    engine.offer(NAMES)
    region = Path(engine._region.mmap_path)
    assert region.exists()
    engine.close()
    assert set(threading.enumerate()) == before
    assert not region.exists()
    assert store.closed == 1
    engine.tier.shutdown()
    assert store.closed == 1


def test_the_end_does_not_wait_for_a_sidecar_that_does_not_answer(pool: Sidecar, engines: Engines) -> None:
    """vLLM kills the engine's process 5 s after it has asked it to end."""
    engine = engines(write_threads=1)
    pool.freeze()
    try:
        for name in NAMES:
            engine.offer([name])
        engine.lookups(["another"])
        engine.step()
        wait_for(lambda: engine.tier._client._transport.session._calls, 10, "a call")
        began = time.monotonic()
        engine.tier.shutdown()
        assert time.monotonic() - began < 2
    finally:
        pool.thaw()


def test_vllm_keeps_its_memory_while_a_copy_may_touch_it(
    store: Store, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_tier, "_MARGIN_S", 0.0)
    engine = engines(lookup_timeout_s=0.1, load_timeout_s=0.1, store_timeout_s=0.2)
    gate = blocked(store, "put")
    engine.offer(NAMES)
    wait_for(lambda: not engine.tier._transfers._queues["store"], 10, "the begin of the copy")
    with pytest.raises(RuntimeError, match="TierBusy"):
        engine.manager.shutdown()
    assert len(engine.manager.primary_tier.get_kv_memoryview()) > 0
    gate.set()
    wait_for(lambda: not engine.tier._transfers._jobs, 10, "the end of the copy")


# -- Keys


def prefix_of(**change: Any) -> bytes:
    """The first part of all keys."""
    config = config_of({}, **change)
    spec = OffloadingSpecFactory.create_spec(config)
    facts = tier_keys.facts_of(spec, change.get("chunk_bytes", 102_400), FileMapper, "0.32.0")
    made = Keys(facts, NAMED["model"], "weights 1").make(key_of("a"))
    assert made is not None
    assert made.endswith(key_of("a"))
    return made[:32]


def changed(part: str, **fields: Any) -> dict[str, Any]:
    return {part: dataclasses.replace(getattr(config_of({}), part), **fields)}


def group_of(**fields: Any) -> dict[str, Any]:
    return {"groups": (dataclasses.replace(config_of({}).groups[0], **fields),)}


@pytest.mark.parametrize(
    "change",
    [
        changed("model", name="other/model"),
        changed("model", dtype="fp8"),
        changed("parallel", tp_size=2),
        changed("parallel", pp_size=2),
        changed("parallel", pcp_size=2),
        changed("parallel", dcp_size=2),
        changed("cache", tokens_per_hash=32),
        changed("cache", blocks_per_chunk=2),
        group_of(tokens_per_block=32),
        group_of(layer_names=("layers.0",)),
        {"groups": config_of({}).groups * 2},
        {"worker_kv_bytes_per_block": 25_008},
        {"kv_cache_layout": "BLHNC"},
        {"canonical_layout": True},
    ],
    ids=lambda change: json.dumps(change, default=str)[:60],
)
def test_a_changed_field_changes_every_key(change: dict[str, Any]) -> None:
    assert prefix_of() == prefix_of()
    assert prefix_of(**change) != prefix_of()


def test_a_changed_version_size_or_weight_changes_every_key() -> None:
    spec = OffloadingSpecFactory.create_spec(config_of({}))

    def prefix(chunk_bytes: int = 4096, version: str = "0.32.0", identity: str = "1") -> bytes:
        facts = tier_keys.facts_of(spec, chunk_bytes, FileMapper, version)
        made = Keys(facts, NAMED["model"], identity).make(key_of("a"))
        assert made is not None
        return made[:32]

    assert prefix() == prefix()
    assert len({prefix(), prefix(chunk_bytes=8192), prefix(version="0.33.0"), prefix(identity="2")}) == 4


def test_what_only_places_an_engine_does_not_change_keys() -> None:
    assert prefix_of(engine_id="another") == prefix_of()
    assert prefix_of(**changed("parallel", data_parallel_index=1, data_parallel_size=2)) == prefix_of()


def test_other_tp_sizes_share_only_canonical_pages() -> None:
    two = changed("parallel", tp_size=2)
    assert prefix_of(**two) != prefix_of(), "a block has one part per rank"
    canonical = {"canonical_layout": True}
    assert prefix_of(**two, **canonical) == prefix_of(**canonical)


def test_without_a_known_model_no_other_process_can_name_the_chunks(
    store: Store, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    first = engines(identity="", model=None)
    first.store(NAMES)
    first.manager.primary_tier.reset_cache()
    assert first.load(NAMES) == BYTES, "the process itself can"
    assert (first.tier._keys.shared, engines().tier._keys.shared) == (False, True)
    for identity in ("", NAMED["identity"]):
        assert engines(identity=identity, model=None).load(NAMES) == MISSES
    assert "NoModelIdentity" in caplog.text


def test_hashes_that_are_not_sha256_are_refused_by_name(store: Store, engines: Engines) -> None:
    engine = engines()
    short = key_of("a")[16:]
    context = engine.request("one")
    for _ in range(2):
        engine.manager.lookup(short, context)
        engine.step()
        wait_for(lambda: not engine.tier._lookups._answers.empty() or not store.asked, 10, "an answer")
    wait_for(lambda: engine.manager.lookup(short, context) is LookupResult.MISS, 10, "a miss")
    assert engine.chunks() == {("lookup", "HashAlgorithmRefused"): 1}
    assert store.asked == []


def model_of(folder: Path, **change: Any) -> dict[str, Any]:
    source = {"model": str(folder), "location": str(folder), "revision": None, "download_dir": None}
    from kvcachepool import weights

    return {
        "settings": "s",
        "unshared": "",
        "sources": [{**source, "remote_code": False}],
        "start": weights.record_files([weights.source_from(source)]),
        **change,
    }


def settled(model: dict[str, Any], identity: str = "") -> Keys:
    keys = Keys({}, model, identity)
    wait_for(lambda: not keys.refusal, 20, "the files read")
    return keys


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's files."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    files = tmp_path / "model"
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"weights")
    (files / "quantize_config.json").write_text("{}")
    return files


def test_the_content_of_the_models_files_is_in_every_key(folder: Path) -> None:
    first = settled(model_of(folder)).make(key_of("a"))
    assert first is not None
    assert settled(model_of(folder)).make(key_of("a")) == first
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert settled(model_of(folder)).make(key_of("a")) != first
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "quantize_config.json").write_text("[]")
    assert settled(model_of(folder)).make(key_of("a")) != first
    (folder / "quantize_config.json").write_text("{}")
    assert settled(model_of(folder, settings="t")).make(key_of("a")) != first
    assert settled(model_of(folder)).make(key_of("a")) == first


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda model, folder: (folder / "model.safetensors").write_bytes(b"longer weights"),
            "WeightsChangedDuringStart",
        ),
        (lambda model, folder: model.update(start={}), "StartNotWitnessed"),
        (lambda model, folder: model.update(unshared="DummyWeights"), "DummyWeights"),
        (lambda model, folder: (folder / "model.safetensors").unlink(), "NoWeightFiles"),
        (lambda model, folder: model["sources"][0].update(model="/nowhere", location="/nowhere"), "NoLocalWeights"),
        (lambda model, folder: model.update(sources=[{}]), "WeightsUnreadable"),
    ],
    ids=["changed", "not witnessed", "dummy", "no weights", "nowhere", "malformed"],
)
def test_a_model_that_cannot_be_identified_is_private(folder: Path, spoil: Any, reason: str) -> None:
    model = model_of(folder)
    spoil(model, folder)
    one, other = settled(model), settled(model)
    assert (one.private, other.private) == (reason, reason)
    assert one.make(key_of("a")) != other.make(key_of("a"))


def test_until_the_files_are_read_everything_is_a_miss(
    store: Store, engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    read = tier_keys._files
    monkeypatch.setattr(tier_keys, "_files", lambda model: (gate.wait(20), read(model))[1])
    engine = engines(identity="", model=model_of(folder))
    engine.store(NAMES)
    engine.manager.primary_tier.reset_cache()
    assert engine.load(NAMES) == MISSES
    assert engine.chunks() == {("store", "WeightsHashing"): 5, ("lookup", "WeightsHashing"): 5}
    gate.set()
    wait_for(lambda: not engine.tier._keys.refusal, 20, "the files read")
    engine.store(NAMES)
    engine.manager.primary_tier.reset_cache()
    assert engine.load(NAMES) == BYTES


# -- vLLM's configuration


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Installs this package's plugin for the test. Collects its reports of why this project's connector is off."""
    from vllm.engine.arg_utils import EngineArgs

    from kvcachepool import plugin

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    collected: list[str] = []
    monkeypatch.setattr(plugin, "report_off", collected.append)
    plugin.register()
    yield collected
    EngineArgs.create_engine_config = EngineArgs._kvcachepool_original
    del EngineArgs._kvcachepool_original


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """The folder of a model that takes images. Its weights are those of `tiny`, and never loaded."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    folder = tmp_path / "images"
    shutil.copytree(models.model("tiny"), folder)
    text, vision = LlamaConfig.from_pretrained(folder), CLIPVisionConfig(num_hidden_layers=2)
    LlavaConfig(
        text_config=text, vision_config=vision, architectures=["LlavaForConditionalGeneration"]
    ).save_pretrained(folder)
    return folder


def engine_config(transfer: dict[str, Any], **change: Any) -> Any:
    """What `vllm serve` makes of its arguments."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"model": str(models.model("tiny")), "kv_transfer_config": KVTransferConfig(**transfer), **change}
    return EngineArgs(**arguments).create_engine_config()


def tier_of(**change: Any) -> dict[str, Any]:
    """The tier's config below the arguments in the guide."""
    extra = engine_config(transfer_config("/run/kvcp/sidecar.sock"), **change).kv_transfer_config
    found: dict[str, Any] = extra.kv_connector_extra_config["secondary_tiers"][0]
    return found


def test_the_plugin_describes_the_model_to_the_tier(reports: list[str]) -> None:
    model = tier_of()["model"]
    assert reports == [], "this connector is off because the user chose the tier"
    assert (len(model["settings"]), model["unshared"], len(model["sources"])) == (64, "", 1)
    assert tier_of()["model"]["settings"] == model["settings"]
    overrides = {"rope_theta": 12345.0}
    assert tier_of(hf_overrides=overrides)["model"]["settings"] != model["settings"]
    assert settled(model).private == ""
    assert tier_of(load_format="dummy")["model"]["unshared"] == "DummyWeights"
    assert tier_of(enable_lora=True)["model"]["unshared"] == "LoraAdapters"


def test_a_model_that_takes_images_shares_nothing(reports: list[str], images: Path) -> None:
    """vLLM's keys have the names that requests give their images, and not the images' content."""
    model = tier_of(model=str(images))["model"]
    assert model["unshared"] == "MultimodalInputs"
    assert settled(model).private == "MultimodalInputs"
    assert settled(model).make(key_of("image")) != settled(model).make(key_of("image"))


def test_the_plugin_reports_another_offloading_as_before(reports: list[str]) -> None:
    engine_config({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
    assert reports == ["ExistingConnector/OffloadingConnector"]


def test_the_guides_arguments_make_the_tier_and_its_metrics(store: Store, reports: list[str]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics

    config = engine_config(transfer_config("/run/kvcp/sidecar.sock"))
    extra = config.kv_transfer_config.kv_connector_extra_config
    spec_class = OffloadingSpecFactory.get_spec_cls(extra)
    assert vllm_tier.CHUNKS in spec_class.build_metric_definitions(extra)
    tier = {name: value for name, value in extra["secondary_tiers"][0].items() if name not in ("type", "module_path")}
    engine = OffloadEngine(tier)
    try:
        engine.store(NAMES)
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

        registry = CollectorRegistry()
        kinds = {
            kind: lambda kind=kind, **given: kind(registry=registry, **given) for kind in (Counter, Gauge, Histogram)
        }
        metrics = OffloadPromMetrics(config, kinds, ["engine"], {0: ["0"]})
        stats = engine.manager.get_stats()
        metrics.observe(stats.data, 0)
        text = generate_latest(registry).decode()
        assert 'kvcachepool:offload_tier_connected{engine="0"} 1.0' in text
        assert 'kvcachepool:offload_tier_shared{engine="0"} ' in text
        assert 'kvcachepool:offload_tier_bytes_in_flight{engine="0",operation="store"} 0.0' in text
        assert "kvcachepool:offload_tier_chunks_total{" in text
    finally:
        engine.close()


def test_events_name_what_was_stored(store: Store, engines: Engines) -> None:
    engine = engines(enable_kv_events=True, locality="LOCAL", options={"events": True})
    engine.store(NAMES)
    events = [event for event in engine.manager.take_events() if event.medium is Medium.STORAGE]
    assert [(event.keys, event.removed, event.locality.value) for event in events] == [
        ([key_of(name) for name in NAMES], False, "LOCAL")
    ]
    assert list(engine.tier.take_events()) == []
    store.put_result = Put.NO_ROOM
    engine.store(["refused"])
    assert list(engine.tier.take_events()) == []
    silent = engines(enable_kv_events=True)
    silent.store(["more"])
    assert list(silent.tier.take_events()) == [], "vLLM publishes none"


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"read_threads": 0}, "read_threads of KVCachePoolTier"),
        ({"write_threads": 1.5}, "write_threads of KVCachePoolTier"),
        ({"lookup_timeout_s": "1"}, "lookup_timeout_s of KVCachePoolTier"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s of KVCachePoolTier"),
        ({"store_timeout_s": -1}, "store_timeout_s of KVCachePoolTier"),
        ({"max_bytes_in_flight": 1000}, "less than one chunk"),
        ({"ttl_s": -1}, "ttl_s of KVCachePoolTier"),
        ({"locality": "NEAR"}, "NEAR"),
        ({"blocks": 1}, "blocks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused_by_name(store: Store, tier: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        OffloadEngine({**NAMED, **tier})


@pytest.mark.parametrize("module", ["vllm.v1.metrics.cache_hit_source", "vllm.v1.kv_offload.tiering.base", "vllm"])
def test_an_older_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """0.30 and 0.31 have tiers, but no `cache_hit_source`."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "kvcachepool.vllm_tier")
    with pytest.raises(ImportError, match=r"VllmTooOld: KVCachePoolTier needs .* vLLM 0\.32 or newer"):
        importlib.import_module("kvcachepool.vllm_tier")


def test_the_guide_names_every_option() -> None:
    import inspect

    guide = (paths.ROOT / "docs" / "guides" / "vllm-tier.md").read_text()
    options = inspect.signature(vllm_tier.KVCachePoolTier.__init__).parameters
    given = {"self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector", "model"}
    assert [name for name in options if name not in given and f"`{name}`" not in guide] == []
