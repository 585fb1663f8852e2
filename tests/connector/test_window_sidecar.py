"""One rank with a window against the real sidecar, which is stopped and killed during its copies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kv_fixture import BLOCK_BYTES, fill
from test_worker_sidecar import BLOCKS, HASHES, OTHERS, PRESSURE, Engine, loaded, stored, until

import kvcachepool.copy_window as copy_window
import kvcachepool.shared as shared_module
import kvcachepool.window as window_module
import kvcachepool.worker as worker_module
from kvcachepool import messages
from kvcachepool.jobs import Chunk, Ended, Job
from kvcachepool.layout import Ranks
from kvcachepool.shared import Shared
from servers.sidecar import Sidecar
from servers.waiting import wait_for

STORE = "kvcachepool_window_copied_bytes_total"


@pytest.fixture
def sidecar(tmp_path: Path, binary: Path) -> Iterator[Sidecar]:
    config = {
        "memory": {"evictionPolicy": "FIFO"},
        "transfer": {"mode": "CudaWindow", "windowSize": "16Mi"},
    }
    made = Sidecar(tmp_path / "pod", memory="64Mi", config=config).start()
    yield made
    go_on(made)
    made.stop()


def begun(sidecar: Sidecar, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(shared_module, "_shared", Shared())
    monkeypatch.setattr(worker_module, "current_ranks", lambda config: Ranks())
    return Engine(sidecar, folder)


@pytest.fixture
def engine(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = begun(sidecar, tmp_path, monkeypatch)
    until(lambda: live(made), "a window")
    yield made
    go_on(sidecar)
    made.close()


def live(engine: Engine) -> Any:
    return engine.worker._windows and engine.worker._windows.live


def worker_of(sidecar: Sidecar) -> dict[str, Any]:
    sessions = sidecar.status()["sessions"]
    return next(session for session in sessions if session["role"] == "worker")


def granted(sidecar: Sidecar) -> int:
    return int(sidecar.status()["memory"]["slots"]["granted"])


def stop(sidecar: Sidecar) -> None:
    """Sends SIGSTOP to the sidecar's engine process and waits until every thread has stopped."""
    engine = sidecar.engine_pid
    os.kill(engine, signal.SIGSTOP)
    tasks = Path(f"/proc/{engine}/task")
    until(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()), "all threads to stop")


def go_on(sidecar: Sidecar) -> None:
    """Sends SIGCONT to the sidecar's engine process."""
    os.kill(sidecar.engine_pid, signal.SIGCONT)


def ships(engine: Engine, sidecar: Sidecar) -> set[int]:
    """Stops the sidecar's engine process, then sends a store job of all chunks to the worker. Returns its slots."""
    reply = engine.grant(HASHES)
    stop(sidecar)
    engine.jobs += 1
    chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(BLOCKS)]
    engine.step(Job(engine.jobs, "store", "s", reply.region, chunks))
    return {int.from_bytes(reply.refs[i * 16 : i * 16 + 4], "little") for i in range(len(HASHES))}


def ended(engine: Engine) -> Ended:
    """Result of the last sent store."""
    stores: dict[int, Ended] = {}

    def there() -> bool:
        stores.update(engine.step()[1])
        return engine.jobs in stores

    until(there, "the end of the store")
    return stores[engine.jobs]


def test_loads_and_stores_use_the_window_and_report_it(engine: Engine, sidecar: Sidecar) -> None:
    expected = stored(engine)
    assert len(expected) == 6 * BLOCK_BYTES
    assert loaded(engine, "a") == expected
    metrics = sidecar.metrics()
    for direction in ("store", "load"):
        assert metrics.total(STORE, direction=direction) == len(expected)
    worker = worker_of(sidecar)
    assert (worker["transfer"], worker["transfer_reason"]) == ("cuda_window", "host memory")


def test_a_job_reuses_stages_if_it_needs_more_than_exist(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live(engine), "_stages", 2)
    cut = copy_window.stage
    monkeypatch.setattr(copy_window, "stage", lambda p, r, b, nbytes: cut(p, r, b, BLOCK_BYTES))
    expected = stored(engine)
    assert loaded(engine, "a") == expected
    assert sidecar.metrics().total("kvcachepool_window_copies_total", result="moved") == 12


