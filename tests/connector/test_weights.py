"""Weights that change while vLLM runs: old KV is not used, and new KV is not stored as old."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from scripted_pool import ScriptedPool
from steps import connected
from stub_sidecar import Received
from vllm.lora import worker_manager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from kvcachepool import watch
from kvcachepool.shared import PUBLISHED
from kvcachepool.wire import Op
from servers.versions import newest
from servers.waiting import wait_for

Make = Callable[..., Loop]


def test_kv_of_the_old_weights_is_not_found_and_that_of_the_new_ones_is(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.reload_weights()
    assert engine.generate("new weights", tokens) == 0
    engine.forget_local()
    assert engine.generate("warm", tokens) == 512


def test_a_load_in_flight_fails_when_weights_change(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.hold_results = True
    engine.add("loading", tokens)
    engine.step()
    worker = engine.worker._worker
    assert worker is not None
    wait_for(lambda: worker._ended_loads, 10, "the copy's end")
    engine.reload_weights()
    engine.hold_results = False
    engine.run("loading")
    assert engine.external["loading"] == 0
    engine.forget_local()


def test_blocks_computed_across_a_change_of_weights_are_not_stored(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(step_tokens=256))
    tokens = prompt(1024, 1)
    engine.add("across", tokens)
    engine.step()
    engine.step()
    engine.reload_weights()
    engine.run("across")
    engine.forget_local()
    assert engine.generate("after", tokens) == 0
    engine.forget_local()
    assert engine.generate("warm", tokens) == 1024


def test_a_request_that_resumes_in_the_step_of_its_preemption_uses_no_old_kv(
    scripted: ScriptedPool, loop: Make
) -> None:
    """vLLM tells of a preemption by `reset_running_requests` with the step in which the request has resumed already."""
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    for turn in range(5):
        name = f"running {turn}"
        engine.add(name, tokens, output=20)
        engine.until(lambda name=name: engine.requests[name].num_output_tokens > 1)
        engine.drain()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.reload_weights()
        engine.run(name)
        engine.forget_local()
        assert engine.generate(f"warm {turn}", tokens) == 512, "of the new weights"
        engine.forget_local()


def test_blocks_of_a_resumed_request_are_not_stored_across_a_change_of_weights(
    scripted: ScriptedPool, loop: Make
) -> None:
    engine = connected(loop(step_tokens=256, role="kv_producer"))
    request = engine.add("across", prompt(1024, 1), output=30)
    engine.until(lambda: request.num_output_tokens)
    engine.drain()
    stored = set(scripted.chunks)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    engine.step()
    assert 0 < request.num_computed_tokens < 1024
    engine.reload_weights()
    engine.run("across")
    engine.drain()
    assert set(scripted.chunks) == stored


def test_blocks_computed_from_old_local_kv_are_not_stored(scripted: ScriptedPool, loop: Make) -> None:
    """vLLM keeps its own prefix cache when weights change, until it is reset."""
    engine = connected(loop())
    tokens, longer = prompt(512, 1), prompt(512, 1) + prompt(256, 2)
    engine.generate("cold", tokens)
    engine.drain()
    engine.reload_weights()
    engine.old_local = True
    assert engine.generate("behind", longer) == 0
    engine.old_local = False
    engine.forget_local()
    assert engine.generate("after", longer) == 0
    # Its own prefix cache is of the new weights now.
    assert engine.generate("behind new", longer + prompt(256, 3)) == 0
    engine.forget_local()
    assert engine.generate("warm", longer + prompt(256, 3)) == 1024


def test_another_engine_with_the_old_weights_finds_their_chunks(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens, others = prompt(512, 1), prompt(512, 2)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.reload_weights()
    engine.generate("new weights", tokens)
    engine.generate("only with new weights", others)
    engine.drain()
    scripted.owner += 1
    second = connected(loop(engine_id="engine-2"))
    assert second.generate("old weights", tokens) == 512
    assert second.generate("never seen", others) == 0


def test_a_store_without_a_grant_is_dropped(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    held: list[Received] = []
    scripted.on_grant = lambda frame: not held.append(frame)  # type: ignore[func-returns-value]
    engine.generate("cold", prompt(512, 1))
    wait_for(lambda: held, 10, "GRANT")
    free = engine.free_blocks()
    engine.reload_weights()
    assert engine.free_blocks() > free
    assert engine.scheduler.reset_prefix_cache()
    scripted.late(held[0], scripted.grants(held[0]))
    scripted.wait_for(lambda all_: [f for f in all_ if f.op == Op.ABORT and f.body.get("grant") == held[0].tag])
    engine.drain()
    assert not scripted.chunks


def test_a_load_fails_if_its_adapter_is_replaced_in_place(
    scripted: ScriptedPool, loop: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"1" * 100)
    adapter = LoRARequest("adapter", 1, str(folder))
    engine = connected(loop())
    tokens = prompt(512, 1)
    scheduler = engine.connector._scheduler
    assert scheduler is not None

    def known() -> bool:
        engine.connector.adapter_loaded(adapter)
        return scheduler._namespaces.hashes.get(adapter.lora_path, 1, time.monotonic() - 1) is not None

    wait_for(known, 10, "the adapter's content")
    engine.generate("cold", tokens, lora_request=adapter)
    engine.forget_local()
    engine.hold_results = True
    engine.add("loading", tokens, lora_request=adapter)
    engine.until(lambda: scheduler._loads.request_ids(), what="load")
    engine.connector.adapter_loaded(LoRARequest("adapter", 1, str(folder), load_inplace=True))
    engine.hold_results = False
    engine.run("loading")
    assert engine.external["loading"] == 0


class Manager:
    """Loads adapters as vLLM's workers do."""

    def __init__(self, order: list[Any]) -> None:
        self.order = order
        self._adapter_manager: Any = MagicMock(capacity=9)
        self._adapter_manager.__len__.return_value = 0

    add_adapter = LRUCacheWorkerLoRAManager.add_adapter

    def list_adapters(self) -> set[int]:
        return set()

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        self.order.append("reads")
        if lora_request.lora_name == "broken":
            raise ValueError("no such files")
        return SimpleNamespace(id=lora_request.lora_int_id)


