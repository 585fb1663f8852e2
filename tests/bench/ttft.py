"""Time to first token of `vllm serve` on 4,000 tokens: computed, from vLLM's own prefix cache, from ours, from LMCache.

Two vLLM processes with the same arguments take turns with the same prompts, one beside the sidecar and one beside
LMCache's server. Hits from ours are asked for with `memory.verify: Always`, the default, and `Background` by turns:
what a digest of the KV adds before it is answered. LMCache gets chunks of one block of vLLM instead of its default of
256 tokens, with which it would recompute 128 tokens more of these prompts than the others. Without LMCache
(`tools/setup.sh lmcache`) its rows are left out.

    python -m bench.ttft [--prompts 5] [--hits 3] [--lmcache-chunk 128] [--states]

With `--states` the model has gated delta nets beside full attention, as Qwen3-Next. LMCache's rows are left out.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.results import Row, merge
from servers import lmcache, paths
from servers.lmcache import LmcacheServer
from servers.models import model, words
from servers.pod import BLOCK, settle, wait_attached
from servers.sidecar import Sidecar
from servers.vllm_server import Reply, VllmServer

TOKENS = 4000
COMMAND = "make bench ONLY=ttft"
STATES_COMMAND = "python -m bench.ttft --states"
#: Values of `memory.verify`.
VERIFY = ("Always", "Background")
ARGUMENTS = ("--dtype", "bfloat16", "--max-model-len", "8192")
ENV = {"VLLM_CPU_KVCACHE_SPACE": "2"}
LMCACHE = "LMCache"


class Cache:
    """A vLLM and the cache beside it, with all replies."""

    def __init__(self, server: VllmServer, settle: Callable[[], None], hits: dict[str, Callable[[], object]]) -> None:
        self.server = server
        #: Waits until what was computed is stored.
        self.settle = settle
        #: Kinds of hits, each with what prepares the cache for it.
        self.hits = hits
        self.cold: list[Reply] = []
        self.local: list[Reply] = []
        self.warm: dict[str, list[Reply]] = {kind: [] for kind in hits}

    def ask(self, prompt: str) -> Reply:
        """One request."""
        return self.server.complete(prompt, TOKENS, max_tokens=1)

    def compute(self, prompt: str) -> None:
        """Asks for a prompt that nothing holds."""
        self.cold.append(self.ask(prompt))
        self.settle()

    def hit(self, prompt: str, turn: int) -> None:
        """Asks for it from vLLM's own prefix cache and, after a reset of that, from the cache."""
        self.local.append(self.ask(prompt))
        for kind in list(self.hits)[:: -1 if turn % 2 else 1]:
            self.hits[kind]()
            self.server.reset_prefix_cache()
            self.warm[kind].append(self.ask(prompt))


def _ours(stack: ExitStack, name: str) -> Cache:
    pod = _folder(stack)
    sidecar = Sidecar(pod, memory="2Gi").start()
    stack.callback(sidecar.stop)
    server = _serve(stack, VllmServer(pod, model(name), pod / "vllm.log", *ARGUMENTS, env=ENV))
    wait_attached(sidecar)

    def verify(value: str) -> Callable[[], object]:
        return lambda: sidecar.change({"memory": {"verify": value}})

    return Cache(server, lambda: settle(sidecar), {value: verify(value) for value in VERIFY})


def _lmcache(stack: ExitStack, chunk_tokens: int) -> Cache:
    logs = _folder(stack)
    beside = LmcacheServer(logs / "lmcache.log", gigabytes=2, chunk_tokens=chunk_tokens)
    stack.callback(beside.stop)
    arguments = (*ARGUMENTS, *beside.wait_ready().arguments())
    server = VllmServer(None, model("mid"), logs / "vllm.log", *arguments, env=ENV, python=str(lmcache.PYTHON))
    return Cache(_serve(stack, server), beside.settle, {LMCACHE: lambda: None})


def _folder(stack: ExitStack) -> Path:
    folder = paths.short_folder()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _serve(stack: ExitStack, server: VllmServer) -> VllmServer:
    """The server after its first request, which pays for what is made once."""
    stack.callback(server.stop)
    server.wait_ready().complete(words(300, 1), 300, max_tokens=1)
    return server


def measure(prompts: int, hits: int, lmcache_chunk: int, states: bool) -> list[Row]:
    """Sends every prompt to one vLLM after the other: cold, then alternately with a local hit and after a reset."""
    command, prefix = (STATES_COMMAND, "ttft_4k_states") if states else (COMMAND, "ttft_4k")
    with ExitStack() as stack:
        ours = _ours(stack, "gdn-mid" if states else "mid")
        caches = [ours]
        if not states and lmcache.PYTHON.exists():
            caches.append(_lmcache(stack, lmcache_chunk))
        elif not states:
            print(f"without {lmcache.NAME}: {lmcache.PYTHON} is missing (tools/setup.sh lmcache)", flush=True)
        for number in range(prompts):
            prompt = words(TOKENS, 7000 + number)
            for turn in range(1 + hits):
                for cache in caches[:: -1 if (number + turn) % 2 else 1]:
                    if turn:
                        cache.hit(prompt, number + turn)
                    else:
                        cache.compute(prompt)
            for cache in caches:
                print(f"prompt {number + 1}: cold {cache.cold[-1].first_token_seconds:.2f} s", end=" ")
                print(f"local {_median(cache.local[-hits:]):.4f} s", end=" ")
                print(
                    ", ".join(f"{kind} {_median(each[-hits:]):.4f} s" for kind, each in cache.warm.items()), flush=True
                )
    always, background = (ours.warm[value] for value in VERIFY)
    note = _recomputed(always=always, background=background, local=ours.local)
    rows = [
        compared(f"{prefix}_warm_over_cold", always, ours.cold, f"cold TTFT in s; {note}", command),
        compared(
            f"{prefix}_warm_over_local", always, ours.local, f"TTFT of vLLM's own prefix hit in s; {note}", command
        ),
        compared(f"{prefix}_always_over_background", always, background, "warm TTFT without digests in s", command),
    ]
    for other in caches[1:]:
        warm = other.warm[LMCACHE]
        note = f"{lmcache.NAME} with chunks of {lmcache_chunk}, {_recomputed(warm=warm, local=other.local)}"
        rows += [
            compared("ttft_4k_lmcache_over_cold", warm, other.cold, f"cold TTFT in s; {note}", COMMAND),
            compared(
                "ttft_4k_lmcache_over_local", warm, other.local, f"TTFT of its vLLM's own hit in s; {note}", COMMAND
            ),
            compared("ttft_4k_warm_over_lmcache", always, warm, f"TTFT with {lmcache.NAME} in s", COMMAND),
        ]
    return rows


def _recomputed(**kinds: list[Reply]) -> str:
    computed = ((kind, sorted({reply.sources["computed"] for reply in replies})) for kind, replies in kinds.items())
    return f"{TOKENS} tokens, recomputed: " + ", ".join(f"{kind} {tokens}" for kind, tokens in computed)


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
    parser.add_argument("--lmcache-chunk", type=int, default=BLOCK)
    parser.add_argument("--states", action="store_true")
    chosen = parser.parse_args()
    merge(measure(chosen.prompts, chosen.hits, chosen.lmcache_chunk, chosen.states))
