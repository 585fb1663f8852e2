"""One rank's jobs: the order of copies, reports and refusals."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kv_fixture import BLOCK_BYTES, BLOCKS, content, fill, kv_cache, vllm_config
from stub_sidecar import Memory, Received, StubSidecar

import kvcachepool.shared as shared_module
import kvcachepool.window as window_module
import kvcachepool.worker as worker_module
from kvcachepool.jobs import Chunk, Ended, EndedLoad, Job, StepMetadata, WorkerReport
from kvcachepool.layout import Ranks
from kvcachepool.pieces import Piece
from kvcachepool.shared import NO_SLOT, Mapping, Shared
from kvcachepool.wire import Op
from kvcachepool.worker import Worker

ABSENT = NO_SLOT.to_bytes(4, "little") + b"\0" * 12


def until(found: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.002)
    return result


class Rank:
    """A worker with its KV cache and the test's sidecar."""

    def __init__(self, sidecar: StubSidecar, folder: Path, groups: int = 1, **parallel: int) -> None:
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "w.bin").write_bytes(b"weights")
        self.sidecar = sidecar
        self.config, self.caches = kv_cache(groups)
        settings = vllm_config(list(self.caches), folder / "model", **parallel)
        self.worker = Worker(settings, self.config, sidecar.path)
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.stores: dict[int, Ended] = {}

    def start(self, ready: bool = True) -> None:
        self.worker.register_kv_caches(self.caches)
        if ready:
            until(lambda: self.worker._mapping is not None)
            self.sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.REGISTER])

    def step(self, *jobs: Job, forget: list[int] | None = None, idle: bool = True) -> None:
        """One engine step, in vLLM's order."""
        metadata = StepMetadata(jobs=list(jobs), forget=forget or [])
        self.worker.handle_preemptions(metadata)
        self.worker.bind(metadata)
        self.worker.wait_for_save()
        ended: list[EndedLoad] = []
        self.worker.take_ended_loads(idle, ended)
        for one in ended:
            assert one.request_id not in self.finished, "a load was reported twice"
            self.finished.add(one.request_id)
            if one.failed is not None:
                self.failed.add(one.request_id)
        report = WorkerReport()
        self.worker.take_report(report)
        assert not set(report.stores) & set(self.stores), "a store was reported twice"
        self.stores |= report.stores

    def until_done(self, found: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        def stepped() -> Any:
            self.step()
            return found()

        return until(stepped, timeout_s)

    def memory(self) -> Memory:
        assert self.sidecar.memory is not None
        return self.sidecar.memory

    def granted(self, slot: int, blocks: int = 2, generation: int = 3, owner: int = 1) -> bytes:
        return self.memory().grant(slot, generation, owner, blocks * BLOCK_BYTES)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_shared", Shared())
    monkeypatch.setattr(worker_module, "current_ranks", lambda config: Ranks())


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[StubSidecar]:
    stub = StubSidecar(tmp_path, rows=128)
    yield stub
    stub.close()


@pytest.fixture
def rank(sidecar: StubSidecar, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(sidecar, tmp_path, **getattr(request, "param", {}))
    yield made
    made.worker.shutdown()


def load(job_id: int, request: str, refs: bytes, *blocks: int, region: int = 7) -> Job:
    return Job(job_id, "load", request, region, [Chunk(refs, (blocks,))])


def store(job_id: int, refs: bytes, *blocks: int, region: int = 7) -> Job:
    return Job(job_id, "store", "r", region, [Chunk(refs, (blocks,))])


def commits(sidecar: StubSidecar) -> list[bytes]:
    return [frame.body["refs"] for frame in sidecar.frames(Op.COMMIT)]


def test_a_store_and_a_load_copy_whole_blocks(rank: Rank, sidecar: StubSidecar) -> None:
    rank.start()
    register = sidecar.frames(Op.REGISTER)[0].body
    assert register["groups"][0] | {"block_bytes": BLOCK_BYTES, "shards": 1, "writer": True} == register["groups"][0]
    assert register["chunk_tokens"] == 256
    assert register["scheduler_block_tokens"] == 128
    assert register["device"] == "cpu"
    expected = fill(rank.caches, 5, 1) + fill(rank.caches, 9, 2)
    refs = rank.granted(8)
    rank.step(store(1, refs, 5, 9))
    rank.until_done(lambda: rank.stores)
    assert rank.stores == {1: Ended(1, 0)}
    assert sidecar.wait_for(lambda all_: commits(sidecar)) == [refs]
    assert rank.memory().read(8, len(expected)) == expected
    published = rank.memory().publish(8, 4, expected)
    rank.step(load(2, "a", published, 11, 12))
    rank.until_done(lambda: rank.finished)
    assert rank.finished == {"a"}
    assert not rank.failed
    assert content(rank.caches, 11) + content(rank.caches, 12) == expected


def test_local_and_null_blocks_are_not_written(rank: Rank) -> None:
    rank.start()
    before = fill(rank.caches, 0, 7)
    published = rank.memory().publish(4, 1, os.urandom(2 * BLOCK_BYTES))
    rank.step(load(1, "a", published, 0, 3))
    rank.until_done(lambda: rank.finished)
    assert not rank.failed
    assert content(rank.caches, 0) == before
    assert content(rank.caches, 3) == rank.memory().read(4, 2 * BLOCK_BYTES)[BLOCK_BYTES:]


@pytest.mark.parametrize(
    "job",
    [
        lambda refs: load(1, "a", refs, 3, 4, region=8),
        lambda refs: Job(1, "load", "a", 0, []),
        lambda refs: Job(1, "load", "a", 7, []),
        lambda refs: load(1, "a", ABSENT, 3, 4),
        lambda refs: load(1, "a", refs, 3, 4, 5),
        lambda refs: load(1, "a", refs, 3, BLOCKS),
        lambda refs: load(1, "a", refs, 3, -1),
        lambda refs: load(1, "a", refs[:8], 3, 4),
        lambda refs: load(1, "a", (4000).to_bytes(4, "little") + refs[4:], 3, 4),
        lambda refs: load(1, "a", refs[:4] + (99).to_bytes(4, "little") + refs[8:], 3, 4),
    ],
    ids=["region", "doomed", "empty", "absent", "length", "block", "negative", "torn", "bounds", "generation"],
)
def test_an_invalid_load_fails_without_writing(rank: Rank, job: Callable[[bytes], Job]) -> None:
    rank.start()
    before = [content(rank.caches, block) for block in range(BLOCKS)]
    refs = rank.memory().publish(4, 1, os.urandom(2 * BLOCK_BYTES))
    rank.step(job(refs))
    rank.until_done(lambda: rank.finished)
    assert rank.finished == rank.failed == {"a"}
    assert [content(rank.caches, block) for block in range(BLOCKS)] == before


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("slot", [127, 128, 0xFFFFFFFE])
def test_a_slot_outside_the_arena_is_not_accessed(rank: Rank, sidecar: StubSidecar, slot: int, kind: Any) -> None:
    rank.start()
    inside = rank.granted(126)
    outside = slot.to_bytes(4, "little") + inside[4:]
    if slot == 127:
        outside = rank.granted(127)
    rank.step(Job(1, kind, "a", 7, [Chunk(outside, ((3, 4),))]))
    rank.until_done(lambda: rank.finished or rank.stores)
    assert rank.failed == rank.finished
    assert rank.stores == ({1: Ended(1, 1)} if kind == "store" else {})
    assert rank.worker._report.events == {f"{kind}_failed/bounds": 1}


class Slowed:
    """A copier that stops in the middle until it is released."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.begun = threading.Event()
        self.go = threading.Event()
        self.crash = False
        self.no_event = False
        self.copied: list[str] = []
        self.synchronised = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def record(self) -> object:
        if self.no_event:
            raise RuntimeError("no event")
        return self.inner.record()

    def copy(self, kind: str, pieces: list[Piece], event: object) -> None:
        self.begun.set()
        assert self.go.wait(10)
        if self.crash:
            raise RuntimeError("copy engine error")
        self.inner.copy(kind, pieces, event)
        self.copied.append(kind)

    def synchronize(self) -> None:
        self.synchronised += 1


@pytest.fixture
def slowed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Slowed:
    made: list[Slowed] = []
    original = worker_module.copier_of

    def wrapped(layout: Any, count: Any) -> Any:
        made.append(Slowed(original(layout, count)))
        return made[0]

    monkeypatch.setattr(worker_module, "copier_of", wrapped)
    rank.start()
    return made[0]


def test_a_generation_that_changes_during_the_copy_fails_the_load(rank: Rank, slowed: Slowed) -> None:
    refs = rank.memory().publish(4, 1, os.urandom(2 * BLOCK_BYTES))
    rank.step(load(1, "a", refs, 3, 4))
    assert slowed.begun.wait(5)
    rank.memory().bump(4)
    slowed.go.set()
    rank.until_done(lambda: rank.finished)
    assert rank.failed == {"a"}


def test_commit_is_sent_only_after_the_copy(rank: Rank, slowed: Slowed, sidecar: StubSidecar) -> None:
    fill(rank.caches, 3, 1)
    rank.step(store(1, rank.granted(8, blocks=1), 3))
    assert slowed.begun.wait(5)
    assert not commits(sidecar)
    assert not rank.stores
    slowed.go.set()
    rank.until_done(lambda: rank.stores)
    sidecar.wait_for(lambda all_: commits(sidecar))


def test_the_pages_of_a_job_are_mapped_before_its_copy(rank: Rank, slowed: Slowed) -> None:
    def made() -> int:
        return os.fstat(rank.memory().arena_fd).st_blocks * 512

    before = made()
    rank.step(store(1, rank.granted(8), 3, 4))
    assert slowed.begun.wait(5)
    assert made() - before == 2 * BLOCK_BYTES
    slowed.go.set()
    rank.until_done(lambda: rank.stores)


def test_the_wait_for_results_takes_at_most_two_milliseconds(rank: Rank, slowed: Slowed) -> None:
    refs = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(load(1, "a", refs, 3), idle=False)
    assert slowed.begun.wait(5)
    start = time.monotonic()
    for _ in range(20):
        rank.step(idle=False)
    busy = (time.monotonic() - start) / 20
    start = time.monotonic()
    for _ in range(20):
        rank.step(idle=True)
    idle = (time.monotonic() - start) / 20
    assert busy < 0.002 <= idle + 0.0005
    assert idle < 0.02
    slowed.go.set()
    rank.until_done(lambda: rank.finished)


@pytest.mark.parametrize("rank", [{"data_parallel_size": 2}], indirect=True)
def test_a_rank_that_steps_together_with_others_does_not_wait_for_results(
    rank: Rank, slowed: Slowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data parallelism of a MoE model, each step of this rank is one of all ranks."""
    monkeypatch.setattr(worker_module, "_IDLE_WAIT_S", 2.0)
    rank.step(load(1, "a", rank.memory().publish(4, 1, b"x" * BLOCK_BYTES), 3), idle=False)
    assert slowed.begun.wait(5)
    start = time.monotonic()
    rank.step(idle=True)
    assert time.monotonic() - start < 1
    slowed.go.set()
    rank.until_done(lambda: rank.finished)


def test_unstarted_jobs_are_cancelled_and_reported(rank: Rank, slowed: Slowed, sidecar: StubSidecar) -> None:
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    refs = rank.granted(8, blocks=1)
    rank.step(load(1, "begun", published, 3))
    assert slowed.begun.wait(5)
    rank.step(load(2, "waiting", published, 4), store(3, refs, 5))
    rank.step(forget=[1, 2, 3])
    assert rank.finished == rank.failed == {"waiting"}
    assert rank.stores == {3: Ended(1, 1)}
    aborts = sidecar.wait_for(lambda all_: sidecar.frames(Op.ABORT))
    assert [frame.body["refs"] for frame in aborts] == [refs]
    slowed.go.set()
    rank.until_done(lambda: "begun" in rank.finished)
    assert "begun" not in rank.failed
    assert slowed.copied == ["load"]


def test_an_exception_synchronises_and_fails_all_queued_jobs(rank: Rank, slowed: Slowed, sidecar: StubSidecar) -> None:
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    slowed.crash = True
    rank.step(load(1, "a", published, 3))
    assert slowed.begun.wait(5)
    rank.step(load(2, "b", published, 4), store(3, rank.granted(8, blocks=1), 5))
    slowed.go.set()
    rank.until_done(lambda: rank.finished == {"a", "b"} and rank.stores)
    assert rank.failed == {"a", "b"}
    assert rank.stores == {3: Ended(1, 1)}
    assert slowed.synchronised == 1
    slowed.crash = False
    rank.step(load(4, "c", published, 6))
    rank.until_done(lambda: "c" in rank.finished)
    assert "c" not in rank.failed


def test_jobs_whose_event_cannot_be_recorded_are_dropped(rank: Rank, slowed: Slowed) -> None:
    slowed.no_event = True
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(load(1, "a", published, 3), store(2, rank.granted(8, blocks=1), 5))
    assert rank.finished == rank.failed == {"a"}
    assert rank.stores == {2: Ended(1, 1)}


def test_a_crashed_copy_thread_leaves_no_job_open(rank: Rank, slowed: Slowed, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(task: Any, mapping: Any, copier: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(rank.worker, "_run", bug)
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(load(1, "a", published, 3), load(2, "b", published, 4))
    rank.until_done(lambda: rank.finished == {"a", "b"})
    assert rank.failed == {"a", "b"}
    until(lambda: rank.worker.off_reason == "CopyThreadFailed")


def test_a_copy_thread_works_without_its_preparation(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: object) -> None:
        raise RuntimeError("no affinity")

    monkeypatch.setattr("kvcachepool.copy_cpu.CpuCopier.begin_thread", refuses)
    rank.start()
    rank.step(load(1, "a", rank.memory().publish(4, 1, b"x" * BLOCK_BYTES), 3))
    rank.until_done(lambda: rank.finished)
    assert not rank.failed


def test_a_repeatedly_failing_copier_turns_the_rank_off(rank: Rank, slowed: Slowed) -> None:
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    slowed.crash = True
    slowed.go.set()
    for job in range(1, 4):
        rank.step(load(job, f"r{job}", published, 3))
        rank.until_done(functools.partial(rank.failed.__contains__, f"r{job}"))
    until(lambda: rank.worker.off_reason == "CopyFailed")
    rank.step(load(9, "late", published, 3), store(10, rank.granted(8, blocks=1), 4))
    rank.until_done(lambda: "late" in rank.failed and rank.stores == {10: Ended(1, 1)})


@pytest.mark.parametrize("wrong", ["owner", "generation", "freed"])
def test_a_store_into_a_lost_slot_writes_nothing(rank: Rank, sidecar: StubSidecar, wrong: str) -> None:
    rank.start()
    fill(rank.caches, 3, 1)
    refs = rank.granted(8, blocks=1, owner=2 if wrong == "owner" else 1)
    if wrong == "generation":
        rank.memory().bump(8)
    if wrong == "freed":
        rank.memory().free(8)
    rank.step(store(1, refs, 3))
    rank.until_done(lambda: rank.stores)
    assert rank.stores == {1: Ended(1, 1)}
    assert rank.memory().read(8, 64) == b"\0" * 64
    sidecar.wait_for(lambda all_: sidecar.frames(Op.ABORT))
    assert not commits(sidecar)


def hold_hello(sidecar: StubSidecar) -> list[Received]:
    """HELLOs stay unanswered from now on."""
    kept: list[Received] = []

    def answer(frame: Received) -> Any:
        if frame.op == Op.HELLO:
            kept.append(frame)
            return False
        return None

    sidecar.answer = answer
    return kept


def test_hello_lists_every_held_store_and_none_starts_before_its_response(
    rank: Rank, slowed: Slowed, sidecar: StubSidecar
) -> None:
    first, second, third = (rank.granted(slot, blocks=1) for slot in (8, 16, 24))
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(store(1, first, 3), store(2, second, 4))
    assert slowed.begun.wait(5)
    kept = hold_hello(sidecar)
    sidecar.cut()
    until(lambda: kept)
    assert kept[0].body["grants"] == first + second
    slowed.go.set()
    rank.step(store(3, third, 5), load(4, "a", published, 6))
    rank.until_done(lambda: "a" in rank.finished and 1 in rank.stores)
    assert slowed.copied == ["store", "load"], "loads go on, stores wait for the answer"
    commit = sidecar.wait_for(lambda all_: sidecar.frames(Op.COMMIT))
    assert commit[0].connection == kept[0].connection, "what ended since the list goes behind its HELLO"
    sidecar.answer = lambda frame: None
    sidecar.greet(kept[0])
    rank.until_done(lambda: len(rank.stores) == 3)
    assert rank.stores == {1: Ended(1, 0), 2: Ended(1, 0), 3: Ended(1, 0)}


def test_hello_does_not_list_grants_of_another_region(rank: Rank, slowed: Slowed, sidecar: StubSidecar) -> None:
    here, there = rank.granted(8, blocks=1), rank.granted(16, blocks=1)
    rank.step(store(1, here, 3), store(2, there, 4, region=6))
    assert slowed.begun.wait(5)
    kept = hold_hello(sidecar)
    sidecar.cut()
    until(lambda: kept)
    assert (kept[0].body["region"], kept[0].body["grants"]) == (7, here)
    slowed.go.set()
    sidecar.answer = lambda frame: None
    sidecar.greet(kept[0])
    rank.until_done(lambda: len(rank.stores) == 2)
    assert rank.stores == {1: Ended(1, 0), 2: Ended(1, 1)}


def test_a_store_that_waits_a_second_for_the_hello_response_is_dropped(rank: Rank, sidecar: StubSidecar) -> None:
    rank.start()
    kept = hold_hello(sidecar)
    sidecar.cut()
    until(lambda: kept)
    refs = rank.granted(8, blocks=1)
    start = time.monotonic()
    rank.step(store(1, refs, 3))
    rank.until_done(lambda: rank.stores)
    assert 0.9 <= time.monotonic() - start < 5
    assert rank.stores == {1: Ended(1, 1)}
    abort = sidecar.wait_for(lambda all_: sidecar.frames(Op.ABORT))
    assert abort[0].body["refs"] == refs
    assert abort[0].connection == kept[-1].connection


def test_stores_that_end_without_a_connection_are_sent_after_the_next_hello(
    rank: Rank, slowed: Slowed, sidecar: StubSidecar
) -> None:
    refs = rank.granted(8, blocks=1)
    rank.step(store(1, refs, 3))
    assert slowed.begun.wait(5)
    connections = len(sidecar.frames(Op.HELLO))
    path = Path(sidecar.path)
    path.rename(path.with_suffix(".away"))
    sidecar.cut()
    client = rank.worker._client
    assert client is not None
    until(lambda: not client.connected)
    slowed.go.set()
    rank.until_done(lambda: rank.stores)
    assert rank.stores == {1: Ended(1, 0)}
    assert not commits(sidecar)
    path.with_suffix(".away").rename(path)
    sidecar.wait_for(lambda all_: commits(sidecar) == [refs])
    assert sidecar.frames(Op.HELLO)[connections].body["grants"] == refs


def test_unmap_fails_the_jobs_and_a_new_region_serves_again(rank: Rank, slowed: Slowed, sidecar: StubSidecar) -> None:
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(load(1, "running", published, 3))
    assert slowed.begun.wait(5)
    rank.step(load(2, "queued", published, 4))
    old = rank.worker._mapping
    assert isinstance(old, Mapping)
    sidecar.memory = Memory(8, 64)
    sidecar.cut()
    rank.until_done(lambda: "queued" in rank.failed)
    assert not old.closed, "a copy under way is waited for"
    slowed.go.set()
    until(lambda: rank.worker._mapping is not None and rank.worker._mapping.region == 8)
    assert old.closed
    rank.step(
        load(3, "stale", published, 3), load(4, "fresh", sidecar.memory.publish(1, 1, b"y" * BLOCK_BYTES), 5, region=8)
    )
    rank.until_done(lambda: {"running", "stale", "fresh"} <= rank.finished)
    assert "stale" in rank.failed
    assert "fresh" not in rank.failed
    assert "running" not in rank.failed


def test_a_rank_whose_layout_is_unknown_is_off_and_still_reports(rank: Rank, sidecar: StubSidecar) -> None:
    rank.config.kv_cache_layout = "XYZ"
    rank.start(ready=False)
    assert rank.worker.off_reason == "LayoutUnknown/XYZ"
    rank.step(load(1, "a", b"\0" * 16, 3), store(2, b"\0" * 16, 4))
    assert rank.finished == rank.failed == {"a"}
    assert rank.stores == {2: Ended(1, 1)}
    hello = sidecar.wait_for(lambda all_: [f for f in all_ if f.body.get("off")])[0]
    assert hello.body["off"] == "LayoutUnknown/XYZ"
    assert hello.body["role"] == "plugin"


def test_a_second_allocation_of_the_kv_cache_turns_the_rank_off(rank: Rank) -> None:
    rank.start()
    rank.worker.register_kv_caches(rank.caches)
    assert rank.worker.off_reason == "RegisteredTwice"
    rank.step(load(1, "a", rank.memory().publish(4, 1, b"x" * BLOCK_BYTES), 3))
    assert rank.failed == {"a"}


def test_an_arena_that_cannot_be_attached_turns_the_rank_off(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: object, mapping: Mapping) -> None:
        raise RuntimeError("no page locks")

    monkeypatch.setattr("kvcachepool.copy_cpu.CpuCopier.attach", refuses)
    rank.start(ready=False)
    until(lambda: rank.worker.off_reason == "AttachFailed")


def test_a_rank_that_the_sidecar_refuses_is_off(rank: Rank, sidecar: StubSidecar) -> None:
    def answer(frame: Received) -> Any:
        if frame.op == Op.REGISTER:
            sidecar.refuse(frame, "SectionTooLarge")
            return False
        return None

    sidecar.answer = answer
    rank.start(ready=False)
    until(lambda: rank.worker.off_reason == "SectionTooLarge")


def test_without_a_sidecar_loads_fail_and_nothing_blocks(rank: Rank, sidecar: StubSidecar) -> None:
    Path(sidecar.path).unlink()
    rank.start(ready=False)
    rank.step(load(1, "a", b"\0" * 16, 3))
    rank.until_done(lambda: rank.finished == rank.failed == {"a"})


def test_a_replica_that_does_not_write_ends_its_stores_at_once(
    rank: Rank, sidecar: StubSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "current_ranks", lambda config: Ranks(tp=2, tp_rank=1))
    # vLLM's specs are frozen, and 0.30 has no such field.
    object.__setattr__(rank.config.kv_cache_groups[0].kv_cache_spec, "max_tp_shards", 1)
    rank.start()
    group = sidecar.frames(Op.REGISTER)[0].body["groups"][0]
    assert (group["shards"], group["shard"], group["writer"]) == (1, 0, False)
    rank.step(store(1, rank.granted(8, blocks=1), 3))
    rank.until_done(lambda: rank.stores == {1: Ended(1, 0)})
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(load(2, "a", published, 3))
    rank.until_done(lambda: rank.finished)
    assert not rank.failed
    assert not commits(sidecar)


def test_window_groups_load_only_their_sections(sidecar: StubSidecar, tmp_path: Path) -> None:
    rank = Rank(sidecar, tmp_path, groups=2)
    rank.start()
    try:
        full = rank.memory().publish(4, 1, os.urandom(2 * BLOCK_BYTES))
        window = rank.memory().publish(16, 1, os.urandom(2 * BLOCK_BYTES))
        window = window[:12] + (1).to_bytes(4, "little")
        chunks = [Chunk(full + ABSENT, ((3, 4), (0, 0))), Chunk(full + window, ((5, 6), (0, 7)))]
        rank.step(Job(1, "load", "a", 7, chunks))
        rank.until_done(lambda: rank.finished)
        assert not rank.failed
        assert content(rank.caches, 7) == rank.memory().read(16, 2 * BLOCK_BYTES)[BLOCK_BYTES:]
        rank.step(Job(2, "load", "b", 7, [Chunk(full + ABSENT, ((3, 4), (0, 8)))]))
        rank.until_done(lambda: "b" in rank.finished)
        assert rank.failed == {"b"}
    finally:
        rank.worker.shutdown()


def test_exit_waits_a_limited_time_for_the_copy_in_flight(rank: Rank, slowed: Slowed) -> None:
    published = rank.memory().publish(4, 1, b"x" * BLOCK_BYTES)
    rank.step(load(1, "a", published, 3), load(2, "b", published, 4))
    assert slowed.begun.wait(5)
    start = time.monotonic()
    rank.worker.end_copies(0.1)
    assert 0.1 <= time.monotonic() - start < 2
    slowed.go.set()
    rank.worker.end_copies(10)
    assert slowed.copied == ["load"]


def test_a_window_is_unmapped_if_the_connection_ends_after_the_copy_thread(rank: Rank) -> None:
    calls: list[str] = []
    rank.worker.end_copies(1)
    window = SimpleNamespace(close=lambda: calls.append("closed"))
    keeper: Any = SimpleNamespace(retire=lambda: calls.append("retired"), take_retired=lambda: [window])
    with rank.worker._wake:
        kept, rank.worker._windows = rank.worker._windows, keeper
        rank.worker.on_lost()
        running: Any = object()
        rank.worker._running = running
        rank.worker.on_lost()
        rank.worker._running, rank.worker._windows = None, kept
    assert calls == ["retired", "closed", "retired"], "nothing is unmapped under a copy"


def test_a_sidecar_without_a_window_response_is_reported_late_and_the_worker_copies_by_itself(
    rank: Rank, sidecar: StubSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_module, "_ANSWER_S", 0.0)
    registered = {"ready": True, "layout_id": b"l" * 32, "model_id": b"m" * 32, "transfer": "cuda_window"}
    sidecar.answer = lambda frame: {Op.REGISTER: registered, Op.WINDOW: False}.get(Op(frame.op))
    rank.start()
    requested = sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.WINDOW])[0]
    keeper = rank.worker._windows
    assert keeper is not None
    until(lambda: keeper.reason)
    assert keeper.reason == "TimedOut"
    assert rank.worker._report.events == {"window_unavailable/TimedOut": 1}
    expected = fill(rank.caches, 5, 1)
    rank.step(store(1, rank.granted(8, blocks=1), 5))
    rank.until_done(lambda: rank.stores)
    assert rank.stores == {1: Ended(1, 0)}
    assert rank.memory().read(8, len(expected)) == expected
    sidecar.refuse(requested, "Busy")
    until(lambda: keeper.reason == "by the test")


def test_shutdown_waits_for_the_copy_and_then_unmaps(rank: Rank, slowed: Slowed) -> None:
    mapping = rank.worker._mapping
    assert mapping is not None
    rank.step(store(1, rank.granted(8, blocks=1), 3))
    assert slowed.begun.wait(5)
    over = threading.Thread(target=rank.worker.shutdown)
    over.start()
    assert not mapping.closed
    slowed.go.set()
    over.join(10)
    assert not over.is_alive()
    assert mapping.closed


def test_ended_jobs_are_reported_to_vllm_without_the_sidecar(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.start()

    def bug() -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(rank.worker, "_send_report", bug)
    rank.step(load(1, "a", rank.memory().publish(4, 1, b"x" * BLOCK_BYTES), 3))
    rank.until_done(lambda: rank.finished == {"a"})


def test_copies_are_reported_to_the_sidecar(rank: Rank, sidecar: StubSidecar) -> None:
    rank.start()
    rank.step(store(1, rank.granted(8, blocks=1), 3))
    rank.until_done(lambda: sidecar.frames(Op.REPORT))
    report = sidecar.frames(Op.REPORT)[0].body
    assert report["copied_bytes"] == {"store": BLOCK_BYTES}
    assert report["copied_seconds"]["store"] > 0
