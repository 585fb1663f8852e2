"""One configuration under stress: traffic, faults and resets on a real engine, and the invariants."""

from __future__ import annotations

import time

from servers.engine import EngineFailed
from servers.models import model, token_ids
from servers.pod import wait_attached
from servers.waiting import TimedOut, wait_for
from stress import adapters
from stress.configs import BLOCK, CHUNK, SEQUENCES
from stress.prompts import MAX_TOKENS, Wanted
from stress.traffic import STATIC_ADAPTERS, StressFailed, Traffic

#: Without requests, blocks are free again after this time: a store with a frozen sidecar holds them for a second.
RESET_SECONDS = 20.0
_REQUESTS_PER_EPOCH = 40
#: A prompt may be stored too early for the disk, and a busy machine may not find in time what the disk has.
_DISK_TRIES = 4


class Rig(Traffic):
    """The engine under stress, with a sequence of events from the seed."""

    def start(self) -> None:
        """The engine alone."""
        self._start_engine()
        if self.config.lora:
            for name in (*STATIC_ADAPTERS, "green0"):
                self._new_adapter(name)

    def control(self) -> None:
        """Traffic without a sidecar, so without a cache. A difference here would invalidate the comparison."""
        self._note("control without a cache")
        self._traffic(_REQUESTS_PER_EPOCH, [])
        try:
            self._check()
        except StressFailed as error:
            raise StressFailed(f"the control run differs: {self.config.name} proves nothing\n{error}") from None
        used = sum(external for _, external in self._sources.values())
        if used:
            raise StressFailed(f"{used} tokens came from a cache without a sidecar")
        self.counts.add("control_requests", self.counts.kinds.pop("finished"))
        self.counts.kinds.pop("undecided", None)
        self.engine.reset(seconds=RESET_SECONDS)
        self._sources.clear()

    def attach(self) -> None:
        """Starts the sidecar and waits until the engine is attached, or the cache is off by name."""
        self.pod.sidecar.start(ready_seconds=60)
        if self.config.off:
            reasons = {session["off"] for session in self.pod.sidecar.status()["sessions"]}
            if f"off in this vLLM: {self.config.off}" not in self.engine.log_text():
                raise StressFailed(f"the cache is not off by the name {self.config.off}: {reasons}")
            self.counts.add("off_by_name")
            return
        self._served()

    def epoch(self) -> None:
        """Traffic with every kind of fault, then a check of all answers and leftovers."""
        self._tree.grow()
        self._traffic(_REQUESTS_PER_EPOCH, self._deck())
        self._rest()
        self._check()

    def _deck(self) -> list[str]:
        config = self.config
        deck = ["freeze", "kill_container", "reset"]
        if not config.off:
            deck += ["kill_engine", "reset_both", "reset_while_running", "hit_partly_local", "restart_cold", "preempt"]
        if not config.off and config.ranks == 1:
            deck += ["restart_under_loads", "kill_vllm"]
        deck += ["reload_weights"] if config.other else []
        deck += ["replace_adapter"] if config.lora else []
        if self.counts.kinds["epochs"]:
            deck = [event for event in deck for _ in range(self._chance.choice((0, 1, 1, 2)))]
        self._chance.shuffle(deck)
        # Before the first reset of the connector, because later chunks are not written to lower tiers.
        deck[:0] = ["load_from_disk"] if config.disk and not self._unshared else []
        self.counts.add("epochs")
        return deck

    def _traffic(self, requests: int, deck: list[str]) -> None:
        due = sorted(self._chance.randrange(requests) for _ in deck)
        for number in range(requests):
            while due and due[0] <= number:
                due.pop(0)
                event = deck.pop(0)
                (getattr(self.faults, event, None) or getattr(self, f"_{event}"))()
            self._send(self._tree.draw(), self._choose_adapter())
            while len(self._running) >= self.config.at_once:
                self._turn()
            for _ in range(self._chance.choice((0, 0, 1, 2, 4))):
                self._turn()
        self._finish()

    def _rest(self) -> None:
        """Without requests nothing is left behind, and new namespaces find nothing."""
        self.faults.end()
        if not self.pod.sidecar.running():
            raise self.failure("the sidecar is not running")
        self._reset_prefix_cache()
        if not self.config.off:
            self._served()
            self._settle()
            wait_for(lambda: self.pod.sidecar.status()["memory"]["leased_bytes"] == 0, 20, "no lease without a load")
            prompt = self._chance.choice(self._tree.prompts)
            self._ask(prompt)
            for kind, fresh in (("salt", {"salt": f"new{self._sent}"}), ("tag", {"tag": f"new{self._sent}"})):
                self._reset_prefix_cache()
                self._must_be_cold(self._ask(prompt, **fresh), f"a new {kind}")
            self._reset_prefix_cache()
        self.faults.collect()
        self.counts.collect_vllm(self.engine)
        if "unexpected error in the KV cache connector" in self.engine.log_text():
            raise self.failure("the connector raised: see the log")

    # -- events that need the engine

    def _reset_prefix_cache(self, *, external: bool = False) -> None:
        self._unshared |= external
        try:
            self.engine.reset(external=external, seconds=RESET_SECONDS)
        except EngineFailed as error:
            raise self.failure(f"blocks stay in use with no request left: {error}") from None

    def _reset(self) -> None:
        self._finish()
        self._note("vLLM's prefix cache is reset")
        self._reset_prefix_cache()
        self.counts.add("resets")

    def _reset_both(self) -> None:
        self._served()
        prompt = self._chance.choice(self._tree.prompts)
        self._ask(prompt)
        self._settle()
        self._note("vLLM's prefix cache and the connector are reset")
        self._reset_prefix_cache(external=True)
        self._must_be_cold(self._ask(prompt), "a reset of the connector")
        self.counts.add("resets_of_both")

    def _reset_while_running(self) -> None:
        self._note(f"the connector is reset while {len(self._running)} requests run")
        self._unshared = True
        self.engine.try_reset(external=True)
        self.counts.add("resets_while_running")

    def _reload_weights(self) -> None:
        self._served()
        prompt = self._chance.choice(self._tree.prompts)
        self._ask(prompt)
        self._settle()
        both = [self.config.model, self.config.other or self.config.model]
        self._weights = both[self._weights == both[0]]
        external = self._chance.random() < 0.3
        self._note(f"weights of {self._weights} are loaded, then the prefix cache is reset, the connector: {external}")
        self._unshared = True
        self.engine.rpc("reload_weights", weights_path=str(model(self._weights)))
        self._reset_prefix_cache(external=external)
        self._must_be_cold(self._ask(prompt), "other weights were loaded")
        self.counts.add("reloads")

    def _replace_adapter(self) -> None:
        """Replaces the weights under the same name, path and number."""
        self._served()
        prompt = self._chance.choice(self._tree.prompts)
        last = [name for name in self._adapters if name.startswith("green")][-1]
        self._ask(prompt, adapter=last)
        self._settle()
        adapter, _ = self._adapters[last]
        self._contents += 1
        self._note(f"adapter {last} is replaced in place by content {self._contents}")
        adapters.write(self.pod.folder / last, self._contents)
        self.engine.load_adapter(adapter, in_place=True)
        self._adapters[last] = adapter, self._contents
        self._reset_prefix_cache()
        self._must_be_cold(self._ask(prompt, adapter=last), "other weights of the adapter were loaded")
        # Its number is not cached from now on. Requests continue with another one, and sometimes this one.
        self._new_adapter(f"green{adapter.number}")
        self.counts.add("adapters_replaced_in_place")

    def _kill_vllm(self) -> None:
        """Kills vLLM with all running requests, loads and stores."""
        self._note(f"vLLM is killed with {len(self._running)} requests")
        self._take_sources()
        self.counts.collect_vllm(self.engine)
        self.counts.add("lost_with_vllm", len(self._running))
        self._running.clear()
        self.engine.kill()
        self.counts.restarted()
        self._start_engine()
        self.counts.add("vllm_killed")

    def _settle(self) -> None:
        self.engine.drain()
        self.pod.settle()

    def _served(self) -> None:
        self._finish()
        self.faults.end()
        # The scheduler's side registers at its first request.
        self._ask(self._prompt(BLOCK * 2))
        wait_attached(self.pod.sidecar)

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(token_ids(tokens, self._chance.randrange(1 << 30)))

    def _hit_partly_local(self) -> None:
        """vLLM holds the beginning of a prompt, and the cache more."""
        self._served()
        prompt = self._prompt(300)
        self._ask(prompt)
        self._settle()
        self._reset_prefix_cache()
        self._ask(prompt[: CHUNK + BLOCK // 2])
        self._ask(prompt)

    def _load_from_disk(self) -> None:
        """Memory is empty, and the disk keeps its content."""
        if not any(self._loads_from_disk() for _ in range(_DISK_TRIES)):
            raise self.failure("nothing is loaded from disk")

    def _loads_from_disk(self) -> bool:
        self._served()
        prompt = self._prompt(300)
        before = self._written_to_disk()
        self._ask(prompt)
        self._settle()
        try:
            wait_for(lambda: self._written_to_disk() >= before + len(prompt) // CHUNK, 10, "the prompt on disk")
        except TimedOut:
            return False  # it was stored before the hashes of the weights were known, and stays in memory
        self._reset_prefix_cache()
        self.faults.restart_cold()
        self._served()
        wait_for(self.pod.sidecar.tiers_ready, 30, "the disk ready")
        asked = self._ask(prompt)
        self._take_sources()
        _, external = self._sources[asked.name]
        self.counts.add("hits_disk", int(external > 0))
        return external > 0

    def _written_to_disk(self) -> float:
        return self.pod.sidecar.metrics().total("kvcachepool_tier_write_chunks", tier="disk", result="stored")

    def _preempt(self) -> None:
        """As many requests as run at once need one block more than exist, each in the middle of its answer."""
        self._finish()
        self._note("requests that do not fit together")
        for _ in range(SEQUENCES):
            self._send(Wanted(self._prompt(4 * BLOCK - 2), MAX_TOKENS, None, None, None), self._usual_adapter)
        self._finish()

    def _restart_under_loads(self) -> None:
        """The sidecar starts with new memory while one load copies and another waits behind it."""
        self._served()
        # Both fit into vLLM's blocks together, also where groups share them.
        prompts = [self._prompt(3 * CHUNK), self._prompt(3 * CHUNK)]
        for prompt in prompts:
            self._ask(prompt)
        self._settle()
        self._reset_prefix_cache()
        self._note("two loads, of which the first takes two seconds")
        self.engine.delay_load(2.0)
        for prompt in prompts:
            # One after another, because loads of one step are copied together.
            loading = self._send(Wanted(prompt, 4, None, None, None), self._usual_adapter).name
            deadline = time.monotonic() + 1
            while loading in self._running and time.monotonic() < deadline:
                if self.engine.states().get(loading) == "WAITING_FOR_REMOTE_KVS":
                    break
                self._turn()
        self.faults.restart_cold()
        self._finish()
