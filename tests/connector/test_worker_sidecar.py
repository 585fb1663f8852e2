"""One rank against the real sidecar: stored chunks survive the death of the engine process or of the whole
container.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kv_fixture import BLOCK_BYTES, content, fill, kv_cache, vllm_config

import kvcachepool.shared as shared_module
import kvcachepool.worker as worker_module
from kvcachepool import messages, rank, weights
from kvcachepool.connection import Connection, Held, Reply
from kvcachepool.copy_cpu import CpuCopier
from kvcachepool.jobs import Chunk, Ended, EndedLoad, Job, StepMetadata, WorkerReport
from kvcachepool.layout import Ranks
from kvcachepool.messages import Message
from kvcachepool.shared import Shared
from kvcachepool.wire import Op
from kvcachepool.worker import Worker
from servers.sidecar import Sidecar

WAIT_S = 20.0

_M = TypeVar("_M", bound=Message)


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (result := found()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)
    return result


class Scheduler:
    """The other role of the same process."""

    def __init__(self, socket_path: str) -> None:
        self.client = Connection("scheduler", "engine-1", 0, "0.32.0", socket_path, self)
        self.client.start()

    def held(self, region: int | None) -> Held:
        return Held()

    def after_hello(self) -> None:
        pass

    def on_hello(self, reply: messages.HelloReply) -> None:
        hashing = messages.Hashing(algorithm="sha256_cbor", root="00" * 32, block_tokens=128)
        body = messages.Register(world=1, local_world=1, scheduler_block_tokens=128, chunk_tokens=256, hashing=hashing)
        self.client.request(Op.REGISTER, body, lambda answer: None)

    def on_lost(self) -> None:
        pass

    def before_unmap(self) -> None:
        pass

    def on_off(self, reason: str) -> None:
        pass

    def request(self, op: Op, body: Message, kind: type[_M]) -> tuple[_M, int] | None:
        """The final answer and its tag. None if the connection was lost meanwhile."""
        done = threading.Event()
        answers: list[Reply] = []

        def on_reply(reply: Reply) -> None:
            answers.append(reply)
            if not reply.partial:
                done.set()

        tag = self.client.request(op, body, on_reply)
        if tag is None or not done.wait(2.0):
            return None
        assert answers[-1].error is None, answers[-1].error
        return answers[-1].read(kind), tag


class Engine:
    """Both roles, a KV cache and the steps between them."""

    def __init__(self, sidecar: Sidecar, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "w.bin").write_bytes(b"weights")
        config, self.caches = kv_cache()
        self.worker = Worker(vllm_config(list(self.caches), folder / "model"), config, str(sidecar.socket))
        self.worker.register_kv_caches(self.caches)
        self.scheduler = Scheduler(str(sidecar.socket))
        self.jobs = 0
        self.failed: set[str] = set()
        self.pressed: list[int] = []

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.client.go_off("TestOver")

    def step(self, job: Job | None = None) -> tuple[set[str], dict[int, Ended]]:
        metadata = StepMetadata(jobs=[job] if job else [])
        self.worker.handle_preemptions(metadata)
        self.worker.bind(metadata)
        self.worker.wait_for_save()
        ended: list[EndedLoad] = []
        self.worker.take_ended_loads(True, ended)
        self.failed |= {one.request_id for one in ended if one.failed is not None}
        report = WorkerReport()
        self.worker.take_report(report)
        return {one.request_id for one in ended}, report.stores

    def grant(self, hashes: list[bytes]) -> messages.GrantReply:
        """Requests GRANTs until all are granted."""
        chunks = [
            messages.GrantChunk(hash=one, parent=hashes[i - 1] if i else b"", first_token=i * 256, tokens=256, groups=1)
            for i, one in enumerate(hashes)
        ]

        def granted() -> Any:
            reply = self.scheduler.request(Op.GRANT, messages.Grant(request="s", chunks=chunks), messages.GrantReply)
            return reply and set(reply[0].results) == {messages.GRANT_GRANTED} and reply[0]

        return until(granted, "GRANT")

    def fill_up(self, chunks: int) -> set[int]:
        """Stores this many other chunks without copying. Returns the granted slots."""
        slots: set[int] = set()
        fresh = (hashlib.sha256(b"%d" % i).digest() for i in itertools.count(1000 * len(self.pressed)))
        self.pressed.append(chunks)

        def one() -> bool:
            chunk = messages.GrantChunk(hash=next(fresh), first_token=0, tokens=256, groups=1)
            reply = self.scheduler.request(Op.GRANT, messages.Grant(request="p", chunks=[chunk]), messages.GrantReply)
            if reply is None or reply[0].results != bytes([messages.GRANT_GRANTED]):
                return False
            slots.add(int.from_bytes(reply[0].refs[:4], "little"))
            client = self.worker._client
            assert client is not None
            return client.send(Op.COMMIT, messages.Sections(region=reply[0].region, refs=reply[0].refs))

        for _ in range(chunks):
            until(one, "room for another chunk")
        return slots

    def store(self, hashes: list[bytes], blocks: list[tuple[int, ...]]) -> Ended:
        reply = self.grant(hashes)
        self.jobs += 1
        chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(blocks)]
        _, stores = self.step(Job(self.jobs, "store", "s", reply.region, chunks))
        while self.jobs not in stores:
            _, stores = self.step()
        return stores[self.jobs]

    def probe(self, hashes: list[bytes], request: str) -> messages.ProbeReply:
        """Sends PROBEs until all chunks are ready, and pins them."""

        def ready() -> Any:
            body = messages.Probe(request=request, hashes=b"".join(hashes), local_tokens=0, budget_ms=1000)
            reply = self.scheduler.request(Op.PROBE, body, messages.ProbeReply)
            return reply and set(reply[0].states) == {messages.CHUNK_READY} and reply

        reply, tag = until(ready, "all chunks ready")
        pin = messages.Pin(request=request, probe=tag, from_=0, to=len(hashes))
        assert self.scheduler.client.send(Op.PIN, pin)
        return reply

    def load(self, hashes: list[bytes], blocks: list[tuple[int, ...]], request: str) -> bool:
        reply = self.probe(hashes, request)
        self.jobs += 1
        chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(blocks)]
        finished, _ = self.step(Job(self.jobs, "load", request, reply.region, chunks))
        while request not in finished:
            finished, _ = self.step()
        self.scheduler.client.send(Op.RELEASE, messages.Release(requests=[request]))
        return request not in self.failed


@pytest.fixture
def sidecar(tmp_path: Path, binary: Path) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path / "pod", memory="64Mi", config={"memory": {"evictionPolicy": "FIFO"}}).start()
    yield made
    made.stop()


@pytest.fixture
def engine(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(shared_module, "_shared", Shared())
    monkeypatch.setattr(worker_module, "current_ranks", lambda config: Ranks())
    made = Engine(sidecar, tmp_path)
    yield made
    made.close()


class Gate:
    """Stops copies before their first byte until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.open.set()
        copy = CpuCopier.copy

        def gated(copier: CpuCopier, kind: str, pieces: Any, event: object) -> None:
            self.begun.set()
            assert self.open.wait(WAIT_S)
            copy(copier, kind, pieces, event)

        monkeypatch.setattr(CpuCopier, "copy", gated)

    def close(self) -> None:
        self.begun.clear()
        self.open.clear()


HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
BLOCKS: list[tuple[int, ...]] = [(3, 4), (5, 6), (7, 8)]
OTHERS: list[tuple[int, ...]] = [(13, 14), (15, 16), (17, 18)]


def stored(engine: Engine) -> bytes:
    """Stores three chunks of random bytes in the pool. Returns them."""
    expected = b"".join(fill(engine.caches, block, block) for ids in BLOCKS for block in ids)
    assert engine.store(HASHES, BLOCKS) == Ended(1, 0)
    return expected


def loaded(engine: Engine, request: str) -> bytes:
    for ids in OTHERS:
        for block in ids:
            fill(engine.caches, block, 99)
    assert engine.load(HASHES, OTHERS, request)
    return b"".join(content(engine.caches, block) for ids in OTHERS for block in ids)


def test_stored_bytes_are_loaded_unchanged(engine: Engine) -> None:
    expected = stored(engine)
    assert len(expected) == 6 * BLOCK_BYTES
    assert loaded(engine, "a") == expected


def test_vllm_survives_the_death_of_the_engine_process(engine: Engine, sidecar: Sidecar) -> None:
    expected = stored(engine)
    assert loaded(engine, "a") == expected
    region = shared_module.shared().mapping
    sidecar.kill_engine()
    assert loaded(engine, "b") == expected
    assert shared_module.shared().mapping is region


def test_vllm_survives_the_death_of_the_sidecar(engine: Engine, sidecar: Sidecar) -> None:
    expected = stored(engine)
    assert loaded(engine, "a") == expected
    mapping = shared_module.shared().mapping
    sidecar.kill_tree()
    sidecar.start(ready_seconds=None)
    assert loaded(engine, "b") == expected
    assert shared_module.shared().mapping is mapping, "the memory was handed back, not made anew"


