"""What the cache costs where it never hits: CPU seconds per prompt token, storing everything, against vLLM alone.

Two servers take turns with the same fresh prompts; the pairs' ratios give the mean and its interval. Two vLLM processes
differ by some percent with nothing between them but their start, so the one with the cache is also compared with
itself: the same prompts with `kvcachepool.store: false`.

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
#: The ways in which a prompt is asked.
STORED, NOT_STORED, ALONE = "stored", "not stored", "vLLM alone"


def measure(pairs: int) -> list[Row]:
    """Runs the pairs, each way first in every third one."""
    pod, other = paths.short_folder(), paths.short_folder()
    sidecar = Sidecar(pod, memory="2Gi").start()
    arguments = ["--dtype", "bfloat16", "--max-model-len", "8192"]
    # Bound by hand: vLLM would set one more core aside where there is a connector, and the two would not be alike.
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    ours = VllmServer(pod, model("mid"), pod / "vllm.log", *arguments, env=env)
    alone = VllmServer(None, model("mid"), other / "vllm.log", *arguments, env=env)
    seconds: dict[str, list[float]] = {STORED: [], NOT_STORED: [], ALONE: []}

    def cost(way: str, prompt: str) -> float:
        server = alone if way == ALONE else ours
        pids = server.process.tree() + ([] if way == ALONE else sidecar.process.tree())
        before = cpu_seconds(pids)
        wish = {"kv_transfer_params": {"kvcachepool.store": False}} if way == NOT_STORED else {}
        sources = server.complete(prompt, TOKENS, max_tokens=1, **wish).sources
        assert sources["computed"] == TOKENS, f"a prompt that must not hit did: {sources}"
        used = at_rest(pids) - before
        if way == STORED:
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
            for turn in range(3):
                way = list(seconds)[(number + turn) % 3]
                # Both ways of one server get prompts of their own: the second would hit.
                seconds[way].append(cost(way, words(TOKENS, 6100 + 2 * number + (way == NOT_STORED))))
            print(
                f"{number + 1}: " + ", ".join(f"{values[-1]:.2f} s {way}" for way, values in seconds.items()),
                flush=True,
            )
        stored = wait_for(
            lambda: sidecar.status()["memory"]["chunks"], 5, "stored chunks: nothing to measure otherwise"
        )
    finally:
        ours.stop()
        alone.stop()
        sidecar.stop()
        for folder in (pod, other):
            shutil.rmtree(folder, ignore_errors=True)
    return [
        _row("overhead_no_hits_percent", seconds, ALONE, stored),
        _row("overhead_stores_percent", seconds, NOT_STORED, stored),
    ]


def _row(name: str, seconds: dict[str, list[float]], against: str, stored: int) -> Row:
    ratios = [one / other - 1 for one, other in zip(seconds[STORED], seconds[against], strict=True)]
    low, high = interval(ratios)
    ours, theirs = (1e6 * statistics.mean(seconds[way]) / TOKENS for way in (STORED, against))
    return Row(
        name=name,
        value=round(100 * statistics.mean(ratios), 2),
        unit="%",
        reference=(
            f"CPU us per prompt token stored: {ours:.1f}, {against}: {theirs:.1f}; "
            f"90 % interval of the mean {100 * low:.2f} to {100 * high:.2f} %; {stored} chunks held"
        ),
        reference_value=None,
        ratio=None,
        runs=len(ratios),
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
    merge(measure(parser.parse_args().pairs))