def test_a_worker_is_notified_before_and_after_vllm_reads_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(watch, "_call_worker_hook", lambda *call: order.append(call))
    monkeypatch.setattr(worker_manager, "WorkerLoRAManager", Manager)
    watch.watch_worker("no.Worker")
    watch.watch_worker("no.Worker")
    good, broken = LoRARequest("good", 1, "/good"), LoRARequest("broken", 2, "/broken")
    Manager(order).add_adapter(good)
    with pytest.raises(ValueError, match="no such files"):
        Manager(order).add_adapter(broken)
    begins, ended = "adapter_read_begins", "adapter_read_ended"
    assert order[:3] == [(begins, good), "reads", (ended, good, True)]
    assert order[3:] == [(begins, broken), "reads", (ended, broken, False)]


def test_all_model_runners_of_vllm_read_adapters_by_the_watched_method() -> None:
    from vllm.v1.worker import lora_model_runner_mixin as mixin
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    assert mixin.LRUCacheWorkerLoRAManager._load_adapter is worker_manager.WorkerLoRAManager._load_adapter
    for runner in (First, Second):
        assert issubclass(runner, mixin.LoRAModelRunnerMixin)
        assert runner.add_lora is mixin.LoRAModelRunnerMixin.add_lora
        assert runner._set_active_loras is mixin.LoRAModelRunnerMixin._set_active_loras


