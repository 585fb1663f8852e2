"""Stores against a scripted pool: refusals, silence, broken connections, dropped jobs."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from scripted_pool import ScriptedPool
from steps import connected, reports
from stub_sidecar import Received

from kvcachepool.jobs import Ended, Job, WorkerReport
from kvcachepool.messages import GRANT_NO_PARENT, GRANT_NO_ROOM, HelloReply
from kvcachepool.stores import Stores
from kvcachepool.wire import Op
from servers.waiting import wait_for

Make = Callable[..., Loop]


def requested(pool: ScriptedPool) -> list[tuple[int, int]]:
    """(first token, tokens) of all requested chunks, in order."""
    return [(c["first_token"], c["tokens"]) for f in pool.frames(Op.GRANT) for c in f.body["chunks"]]


def test_a_chunk_is_requested_in_the_step_that_completes_it(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(step_tokens=100))
    engine.add("cold", prompt(300, 1))
    engine.step()
    wait_for(lambda: requested(scripted) == [(0, 64)], 10, "the first chunk")
    engine.step()
    wait_for(lambda: requested(scripted) == [(0, 64), (64, 64), (128, 64)], 10, "two more")
    engine.run("cold")
    engine.drain()
    assert requested(scripted) == [(0, 64), (64, 64), (128, 64), (192, 64), (256, 32)]


def test_the_lookup_is_released_before_its_chunks_are_requested(scripted: ScriptedPool, loop: Make) -> None:
    # A chunk that is still being fetched for the lookup exists already, and is not stored if that fetch fails.
    engine = connected(loop())
    engine.generate("cold", prompt(300, 1))
    engine.drain()
    sent = [frame.op for frame in scripted.received if frame.op in (Op.PROBE, Op.RELEASE, Op.GRANT)]
    assert sent[:3] == [Op.PROBE, Op.RELEASE, Op.GRANT]


def test_parents_and_block_hashes_make_a_chain(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    request = engine.add("cold", prompt(200, 1))
    engine.run("cold")
    engine.drain()
    chunks = [c for f in scripted.frames(Op.GRANT) for c in f.body["chunks"]]
    hashes = request.block_hashes
    assert [c.get("parent", b"") for c in chunks] == [b"", hashes[3], hashes[7]]
    assert [c["hash"] for c in chunks] == [hashes[3], hashes[7], hashes[11]]
    assert chunks[1]["block_hashes"] == b"".join(hashes[4:8])


def test_drafts_and_generated_tokens_are_not_stored_by_default(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.generate("long", prompt(100, 1), output=100)
    engine.drain()
    assert requested(scripted) == [(0, 64), (64, 32)]


def test_generated_tokens_are_stored_if_the_pool_requests_it(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings["save"] = "PromptAndDecode"
    engine = connected(loop())
    engine.generate("long", prompt(100, 1), output=100)
    engine.drain()
    assert requested(scripted) == [(0, 64), (64, 32), (64, 64), (128, 64)]


@pytest.mark.parametrize(
    ("params", "stored"),
    [
        ({"kvcachepool.store": False}, []),
        ({"lmcache.skip_save": True}, []),
        ({"lmcache.max_offload_tokens": 130}, [(0, 64), (64, 64)]),
        ({"kvcachepool.skip_last_tokens": 40}, [(0, 64), (64, 64), (128, 16)]),
        ({"max_offload_tokens": 130}, [(0, 64), (64, 64)]),
        ({"kvcachepool.skip_last_tokens": 1000}, []),
    ],
)
def test_controls_are_parsed(
    scripted: ScriptedPool, loop: Make, params: dict[str, Any], stored: list[tuple[int, int]]
) -> None:
    engine = connected(loop())
    engine.generate("cold", prompt(190, 1), params=params)
    engine.drain()
    assert requested(scripted) == stored


@pytest.mark.parametrize(
    ("pool", "params", "stored"),
    [
        (40, {}, [(0, 64), (64, 64), (128, 16)]),
        (40, {"kvcachepool.skip_last_tokens": 80}, [(0, 64), (64, 32)]),
        (80, {"kvcachepool.skip_last_tokens": 40}, [(0, 64), (64, 32)]),
        (1000, {}, []),
    ],
)
def test_the_pool_and_the_request_may_skip_the_end_of_a_prompt(
    scripted: ScriptedPool, loop: Make, pool: int, params: dict[str, Any], stored: list[tuple[int, int]]
) -> None:
    scripted.settings.update({"save": "PromptAndDecode", "skip_last_tokens": pool})
    engine = connected(loop())
    engine.generate("cold", prompt(190, 1), output=100, params=params)
    engine.drain()
    assert requested(scripted) == stored


def test_a_pool_may_store_nothing_and_load(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.generate("cold", prompt(256, 1))
    engine.drain()
    engine.close()
    stored = requested(scripted)
    assert stored
    scripted.settings["save"] = "None"
    engine = connected(loop())
    assert engine.generate("warm", prompt(256, 1)) == 256
    engine.generate("other", prompt(256, 2), output=100)
    engine.drain()
    assert requested(scripted) == stored


def test_the_grant_carries_the_ttl(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.generate("cold", prompt(190, 1), params={"kvcachepool.ttl": 60})
    engine.drain()
    assert [frame.body["ttl_s"] for frame in scripted.frames(Op.GRANT)] == [60]


def test_blocks_are_held_until_the_copy_has_ended_and_then_released(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    free = engine.free_blocks()
    engine.hold_results = True
    engine.add("cold", prompt(256, 1))
    engine.run("cold")
    for _ in range(5):
        engine.step()
    assert engine.connector.has_pending_push_work()
    assert engine.free_blocks() == free - 16
    assert not engine.scheduler.reset_prefix_cache()
    engine.hold_results = False
    engine.drain()
    assert engine.free_blocks() == free


def test_stores_begin_with_the_next_step_if_vllm_announces_no_end_of_a_forward(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculation, vLLM's V1 runner calls `wait_for_save` on ranks of the last pipeline stage only."""
    engine = connected(loop())
    monkeypatch.setattr(engine.worker, "wait_for_save", lambda: None)
    engine.add("running", prompt(256, 1), output=4000)
    engine.until(lambda: scripted.frames(Op.COMMIT), 5, what="a COMMIT while the request runs")
    assert "running" not in engine.done
    engine.abort("running")
    engine.forget_local()
    assert engine.generate("warm", prompt(256, 1)) == 256


