"""How the scheduler side handles chunks in a lower tier: it requests them, waits for them, or leaves them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from scripted_pool import ScriptedPool
from steps import connected, loads_of, reports
from stub_sidecar import Received

from kvcachepool import lookups
from kvcachepool.local_cache import LocalCache
from kvcachepool.lookups import WaitBudget
from kvcachepool.messages import CHUNK_PENDING, CHUNK_READY
from kvcachepool.probes import Lookup
from kvcachepool.wire import Op
from servers.waiting import wait_for

Make = Callable[..., Loop]
TOKENS = prompt(512, 1)


def stored(scripted: ScriptedPool, engine: Loop) -> None:
    """Eight chunks are in the pool and none in vLLM. No PROBE was sent since then."""
    engine.generate("cold", TOKENS)
    engine.forget_local()


def partly(scripted: ScriptedPool, frame: Received, in_memory: int, **more: Any) -> dict[str, Any]:
    """An answer with the first chunks in memory and all others on disk."""
    found = scripted.found(frame)
    states = bytes(CHUNK_READY if at < in_memory else CHUNK_PENDING for at in range(len(found["states"])))
    tiers = bytes(1 if at < in_memory else 2 for at in range(len(states)))
    return found | {"states": states, "tiers": tiers, "refs": found["refs"][: 16 * in_memory]} | more


def probe_count(scripted: ScriptedPool) -> int:
    """PROBEs for the request under test."""
    return sum(frame.body["request"] == "warm" for frame in scripted.frames(Op.PROBE))


def misses(scripted: ScriptedPool, engine: Loop) -> dict[str, int]:
    """Of the request under test."""
    engine.run("warm")
    wait_for(lambda: sum(reports(scripted, "hit_tokens").values()) > 0, 10, "its report")
    counted = reports(scripted, "miss_tokens")
    return {reason: tokens for reason, tokens in counted.items() if reason != "absent"}


def test_a_tier_with_too_few_tokens_is_not_asked_to_fetch(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings["min_load_tokens"] = 192
    engine = connected(loop())
    stored(scripted, engine)

    def answers(frame: Received) -> bool:
        scripted.late(frame, partly(scripted, frame, 6))
        return True

    scripted.on_probe = answers
    engine.add("warm", TOKENS)
    assert misses(scripted, engine) == {"min_load_tokens": 128}
    assert engine.external["warm"] == 384
    assert probe_count(scripted) == 1


def test_tokens_left_in_a_tier_are_misses_with_the_reason(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    stored(scripted, engine)

    def answers(frame: Received) -> bool:
        early = frame.body.get("local_tokens") is None
        declined = {} if early else {"declined": "recompute"}
        scripted.late(frame, partly(scripted, frame, 3, **declined))
        return True

    scripted.on_probe = answers
    engine.add("warm", TOKENS)
    assert misses(scripted, engine) == {"recompute": 320}
    assert engine.external["warm"] == 192


def hints_and_holds(
    scripted: ScriptedPool, monkeypatch: pytest.MonkeyPatch, held: int | None
) -> tuple[list[Received], Callable[[], dict[str, Any]]]:
    """The scheduler side assumes that vLLM holds `held` tokens, and the first PROBE is not answered. Returns its answer
    from a sidecar that has everything on disk and fetches nothing before `held`.
    """
    monkeypatch.setattr(LocalCache, "held", lambda *_: held)
    scripted.settings["load_timeout_ms"] = 20_000
    probes: list[Received] = []

    def answers(frame: Received) -> bool:
        probes.append(frame)
        return len(probes) == 1

    def answer() -> dict[str, Any]:
        body = partly(scripted, probes[0], 0)
        before = (held or 0) // 64
        return body | {name: bytes(before) + body[name][before:] for name in ("states", "tiers")}

    scripted.on_probe = answers
    return probes, answer


@pytest.mark.parametrize("held", [None, 256, 512], ids=["unknown", "partly-evicted", "evicted"])
@pytest.mark.parametrize("late", [False, True], ids=["first-poll", "later-poll"])
def test_a_second_probe_fetches_what_the_early_one_left_in_a_tier(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, held: int | None, late: bool
) -> None:
    monkeypatch.setattr(WaitBudget, "_LATE_S", 20.0)
    if late:
        scripted.settings["first_poll_wait_us"] = 0
    engine = connected(loop())
    stored(scripted, engine)
    probes, answer = hints_and_holds(scripted, monkeypatch, held)
    engine.add("warm", TOKENS)
    wait_for(lambda: probes, 10, "the early PROBE")
    if late:
        for _ in range(3):
            assert engine.step().total_num_scheduled_tokens == 0
    scripted.late(probes[0], answer())
    engine.run("warm")
    assert engine.external["warm"] == 512
    assert [frame.body.get("local_tokens") for frame in probes] == [held, 0]


def test_nothing_is_requested_that_cannot_arrive_in_time(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connected(loop())
    stored(scripted, engine)
    probes, answer = hints_and_holds(scripted, monkeypatch, None)
    engine.add("warm", TOKENS)
    wait_for(lambda: probes, 10, "the early PROBE")
    scripted.late(probes[0], answer() | {"pending_ms": 60_000})
    engine.run("warm")
    assert (engine.external["warm"], len(probes)) == (0, 1)


@pytest.mark.parametrize("looks", range(1, 7))
def test_an_answer_that_arrives_during_a_poll_is_no_refusal(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    class Racing(Lookup):
        """Its first answer arrives right after the last of this many checks found none."""

        left = 0

        @property
        def result(self) -> Any:
            seen = Lookup.result.__get__(self)  # type: ignore[attr-defined]
            if seen is None and threading.current_thread() is engines and Racing.left:
                Racing.left -= 1
                if not Racing.left:
                    scripted.late(probes[0], scripted.found(probes[0]))
                    wait_for(lambda: Lookup.result.__get__(self) is not None, 10, "its answer")  # type: ignore[attr-defined]
            return seen

        @result.setter
        def result(self, value: Any) -> None:
            Lookup.result.__set__(self, value)  # type: ignore[attr-defined]

    engines = threading.current_thread()
    monkeypatch.setattr(WaitBudget, "_LATE_S", 20.0)
    scripted.settings["first_poll_wait_us"] = 0
    engine = connected(loop())
    stored(scripted, engine)
    probes, _ = hints_and_holds(scripted, monkeypatch, 0)
    monkeypatch.setattr(lookups, "Lookup", Racing)
    engine.add("warm", TOKENS)
    wait_for(lambda: probes, 10, "the early PROBE")
    Racing.left = looks
    engine.run("warm")
    assert (engine.external["warm"], Racing.left) == (512, 0)


@pytest.mark.parametrize(("number", "tier"), [(2, "disk"), (3, "redis"), (4, "s3"), (5, "filesystem")])
def test_a_load_waits_for_its_rest_however_small(scripted: ScriptedPool, loop: Make, number: int, tier: str) -> None:
    scripted.settings["min_load_tokens"] = 256
    engine = connected(loop())
    stored(scripted, engine)
    held: list[Received] = []

    def answers(frame: Received) -> bool:
        held.append(frame)
        scripted.late(frame, partly(scripted, frame, 0), partial=frame.body.get("local_tokens") is not None)
        return True

    scripted.on_probe = answers
    engine.add("warm", TOKENS)
    engine.step()
    wait_for(lambda: held and held[-1].body.get("local_tokens") == 0, 10, "the PROBE that fetches")
    # all but the last chunk arrived, so less than the minimum is left
    some = partly(scripted, held[-1], 7)
    scripted.late(held[-1], some | {"tiers": bytes([number] * 8)}, partial=True)
    for _ in range(5):
        assert engine.step().total_num_scheduled_tokens == 0
    scripted.late(held[-1], scripted.found(held[-1]) | {"tiers": bytes([number] * 8)})
    engine.run("warm")
    assert engine.external["warm"] == 512
    wait_for(lambda: reports(scripted, "hit_tokens") == {tier: 512}, 10, "its report")


def test_probes_carry_the_prefill_speed(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(step_tokens=128))
    engine.generate("one", prompt(512, 1))
    engine.generate("two", prompt(512, 2))
    speeds = [frame.body.get("prefill_tokens_per_s", 0) for frame in scripted.frames(Op.PROBE)]
    assert speeds[0] == 0
    assert speeds[-1] > 0


def checked_first(scripted: ScriptedPool) -> list[Received]:
    """All PROBEs from now on are answered with all chunks in memory under verification."""
    probes: list[Received] = []

    def answers(frame: Received) -> bool:
        probes.append(frame)
        scripted.late(frame, scripted.found(frame, CHUNK_PENDING), partial=True)
        return True

    scripted.on_probe = answers
    return probes


def test_an_idle_engine_waits_for_a_check_inside_its_step(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitBudget, "_IDLE_S", 20.0)
    scripted.settings["load_timeout_ms"] = 20_000
    engine = connected(loop())
    stored(scripted, engine)
    probes = checked_first(scripted)
    engine.add("warm", TOKENS)
    assert engine.step().total_num_scheduled_tokens == 0
    timer = threading.Timer(0.2, lambda: scripted.late(probes[0], scripted.found(probes[0])))
    timer.start()
    loads = loads_of(engine)
    engine.step()
    timer.join()
    assert len(loads) == 1, "the step that waited begins the load"
    engine.run("warm")
    assert engine.external["warm"] == 512
    assert len(probes) == 1


def test_the_end_of_a_request_ends_its_open_lookup(scripted: ScriptedPool, loop: Make) -> None:
    scripted.settings["load_timeout_ms"] = 60_000
    engine = connected(loop())
    stored(scripted, engine)
    probes = checked_first(scripted)
    engine.add("warm", TOKENS)
    engine.step()
    assert len(probes) == 1
    client = engine.connector._scheduler._client  # type: ignore[union-attr]
    assert client._callbacks, "further answers are awaited"
    engine.abort("warm")
    assert not client._callbacks


def test_an_engine_that_computes_does_not_wait_for_a_check(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitBudget, "_IDLE_S", 60.0)
    scripted.settings["load_timeout_ms"] = 60_000
    engine = connected(loop())
    stored(scripted, engine)
    engine.add("decodes", prompt(64, 9), output=50)
    engine.until(lambda: engine.requests["decodes"].num_output_tokens, 20, "the first token")
    probes = checked_first(scripted)
    engine.add("warm", TOKENS)
    began = time.monotonic()
    for _ in range(10):
        assert engine.step().total_num_scheduled_tokens == 1
    assert time.monotonic() - began < 30
    scripted.late(probes[0], scripted.found(probes[0]))
    engine.run("warm", "decodes")
    assert engine.external["warm"] == 512


def test_an_idle_engine_that_steps_together_with_others_does_not_wait(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data parallelism of a MoE model, each step of this engine is one of all ranks."""
    monkeypatch.setattr(WaitBudget, "_IDLE_S", 5.0)
    scripted.settings["load_timeout_ms"] = 60_000
    engine = connected(loop(ranks=2))
    stored(scripted, engine)
    probes = checked_first(scripted)
    engine.add("warm", TOKENS)
    began = time.monotonic()
    for _ in range(3):
        assert engine.step().total_num_scheduled_tokens == 0
    assert time.monotonic() - began < 4
    scripted.late(probes[0], scripted.found(probes[0]))
    engine.run("warm")
    assert engine.external["warm"] == 512


def test_checks_of_an_early_probe_are_requested_once(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCache, "held", lambda *_: None)
    engine = connected(loop())
    stored(scripted, engine)
    probes = checked_first(scripted)
    engine.add("warm", TOKENS)
    for _ in range(3):
        assert engine.step().total_num_scheduled_tokens == 0
    scripted.late(probes[0], scripted.found(probes[0]))
    engine.run("warm")
    assert engine.external["warm"] == 512
    assert len(probes) == 1
