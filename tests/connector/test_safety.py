"""Whatever fails in the connector, vLLM's requests end with the right tokens and no block stays held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from raising import Injected, Line, lines_of, raising_at
from scripted_pool import ScriptedPool
from steps import connected
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from kvcachepool import connector as connector_module
from kvcachepool import (
    held_blocks,
    loads,
    local_cache,
    lookups,
    namespaces,
    prefill,
    probes,
    registration,
    requests,
    session,
    stores,
    worker,
)
from kvcachepool import scheduler as scheduler_module
from kvcachepool.jobs import Ended
from kvcachepool.prefill import PrefillSpeed
from kvcachepool.scheduler import Scheduler
from kvcachepool.stores import Stores
from kvcachepool.watch import watch_engine
from kvcachepool.wire import Op
from servers.waiting import wait_for

Make = Callable[..., Loop]


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The next call of a method raises before it has any effect. Returns a list that then contains its name."""
    original = getattr(owner, name)
    raised: list[str] = []

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not raised:
            raised.append(name)
            raise Injected(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)
    return raised


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (lookups.WaitBudget, "new_step"),
        (Stores, "offer_step"),
        (PrefillSpeed, "step"),
        (lookups.Lookups, "send_releases"),
        (Stores, "process"),
        (Stores, "take"),
    ],
)
def test_a_step_that_fails_loses_no_load(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.add("warm", tokens)
    raised = raise_once(monkeypatch, owner, name)
    engine.run("warm")
    assert raised
    assert engine.external["warm"] in (0, 512)
    engine.forget_local()


def test_a_failed_load_is_not_reported_as_a_completion(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.completions_only = True
    engine.add("warm", tokens)
    assert scripted.memory is not None
    for row in scripted.slots():
        scripted.memory.bump(row)
    engine.run("warm")
    assert engine.external["warm"] == 0, "computed anew, and checked against what attention must read"
    engine.forget_local()


#: All functions that vLLM's threads run in a hook.
MODULES = (
    scheduler_module,
    session,
    registration,
    stores,
    loads,
    held_blocks,
    lookups,
    probes,
    local_cache,
    namespaces,
    requests,
    prefill,
    worker,
)


class WatchedPool:
    """vLLM's block pool, which is for one thread. Records the names of others that call it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._thread = threading.current_thread()
        self.others: set[str] = set()

    def touch(self, blocks: Iterable[Any]) -> None:
        self._record()
        self._pool.touch(blocks)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        self._record()
        self._pool.free_blocks(blocks)

    def _record(self) -> None:
        if threading.current_thread() is not self._thread:
            self.others.add(threading.current_thread().name)


def watch_pool(engine: Loop) -> WatchedPool:
    """The connector calls vLLM's block pool through the returned one."""
    watched = WatchedPool(engine.scheduler.kv_cache_manager.block_pool)
    assert engine.connector._scheduler is not None
    engine.connector._scheduler._stores._held.bind(watched)  # type: ignore[arg-type]
    return watched


class Scenario:
    """Stores, loads, a request that ends during its load, and a preempted one, repeatedly on one engine."""

    def __init__(self, engine: Loop, pool: ScriptedPool) -> None:
        self.engine = engine
        self.pool = pool
        self.rounds = 0
        self.blocks = engine.free_blocks()
        self.watched = watch_pool(engine)

    def run(self) -> None:
        """One round. Every request's KV is checked while it is computed."""
        engine = self.engine
        self.rounds += 1
        names = ("first", "cold", "warm", "gone", "new", "moved")
        first, cold, warm, gone, new, moved = (f"{name}-{self.rounds}" for name in names)
        tokens = prompt(208, 1)
        engine.add(first, prompt(80, 5), early=False)
        engine.step()  # its store holds blocks while the input thread receives the next request
        engine.generate(cold, tokens)
        engine.drain()
        assert engine.scheduler.reset_prefix_cache()
        engine.add(warm, tokens)
        engine.step()
        engine.add(gone, [*tokens[:128], *prompt(80, 2)])
        engine.add(new, prompt(144, 3), output=2)
        engine.step()
        engine.abort(gone)
        engine.run(warm, new)
        engine.add(moved, prompt(144, 4), output=4)
        engine.step()
        running = engine.scheduler.running
        if running:
            engine.scheduler._preempt_request(running.pop(), 0.0)
        engine.run(moved)

    def check(self) -> None:
        """No block is held and nothing is pending."""
        engine = self.engine
        engine.drain(5)
        engine.until(lambda: not engine.scheduler.has_requests(), 5, "nothing left to do")
        assert engine.scheduler.reset_prefix_cache()
        assert engine.free_blocks() == self.blocks
        assert not self.watched.others

    def clean(self) -> None:
        """Restores the initial state."""
        engine = self.engine
        engine.connector.bugs = engine.worker.bugs = 0
        with self.pool._guard:
            self.pool.chunks.clear()
            self.pool.granted.clear()
            self.pool._next_row = 1


def test_an_exception_at_any_line_costs_no_more_than_a_miss(scripted: ScriptedPool, loop: Make) -> None:
    """The lines are found by running them. At each of them a hook is left half-way."""
    engine = connected(loop(blocks=128))
    scenario = Scenario(engine, scripted)
    scenario.run()
    scenario.check()
    lines: dict[Line, None] = {}
    for _ in range(2):
        scenario.clean()
        lines.update(dict.fromkeys(lines_of(MODULES, scenario.run)))
        scenario.check()
    reached, failed = 0, []
    for line in lines:
        scenario.clean()
        try:
            reached += raising_at(MODULES, line, scenario.run)
            scenario.check()
            assert engine.connector.off_reason == ""
        except Exception as error:
            failed.append(f"{line}: {type(error).__name__}: {error}")
            if len(failed) == 5:
                break
            scenario = Scenario(engine := connected(loop(blocks=128)), scripted)
    assert not failed, "not survived: an exception before\n" + "\n".join(failed)
    assert len(lines) > 300
    assert reached > 0.9 * len(lines)


def test_an_early_lookup_that_fails_touches_no_block(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's input thread makes it, and only the engine's thread may change the block pool."""
    engine = connected(loop())
    free = engine.free_blocks()
    watched = watch_pool(engine)
    scripted.on_grant = lambda frame: True
    engine.add("holding", prompt(256, 1), output=64)
    engine.until(lambda: scripted.frames(Op.GRANT), what="a GRANT, which stays unanswered")
    raised = raise_once(monkeypatch, lookups.Lookups, "probe_early")
    engine.add("failing", prompt(256, 2))
    assert raised
    assert engine.connector.bugs == 1
    assert not watched.others
    engine.run("holding", "failing")
    engine.drain()
    assert engine.free_blocks() == free


def test_an_early_lookup_does_not_fail_if_vllms_cache_cannot_be_read(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread changes it meanwhile."""
    engine = connected(loop())

    def raises(*_: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    with monkeypatch.context() as during:
        during.setattr(engine.scheduler.kv_cache_manager.block_pool, "get_cached_block", raises)
        engine.connector.arrive(engine.request("early", prompt(256, 1)))
    assert engine.connector.bugs == 0
    wait_for(lambda: scripted.frames(Op.PROBE), 10, "the early PROBE")
    assert scripted.frames(Op.PROBE)[0].body.get("local_tokens") is None


class RaisingPool:
    """vLLM's block pool, of which one call raises once: before, during or after its effect."""

    def __init__(self, pool: Any, name: str, when: str) -> None:
        self._pool = pool
        self._name = name
        self._when = when
        self.raised = False

    def touch(self, blocks: Any) -> None:
        self._call("touch", list(blocks))

    def free_blocks(self, blocks: Any) -> None:
        self._call("free_blocks", list(blocks))

    def _call(self, name: str, blocks: list[Any]) -> None:
        call = getattr(self._pool, name)
        if name != self._name or self.raised:
            call(blocks)
            return
        self.raised = True
        call({"before": [], "amid": blocks[: len(blocks) // 2], "after": blocks}[self._when])
        raise Injected(name)


@pytest.mark.parametrize("when", ["before", "amid", "after"])
@pytest.mark.parametrize("name", ["touch", "free_blocks"])
def test_a_block_pool_that_raises_leaves_no_block_held(
    scripted: ScriptedPool, loop: Make, name: str, when: str
) -> None:
    engine = connected(loop(blocks=128))
    scenario = Scenario(engine, scripted)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    raising = RaisingPool(engine.scheduler.kv_cache_manager.block_pool, name, when)
    scheduler._stores._held.bind(raising)  # type: ignore[arg-type]
    scenario.run()
    scenario.check()
    assert raising.raised


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "matched_tokens"),
        (Scheduler, "allocated"),
        (Scheduler, "step"),
        *([(Scheduler, "sources")] if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources") else []),
        (Stores, "offer_step"),
        (loads.Loads, "begin"),
        (Stores, "process"),
        (Stores, "offer"),
        (worker.Worker, "bind"),
        (worker.Worker, "wait_for_save"),
    ],
)
def test_repeated_failures_turn_the_cache_off_by_name(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    engine = connected(loop(blocks=128))
    scenario = Scenario(engine, scripted)
    scenario.run()
    scenario.check()

    def raises(self: Any, *_: Any, **__: Any) -> Any:
        raise Injected(name)

    monkeypatch.setattr(owner, name, raises)
    for _ in range(connector_module.MOST_BUGS):
        scenario.run()
    scenario.check()
    assert (engine.connector.off_reason or engine.worker.off_reason).startswith("ConnectorBug/")


def test_blocks_are_released_in_time_if_the_sidecar_is_frozen(scripted: ScriptedPool, loop: Make) -> None:
    """One rank has a store in its queue, another one waits for a GRANT, and from now on nothing answers."""
    engine = connected(loop(world=2))
    free = engine.free_blocks()
    rank = engine.worker._worker
    assert rank is not None

    def both_ranks(output: Any) -> None:
        report = output.kv_connector_worker_meta
        if report is not None:  # the other rank ended its part in the same way, and reports it in the same step
            report.stores = {job: Ended(2, 2 * ended.dropped) for job, ended in report.stores.items()}

    engine.rewrite_output = both_ranks
    with rank._wake:
        rank._stores_paused = True
    engine.generate("queued", prompt(256, 1))
    engine.until(lambda: rank._queue, what="a store in the worker's queue")
    scripted.answer = lambda frame: False
    engine.generate("unanswered", prompt(256, 2))
    assert engine.free_blocks() < free
    engine.until(lambda: engine.free_blocks() == free, 10, "all blocks given back")
    assert engine.scheduler.reset_prefix_cache()


def hold_load(engine: Loop, tokens: list[int]) -> None:
    """Begins the load of a request, whose end is not reported while results are held."""
    engine.hold_results = True
    engine.add("loading", tokens)
    engine.until(lambda: engine.requests["loading"].status.name == "WAITING_FOR_REMOTE_KVS", what="a load")


def test_a_paused_engine_steps_until_its_load_has_ended(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    hold_load(engine, tokens)
    assert engine.connector.has_pending_push_work(), "workers write into blocks"
    engine.hold_results = False
    engine.run("loading")


def core_of(engine: Loop) -> EngineCore:
    """A watched engine core with the scheduler of this engine."""
    watch_engine()
    core: EngineCore = object.__new__(EngineCore)
    core.scheduler = engine.scheduler
    return core


def test_a_paused_engine_empties_its_cache_after_a_load(scripted: ScriptedPool, loop: Make) -> None:
    """vLLM frees the blocks of running requests for that, and not those of a load that it has not taken yet."""
    engine = connected(loop())
    core = core_of(engine)
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    free = engine.free_blocks()
    hold_load(engine, tokens)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.hold_results = False
    engine.drain()
    assert engine.free_blocks() < free
    assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.free_blocks() == free
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run("loading")
    assert engine.external["loading"] == 0, "the cache was cleared"
    engine.drain()
    assert engine.free_blocks() == free


def test_a_load_in_flight_keeps_its_blocks_when_the_cache_is_emptied(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    core = core_of(engine)
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    hold_load(engine, tokens)
    free = engine.free_blocks()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        core.reset_prefix_cache(reset_running_requests=True)
    assert engine.free_blocks() == free, "workers write into them"
    engine.hold_results = False
    engine.run("loading")
    assert engine.external["loading"] == 512
