"""How long the connector holds vLLM's scheduler thread in a step with 200 waiting requests (bounded waits apart).

vLLM's real scheduler with the real connector and the real sidecar: 32 requests decode; one prompt of 4,000 tokens is
being loaded and 199 requests with the same prompt wait for it, so each is asked for in every step. Then 200 different
prompts arrive at once, again and again, and those that were not served go away together.

Twice: with the worker in the engine's process, as vLLM runs one rank (its hooks are on that thread too, and count),
and with the worker in a process of its own ("apart"), as it runs several. One step is measured by the wall clock, the
next by the thread's CPU clock, which does not see what other processes take.

    python tests/bench/scheduler.py [--steps 600]
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sidecar" / "connector"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

import torch.multiprocessing
from engine_loop import Loop, prompt
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

import kvcachepool.worker as worker_module
from bench.results import Row, merge
from kvcachepool.connector import KVCachePoolConnector
from kvcachepool.layout import Ranks
from servers.paths import short_folder
from servers.sidecar import Sidecar
from servers.waiting import wait_for

WAITING = 200
DECODING = 32
PROMPT = 4000
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
)


class Apart(Loop):
    """The engine with its worker in another process, over the same KV cache."""

    def make_worker(self) -> Any:
        for cache in self.caches.values():
            cache.share_memory_()
        config = copy.copy(self.config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        context = torch.multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, config, self.kv_cache_config, self.caches), daemon=True)
        process.start()
        return Remote(pipe, process)


def work(pipe: Any, config: Any, kv_cache_config: Any, caches: dict[str, torch.Tensor]) -> None:
    """The worker's process. One message per step."""
    worker_module.current_ranks = lambda vllm_config: Ranks()
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="vec")
    config.compilation_config.static_forward_context = dict.fromkeys(caches, module)
    connector = KVCachePoolConnector(config, KVConnectorRole.WORKER, kv_cache_config)
    connector.register_kv_caches(caches)
    worker = connector._worker
    assert worker is not None
    wait_for(lambda: worker._mapping is not None, 60, "the arena mapped")
    pipe.send("mapped")
    while (message := pipe.recv()) is not None:
        metadata, finished, wants_results = message
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.wait_for_save()
        if wants_results:
            pipe.send((connector.get_transfer_results(finished), connector.build_connector_worker_meta()))
        connector.clear_connector_metadata()
    connector.shutdown()