def test_grants_without_a_job_are_released_at_the_workers_next_hello(engine: Engine, sidecar: Sidecar) -> None:
    lost = engine.grant(HASHES)
    sidecar.kill_engine()
    expected = b"".join(fill(engine.caches, block, block) for ids in BLOCKS for block in ids)
    assert engine.store(HASHES, BLOCKS) == Ended(1, 0), "the chunks can be granted anew"
    engine.jobs += 1
    late = Job(engine.jobs, "store", "s", lost.region, [Chunk(lost.refs[:16], ((9, 10),))])
    _, stores = engine.step(late)
    while engine.jobs not in stores:
        _, stores = engine.step()
    assert stores[engine.jobs] == Ended(1, 1), "a job of a voided grant writes nothing"
    assert loaded(engine, "a") == expected


#: More chunks than fit into the arena of 64 MiB.
PRESSURE = 150


def test_a_slot_with_a_copy_in_flight_is_not_granted_again_after_restarts(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    expected = b"".join(fill(engine.caches, block, block) for ids in BLOCKS for block in ids)
    reply = engine.grant(HASHES)
    mine = {int.from_bytes(reply.refs[i * 16 : i * 16 + 4], "little") for i in range(len(HASHES))}
    gate.close()
    engine.jobs += 1
    chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(BLOCKS)]
    engine.step(Job(engine.jobs, "store", "s", reply.region, chunks))
    assert gate.begun.wait(WAIT_S)
    sidecar.kill_engine()
    assert not engine.fill_up(PRESSURE) & mine, "a granted slot was given to somebody else"
    gate.open.set()
    stores: dict[int, Ended] = {}
    while engine.jobs not in stores:
        _, stores = engine.step()
    assert stores[engine.jobs] == Ended(1, 0)
    assert loaded(engine, "a") == expected


def test_a_load_whose_slots_are_reused_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    stored(engine)
    reply = engine.probe(HASHES, "a")
    gate.close()
    engine.jobs += 1
    chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(OTHERS)]
    engine.step(Job(engine.jobs, "load", "a", reply.region, chunks))
    assert gate.begun.wait(WAIT_S)
    engine.scheduler.client.send(Op.RELEASE, messages.Release(requests=["a"]))
    engine.fill_up(PRESSURE)
    gate.open.set()
    finished: set[str] = set()
    while "a" not in finished:
        finished, _ = engine.step()
    assert engine.failed == {"a"}


def test_a_frozen_sidecar_never_delays_a_step(engine: Engine, sidecar: Sidecar) -> None:
    expected = stored(engine)
    reply = engine.probe(HASHES, "a")
    sidecar.freeze()
    try:
        engine.jobs += 1
        chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(OTHERS)]
        slowest = 0.0
        finished: set[str] = set()
        job: Job | None = Job(engine.jobs, "load", "a", reply.region, chunks)
        while "a" not in finished:
            start = time.monotonic()
            finished, _ = engine.step(job)
            slowest = max(slowest, time.monotonic() - start)
            job = None
        assert not engine.failed, "a load needs no answer of the sidecar"
        assert slowest < 0.1
    finally:
        sidecar.thaw()
    assert loaded(engine, "b") == expected


def test_a_rank_is_served_in_a_process_local_domain_until_its_weights_are_hashed(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, read = threading.Event(), weights.content
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "content", lambda path: (known.wait(WAIT_S) or True) and read(path))
    monkeypatch.setattr(rank, "_WEIGHTS_WAIT_S", 0.05)
    monkeypatch.setattr(shared_module, "_shared", Shared())
    monkeypatch.setattr(worker_module, "current_ranks", lambda config: Ranks())
    engine = Engine(sidecar, tmp_path)

    def reasons() -> list[str]:
        return [domain["reason"] for domain in sidecar.status()["domains"]]

    until(lambda: reasons() == ["NotShareable/WeightsHashing"], "the provisional domain")
    expected = stored(engine)
    assert loaded(engine, "a") == expected
    known.set()
    until(lambda: reasons() == [""], "the final domain")
    body = messages.Probe(request="b", hashes=b"".join(HASHES), local_tokens=0, budget_ms=1000)
    reply = until(lambda: engine.scheduler.request(Op.PROBE, body, messages.ProbeReply), "an answer")
    assert messages.CHUNK_READY not in reply[0].states, "nothing of the provisional name is served under the final one"
    expected = stored(engine)
    assert loaded(engine, "c") == expected
    engine.close()