def test_chunks_of_a_failed_step_are_not_stored(scripted: ScriptedPool, loop: Make) -> None:
    """With asynchronous scheduling, the next step is on its way before vLLM knows that this one failed."""
    engine = connected(loop())
    worker, scheduler = engine.worker, engine.scheduler

    def bind() -> list[Job]:
        metadata = pickle.loads(pickle.dumps(scheduler.schedule().kv_connector_metadata))
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        jobs: list[Job] = metadata.jobs
        return jobs

    engine.add("fails", prompt(256, 1), output=8)
    assert bind() == []
    wait_for(lambda: scripted.frames(Op.GRANT), 10, "the chunks requested")
    worker.step_failed()
    worker.wait_for_save()
    worker.clear_connector_metadata()
    stores: list[Job] = []

    def shipped() -> bool:
        engine.add(f"next-{len(engine.done)}-{time.monotonic()}", prompt(10, 2), output=8)
        stores.extend(bind())
        worker.wait_for_save()
        worker.clear_connector_metadata()
        return bool(stores)

    wait_for(shipped, 10, "the failed step's store shipped")
    report = worker.build_connector_worker_meta()
    assert report.stores == {job.id: Ended(1, 1) for job in stores}
    assert not scripted.frames(Op.COMMIT)


def test_a_refused_chunk_waits_in_prefix_order_while_its_request_runs(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    full = [True]

    def no_room(frame: Received) -> bool:
        if full[0]:
            scripted.late(frame, {"results": bytes([GRANT_NO_ROOM] * len(frame.body["chunks"])), "refs": b""})
        return full[0]

    scripted.on_grant = no_room
    free = engine.free_blocks()
    engine.add("cold", prompt(250, 1), output=4000)
    engine.until(lambda: len(scripted.frames(Op.GRANT)) >= 2, what="requested again")
    full[0] = False
    engine.until(lambda: len(scripted.chunks) == 4, what="all stored")
    engine.abort("cold")
    engine.drain()
    assert engine.free_blocks() == free
    wait_for(lambda: reports(scripted, "events").get("grant_refused/NoRoom", 0) >= 4, 10, "refusals counted")


def test_a_lost_parent_requests_the_chain_again(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(step_tokens=64))
    refused: list[Received] = []

    def orphan(frame: Received) -> bool:
        if refused or frame.body["chunks"][0]["first_token"] == 0:
            return False
        refused.append(frame)
        scripted.late(frame, {"results": bytes([GRANT_NO_PARENT]), "refs": b""})
        return True

    scripted.on_grant = orphan
    engine.add("cold", prompt(128, 1), output=4000)
    engine.until(
        lambda: len(scripted.chunks) == 2 and requested(scripted).count((0, 64)) == 2, what="chain requested again"
    )


def test_chunks_after_a_refused_one_wait_too(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    turns: list[Received] = []

    def no_room_then_orphans(frame: Received) -> bool:
        turns.append(frame)
        if len(turns) > 5:
            return False
        results = [GRANT_NO_ROOM] + [GRANT_NO_PARENT] * (len(frame.body["chunks"]) - 1)
        scripted.late(frame, {"results": bytes(results), "refs": b""})
        return True

    scripted.on_grant = no_room_then_orphans
    engine.add("cold", prompt(500, 1), output=4000)
    engine.until(lambda: len(scripted.chunks) == 8, what="all stored")


def test_an_unanswered_grant_is_aborted_until_the_abort_is_answered(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    free = engine.free_blocks()
    silent: list[Received] = []
    scripted.on_grant = lambda frame: silent.append(frame) or len(silent) == 1  # type: ignore[func-returns-value]
    scripted.on_abort = lambda frame: True
    begun = time.monotonic()
    engine.generate("cold", prompt(128, 1))
    engine.until(lambda: engine.free_blocks() == free, what="blocks released")
    assert 0.9 < time.monotonic() - begun < 5
    assert not engine.connector.has_pending_push_work()
    abort = scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.ABORT])[0]
    assert abort.body["grant"] == silent[0].tag
    scripted.late(silent[0], scripted.grants(silent[0]))
    engine.step()
    assert not engine.connector.has_pending_push_work(), "the late answer is dropped"
    scripted.on_abort = lambda frame: False
    scripted.cut()
    again = scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.ABORT][1:])[0]
    assert again.body["grant"] == silent[0].tag
    hello = max(i for i, f in enumerate(scripted.received) if f.op == Op.HELLO and f.connection == again.connection)
    assert scripted.received.index(again) > hello


