"""The common part of all demos: rounds of questions about documents, and a table of the results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from demo.documents import document
from demo.progress import Failed, at_work, wait_for_end
from servers.models import model
from servers.pod import wait_attached
from servers.sidecar import SidecarClient
from servers.vllm_server import Reply, VllmClient

DOCUMENTS = 3
DOCUMENT_TOKENS = 4000
ANSWER_TOKENS = 16
_CONTEXT_TOKENS = 8192
#: GiB for vLLM's own KV cache, enough for a whole round.
KV_SPACE = "2"


class Model(NamedTuple):
    """The served model."""

    folder: Path
    #: Whether the user gave the model. Otherwise it has random weights.
    real: bool

    @classmethod
    def chosen(cls) -> Model:
        """The folder in MODEL, or a newly created model."""
        name = os.environ.get("MODEL", "")
        if not name:
            with at_work("a model with random weights (210 M parameters)"):
                return cls(model("mid"), False)
        folder = Path(name).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise Failed(
                f"MODEL={name}: {folder}/config.json is not there; name the folder of a model, with its tokenizer"
            )
        return cls(folder, True)

    def arguments(self) -> list[str]:
        """Arguments of `vllm serve` without any about the cache. float32 makes equal outputs comparable."""
        config = json.loads((self.folder / "config.json").read_text())
        positions = config.get("text_config", config).get("max_position_embeddings") or _CONTEXT_TOKENS
        context = min(_CONTEXT_TOKENS, positions)
        if context < DOCUMENT_TOKENS + 96:
            raise Failed(f"{self.folder} takes prompts of {context} tokens; the documents have {DOCUMENT_TOKENS}")
        return ["--dtype", "float32", "--max-model-len", str(context), "--max-num-batched-tokens", "2048"]


class Round(NamedTuple):
    """One request per document."""

    #: Name of the round.
    asked: str
    #: Whether vLLM's own prefix cache is empty and the pool is not.
    from_pool: bool = True


COLD = Round("never seen before", from_pool=False)
LOCAL = Round("asked again: vLLM's own prefix cache", from_pool=False)
RESET = Round("after vLLM forgot its prefix cache")
RESTART = Round("after vLLM was killed and started anew")


class Row(NamedTuple):
    """One request."""

    document: int
    round: Round
    reply: Reply
    equal: bool


class Workload:
    """The rounds with a vLLM and its sidecar, which may be replaced in between."""

    def __init__(self, vllm: VllmClient, sidecar: SidecarClient, chosen: Model) -> None:
        self.vllm = vllm
        self.sidecar = sidecar
        self._model = chosen
        self._prompts: list[tuple[str, int]] = []
        self._cold: list[str] = []
        self._rows: list[Row] = []

    def attach(self) -> None:
        """One short request, so that kernel compilation and vLLM's registration are not measured."""
        self.vllm.complete(self._short(), 1, max_tokens=1)
        wait_attached(self.sidecar)

    def run(self, restart: Callable[[], VllmClient]) -> None:
        """Four rounds with one sidecar. `restart` kills vLLM, starts it again and returns it."""
        self.ask(COLD)
        self.ask(LOCAL)
        self.vllm.reset_prefix_cache()
        self.ask(RESET)
        self.vllm = restart()
        self.attach()
        self.ask(RESTART)

    def _short(self) -> str:
        return "Her grandmother remembered" if self._model.real else "w3 w4 w5"

    def ask(self, now: Round) -> None:
        """Runs one round. The first one is the reference of the others."""
        if not self._prompts:
            self._prompts = [document(self.vllm, n, DOCUMENT_TOKENS, real=self._model.real) for n in range(DOCUMENTS)]
        for number, (prompt, tokens) in enumerate(self._prompts):
            with at_work(f"document {number + 1}, {now.asked}"):
                reply = self.vllm.complete(prompt, tokens, max_tokens=ANSWER_TOKENS)
            if len(self._cold) == number:
                self._cold.append(reply.text)
            self._rows.append(Row(number + 1, now, reply, reply.text == self._cold[number]))

    def print_table(self) -> None:
        """One line per request, then totals per round."""
        head = f"{'document':>8}  {'asked':<40} {'first token':>11}  {'computed':>8} {'vLLM':>6} {'kvcachepool':>11}"
        head += "  equal"
        print(f"\n{head}\n{'-' * len(head)}")
        for row in self._rows:
            source = row.reply.sources
            numbers = f"{source['computed']:>8} {source['local']:>6} {source['external']:>11}"
            first = f"{row.reply.first_token_seconds:.2f} s"
            print(f"{row.document:>8}  {row.round.asked:<40} {first:>11}  {numbers}  {'yes' if row.equal else 'NO'}")
        print(f"{'-' * len(head)}")
        cold = 0.0
        for each in dict.fromkeys(row.round for row in self._rows):
            replies = [row.reply for row in self._rows if row.round == each]
            sums = [sum(reply.sources[name] for reply in replies) for name in ("computed", "local", "external")]
            seconds = sum(reply.first_token_seconds for reply in replies)
            cold = cold or seconds
            numbers = f"{sums[0]:>8} {sums[1]:>6} {sums[2]:>11}"
            print(f"{'total':>8}  {each.asked:<40} {seconds:>9.2f} s  {numbers}  {cold / seconds:.0f}x")
        asked = sum(tokens for _, tokens in self._prompts)
        print(f"\nPrompt tokens by where their KV came from, as vLLM counts them; {asked} tokens a round.")
        print(
            f"Outputs equal to the cold ones: {sum(row.equal for row in self._rows)} of {len(self._rows)}.", flush=True
        )

    def print_sidecar(self) -> None:
        """Prints the sidecar's own numbers."""
        metrics = self.sidecar.metrics()
        requested = metrics.total("kvcachepool_requested_tokens_total")
        missed = metrics.total("kvcachepool_miss_tokens_total")
        tiers = metrics.by("kvcachepool_hit_tokens_total", "tier")
        hits = " + ".join(f"{count:.0f} from {tier}" for tier, count in tiers.items() if count) or "0 found"
        reasons = metrics.by("kvcachepool_miss_tokens_total", "reason")
        why = ", ".join(f"{reason} {count:.0f}" for reason, count in reasons.items() if count)
        memory = self.sidecar.status()["memory"]
        held = f"{memory['used_bytes'] / 2**20:.0f} of {memory['capacity_bytes'] / 2**20:.0f} MiB"
        print(
            f"\nSidecar: asked for {requested:.0f} tokens = {hits} + {missed:.0f} missed ({why}); "
            f"holds {memory['chunks']} chunks in {held}."
        )

    def print_addresses(self) -> None:
        """Prints where to read the numbers, and why the answers are as expected."""
        print(f"Metrics: {self.sidecar.url}/metrics and {self.vllm.url}/metrics; state: {self.sidecar.url}/v1/status")
        if not self._model.real:
            print(f"The answers are gibberish because the weights are random, such as: {self._cold[0][:60]!r}")

    def keep(self, what: str, *more: str) -> None:
        """With KEEP=1 keeps everything running, with commands to try, until Ctrl-C or SIGTERM."""
        if os.environ.get("KEEP", "") in ("", "0"):
            return
        body = json.dumps({"model": "model", "prompt": self._short(), "max_tokens": 8})
        print(f"\n{what} until Ctrl-C, which ends and removes all of it. Try:")
        print(f"  curl -s {self.vllm.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
        for line in more:
            print(f"  {line}")
        sys.stdout.flush()
        wait_for_end()

    def end(self, what: str) -> int:
        """Prints everything, then calls `keep`. Returns the exit status."""
        self.print_table()
        self.print_sidecar()
        self.print_addresses()
        self.keep(what)
        return self.status()

    def status(self) -> int:
        """Exit status: 0 if all outputs are equal, and tokens were saved whenever vLLM's own cache was empty."""
        saved = {row.round for row in self._rows if row.reply.sources["external"] > 0}
        wanted = {row.round for row in self._rows if row.round.from_pool}
        return 0 if wanted <= saved and all(row.equal for row in self._rows) else 1
