"""How long the connector holds vLLM's scheduler thread in a step with 200 waiting requests (bounded waits apart).

vLLM's real scheduler with the real connector and the real sidecar: 32 requests decode; one prompt of 4,000 tokens is
being loaded and 199 requests with the same prompt wait for it, so each is asked for in every step. Also with 200
different prompts that arrive at once. On a busy machine the wall time includes what other processes take.

    python tests/bench/scheduler.py [--steps 400]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sidecar" / "connector"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from engine_loop import Loop, prompt

import kvcachepool.worker as worker_module
from bench.results import Row, merge
from kvcachepool.layout import Ranks
from kvcachepool.lookups import Patience
from servers.paths import short_folder
from servers.sidecar import Sidecar
from servers.waiting import wait_for

WAITING = 200
DECODING = 32
PROMPT = 4000
BAR_US = 500.0
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


class Clock:
    """Seconds that our hooks spend on the engine thread in the present step, without bounded waits."""

    def __init__(self, connector: Any) -> None:
        self.spent_s = 0.0
        self.waited_s = 0.0
        self.calls = 0
        for name in HOOKS:
            setattr(connector, name, self._timed(getattr(connector, name)))
        patience = Patience.wait

        def wait(one: Patience, *arguments: Any) -> bool:
            begun = time.perf_counter()
            answered = patience(one, *arguments)
            self.waited_s += time.perf_counter() - begun
            return answered

        Patience.wait = wait  # type: ignore[assignment]

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return hook(*arguments)
            finally:
                self.spent_s += time.perf_counter() - begun
                self.calls += 1

        return timed

    def lap(self) -> tuple[float, int]:
        """(microseconds, calls) of the step that has ended."""
        spent, calls = (self.spent_s - self.waited_s) * 1e6, self.calls
        self.spent_s = self.waited_s = 0.0
        self.calls = 0
        return spent, calls


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def measure(steps: int) -> list[Row]:
    """Runs both scenes. Returns the rows."""
    folder = short_folder()
    sidecar = Sidecar(folder, memory="512Mi", config={"cache": {"loadTimeout": "60s"}}).start()
    os.environ["KVCACHEPOOL_SOCKET"] = str(sidecar.socket)
    worker_module._ranks = lambda vllm_config: Ranks()
    engine = Loop(blocks=2048, step_tokens=2048, max_seqs=512)
    try:
        return _scenes(engine, sidecar, steps)
    finally:
        engine.close()
        sidecar.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _scenes(engine: Loop, sidecar: Sidecar, steps: int) -> list[Row]:
    worker, scheduler = engine.worker._worker, engine.connector._scheduler
    assert worker is not None
    assert scheduler is not None
    wait_for(lambda: scheduler._client.connected and worker._mapping is not None, 30, "both sides connected")
    tokens = prompt(PROMPT, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    wait_for(lambda: stored(sidecar) >= PROMPT // 256, 30, "chunks stored")
    clock = Clock(engine.connector)
    for number in range(DECODING):
        engine.add(f"decode{number}", prompt(64, 1000 + number), output=4000)
    engine.until(lambda: all(engine.requests[f"decode{n}"].num_output_tokens for n in range(DECODING)), 60, "decoding")
    engine.hold_results = True
    for number in range(WAITING):
        engine.add(f"wait{number}", tokens)
    engine.step()
    clock.lap()
    waiting: list[float] = []
    calls: list[int] = []
    for _ in range(steps):
        engine.step()
        spent, count = clock.lap()
        waiting.append(spent)
        calls.append(count)
    assert statistics.median(calls) > WAITING, "every waiting request is asked for in every step"
    for number in range(WAITING):
        engine.abort(f"wait{number}")
    engine.hold_results = False
    engine.step()
    arriving: list[float] = []
    for turn in range(max(4, steps // 50)):
        for number in range(WAITING):
            engine.add(f"new{turn}-{number}", prompt(600, 5000 + turn * WAITING + number))
        clock.lap()
        for _ in range(10):
            engine.step()
            arriving.append(clock.lap()[0])
        for number in range(WAITING):
            if f"new{turn}-{number}" not in engine.done:
                engine.abort(f"new{turn}-{number}")
    command = f"python tests/bench/scheduler.py --steps {steps}"
    return [
        _row("engine_thread_block_p99_us", p99(waiting), len(waiting), command),
        _row("engine_thread_block_p50_us", statistics.median(waiting), len(waiting), command),
        _row("engine_thread_block_arrivals_p99_us", p99(arriving), len(arriving), command),
    ]


def stored(sidecar: Sidecar) -> float:
    """Chunks that can be read."""
    return float(sidecar.metrics().total("kvcachepool_stored_chunks_total"))


def _row(name: str, value: float, runs: int, command: str) -> Row:
    return Row(
        name=name,
        value=round(value, 1),
        unit="us",
        reference=f"bar: {WAITING} waiting requests",
        reference_value=BAR_US,
        ratio=round(value / BAR_US, 3),
        runs=runs,
        command=command,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    merge(measure(parser.parse_args().steps))
