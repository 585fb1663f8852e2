"""Time to first token of `vllm serve` on 4,000 tokens: computed, from vLLM's own prefix cache, from ours.

The same prompts in all of them; every kind of hit leaves the same last tokens to compute. Hits from ours are asked for
with `memory.verify: Always`, the default, and `Background` by turns: what a digest of the KV adds before it is
answered.

    python -m bench.ttft [--prompts 5] [--hits 3]
"""

from __future__ import annotations

import argparse
import shutil
import statistics

from bench.results import Row, merge
from servers import paths
from servers.models import model, words
from servers.pod import settle, wait_attached
from servers.sidecar import Sidecar
from servers.vllm_server import Reply, VllmServer

TOKENS = 4000
COMMAND = "make bench ONLY=ttft"
#: Values of `memory.verify`.
VERIFY = ("Always", "Background")
#: The metric of the server with which every time is measured.
ARGUMENTS = ("--dtype", "bfloat16", "--max-model-len", "8192")
ENV = {"VLLM_CPU_KVCACHE_SPACE": "2"}


def measure(prompts: int, hits: int) -> list[Row]:
    """Sends every prompt cold, then alternately with a local hit and after a reset."""
    pod = paths.short_folder()
    sidecar = Sidecar(pod, memory="2Gi").start()
    server = VllmServer(pod, model("mid"), pod / "vllm.log", *ARGUMENTS, env=ENV)
    cold: list[Reply] = []
    local: list[Reply] = []
    warm: dict[str, list[Reply]] = {verify: [] for verify in VERIFY}
    try:
        server.wait_ready()
        server.complete(words(300, 1), 300, max_tokens=1)
        wait_attached(sidecar)
        for number in range(prompts):
            prompt = words(TOKENS, 7000 + number)
            cold.append(server.complete(prompt, TOKENS, max_tokens=1))
            settle(sidecar)
            for hit in range(hits):
                local.append(server.complete(prompt, TOKENS, max_tokens=1))
                for verify in VERIFY if (number + hit) % 2 else VERIFY[::-1]:
                    sidecar.change({"memory": {"verify": verify}})
                    server.reset_prefix_cache()
                    warm[verify].append(server.complete(prompt, TOKENS, max_tokens=1))
            print(f"prompt {number + 1}: cold {cold[-1].first_token_seconds:.2f} s", end=" ")
            print(f"local {_median(local[-hits:]):.4f} s", end=" ")
            print(", ".join(f"{verify} {_median(warm[verify][-hits:]):.4f} s" for verify in VERIFY), flush=True)
    finally:
        server.stop()
        sidecar.stop()
        shutil.rmtree(pod, ignore_errors=True)
    recomputed = {
        name: {reply.sources["computed"] for reply in replies}
        for name, replies in (("l", local), ("w", [*warm["Always"], *warm["Background"]]))
    }
    note = f"{TOKENS} tokens, recomputed: warm {sorted(recomputed['w'])}, local {sorted(recomputed['l'])}"
    always, background = warm["Always"], warm["Background"]
    return [
        compared("ttft_4k_warm_over_cold", always, cold, f"cold TTFT in s; {note}", COMMAND),
        compared("ttft_4k_warm_over_local", always, local, f"TTFT of vLLM's own prefix hit in s; {note}", COMMAND),
        compared("ttft_4k_always_over_background", always, background, "warm TTFT without digests in s", COMMAND),
    ]


def _median(replies: list[Reply]) -> float:
    return statistics.median(reply.first_token_seconds for reply in replies)


def compared(name: str, replies: list[Reply], reference: list[Reply], what: str, command: str) -> Row:
    """A row of two medians."""
    value, other = _median(replies), _median(reference)
    return Row(
        name=name,
        value=round(value, 4),
        unit="s",
        reference=what,
        reference_value=round(other, 4),
        ratio=round(value / other, 4),
        runs=len(replies),
        command=command,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--hits", type=int, default=3)
    chosen = parser.parse_args()
    merge(measure(chosen.prompts, chosen.hits))