def test_a_grant_lost_with_the_connection_is_aborted_after_the_next_hello(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    free = engine.free_blocks()
    silent: list[Received] = []
    scripted.on_grant = lambda frame: silent.append(frame) or True  # type: ignore[func-returns-value]
    engine.add("cold", prompt(128, 1))
    engine.step()
    scripted.wait_for(lambda frames: silent)
    scripted.cut()
    abort = scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.ABORT])[0]
    assert abort.body["grant"] == silent[0].tag
    engine.run("cold")
    engine.until(lambda: engine.free_blocks() == free, what="blocks released")
    assert not engine.connector.has_pending_push_work()


def test_answered_grants_are_sent_after_a_lost_connection(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.add("cold", prompt(128, 1))
    engine.step()
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    wait_for(lambda: scheduler._stores._answered, 10, "an answer")
    client = scheduler._client
    connection = client.connection
    scripted.cut()
    wait_for(lambda: client.connected and client.connection > connection, 10, "connected again")
    engine.run("cold")
    engine.drain()
    assert not [f for f in scripted.frames(Op.ABORT) if "grant" in f.body]


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply | {"refs": reply["refs"][:-1]},
        lambda reply: reply | {"refs": reply["refs"][:-16]},
        lambda reply: reply | {"refs": b""},
        lambda reply: reply | {"results": reply["results"][:-1]},
        lambda reply: {"results": "no bytes"},
    ],
    ids=["torn", "one less", "none", "results", "types"],
)
def test_an_invalid_grant_response_is_aborted(
    scripted: ScriptedPool, loop: Make, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    engine = connected(loop())
    free = engine.free_blocks()
    wrong: list[Received] = []

    def once(frame: Received) -> bool:
        if not wrong:
            wrong.append(frame)
            scripted.late(frame, change(scripted.grants(frame)))
            scripted.granted.clear()
            return True
        return False

    scripted.on_grant = once
    jobs: list[Any] = []
    engine.rewrite_metadata = lambda metadata: jobs.extend(metadata.jobs)
    engine.generate("cold", prompt(128, 1))
    engine.drain()
    assert not jobs
    assert engine.free_blocks() == free
    wait_for(lambda: reports(scripted, "events").get("grant_refused/BadAnswer") == 2, 10, "counted")
    abort = scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.ABORT])[0]
    assert abort.body["grant"] == wrong[0].tag


