"""A pod: a folder as the shared volume, the real sidecar, and a real vLLM engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers import paths
from servers.engine import Engine, by_source
from servers.models import model
from servers.sidecar import Sidecar, SidecarClient
from servers.waiting import wait_for

# Tokens of a block of vLLM on CPUs. Hits are whole blocks.
BLOCK = 128


def attached(sidecar: SidecarClient) -> bool:
    """Whether a vLLM is connected with worker and scheduler sessions that are all served."""
    sessions = [s for s in sidecar.status()["sessions"] if s["connected"] and not s["off"]]
    roles = {s["role"].lower() for s in sessions}
    return {"scheduler", "worker"} <= roles and all(s["ready"] for s in sessions)


def wait_attached(sidecar: SidecarClient) -> None:
    """Until `attached`."""
    try:
        wait_for(lambda: attached(sidecar), 20, "all sessions of vLLM ready")
    except AssertionError as error:
        raise AssertionError(f"{error}: {sidecar.status()['sessions']}") from None


def settle(sidecar: SidecarClient) -> None:
    """Waits until no slot has a pending writer or digest."""

    def settled() -> bool:
        slots = sidecar.status()["memory"]["slots"]
        return slots["granted"] == 0 and slots["committed"] == 0

    wait_for(settled, 20, "stores readable")


class Answer:
    """The answer to a request, and the source of its prompt's KV."""

    def __init__(self, tokens: list[int], sources: dict[str, int]) -> None:
        self.tokens = tokens
        self.computed = sources["computed"]
        self.local = sources["local"]
        self.external = sources["external"]

    def __repr__(self) -> str:
        return f"computed {self.computed}, local {self.local}, external {self.external}: {self.tokens}"


class Pod:
    """A sidecar and the vLLM engine beside it."""

    def __init__(self, **config: Any) -> None:
        self.folder = paths.short_folder()
        self.sidecar = Sidecar(self.folder, **config)
        self._engine: Engine | None = None
        self._engines = 0

    @property
    def engine(self) -> Engine:
        """The running engine."""
        assert self._engine is not None
        return self._engine

    def start_engine(self, name: str | Path = "tiny", **arguments: Any) -> Engine:
        """Starts vLLM without any reference to the connector. `name`: a model's, or a folder with one."""
        self._engines += 1
        files = name if isinstance(name, Path) else model(name)
        self._engine = Engine(self.folder, files, self.folder / f"vllm-{self._engines}.log", **arguments)
        return self._engine

    def start(self, name: str = "tiny", **arguments: Any) -> Pod:
        """Starts both, attached to each other, with every tier open. The engine is that of `start_engine`."""
        self.sidecar.start()
        self.start_engine(name, **arguments)
        self.attach()
        wait_for(self.sidecar.tiers_ready, 20, "every tier to be open")
        return self

    def attach(self, tokens: int = 300) -> None:
        """Runs one short prompt, with which the scheduler side registers, and waits until every session is ready."""
        if not self.attached():
            self.engine.generate([3 + n % 7 for n in range(tokens)], max_tokens=1)
        wait_attached(self.sidecar)

    def attached(self) -> bool:
        """Whether worker and scheduler sessions are connected and served."""
        return attached(self.sidecar)

    def generate(self, tokens: list[int], **arguments: Any) -> Answer:
        """Runs one prompt and waits until everything that it stored is readable."""
        before = self.engine.counters()
        generated = self.engine.generate(tokens, **arguments)
        self.settle()
        return Answer(generated, by_source(before, self.engine.counters()))

    def generate_again(self, tokens: list[int], **arguments: Any) -> Answer:
        """Like `generate`, after a reset of vLLM's own prefix cache.

        vLLM waits up to 0.1 s for the sidecar's answer and then computes. On a busy machine the answer may be late.
        This then resets the prefix cache and generates a second time.
        """
        unanswered = self._unanswered()
        self.engine.reset()
        answer = self.generate(tokens, **arguments)
        if self._unanswered() == unanswered:
            return answer
        self.engine.reset()
        return self.generate(tokens, **arguments)

    def add_probed(self, name: str, tokens: list[int]) -> None:
        """Adds a request that the sidecar answers before vLLM's first poll, because vLLM waits only 0.1 s."""
        before = self._probed_chunks()
        self.engine.add(name, tokens)
        wait_for(lambda: self._probed_chunks() > before, 20, "an answer to the request's early PROBE")

    def _probed_chunks(self) -> float:
        return self.sidecar.metrics().total("kvcachepool_probe_chunks_total")

    def _unanswered(self) -> float:
        if not self.sidecar.running():
            return 0
        return self.missed().get("unanswered", 0)

    def missed(self) -> dict[str, float]:
        """Requested tokens that were not hits, by reason."""
        return self.sidecar.metrics().by("kvcachepool_miss_tokens_total", "reason")

    def freeze_amid(self, freeze: Callable[[], None], tier: str, direction: str) -> None:
        """Freezes a tier's server with a chunk on its way from it (`fetch`) or to it (`write`), and others behind it.

        The config's `pacing` lets them go one by one: the next one begins when the server is frozen already.
        """

        def of(name: str) -> float:
            return self.sidecar.metrics().total(f"kvcachepool_tier_{name}", tier=tier, direction=direction)

        def waits() -> bool:
            self.engine.step()
            return of("waiting_chunks") > 0

        wait_for(waits, 30, f"chunks that wait for their {direction}", pause=0)
        freeze()
        left = of("waiting_chunks")
        wait_for(lambda: of("waiting_chunks") < left and of("in_flight_bytes") > 0, 10, f"a {direction} under way")

    def chunk_bytes(self) -> int:
        """Bytes of a chunk of the sidecar's only domain."""
        (domain,) = self.sidecar.status()["domains"]
        return int(domain["chunk_bytes"])

    def settle(self) -> None:
        """Waits until all stored chunks are readable. Returns at once without a sidecar."""
        if self.sidecar.running():
            settle(self.sidecar)

    def stop(self) -> None:
        """Ends both and removes the folder."""
        if self._engine is not None:
            self._engine.stop()
        self.sidecar.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
