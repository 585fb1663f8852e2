"""Lookups and loads against a scripted pool: waits, refusals, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from scripted_pool import ScriptedPool
from steps import connected, loads_of, reports, requested
from stub_sidecar import Received

from kvcachepool import probes
from kvcachepool.loads import Loads
from kvcachepool.lookups import WaitBudget
from kvcachepool.messages import CHUNK_ABSENT, CHUNK_PENDING, CHUNK_READY, ProbeReply
from kvcachepool.probes import Plan
from kvcachepool.requests import RequestState
from kvcachepool.scheduler import Scheduler
from kvcachepool.wire import Op
from servers.waiting import wait_for

Make = Callable[..., Loop]


def test_only_the_last_token_of_a_full_hit_is_computed(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(1024, 1)
    assert engine.generate("cold", tokens) == 0
    engine.forget_local()
    assert engine.generate("warm", tokens) == 1024


def test_chunks_of_a_longer_prompt_serve_a_shorter_one(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(1000, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    assert engine.generate("warm", tokens[:500] + prompt(100, 2)) == 448


def test_the_tail_of_a_prompt_is_a_chunk(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(1000, 1)
    engine.generate("cold", tokens)
    engine.drain()
    tails = [c for f in scripted.frames(Op.GRANT) for c in f.body["chunks"] if c["tokens"] < 64]
    assert [(c["first_token"], c["tokens"]) for c in tails] == [(960, 32)]
    engine.forget_local()
    assert engine.generate("warm", tokens) == 992


def test_local_blocks_are_not_loaded_again(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    scripted_probe, scripted.on_probe = scripted.on_probe, lambda frame: True
    engine.generate("local", tokens[:240])
    scripted.on_probe = scripted_probe
    jobs = loads_of(engine)
    assert engine.generate("warm", tokens) == 512 - 240
    assert [chunk.blocks[0].count(0) for chunk in jobs[0].chunks] == [3, 0, 0, 0, 0]


def test_a_long_wait_renews_the_probe_on_another_thread(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "RENEW_AFTER_S", (0.01, 0.02))
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    assert engine.connector._scheduler is not None
    client = engine.connector._scheduler._client
    senders: list[str] = []
    request = client.request

    def spied(op: Op, body: Any, on_reply: Any) -> int | None:
        if op == Op.PROBE and body.request == "waits":
            senders.append(threading.current_thread().name)
        return request(op, body, on_reply)

    monkeypatch.setattr(client, "request", spied)
    engine.hold_results = True
    engine.add("loads", tokens)
    engine.step()
    engine.add("waits", tokens)
    engine.until(lambda: len(senders) > 1, what="another PROBE")
    assert set(senders[1:]) == {"kvcachepool-report"}
    engine.hold_results = False
    engine.run("loads", "waits")
    engine.drain()
    assert engine.connector._scheduler._states == {}


def test_two_equal_prompts_at_once_are_loaded_once(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    jobs = loads_of(engine)
    engine.add("one", tokens)
    engine.add("two", tokens)
    engine.run("one", "two")
    assert len(jobs) == 1
    assert engine.external["one"] == 512


def test_no_prompt_waits_for_a_load_that_was_replaced(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.settings["load_timeout_ms"] = 60_000
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()

    def raises(*_: Any) -> None:
        raise RuntimeError("after the load was planned")

    with monkeypatch.context() as during:
        during.setattr(Scheduler, "_count", raises)
        engine.add("replaced", tokens)
        engine.step()
    engine.run("replaced")
    assert engine.connector.bugs
    engine.forget_local()
    engine.add("next", tokens)
    engine.run("next", seconds=5)
    assert engine.external["next"] == 512


def test_an_aborted_load_stores_nothing_and_the_prompt_can_come_again(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    free = engine.free_blocks()
    grants = len(scripted.frames(Op.GRANT))
    engine.hold_results = True
    engine.add("aborted", tokens)
    engine.step()
    engine.abort("aborted")
    engine.add("again", tokens)
    engine.step()
    engine.hold_results = False
    engine.run("again")
    engine.drain()
    engine.until(lambda: engine.free_blocks() == free, what="blocks of the aborted load are free")
    assert len(scripted.frames(Op.GRANT)) == grants

    def released() -> set[str]:
        return {name for frame in scripted.frames(Op.RELEASE) for name in frame.body["requests"]}

    wait_for(lambda: {"aborted", "again"} <= released(), 10, "both released")


def test_requests_that_end_before_a_step_are_released_with_it(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    for number in range(5):
        engine.add(f"gone{number}", prompt(512, number))
    scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.PROBE][4:])
    for number in range(5):
        engine.abort(f"gone{number}")
    assert engine.connector.has_pending_push_work(), "the leases are still to be given back"
    engine.step()
    assert not engine.connector.has_pending_push_work()
    (frame,) = scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.RELEASE])
    assert frame.body["requests"] == [f"gone{number}" for number in range(5)]


def test_a_reused_request_id_is_released_before_its_probe(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.add("name", prompt(512, 1))
    engine.abort("name")
    engine.add("name", prompt(512, 2))
    scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.PROBE][1:])
    sent = [frame.op for frame in scripted.received if frame.op in (Op.PROBE, Op.RELEASE)]
    assert sent == [Op.PROBE, Op.RELEASE, Op.PROBE]


def test_a_failed_load_is_recomputed_and_not_retried(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    assert scripted.memory is not None
    for slot in scripted.slots():
        scripted.memory.bump(slot)
    jobs = loads_of(engine)
    engine.generate("warm", tokens)
    assert len(jobs) == 1
    scripted.wait_for(lambda frames: any(f.op == Op.REPORT and f.body.get("load_failed_tokens") for f in frames))


def all_pending(scripted: ScriptedPool) -> list[Received]:
    """From now on each PROBE is answered as fully pending, with more later. Returns them as they arrive."""
    held: list[Received] = []

    def later(frame: Received) -> bool:
        held.append(frame)
        scripted.late(frame, scripted.found(frame, CHUNK_PENDING), partial=True)
        return True

    scripted.on_probe = later
    return held


def test_pending_chunks_are_waited_for_within_the_load_timeout(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    held = all_pending(scripted)
    engine.add("warm", tokens)
    wait_for(lambda: held, 10, "the PROBE on arrival")
    for _ in range(5):
        assert engine.step().total_num_scheduled_tokens == 0
    scripted.late(held[-1], scripted.found(held[-1]))
    engine.run("warm")
    assert engine.external["warm"] == 512


def test_a_waiting_request_continues_as_soon_as_nothing_more_is_pending(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitBudget, "_LATE_S", 20.0)
    monkeypatch.setattr(probes, "RENEW_AFTER_S", (600.0, 600.0))
    scripted.settings["load_timeout_ms"] = 600_000
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    held = all_pending(scripted)
    engine.add("warm", tokens)
    wait_for(lambda: held, 10, "the PROBE on arrival")
    scheduler = engine.connector._scheduler
    assert scheduler is not None

    def waits_for_more() -> bool:
        engine.step()
        poll = scheduler._states["warm"].pending_poll
        return poll is not None and poll.result is not None

    wait_for(waits_for_more, 10, "it waits")
    scripted.late(held[-1], scripted.found(held[-1]) | {"states": b""})
    wait_for(lambda: engine.step().total_num_scheduled_tokens > 0, 10, "the end of the wait")
    assert engine.external.get("warm", 0) == 0
    wait_for(lambda: reports(scripted, "miss_tokens").get("BadAnswer", 0) == 512, 10, "misses by reason")


def test_pending_chunks_are_given_up_after_the_load_timeout(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings["load_timeout_ms"] = 300
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    all_pending(scripted)
    begun = time.monotonic()
    engine.add("warm", tokens)
    engine.run("warm")
    assert engine.external["warm"] == 0
    assert 0.25 < time.monotonic() - begun < 5


def test_a_silent_sidecar_costs_a_bounded_wait_and_then_none(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings |= {"first_poll_wait_us": 20_000, "step_wait_us": 40_000}
    engine = connected(loop())
    scripted.on_probe = lambda frame: True
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    waits: list[float] = []
    for number in range(5):
        begun = time.monotonic()
        request = engine.add(f"r{number}", prompt(200, number))
        begun = time.monotonic()
        answer = scheduler.matched_tokens(request, 0)
        waits.append(time.monotonic() - begun)
        wait_for(lambda one=request: scheduler.matched_tokens(one, 0) == (0, False), 1, "the end of the patience")
        engine.run(f"r{number}")
    assert answer == (0, False), "the breaker is open: nothing is waited for"
    assert all(0.015 < wait < 0.5 for wait in waits[:1])
    assert waits[4] < 0.01, "the breaker is open: no wait"
    wait_for(lambda: reports(scripted, "miss_tokens").get("unanswered", 0) == 5 * 200, 10, "misses by reason")


def test_a_slightly_late_answer_is_used(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings |= {"first_poll_wait_us": 1_000}
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    held: list[Received] = []
    scripted.on_probe = lambda frame: held.append(frame) or True
    request = engine.add("warm", tokens)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    assert scheduler.matched_tokens(request, 0) == (None, False)
    wait_for(lambda: held, 5, "the PROBE")
    scripted.late(held[0], scripted.found(held[0]))
    lookup = scheduler._states["warm"].lookup
    assert lookup is not None
    wait_for(lambda: lookup.result is not None, 5, "its answer")
    assert scheduler.matched_tokens(request, 0) == (512, True)


def test_waits_of_one_step_are_bounded_together(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings |= {"first_poll_wait_us": 20_000, "step_wait_us": 30_000}
    engine = connected(loop())
    scripted.on_probe = lambda frame: True
    for number in range(20):
        engine.add(f"r{number}", prompt(100, number))
    begun = time.monotonic()
    engine.scheduler.schedule()
    assert time.monotonic() - begun < 0.3


@pytest.mark.parametrize(
    ("params", "more", "loaded"),
    [
        ({"max_load_tokens": 200}, {}, 192),
        ({"max_load_tokens": 10}, {}, 0),
        ({"max_load_tokens": "many"}, {}, 512),
        ({}, {"skip_reading": True}, 0),
        ({"kvcachepool.tags": ["tenant-a"]}, {}, 0),
        ({}, {"cache_salt": "pepper"}, 0),
    ],
)
def test_controls_are_parsed(
    scripted: ScriptedPool, loop: Make, params: dict[str, Any], more: dict[str, Any], loaded: int
) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    assert engine.generate("warm", tokens, params=params, **more) == loaded


def test_a_producer_only_stores_and_a_consumer_only_loads(scripted: ScriptedPool, loop: Make) -> None:
    producer = connected(loop(role="kv_producer", engine_id="producer"))
    tokens = prompt(512, 1)
    producer.generate("cold", tokens)
    producer.drain()
    producer.forget_local()
    assert producer.generate("still cold", tokens) == 0
    producer.drain()
    assert not scripted.frames(Op.PROBE)
    wait_for(lambda: reports(scripted, "miss_tokens").get("kv_producer") == 1024, 10, "misses by their reason")
    grants = len(scripted.frames(Op.GRANT))
    consumer = connected(loop(role="kv_consumer", engine_id="consumer"))
    assert consumer.generate("warm", tokens) == 512
    assert consumer.generate("never stored", prompt(512, 2)) == 0
    consumer.drain()
    assert len(scripted.frames(Op.GRANT)) == grants


def test_wrong_types_are_ignored_and_counted(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.generate("odd", prompt(200, 1), params={"kvcachepool.ttl": "1h", "kvcachepool.store": 1})
    wait_for(
        lambda: (
            {"parameter_ignored/kvcachepool.ttl", "parameter_ignored/kvcachepool.store"}
            <= set(reports(scripted, "events"))
        ),
        10,
        "counted",
    )


def test_every_requested_token_is_counted_once(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(500, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.generate("warm", tokens)
    engine.generate("local", tokens)
    engine.generate("short", prompt(40, 3))
    local_left = 500 - 496
    wait_for(lambda: requested(scripted) == 500 + 500 + local_left + 40, 10, "requested tokens")
    hits, misses = reports(scripted, "hit_tokens"), reports(scripted, "miss_tokens")
    assert hits == {"memory": 496}
    assert sum(hits.values()) + sum(misses.values()) == requested(scripted)


def test_reset_cache_hides_old_chunks_and_fails_loads_in_flight(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.hold_results = True
    engine.add("loading", tokens)
    engine.step()
    assert engine.connector.reset_cache() is True
    engine.hold_results = False
    engine.run("loading")
    assert engine.external["loading"] == 0
    engine.forget_local()
    assert engine.generate("stored anew", tokens) == 512


def test_a_preempted_request_is_looked_up_again(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings["load_timeout_ms"] = 20
    engine = connected(loop(blocks=40, step_tokens=256))
    first, second = prompt(256, 1), prompt(256, 2)
    engine.add("one", first, output=60)
    engine.add("two", second, output=60)
    engine.run("one", "two")
    assert any(request.num_preemptions for request in engine.requests.values())
    probes = [frame.body["request"] for frame in scripted.frames(Op.PROBE)]
    assert max(probes.count("one"), probes.count("two")) >= 2
    # independent of its first PROBE
    assert {frame.body["budget_ms"] for frame in scripted.frames(Op.PROBE)} == {20}


def test_a_load_reads_the_chunks_of_the_answer_that_promised_it(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    absent, ready, size = CHUNK_ABSENT, CHUNK_READY, 16
    begin = Loads.begin

    def first_four(frame: Received) -> bool:
        found = scripted.found(frame)
        states = bytes([ready] * 4 + [absent] * 4)
        scripted.late(frame, found | {"states": states, "tiers": states, "refs": found["refs"][: 4 * size]})
        return True

    def overtaken(self: Loads, state: RequestState, plan: Plan, *more: Any) -> dict[str, int]:
        # The second chunk was corrupt, and one behind the four arrived.
        refs = scripted.found(scripted.frames(Op.PROBE)[-1])["refs"]
        states = bytes([ready, absent, ready, ready, ready, absent, absent, absent])
        refs = refs[:size] + refs[2 * size : 5 * size]
        result = plan.lookup.result
        answer = ProbeReply(states=states, refs=refs, region=plan.answer.region, tiers=states)
        assert result is not None
        plan.lookup.result = result._replace(answer=answer)
        return begin(self, state, plan, *more)

    scripted.on_probe = first_four
    monkeypatch.setattr(Loads, "begin", overtaken)
    assert engine.generate("warm", tokens) == 256