def test_a_grant_of_an_old_chunk_size_does_not_affect_new_chunks(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.add("cold", prompt(100, 1), output=4000)
    engine.step()
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    wait_for(lambda: scheduler._stores._answered, 10, "an answer")
    scripted.settings["chunk_tokens"] = 128
    scripted.cut()
    wait_for(lambda: scheduler.session.registration.geometry.chunk == 128, 10, "the other chunk size")
    engine.until(lambda: len(requested(scripted)) == 3, what="chunks of the other size")
    engine.abort("cold")
    engine.drain()
    assert requested(scripted) == [(0, 64), (64, 32), (0, 96)]


def test_no_register_names_a_chunk_size_that_hello_has_replaced(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    session, between, resume = scheduler.session, threading.Event(), threading.Event()
    take = session.on_hello

    def take_late(reply: HelloReply) -> None:
        between.set()
        assert resume.wait(10)
        take(reply)

    session.on_hello = take_late  # type: ignore[method-assign]
    scripted.settings["chunk_tokens"] = 128
    scripted.cut()
    assert between.wait(10)
    with session.lock:
        assert not session.registration.ensure()
    resume.set()

    def registered() -> list[int]:
        return [f.body["chunk_tokens"] for f in scripted.frames(Op.REGISTER) if "hashing" in f.body]

    wait_for(lambda: registered() == [64, 128], 10, "the scheduler side registers once per connection")


def test_a_job_that_a_worker_dropped_is_aborted_and_requested_again(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    dropped: list[int] = []

    def drop_once(output: Any) -> None:
        report = output.kv_connector_worker_meta
        if report is not None and not dropped:
            dropped.extend(report.stores)
            output.kv_connector_worker_meta = WorkerReport({job: Ended(1, 1) for job in report.stores})

    engine.rewrite_output = drop_once
    engine.add("cold", prompt(128, 1), output=4000)
    engine.until(lambda: len(scripted.frames(Op.GRANT)) >= 2, what="requested again")
    first, second = scripted.frames(Op.GRANT)[:2]
    abort = next(frame for frame in scripted.received if frame.op == Op.ABORT)
    assert abort.body["grant"] == first.tag
    assert scripted.received.index(abort) < scripted.received.index(second), "else it would be there already"


def test_a_dropped_job_is_aborted_without_another_step(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())

    def drop(output: Any) -> None:
        report = output.kv_connector_worker_meta
        if report is not None:
            output.kv_connector_worker_meta = WorkerReport({job: Ended(1, 1) for job in report.stores})

    engine.rewrite_output = drop
    engine.generate("cold", prompt(128, 1))
    engine.drain()
    abort = scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.ABORT and "grant" in f.body])[0]
    assert abort.body["grant"] == scripted.frames(Op.GRANT)[0].tag


def test_a_grant_is_not_aborted_before_every_rank_has_ended_it(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(world=2))
    reported: list[int] = []

    def one_of_two_ranks(output: Any) -> None:
        report = output.kv_connector_worker_meta
        if report is not None:
            reported.extend(report.stores)
            output.kv_connector_worker_meta = WorkerReport({job: Ended(1, 1) for job in report.stores})

    engine.rewrite_output = one_of_two_ranks
    engine.generate("cold", prompt(128, 1))
    engine.until(lambda: reported, what="the first rank's report")
    for _ in range(3):
        engine.step()
    assert not [f for f in scripted.frames(Op.ABORT) if "grant" in f.body], "the other one may be writing"

    def the_other(output: Any) -> None:
        if reported:
            output.kv_connector_worker_meta = WorkerReport({reported.pop(): Ended(1, 0)})

    engine.rewrite_output = the_other
    engine.until(lambda: [f for f in scripted.frames(Op.ABORT) if "grant" in f.body], what="aborted")


def test_a_repeated_report_releases_blocks_once(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    free = engine.free_blocks()
    kept: list[WorkerReport] = []

    def twice(output: Any) -> None:
        if output.kv_connector_worker_meta is not None:
            kept.append(output.kv_connector_worker_meta)
        elif kept:
            output.kv_connector_worker_meta = kept[-1]

    engine.rewrite_output = twice
    engine.generate("cold", prompt(256, 1))
    engine.drain()
    for _ in range(3):
        engine.step()
    assert kept
    assert engine.free_blocks() == free
    engine.generate("again", prompt(256, 1))
    assert engine.free_blocks() == free


def test_existing_chunks_are_not_requested(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.drain()
    engine.forget_local()
    before = len(requested(scripted))
    engine.generate("warm", tokens)
    engine.drain()
    assert len(requested(scripted)) == before


def test_bytes_in_flight_are_bounded(scripted: ScriptedPool, loop: Make) -> None:
    token = 2 * 2 * 2 * 32 * 4
    scripted.settings["store_bytes_in_flight"] = token
    engine = connected(loop(step_tokens=64))
    engine.hold_results = True
    engine.add("cold", prompt(640, 1), output=4000)
    for _ in range(30):
        engine.step()
        time.sleep(0.005)
    assert len(requested(scripted)) == 2, "2 x max_num_batched_tokens"
    engine.hold_results = False
    engine.until(lambda: len(scripted.chunks) == 10, what="the backlog is stored in order")
    assert requested(scripted) == [(n * 64, 64) for n in range(10)]


def test_without_room_a_step_examines_no_request(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.settings["store_bytes_in_flight"] = 1
    engine = connected(loop(step_tokens=64))
    engine.hold_results = True
    engine.add("cold", prompt(640, 1), output=4000)
    engine.until(lambda: len(requested(scripted)) == 2, what="2 x max_num_batched_tokens in flight")
    examined: list[Any] = []
    monkeypatch.setattr(Stores, "offer", lambda self, request_id, *_: examined.append(request_id) or 0)
    for _ in range(5):
        engine.step()
    assert examined == []
    engine.hold_results = False
    engine.until(lambda: examined, what="the worker's reports make room")


def test_blocks_are_released_when_all_ranks_have_ended(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(world=2))
    free = engine.free_blocks()
    first: list[WorkerReport] = []

    def one_rank(output: Any) -> None:
        report = output.kv_connector_worker_meta
        # Other requests only have the time of a step.
        if report is not None and report.stores:
            first.append(WorkerReport(dict(report.stores)))

    engine.rewrite_output = one_rank
    engine.generate("cold", prompt(256, 1))
    engine.until(lambda: first, what="a report of the first rank")
    for _ in range(3):
        engine.step()
    assert engine.free_blocks() < free
    assert engine.connector.has_pending_push_work()

    def other_rank(output: Any) -> None:
        if first:
            output.kv_connector_worker_meta = first.pop().aggregate(output.kv_connector_worker_meta or WorkerReport())

    engine.rewrite_output = other_rank
    engine.drain()
    assert engine.free_blocks() == free
