"""vLLM's scheduler-side hooks. Each calls the owners of the state that it changes.

`lookups` answers polls, and `loads` and `stores` own the transfers in flight. `session` creates them, and changes them
for events that affect all requests. Dependencies have one direction: no part imports this module.

Threads: the engine's (all hooks), the input thread (`arrive`: the early PROBE), the client's reader (responses, HELLO),
one that sends what is not urgent (`Reporter`), two that read the files of LoRA adapters. One lock guards all state. It
is never held while waiting or during a file system call. Only the engine thread calls the block pool.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import provenance
from .controls import parse_controls
from .jobs import StepMetadata, WorkerReport
from .lookups import POLL_AGAIN
from .metrics import CacheStats, hit_sources
from .preflight import is_composed
from .requests import RequestState
from .session import Session

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: A preprocessed request that vLLM never added is dropped after this time.
_ORPHAN_S = 60.0


class Scheduler:
    """One per EngineCore. Before the first HELLO response every lookup is a miss with the reason `unconnected`."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, socket_path: str, engine_version: str
    ) -> None:
        self.session = session = Session(vllm_config, kv_cache_config, socket_path, engine_version)
        self._lock = session.lock
        self._client = session.client
        self._lookups = session.lookups
        self._loads = session.loads
        self._stores = session.stores
        self._namespaces = session.namespaces
        self._local_cache = session.local_cache
        self._speed = session.speed
        self._states = session.requests
        self._swept_s = time.monotonic()
        #: Requests that were polled since the last step and found to be preempted.
        self._resuming: set[str] = set()
        self._role = vllm_config.kv_transfer_config.kv_role
        self._composed = is_composed(vllm_config.kv_transfer_config)
        #: Requests that got blocks since the last step, beside another connector, with the tokens whose KV is known.
        self._admitted: list[tuple[Request, RequestState, int]] = []

    # -- a request

    def arrive(self, request: Request) -> None:
        """Sends the early PROBE, from the input thread or the engine's. A known request keeps its state."""
        with self._lock:
            state = self._states.get(request.request_id)
            if state is None:
                self._lookups.probe_early(self._add(request))
            elif request is not state.request:
                provenance.proven(request)  # more input of a session: remember its item names

    def on_new_request(self, request: Request) -> None:
        self.arrive(request)
        with self._lock:
            state = self._states[request.request_id]
            state.request = request
            state.attached = True

    def _add(self, request: Request) -> RequestState:
        controls = parse_controls(getattr(request, "kv_transfer_params", None))
        if self._role == "kv_producer":
            controls = replace(controls, load=False)
        elif self._role == "kv_consumer":
            controls = replace(controls, store=False)
        state = RequestState(request, controls, time.monotonic())
        state.decode = self._client.settings.save == "PromptAndDecode"
        for name in state.controls.ignored:
            self.session.counters.event(f"parameter_ignored/{name}")
        self._states[request.request_id] = state
        if request.lora_request is not None:
            self.session.adapter_named(request.lora_request)
        self._namespaces.assign(state)
        return state

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Tokens beyond `local` that will be loaded asynchronously; None = poll again."""
        state = self._states.get(request.request_id)
        if state is None:
            with self._lock:
                state = self._add(request)
        elif state.holds_blocks:
            # vLLM polls only requests without blocks. It tells of a preemption by `reset_running_requests` with the
            # step in which the request resumes.
            with self._lock:
                self._preempted(request.request_id)
                self._resuming.add(request.request_id)
        elif (pending := state.pending_poll) is not None and self._lookups.is_unchanged(state, pending, local):
            return POLL_AGAIN
        return self._lookups.poll(state, local)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM has allocated blocks for `tokens` external tokens (fewer than promised, or none), or after the load."""
        with self._lock:
            state = self._states.get(request.request_id)
            if state is None:
                if tokens:
                    self._loads.fail_load(request.request_id)
                return
            if self._composed and not state.holds_blocks:
                self._admitted.append((request, state, state.local + tokens))
            plan, state.plan = state.plan, None
            state.holds_blocks = True
            if self._local_cache.outdated and state.local:
                state.stale = True
            self._lookups.learn_present(state)
            if not tokens and request.lora_request is not None:
                self._namespaces.mark_read(request.lora_request)
            if tokens > 0:
                state.hit_tiers = self._loads.begin(state, plan, blocks.get_block_ids(), tokens)
                state.loading = True
            if not state.counted:
                self._count(state, tokens)
            self._lookups.end(state)

    def _count(self, state: RequestState, tokens: int) -> None:
        """Counts the request's admission, once."""
        state.counted = True
        requested = max(0, state.request.num_prompt_tokens - state.local)
        missed = [(reason, requested if count == math.inf else int(count)) for reason, count in state.missed]
        self.session.counters.admitted(requested, state.hit_tiers if tokens else {}, missed)

    def sources(self, request: Request, tokens: int) -> dict[Any, int]:
        """vLLM's hit sources of a load that was just planned."""
        with self._lock:
            state = self._states.get(request.request_id)
            return hit_sources(state.hit_tiers if state is not None else {}, tokens)

    def fail_load(self, request_id: str) -> None:
        """vLLM waits for a load that could not be planned, so it is reported as failed."""
        with self._lock:
            self._loads.fail_load(request_id)

    def finished(self, request_id: str) -> None:
        """The request has ended in any way. A load in flight keeps its lease until all ranks have reported it."""
        with self._lock:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is None:
            return
        if state.loading:
            self._loads.forget(request_id)
        self._lookups.end(state)

    # -- a step

    def step(self, output: SchedulerOutput) -> None:
        """Ends a `schedule()` and starts stores. Jobs stay queued until `ship` moves them, so a failed step loses
        none.
        """
        now_s = time.monotonic()
        with self._lock:
            self._speed.due = 0
            self._find_foreign()
            if self.session.nodes is not None:
                self.session.nodes.deliver()
                self.session.registration.ensure()
            self._lookups.new_step(self._is_idle(output))
            resuming, self._resuming = self._resuming, set()
            for request_id in output.preempted_req_ids or ():
                if request_id not in resuming:
                    self._preempted(request_id)
            self._stores.process(now_s, self.session.grant_timeout_s())
            if now_s - self._swept_s > _ORPHAN_S:
                self._sweep(now_s)
            # Before the GRANTs: a chunk that is still being fetched exists already, and would not be stored.
            self._lookups.send_releases()
            scheduled = output.num_scheduled_tokens
            if scheduled:
                self._stores.offer_step(scheduled, self._states, now_s)
                self._speed.step(now_s, scheduled, output.total_num_scheduled_tokens, self._states)

    def _find_foreign(self) -> None:
        """Finds requests of which another connector has loaded KV, or will. A peer may have computed it with another
        revision, dtype or adapter, so neither it nor what follows it is stored under this engine's identity.

        vLLM's own prefix cache gets such blocks with the request's next step, or has them already.
        """
        admitted, self._admitted = self._admitted, []
        foreign = [(request, state) for request, state, known in admitted if request.num_computed_tokens > known]
        if not foreign:
            return
        self._local_cache.outdated = True
        # Blocks of a load that still runs are not in vLLM's own cache yet.
        cached = any(request.status.name != "WAITING_FOR_REMOTE_KVS" for request, _ in foreign)
        behind = [state for _, state, _ in admitted if cached and state.local]
        for state in (*(state for _, state in foreign), *behind):
            state.stale = True

    def _is_idle(self, output: SchedulerOutput) -> bool:
        """Whether the step computes nothing, and nothing is in flight that needs further steps."""
        return not (
            output.total_num_scheduled_tokens
            or self._stores.pending
            or any(state.holds_blocks for state in self._states.values())
        )

    def _preempted(self, request_id: str) -> None:
        """vLLM freed the request's blocks. Sends the PROBE for its resumption."""
        state = self._states.get(request_id)
        if state is None:
            return
        state.plan = None
        self._lookups.consume(state)
        self._namespaces.restart(state)
        self._lookups.probe_early(state)

    def _sweep(self, now_s: float) -> None:
        self._swept_s = now_s
        for request_id, state in list(self._states.items()):
            if not state.attached and not state.counted and now_s - state.created_s > _ORPHAN_S:
                self._end(request_id)

    def ship(self, metadata: StepMetadata) -> None:
        """Moves all queued jobs into the metadata of a step. It also runs after a failed `step`, because vLLM waits
        indefinitely for a promised load, and stores hold blocks until all ranks have ended them.
        """
        with self._lock:
            self._loads.take(metadata.jobs, metadata.forget)
            self._stores.take(metadata.jobs)
            metadata.timed, self._speed.due = self._speed.due, 0
            if self.session.nodes is not None:
                metadata.passed = self.session.nodes.take()

    def output(self, output: KVConnectorOutput) -> None:
        """Processes the workers' reports, aggregated over all ranks. After an exception it is called again, and
        does not count reports twice.
        """
        with self._lock:
            report = output.kv_connector_worker_meta
            if not isinstance(report, WorkerReport):
                report = WorkerReport()
            if report.adapters_changed:
                self.session.adapters_changed(report.adapters_changed)
            failed = set(output.failed_recving or ())
            if output.invalid_block_ids:
                failed |= self._loads.writing(output.invalid_block_ids)
            finished = output.finished_recving or set()
            for request_id in self._loads.withhold_outdated(finished, failed, self._states):
                self._lookups.release(request_id)
                self._loads.fail_load(request_id, self._loads.tokens(request_id))
            for request_id in finished:
                self._load_ended(request_id, request_id in failed)
            for node, reports in report.nodes.items():
                if self.session.nodes is not None:
                    self.session.nodes.reported(node, reports)
            self._stores.ended(report.stores)
            self._speed.ended(time.monotonic(), report.timed)

    def _load_ended(self, request_id: str, failed: bool) -> None:
        if request_id not in self._loads:
            return
        self._lookups.release(request_id)
        state = self._states.get(request_id)
        self._loads.ended(request_id, state, failed)
        if failed and state is not None:
            self._namespaces.restart(state)

    def is_busy(self) -> bool:
        """An idle engine must keep stepping: stores hold blocks, loads write blocks, leases have ended, or KV events
        are to be published.
        """
        with self._lock:
            parts = (self._stores, self._loads, self._lookups, self.session.reporter, self.session.nodes)
            return any(part.pending for part in parts if part is not None)

    # -- vLLM's numbers

    def stats(self) -> CacheStats | None:
        """Stats since the last call."""
        return self.session.counters.take_stats()

    def events(self) -> list[Any]:
        """KV events since the last call."""
        return self.session.reporter.events(self._local_cache.pool)
