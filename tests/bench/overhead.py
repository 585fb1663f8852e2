"""What the cache costs where it never hits: CPU seconds per prompt token, storing everything, against vLLM alone.

Servers take turns with the same fresh prompts. Two vLLM processes differ by some percent with nothing between them but
their start, so all are started anew again and again, each start counts once, and what two without a cache differ by
stands beside it. The one with the cache is also compared with itself: the same prompts with `kvcachepool.store: false`.

    python -m bench.overhead [--starts 4] [--pairs 4]
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.results import Row, merge
from servers import paths
from servers.models import model, words
from servers.pod import wait_attached
from servers.process import cpu_seconds
from servers.sidecar import Sidecar
from servers.vllm_server import VllmServer

TOKENS = 4000
#: Variants in which a prompt is sent.
STORED, NOT_STORED, ALONE, ALONE_TOO = "stored", "not stored", "vLLM alone", "another alone"
WAYS = (STORED, NOT_STORED, ALONE, ALONE_TOO)
_ARGUMENTS = ("--dtype", "bfloat16", "--max-model-len", "8192")
# CPUs are assigned here, because vLLM would reserve another core with a connector, and the servers would differ.
_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
#: CPU seconds of each prompt, by variant.
Seconds = dict[str, list[float]]


def measure(starts: int, pairs: int) -> list[Row]:
    """Measures this many prompts per variant for every start of all servers."""
    seconds = []
    for number in range(starts):
        seconds.append(_start(number, pairs))
        means = ", ".join(f"{statistics.mean(values):.2f} s {way}" for way, values in seconds[-1].items())
        print(f"start {number + 1}: {means}", flush=True)
    return [
        _row("overhead_no_hits_percent", seconds, STORED, ALONE),
        _row("overhead_stores_percent", seconds, STORED, NOT_STORED),
        _row("overhead_of_nothing_percent", seconds, ALONE_TOO, ALONE),
    ]


def _start(start: int, pairs: int) -> Seconds:
    with ExitStack() as stack:
        pod = stack.enter_context(_folder())
        sidecar = Sidecar(pod, memory="2Gi").start()
        stack.callback(sidecar.stop)
        folders = {STORED: pod, ALONE: None, ALONE_TOO: None}
        servers = {}
        # The order of the starts rotates.
        for way in random.Random(start).sample(list(folders), len(folders)):
            logs = stack.enter_context(_folder())
            servers[way] = VllmServer(folders[way], model("mid"), logs / "vllm.log", *_ARGUMENTS, env=_ENV)
            stack.callback(servers[way].stop)
        for server in servers.values():
            server.wait_ready()
        servers[STORED].complete(words(TOKENS, 6000), TOKENS, max_tokens=1)
        wait_attached(sidecar)
        # The first requests and stores pay for one-time work.
        for number in range(2):
            for server in servers.values():
                server.complete(words(TOKENS, 6001 + number), TOKENS, max_tokens=1)
        servers[NOT_STORED] = servers[STORED]
        seconds: Seconds = {way: [] for way in WAYS}
        for number in range(pairs):
            for turn in range(len(WAYS)):
                way = WAYS[(start + number + turn) % len(WAYS)]
                # Both variants of one server get different prompts, because the second would hit.
                prompt = words(TOKENS, 6100 + 2 * number + (way == NOT_STORED))
                seconds[way].append(_cost(way, servers[way], sidecar, prompt))
        stored = sidecar.status()["memory"]["chunks"]
        assert stored >= pairs * TOKENS // 256, f"{stored} chunks stored: nothing to measure"
        return seconds


@contextmanager
def _folder() -> Iterator[Path]:
    made = paths.short_folder()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _cost(way: str, server: VllmServer, sidecar: Sidecar, prompt: str) -> float:
    pids = server.process.tree() + (sidecar.process.tree() if way in (STORED, NOT_STORED) else [])
    before = cpu_seconds(pids)
    wish: dict[str, Any] = {"kv_transfer_params": {"kvcachepool.store": False}} if way == NOT_STORED else {}
    sources = server.complete(prompt, TOKENS, max_tokens=1, **wish).sources
    assert sources["computed"] == TOKENS, f"a prompt that must not hit did: {sources}"
    used = at_rest(pids) - before
    if way == STORED:
        # Asked after the measurement, because the sidecar pays for each answer.
        slots = sidecar.status()["memory"]["slots"]
        assert slots["granted"] == slots["committed"] == 0, f"stores still under way: {slots}"
    return used


def _row(name: str, seconds: list[Seconds], way: str, against: str) -> Row:
    # The median of the pairs excludes disturbances by other processes of this machine.
    each = [
        100 * statistics.median(one / other - 1 for one, other in zip(start[way], start[against], strict=True))
        for start in seconds
    ]
    low, high = interval(each)
    cached, plain = (
        1e6 * statistics.mean(statistics.mean(start[of]) for start in seconds) / TOKENS for of in (way, against)
    )
    pairs = len(seconds[0][way])
    return Row(
        name=name,
        value=round(statistics.mean(each), 2),
        unit="%",
        reference=(
            f"CPU us per prompt token {way}: {cached:.1f}, {against}: {plain:.1f}; 90 % interval of the mean "
            f"{low:.2f} to {high:.2f} %; starts ({pairs} pairs each): {', '.join(f'{one:.1f}' for one in each)}"
        ),
        reference_value=None,
        ratio=None,
        runs=len(each),
        command="make bench ONLY=overhead",
    )


def at_rest(pids: list[int]) -> float:
    """CPU seconds of these processes once they work no more: vLLM's go on spinning for about a second after a request,
    which belongs to that one and not to the next.
    """
    used = cpu_seconds(pids)
    while True:
        time.sleep(0.5)
        last, used = used, cpu_seconds(pids)
        if used - last <= 0.02:
            return used


def interval(values: list[float], rounds: int = 4000) -> tuple[float, float]:
    """Bootstrapped 90 % interval of the mean."""
    draw = random.Random(1)
    means = sorted(statistics.mean(draw.choices(values, k=len(values))) for _ in range(rounds))
    return means[rounds // 20], means[-rounds // 20]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    merge(measure(options.starts, options.pairs))