def test_no_copy_starts_while_the_kv_cache_has_no_memory(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    worker = engine.worker._worker
    assert worker is not None
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    published = len(scripted.chunks)
    with worker._wake:
        worker._stores_paused = True
    engine.generate("queued", prompt(512, 2))
    engine.until(lambda: worker._queue, what="a store in the worker's queue")
    engine.connector.weights_changed("sleep")
    engine.worker.kv_cache_released()
    for cache in engine.caches.values():
        cache.zero_()
    with worker._wake:
        worker._stores_paused = False
        worker._wake.notify_all()
    engine.add("asleep", tokens)
    for _ in range(5):
        engine.step()
    engine.worker.kv_cache_restored()
    engine.run("asleep")
    engine.drain()
    assert len(scripted.chunks) - published <= 8, "only what was computed anew"
    rows = {section[0] for sections in scripted.chunks.values() for section in sections}
    assert scripted.memory is not None
    assert all(scripted.memory._view[row, 0] == PUBLISHED for row in rows)
    assert all(any(scripted.memory.read(row, 64)) for row in rows), "zeroed blocks were stored"
    engine.forget_local()


class Core:
    """Methods of vLLM's EngineCore."""

    def __init__(self, connector: Any) -> None:
        self.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)
        self.called: list[str] = []

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        self.called.append(str(method))
        if method == "broken":
            raise RuntimeError("on a worker")
        return [method]

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.called.append(f"sleep{level}")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.called.append("wake_up")
        return True

    def release_kv_cache_memory(self) -> None:
        self.called.append("release_kv_cache_memory")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Core, list[str]]:
    """A watched engine core, and the connector's record of changes."""
    from vllm.v1.engine import core

    reported: list[str] = []
    watched_core = type("WatchedCore", (Core,), {})
    monkeypatch.setattr(core, "EngineCore", watched_core)
    watch.watch_engine()
    return watched_core(SimpleNamespace(arrive=print, weights_changed=reported.append)), reported


def test_calls_that_may_change_weights_are_reported_before_and_after(watched: tuple[Core, list[str]]) -> None:
    core, reported = watched

    def load_my_weights(worker: Any) -> None: ...

    assert core.collective_rpc("reload_weights", kwargs={"weights_path": "x"}) == ["reload_weights"]
    core.collective_rpc("start_weight_update")
    core.collective_rpc(load_my_weights)
    core.sleep(level=2)
    core.sleep(1)
    core.wake_up()
    core.wake_up(tags=["weights"])
    core.release_kv_cache_memory()
    names = ["reload_weights", "start_weight_update", "load_my_weights", "sleep", "sleep", "wake_up", "wake_up"]
    assert reported == [name for name in [*names, "release_kv_cache_memory"] for _ in range(2)]


def test_a_call_that_fails_on_the_workers_is_reported_too(watched: tuple[Core, list[str]]) -> None:
    core, reported = watched
    with pytest.raises(RuntimeError, match="on a worker"):
        core.collective_rpc("broken")
    assert reported == ["broken", "broken"]


def test_read_only_calls_are_not_reported(watched: tuple[Core, list[str]]) -> None:
    core, reported = watched
    for name in watch.HARMLESS_RPCS:
        core.collective_rpc(name)
    core.sleep(level=0)
    core.wake_up(tags=["scheduling"])
    assert reported == []
    assert len(core.called) == len(watch.HARMLESS_RPCS) + 2


def test_harmless_methods_are_those_of_vllms_workers() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    missing = {name for name in watch.HARMLESS_RPCS if not hasattr(Worker, name)}
    assert missing <= (set() if newest() else {"compute_weight_checksums"})


def test_failures_of_the_connector_do_not_stop_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    watched_core = type("WatchedCore", (Core,), {})
    monkeypatch.setattr(core, "EngineCore", watched_core)
    watch.watch_engine()
    assert watched_core(None).collective_rpc("reload_weights") == ["reload_weights"]


def test_a_worker_is_notified_of_released_and_restored_memory_and_of_failed_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(watch, "_call_worker_hook", order.append)

    class CPUWorker:
        def sleep(self, level: int = 1) -> None:
            order.append("asleep")

        def wake_up(self, tags: list[str] | None = None) -> None:
            order.append("awake")

        def discard(self, tags: tuple[str, ...]) -> None:
            order.append("discarded")

        def execute_model(self, step: object) -> object:
            raise MemoryError(step)

    module = SimpleNamespace(CPUWorker=CPUWorker)
    monkeypatch.setitem(watch.sys.modules, "made.up", module)
    watch.watch_worker("made.up.CPUWorker")
    watch.watch_worker("made.up.CPUWorker")
    worker = CPUWorker()
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    worker.wake_up(tags=["kv_cache"])
    worker.discard(("kv_cache",))
    worker.wake_up()
    leaves, back = "kv_cache_released", "kv_cache_restored"
    assert order == [leaves, "asleep", "awake", "awake", back, leaves, "discarded", "awake", back]
    with pytest.raises(MemoryError, match="first"):
        worker.execute_model("first")
    assert order[-1] == "step_failed"
