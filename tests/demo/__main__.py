"""The sidecar and a real `vllm serve` on this machine, without Kubernetes and without any connector argument.

KEEP=1 leaves both running; MODEL=folder takes a real model instead of one with random weights.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from demo.documents import document
from servers import paths
from servers.models import model
from servers.pod import wait_attached
from servers.sidecar import Sidecar
from servers.vllm_server import Reply, VllmServer

DOCUMENTS = 3
DOCUMENT_TOKENS = 4000
ANSWER_TOKENS = 16
PHASES = {
    "cold": "never seen before",
    "local": "asked again: vLLM's own prefix cache",
    "reset": "after vLLM forgot its prefix cache",
    "restart": "after vLLM was killed and started anew",
}
_START = time.monotonic()


class Row(NamedTuple):
    """One request."""

    document: int
    phase: str
    reply: Reply
    equal: bool


def say(text: str) -> None:
    """A line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - _START:4.0f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def at_work(text: str) -> Iterator[None]:
    """Says what goes on, and every 10 s that it still does."""
    say(text)
    done = threading.Event()

    def remind() -> None:
        while not done.wait(10):
            say(f"... {text}")

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def start_vllm(pod: Path, folder: Path, number: int) -> VllmServer:
    """Starts vLLM with the pod's folder on PYTHONPATH: nothing else tells it of the cache."""
    arguments = ["--dtype", "float32", "--max-model-len", "8192", "--max-num-batched-tokens", "2048"]
    server = VllmServer(pod, folder, pod / f"vllm-{number}.log", *arguments, env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    with at_work(f"vLLM starts: PYTHONPATH={pod} vllm serve {folder} {' '.join(arguments)}"):
        server.wait_ready()
    return server


def ask_all(server: VllmServer, prompts: list[tuple[str, int]], phase: str, known: list[str], rows: list[Row]) -> None:
    """Asks every document once."""
    for number, (prompt, tokens) in enumerate(prompts):
        with at_work(f"document {number + 1}, {PHASES[phase]}"):
            reply = server.complete(prompt, tokens, max_tokens=ANSWER_TOKENS)
        if phase == "cold":
            known.append(reply.text)
        rows.append(Row(number + 1, phase, reply, reply.text == known[number]))


def print_table(rows: list[Row], prompts: list[tuple[str, int]]) -> None:
    """One line per request, then totals per round."""
    head = f"{'document':>8}  {'asked':<40} {'first token':>11}  {'computed':>8} {'vLLM':>6} {'kvcachepool':>11}  equal"
    print(f"\n{head}\n{'-' * len(head)}")
    for row in rows:
        source = row.reply.sources
        numbers = f"{source['computed']:>8} {source['local']:>6} {source['external']:>11}"
        first = f"{row.reply.first_token_seconds:.2f} s"
        print(f"{row.document:>8}  {PHASES[row.phase]:<40} {first:>11}  {numbers}  {'yes' if row.equal else 'NO'}")
    print(f"{'-' * len(head)}")
    asked = sum(tokens for _, tokens in prompts)
    cold = sum(row.reply.first_token_seconds for row in rows if row.phase == "cold")
    for phase, meaning in PHASES.items():
        of_phase = [row.reply for row in rows if row.phase == phase]
        sums = [sum(reply.sources[name] for reply in of_phase) for name in ("computed", "local", "external")]
        seconds = sum(reply.first_token_seconds for reply in of_phase)
        numbers = f"{sums[0]:>8} {sums[1]:>6} {sums[2]:>11}"
        print(f"{'total':>8}  {meaning:<40} {seconds:>9.2f} s  {numbers}  {cold / seconds:.0f}x")
    print(f"\nPrompt tokens by where their KV came from, as vLLM counts them; {asked} tokens a round.")
    print(f"Outputs equal to the cold ones: {sum(row.equal for row in rows)} of {len(rows)}.")


def print_sidecar(sidecar: Sidecar) -> None:
    """What the sidecar says of the same."""
    metrics = sidecar.metrics()
    requested = metrics.total("kvcachepool_requested_tokens_total")
    hit, missed = metrics.total("kvcachepool_hit_tokens_total"), metrics.total("kvcachepool_miss_tokens_total")
    reasons = metrics.by("kvcachepool_miss_tokens_total", "reason")
    why = ", ".join(f"{reason} {count:.0f}" for reason, count in reasons.items() if count)
    memory = sidecar.status()["memory"]
    held = f"{memory['used_bytes'] / 2**20:.0f} of {memory['capacity_bytes'] / 2**20:.0f} MiB"
    print(
        f"\nSidecar: asked for {requested:.0f} tokens = {hit:.0f} from memory + {missed:.0f} missed ({why});", end=" "
    )
    print(f"holds {memory['chunks']} chunks in {held}.")


def demo(chosen: str, keep: bool) -> int:
    """Runs it all; the answer is the exit status."""
    with ExitStack() as ends:
        pod = paths.short_folder()
        ends.callback(shutil.rmtree, pod, ignore_errors=True)
        with at_work("a model with random weights (210 M parameters) is made" if not chosen else f"model {chosen}"):
            folder = Path(chosen).resolve() if chosen else model("mid")
        sidecar = Sidecar(pod, memory="2Gi")
        ends.callback(sidecar.stop)
        with at_work(f"the sidecar starts: kvcachepool-sidecar run --config {pod}/config.v1.yaml"):
            sidecar.start(ready_seconds=60)
        server = start_vllm(pod, folder, 1)
        ends.callback(lambda: server.stop())
        prompts = [document(server, n, DOCUMENT_TOKENS, real=bool(chosen)) for n in range(DOCUMENTS)]
        known: list[str] = []
        rows: list[Row] = []
        # One short request first: compiled kernels and the sidecar's registration are not what is measured.
        server.complete("w3 w4 w5", 1, max_tokens=1)
        wait_attached(sidecar)
        for phase in ("cold", "local"):
            ask_all(server, prompts, phase, known, rows)
        server.reset_prefix_cache()
        ask_all(server, prompts, "reset", known, rows)
        say("vLLM is killed (SIGKILL)")
        server.kill()
        server = start_vllm(pod, folder, 2)
        server.complete("w3 w4 w5", 1, max_tokens=1)
        wait_attached(sidecar)
        ask_all(server, prompts, "restart", known, rows)
        print_table(rows, prompts)
        print_sidecar(sidecar)
        print(f"Metrics: {sidecar.url}/metrics and {server.url}/metrics; state: {sidecar.url}/v1/status")
        if not chosen:
            print(f"The answers are gibberish because the weights are random, such as: {known[0][:60]!r}")
        if keep:
            print("\nBoth run on until Ctrl-C. Try:")
            body = f'{{"model":"model","prompt":"{known[0][:40]}","max_tokens":8}}'
            print(f"  curl -s {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
        saved = all(row.reply.sources["external"] > 0 for row in rows if row.phase in ("reset", "restart"))
        return 0 if saved and all(row.equal for row in rows) else 1


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        status = demo(os.environ.get("MODEL", ""), os.environ.get("KEEP", "") not in ("", "0"))
    except KeyboardInterrupt:
        say("stopped; nothing is left running")
        status = 130
    raise SystemExit(status)