class Remote:
    """The engine's end of the pipe, with the hooks of a worker."""

    def __init__(self, pipe: Any, process: Any) -> None:
        self._pipe = pipe
        self._process = process
        self._metadata: Any = None
        self._report: Any = None
        assert pipe.recv() == "mapped"

    def handle_preemptions(self, metadata: Any) -> None:
        self._metadata = metadata

    def bind_connector_metadata(self, metadata: Any) -> None: ...
    def start_load_kv(self, forward_context: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished: set[str]) -> Any:
        self._pipe.send((self._metadata, finished, True))
        self._metadata = None
        results, self._report = self._pipe.recv()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def build_connector_worker_meta(self) -> Any:
        return self._report

    def clear_connector_metadata(self) -> None:
        if self._metadata is not None:
            self._pipe.send((self._metadata, set(), False))

    def shutdown(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


class Lap(NamedTuple):
    """Time of the connector's hooks in a step, by wall clock or the thread's CPU clock, and the number of calls."""

    spent_us: float
    calls: int
    cpu: bool


class Clock:
    """Sums the time of the connector's hooks on the engine thread, without bounded waits. The two clocks alternate."""

    def __init__(self, engine: Loop) -> None:
        self._now = time.perf_counter
        self._spent_s = 0.0
        self._waited_s = 0.0
        self._calls = 0
        hooks: list[tuple[Any, str]] = [(engine.connector, name) for name in HOOKS]
        if not isinstance(engine, Apart):
            hooks += [(engine.worker, name) for name in WORKER_HOOKS]
        for connector, name in hooks:
            setattr(connector, name, self._timed(getattr(connector, name)))
        scheduler = engine.connector._scheduler
        assert scheduler is not None
        patience = scheduler._lookups._patience
        wait = patience.wait

        def waits(*arguments: Any) -> None:
            begun = self._now()
            wait(*arguments)
            self._waited_s += self._now() - begun

        patience.wait = waits

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = self._now()
            try:
                return hook(*arguments)
            finally:
                self._spent_s += self._now() - begun
                self._calls += 1

        return timed

    def lap(self) -> Lap:
        """The time of the step that has ended, including everything since the previous one."""
        cpu = self._now is time.thread_time
        lap = Lap((self._spent_s - self._waited_s) * 1e6, self._calls, cpu)
        self._spent_s = self._waited_s = 0.0
        self._calls = 0
        self._now = time.perf_counter if cpu else time.thread_time
        return lap


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def measure(steps: int) -> list[Row]:
    """Runs both scenes with the worker in both places. Returns the rows."""
    worker_module.current_ranks = lambda vllm_config: Ranks()
    rows = []
    for kind, name in ((Loop, ""), (Apart, "apart_")):
        folder = short_folder()
        sidecar = Sidecar(folder, memory="512Mi", config={"cache": {"loadTimeout": "60s"}}).start()
        os.environ["KVCACHEPOOL_SOCKET"] = str(sidecar.socket)
        engine = kind(blocks=2048, step_tokens=2048, max_seqs=512)
        try:
            rows += _scenes(engine, sidecar, steps, name)
        finally:
            engine.close()
            sidecar.stop()
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def _scenes(engine: Loop, sidecar: Sidecar, steps: int, kind: str) -> list[Row]:
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    wait_for(lambda: scheduler._client.connected, 30, "connected")
    tokens = prompt(PROMPT, 1)
    turn = 0
    while stored(sidecar) < PROMPT // 256:
        assert turn < 60, "chunks stored"
        engine.generate(f"cold{turn}", tokens)
        engine.forget_local()
        turn += 1
        time.sleep(0.5)
    clock = Clock(engine)
    for number in range(DECODING):
        engine.add(f"decode{number}", prompt(64, 1000 + number), output=4000)
    engine.until(lambda: all(engine.requests[f"decode{n}"].num_output_tokens for n in range(DECODING)), 60, "decoding")
    engine.hold_results = True
    for number in range(WAITING):
        engine.add(f"wait{number}", tokens)
    engine.step()
    clock.lap()
    waiting: list[Lap] = []
    for _ in range(steps):
        engine.step()
        waiting.append(clock.lap())
    assert statistics.median(lap.calls for lap in waiting) > WAITING, "every waiting request is asked for in every step"
    for number in range(WAITING):
        engine.abort(f"wait{number}")
    engine.hold_results = False
    engine.step()
    clock.lap()
    arriving: list[Lap] = []
    for turn in range(max(4, steps // 50)):
        names = [f"new{turn}-{number}" for number in range(WAITING)]
        for number, name in enumerate(names):
            engine.add(name, prompt(600, 5000 + turn * WAITING + number))
        for _ in range(10):
            engine.step()
            arriving.append(clock.lap())
        for name in names:
            if name not in engine.done:
                engine.abort(name)
        engine.step()
        arriving.append(clock.lap())
    command = f"python tests/bench/scheduler.py --steps {steps}"
    rows = []
    for scene, laps in (("", waiting), ("arrivals_", arriving)):
        for cpu in (False, True):
            values = [lap.spent_us for lap in laps if lap.cpu == cpu]
            prefix = f"engine_thread_{'cpu' if cpu else 'block'}_{kind}{scene}"
            rows.append(_row(f"{prefix}p50_us", statistics.median(values), len(values), command))
            rows.append(_row(f"{prefix}p99_us", p99(values), len(values), command))
    return rows


def stored(sidecar: Sidecar) -> float:
    """Number of readable chunks."""
    return float(sidecar.metrics().total("kvcachepool_stored_chunks_total"))


def _row(name: str, value: float, runs: int, command: str) -> Row:
    return Row(
        name=name,
        value=round(value, 1),
        unit="us",
        reference=f"{WAITING} requests",
        reference_value=None,
        ratio=None,
        runs=runs,
        command=command,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    merge(measure(parser.parse_args().steps))