def test_a_new_window_follows_the_death_of_the_engine_process(engine: Engine, sidecar: Sidecar) -> None:
    expected = stored(engine)
    assert loaded(engine, "a") == expected
    first = live(engine)
    sidecar.kill_engine()
    until(lambda: live(engine) not in (None, first), "another window")
    assert loaded(engine, "b") == expected
    assert sidecar.metrics().total(STORE, direction="load") == len(expected)


def test_a_store_whose_sidecar_dies_keeps_its_slots_until_no_dead_copy_can_reach_them(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ids in BLOCKS:
        for block in ids:
            fill(engine.caches, block, block)
    slots = ships(engine, sidecar)
    sidecar.kill_engine()
    assert ended(engine) == Ended(1, 1), "nothing of it is committed"
    keeper = engine.worker._windows
    assert keeper is not None
    until(lambda: keeper.lost and keeper.lost[0].ended_at and live(engine), "the next boot")
    assert not engine.fill_up(PRESSURE) & slots, "a slot that a dead copy may reach was given to somebody else"
    wait_for(lambda: granted(sidecar) == len(HASHES), 20, "all others to be committed")
    monkeypatch.setattr(window_module, "_DEAD_COPIES_S", 0.0)
    with engine.worker._wake:
        engine.worker._wake.notify_all()
    wait_for(lambda: granted(sidecar) == 0 and not keeper.lost, 20, "the slots to come back")
    assert stored(engine) == loaded(engine, "b")


def test_a_silent_sidecar_loses_its_window_and_the_worker_copies_by_itself(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_window, "_STAGE_TIMEOUT_S", 0.3)
    ships(engine, sidecar)
    assert ended(engine) == Ended(1, 1)
    keeper = engine.worker._windows
    assert keeper is not None
    assert len(keeper.lost) == 1
    assert live(engine) is None
    go_on(sidecar)
    until(lambda: not keeper.lost, "the answer that no copy runs any more")
    assert granted(sidecar) == 0
    before = sidecar.metrics().total(STORE)
    assert stored(engine) == loaded(engine, "a")
    assert sidecar.metrics().total(STORE) == before
    wait_for(lambda: worker_of(sidecar)["transfer_reason"] == "HungUp", 20, "the reason")


def test_a_load_whose_sidecar_is_frozen_fails_in_time(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_window, "_STAGE_TIMEOUT_S", 0.3)
    expected = stored(engine)
    reply = engine.probe(HASHES, "a")
    stop(sidecar)
    engine.jobs += 1
    chunks = [Chunk(reply.refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(OTHERS)]
    finished, _ = engine.step(Job(engine.jobs, "load", "a", reply.region, chunks))
    while "a" not in finished:
        finished, _ = engine.step()
    assert engine.failed == {"a"}
    go_on(sidecar)
    assert loaded(engine, "b") == expected


def test_a_window_in_device_memory_is_requested_when_vllm_serves(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_module, "_EARLY", ())
    engine = begun(sidecar, tmp_path, monkeypatch)
    try:
        until(lambda: engine.worker._windows and engine.worker._windows._window_client, "a response to REGISTER")
        assert worker_of(sidecar)["transfer_reason"] == "WindowAsked"
        expected = stored(engine)
        until(lambda: live(engine), "a window")
        assert loaded(engine, "a") == expected
        assert sidecar.metrics().total(STORE, direction="load") == len(expected)
    finally:
        engine.close()


def test_a_window_is_used_only_if_both_sides_see_it(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_window.HostMemory, "write", lambda memory, content: None)
    engine = begun(sidecar, tmp_path, monkeypatch)
    try:
        until(lambda: engine.worker._windows and engine.worker._windows.reason == "PatternMismatch", "the reason")
        assert stored(engine) == loaded(engine, "a")
        assert sidecar.metrics().total(STORE) == 0
        worker = worker_of(sidecar)
        assert worker["transfer"] == "engine"
        assert worker["transfer_reason"].startswith("PatternMismatch")
    finally:
        engine.close()


def test_a_window_end_seen_after_the_next_boots_hello_sends_that_boot_nothing(engine: Engine) -> None:
    keeper, client = engine.worker._windows, engine.worker._client
    assert keeper is not None
    assert client is not None
    body = messages.Sections(region=1, refs=bytes(range(16)))
    assert client.hello is not None
    with engine.worker._wake:
        keeper.add_lost(client, client.hello.boot - 1, body)
        assert keeper.lost[0].ended_at is not None
        assert keeper.lost[0].body.refs in engine.worker.held(body.region).grants
        assert engine.worker.held(body.region + 1).grants == b""


def test_a_failed_copy_while_the_sidecar_holds_stages_ends_the_window(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stored(engine)
    cut = copy_window.stage
    monkeypatch.setattr(copy_window, "stage", lambda p, r, b, nbytes: cut(p, r, b, BLOCK_BYTES))
    copy = copy_window.HostMemory.copy

    def fails(memory: copy_window.HostMemory, kind: str, pieces: Any, event: object) -> None:
        monkeypatch.setattr(copy_window.HostMemory, "copy", copy)
        raise RuntimeError("no such luck")

    monkeypatch.setattr(copy_window.HostMemory, "copy", fails)
    assert not engine.load(HASHES, OTHERS, "a")
    assert live(engine) is None
    engine.failed.clear()
    assert loaded(engine, "b") == expected, "the worker copies itself"


def test_a_window_with_failing_copies_is_retired_and_the_worker_copies_by_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, counted = threading.Event(), []

    def fails(memory: copy_window.HostMemory, kind: str, pieces: Any, event: object) -> None:
        queued.wait(10)
        raise RuntimeError("no such luck")

    monkeypatch.setattr(copy_window.HostMemory, "copy", fails)
    keeper = engine.worker._windows
    assert keeper is not None
    monkeypatch.setattr(keeper, "_count", counted.append)
    jobs = []
    for one, ids in zip(HASHES, BLOCKS, strict=True):
        reply = engine.grant([one])
        engine.jobs += 1
        jobs.append(Job(engine.jobs, "store", "s", reply.region, [Chunk(reply.refs, (ids,))]))
    stores: dict[int, Ended] = {}
    for job in jobs:
        stores |= engine.step(job)[1]
    queued.set()
    while len(stores) < len(jobs):
        stores |= engine.step()[1]
    assert stores == {1: Ended(1, 1), 2: Ended(1, 0), 3: Ended(1, 0)}
    assert (live(engine), engine.worker.off_reason, keeper.reason) == (None, "", "CopyFailed")
    assert counted == ["window_unavailable/CopyFailed"]
    assert engine.store(HASHES[:1], BLOCKS[:1]) == Ended(1, 0)
    assert engine.load(HASHES, OTHERS, "a")


def test_a_slow_unmap_of_a_window_delays_no_step_of_vllm(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapping, free, answered = threading.Event(), threading.Event(), threading.Event()
    close = copy_window.HostMemory.close

    def slow(memory: copy_window.HostMemory) -> bool:
        unmapping.set()
        free.wait(30)
        return close(memory)

    def step() -> None:
        engine.step()
        answered.set()

    monkeypatch.setattr(copy_window.HostMemory, "close", slow)
    worker = engine.worker
    with worker._wake:
        assert worker._windows is not None
        worker._windows.retire()
        worker._wake.notify_all()
    vllm = threading.Thread(target=step)
    try:
        assert unmapping.wait(10)
        vllm.start()
        assert answered.wait(10)
        assert worker_of(sidecar)["transfer"] == "cuda_window", "it hangs up behind the unmapping"
    finally:
        free.set()
        vllm.join()
    wait_for(lambda: worker_of(sidecar)["transfer_reason"] == "HungUp", 20, "the end of the window")
    assert stored(engine) == loaded(engine, "a")


def test_the_copy_thread_unmaps_the_window_before_it_ends(engine: Engine) -> None:
    worker, window = engine.worker, live(engine)
    with worker._wake:
        assert worker._windows is not None
        worker._windows.retire()
        worker._stopping = True
        worker._wake.notify_all()
    until(lambda: not window._mapped, "the end of the window")
