"""What the cache costs where it never hits: CPU seconds per prompt token, storing everything, against vLLM alone.

Two servers take turns with the same fresh prompts; the pairs' ratios give the mean and its interval.

    python -m bench.overhead [--pairs 16]
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import time

from bench.results import Row, merge
from servers import paths
from servers.models import model, words
from servers.pod import wait_attached
from servers.process import cpu_seconds
from servers.sidecar import Sidecar
from servers.vllm_server import VllmServer
from servers.waiting import wait_for

TOKENS = 4000


def measure(pairs: int) -> Row:
    """Runs the pairs, each server first in every other one."""
    pod, other = paths.short_folder(), paths.short_folder()
    sidecar = Sidecar(pod, memory="2Gi").start()
    arguments = ["--dtype", "bfloat16", "--max-model-len", "8192"]
    # Bound by hand: vLLM would set one more core aside where there is a connector, and the two would not be alike.
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    ours = VllmServer(pod, model("mid"), pod / "vllm.log", *arguments, env=env)
    alone = VllmServer(None, model("mid"), other / "vllm.log", *arguments, env=env)
    ratios: list[float] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def processes(with_cache: bool) -> list[int]:
        return ours.process.tree() + sidecar.process.tree() if with_cache else alone.process.tree()

    def cost(with_cache: bool, prompt: str) -> float:
        server = ours if with_cache else alone
        before = cpu_seconds(processes(with_cache))
        sources = server.complete(prompt, TOKENS, max_tokens=1).sources
        assert sources["computed"] == TOKENS, f"a prompt that must not hit did: {sources}"
        used = at_rest(processes(with_cache)) - before
        if with_cache:
            # Asked behind the measurement: the sidecar pays for each answer.
            slots = sidecar.status()["memory"]["slots"]
            assert slots["granted"] == slots["committed"] == 0, f"stores still under way: {slots}"
        return used

    try:
        ours.wait_ready()
        alone.wait_ready()
        # The first requests pay for what is made once.
        for number in range(2):
            for server in (ours, alone):
                server.complete(words(TOKENS, 6000 + number), TOKENS, max_tokens=1)
        wait_attached(sidecar)
        for number in range(pairs):
            prompt = words(TOKENS, 6100 + number)
            pair = {with_cache: cost(with_cache, prompt) for with_cache in ((True, False), (False, True))[number % 2]}
            for with_cache, value in pair.items():
                seconds[with_cache].append(value)
            ratios.append(pair[True] / pair[False] - 1)
            print(f"pair {number + 1}: {pair[True]:.2f} s with, {pair[False]:.2f} s without", flush=True)
        stored = wait_for(
            lambda: sidecar.status()["memory"]["chunks"], 5, "stored chunks: nothing to measure otherwise"
        )
    finally:
        ours.stop()
        alone.stop()
        sidecar.stop()
        for folder in (pod, other):
            shutil.rmtree(folder, ignore_errors=True)
    low, high = interval(ratios)
    microseconds = {which: 1e6 * statistics.mean(values) / TOKENS for which, values in seconds.items()}
    return Row(
        name="overhead_no_hits_percent",
        value=round(100 * statistics.mean(ratios), 2),
        unit="%",
        reference=(
            f"CPU us per prompt token without: {microseconds[False]:.1f}, with: {microseconds[True]:.1f}; "
            f"90 % interval of the mean {100 * low:.2f} to {100 * high:.2f} %; {stored} chunks held"
        ),
        reference_value=None,
        ratio=None,
        runs=pairs,
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
    parser.add_argument("--pairs", type=int, default=16)
    merge([measure(parser.parse_args().pairs)])
