"""Requests to one engine with its sidecar, and the invariants of their answers."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass

from servers.engine import Adapter, EngineFailed
from servers.pod import Pod
from stress import adapters
from stress.configs import BLOCK, CHUNK, Config
from stress.counts import Counts
from stress.faults import Faults
from stress.oracle import Oracle, Question
from stress.prompts import PrefixTree, Wanted

#: No request takes longer, whatever is done to the sidecar. Far more than a busy machine needs.
REQUEST_SECONDS = 90.0
_LAST_EVENTS = 40
#: Adapters that do not change.
STATIC_ADAPTERS = ("red", "blue")


class StressFailed(AssertionError):
    """A wrong answer, a hang, or a leftover."""


@dataclass
class Asked:
    """A sent request."""

    name: str
    wanted: Wanted
    question: Question
    adapter: str
    sent_at: float
    turns: int = 0
    tokens: list[int] | None = None

    def __str__(self) -> str:
        wanted = self.wanted
        return (
            f"request {self.name}: {len(wanted.prompt)} tokens {list(wanted.prompt[:4])}..., {wanted.max_tokens} wanted"
            f", weights {self.question.weights}, adapter {self.adapter or None} (content {self.question.adapter}),"
            f" salt {wanted.salt}, {wanted.params}"
        )


class Traffic:
    """The engine under stress, its sidecar, and all random choices, which come from the seed."""

    def __init__(self, config: Config, seed: int, oracle: Oracle) -> None:
        self.config = config
        self.counts = Counts()
        self._chance = random.Random(f"{seed}/{config.name}")
        self._oracle = oracle
        self._tree = PrefixTree(self._chance)
        self._start = time.monotonic()
        self._events: deque[str] = deque(maxlen=_LAST_EVENTS)
        self._running: dict[str, Asked] = {}
        self._unchecked: list[Asked] = []
        self._sources: dict[str, tuple[int, int]] = {}
        self._sent = 0
        self._weights = config.model
        self._adapters: dict[str, tuple[Adapter, int]] = {}
        self._contents = 0
        self._unshared = False
        self._last_adapter = ""
        cache = {"chunkTokens": CHUNK, "minLoadTokens": BLOCK, "loadTimeout": "5s", "loadOrRecompute": "AlwaysLoad"}
        self.pod = Pod(memory="64Mi", config={"cache": cache})
        if config.disk:
            (self.pod.folder / "disk").mkdir()
            self.pod.sidecar.configure({"disk": {"path": str(self.pod.folder / "disk"), "size": "256Mi"}})
        self.faults = Faults(self.pod.sidecar, self._chance, self.counts, self._note)

    def _start_engine(self) -> None:
        # Threads that wait for each other are slow if other processes take their cores.
        env = {"PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        if self.config.ranks > 1:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        arguments = self.config.engine_arguments
        self.engine = self.pod.start_engine(self.config.model, env=env, answer_seconds=REQUEST_SECONDS, **arguments)
        self._weights = self.config.model
        self._unshared = False

    # -- requests

    def _new_adapter(self, name: str) -> None:
        self._contents += 1
        adapters.write(self.pod.folder / name, self._contents)
        adapter = Adapter(name, len(self._adapters) + 1, str(self.pod.folder / name))
        self._adapters[name] = adapter, self._contents

    def _choose_adapter(self) -> str:
        # vLLM for CPUs applies an adapter to all requests of a step, so either all requests have one or none.
        return self._chance.choice([*STATIC_ADAPTERS, *list(self._adapters)[-2:]]) if self._adapters else ""

    @property
    def _usual_adapter(self) -> str:
        return STATIC_ADAPTERS[0] if self._adapters else ""

    def _send(self, wanted: Wanted, adapter: str) -> Asked:
        self._sent += 1
        lora, content = self._adapters.get(adapter, (None, None))
        question = Question(self._weights, content, wanted.prompt)
        asked = Asked(f"r{self._sent}", wanted, question, adapter, time.monotonic())
        self._note(f"{asked}")
        self.engine.add(
            asked.name,
            list(wanted.prompt),
            max_tokens=wanted.max_tokens,
            salt=wanted.salt,
            params=wanted.params,
            lora=lora,
        )
        self._running[asked.name] = asked
        self.counts.add("salted", int(wanted.salt is not None))
        self.counts.add("tagged", int("kvcachepool.tags" in (wanted.params or {})))
        self.counts.add("adapter_swaps", int(bool(adapter) and adapter != self._last_adapter))
        self._last_adapter = adapter or self._last_adapter
        return asked

    def _ask(
        self, prompt: tuple[int, ...], *, adapter: str | None = None, salt: str | None = None, tag: str | None = None
    ) -> Asked:
        """Runs one request alone to its end."""
        params = {"kvcachepool.tags": tag} if tag else None
        asked = self._send(Wanted(prompt, 4, salt, params, None), adapter or self._usual_adapter)
        self._finish()
        return asked

    def _turn(self) -> None:
        """One step of the engine. Ends expired faults and aborts requests before it."""
        self.faults.pass_time()
        for asked in [asked for asked in self._running.values() if asked.turns == asked.wanted.abort_after]:
            self._note(f"{asked.name} is aborted")
            self.engine.abort(asked.name)
            del self._running[asked.name]
            self.counts.add("aborted")
        if not self._running:
            return
        try:
            outputs = self.engine.step()
        except EngineFailed as error:
            raise self.failure(f"the engine failed: {error}") from None
        for name, output in outputs.items():
            if output.finished and name in self._running:
                self._ended(self._running.pop(name), output.tokens, output.reason)
        now = time.monotonic()
        for asked in self._running.values():
            asked.turns += 1
            if now - asked.sent_at > REQUEST_SECONDS:
                raise self._hung(asked)

    def _ended(self, asked: Asked, tokens: list[int], reason: str | None) -> None:
        if reason != "length":
            raise self.failure(f"ended with {reason}: {asked}")
        asked.tokens = tokens
        self._unchecked.append(asked)
        self.counts.add("finished")

    def _finish(self) -> None:
        while self._running:
            self._turn()

    # -- invariants

    def _check(self) -> None:
        """Compares all answers since the last check."""
        done, self._unchecked = self._unchecked, []
        self._take_sources()
        expected = self._oracle.answers(self.config, [asked.question for asked in done])
        for asked in done:
            truth = expected[asked.question][: asked.wanted.max_tokens]
            assert asked.tokens is not None
            self.counts.add("undecided", int(len(truth) < asked.wanted.max_tokens))
            if asked.tokens[: len(truth)] != truth:
                at = next(at for at, token in enumerate(truth) if asked.tokens[at] != token)
                local, external = self._sources.get(asked.name, (0, 0))
                raise self.failure(
                    f"WRONG from token {at} on: {asked}\nfrom vLLM's own cache {local}, loaded {external}\n"
                    f"expected {truth}\ngot      {asked.tokens}"
                )
        if self.config.off and any(external for _, external in self._sources.values()):
            raise self.failure("a cache that is off gave tokens")

    def _take_sources(self) -> None:
        taken = self.engine.take_sources()
        self._sources |= taken
        self.counts.add("loads_failed", self.engine.take_failed_loads())
        self.counts.add("hits_partly_local", sum(bool(local and external) for local, external in taken.values()))
        self.counts.add("requests_with_hits", sum(bool(external) for _, external in taken.values()))

    def _must_be_cold(self, asked: Asked, why: str) -> None:
        self._take_sources()
        local, external = self._sources.get(asked.name, (0, 0))
        if local or external:
            raise self.failure(f"{external} tokens came from the cache after {why} ({local} from vLLM's own): {asked}")

    def _hung(self, asked: Asked) -> StressFailed:
        try:
            states: object = self.engine.states()
        except EngineFailed as error:
            states = error
        return self.failure(
            f"HUNG for {REQUEST_SECONDS:g} s: {asked}\nstates {states}\n{self._status()}\n{self.engine.stacks()}"
        )

    def _status(self) -> str:
        try:
            return f"sidecar {self.pod.sidecar.status()}"
        except (AssertionError, OSError) as error:
            return f"sidecar: {error}"

    def failure(self, what: str) -> StressFailed:
        """The error with the last events."""
        events = "\n".join(self._events)
        return StressFailed(f"{what}\n\nlast events of {self.config.name}:\n{events}\n\ncounts: {self.counts}")

    def _note(self, event: str) -> None:
        self._events.append(f"{time.monotonic() - self._start:8.3f} s  {event}")

    def stop(self) -> None:
        """Stops everything."""
        self.pod.stop()
