"""Time to first token of `vllm serve` on 4,000 tokens that only a tier has: sidecar and vLLM are both fresh."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.results import Row
from bench.ttft import ARGUMENTS, ENV, TOKENS, compared
from servers import paths
from servers.models import model, words
from servers.pod import settle, wait_attached
from servers.redis import RedisServer
from servers.s3 import S3Server
from servers.sidecar import Sidecar
from servers.vllm_server import Reply, VllmServer
from servers.waiting import wait_for


@contextmanager
def _serving(tiers: dict[str, Any]) -> Iterator[tuple[Sidecar, VllmServer]]:
    """A new sidecar with these tiers and a new vLLM, attached to each other."""
    pod = paths.short_folder()
    sidecar = Sidecar(pod, memory="2Gi", config=tiers).start()
    server = VllmServer(pod, model("mid"), pod / "vllm.log", *ARGUMENTS, env=ENV)
    try:
        server.wait_ready()
        server.complete(words(300, 1), 300, max_tokens=1)
        wait_attached(sidecar)
        wait_for(sidecar.tiers_ready, 30, "every tier to be ready")
        yield sidecar, server
    finally:
        server.stop()
        sidecar.stop()
        shutil.rmtree(pod, ignore_errors=True)


def rows(prompts: int) -> list[Row]:
    """One vLLM computes all prompts and its sidecar writes them to every tier. Then one pod per tier reads them."""
    folder = Path(paths.short_folder())
    (folder / "disk").mkdir()
    redis, s3 = RedisServer(memory="4gb"), S3Server()
    tiers = {"disk": {"path": str(folder / "disk"), "size": "4Gi"}, "redis": redis.config(), "s3": s3.config()}
    texts = [words(TOKENS, 7100 + number) for number in range(prompts)]
    try:
        with _serving(tiers) as (sidecar, server):
            cold = [_asked(server, text, "computed") for text in texts]
            settle(sidecar)
            wait_for(lambda: sidecar.written_to(*tiers), 120, "every chunk in every tier")
        made = []
        for name, section in tiers.items():
            with _serving({name: section}) as (_, server):
                warm = [_asked(server, text, "external") for text in texts]
            what = f"cold TTFT in s; {TOKENS} tokens, recomputed: {sorted({each.sources['computed'] for each in warm})}"
            made.append(compared(f"ttft_4k_{name}_over_cold", warm, cold, what, "make bench-tiers"))
        return made
    finally:
        redis.stop()
        s3.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _asked(server: VllmServer, text: str, source: str) -> Reply:
    """The reply. Most of its prompt must have come from the tier."""
    reply = server.complete(text, TOKENS, max_tokens=1)
    if reply.sources[source] < TOKENS * 0.9:
        raise RuntimeError(f"not from {source}: {reply.sources}")
    return reply
