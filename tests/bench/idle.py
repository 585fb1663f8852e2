"""What the sidecar uses while nothing happens: CPU and anonymous memory, with a full arena and one vLLM attached.

python -m bench.idle [--seconds 30]
"""

from __future__ import annotations

import argparse
import time

from bench.results import Row, merge
from servers.models import token_ids
from servers.pod import Pod
from servers.process import cpu_seconds, rss_anon_mib

PROMPT_TOKENS = 7900
MEMORY = "512Mi"


def measure(seconds: float) -> list[Row]:
    """Fills the arena until chunks are evicted, then looks at the idle processes."""
    pod = Pod(memory=MEMORY)
    try:
        pod.sidecar.start()
        pod.start_engine(dtype="bfloat16")
        pod.attach()
        number = 0
        while not pod.sidecar.metrics().total("kvcachepool_evicted_chunks_total"):
            number += 1
            pod.engine.generate(token_ids(PROMPT_TOKENS, 5000 + number), max_tokens=1)
            memory = pod.sidecar.status()["memory"]
            print(f"prompt {number}: {memory['used_bytes'] >> 20} of {memory['capacity_bytes'] >> 20} MiB", flush=True)
        pod.settle()
        processes = pod.sidecar.process.tree()
        before, start = cpu_seconds(processes), time.monotonic()
        # Waiting is the measurement here.
        time.sleep(seconds)
        used = 100 * (cpu_seconds(processes) - before) / (time.monotonic() - start)
        resident = rss_anon_mib(processes)
        what = f"supervisor and engine, one vLLM attached, arena of {MEMORY} full, {memory['chunks']} chunks"
    finally:
        pod.stop()

    def row(name: str, value: float, unit: str, reference: str) -> Row:
        return Row(
            name=name,
            value=value,
            unit=unit,
            reference=reference,
            reference_value=None,
            ratio=None,
            runs=1,
            command="make bench ONLY=idle",
        )

    return [
        row("idle_cpu_percent", round(used, 3), "%", f"{what}; {seconds:g} s"),
        row("rss_beyond_arena_mib", round(resident, 1), "MiB", f"RssAnon; {what}"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30)
    merge(measure(parser.parse_args().seconds))
