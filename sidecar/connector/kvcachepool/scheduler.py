"""The scheduler side: what vLLM's scheduler is told about the cache, and what is done for it.

Threads: the engine's (all hooks), the input thread (`arrive`: the early PROBE), the client's reader (answers, HELLO),
one that sends what has time (`Telling`), two that look at the files of LoRA adapters. One lock guards all state; it is
never held while waiting, nor over a file system call. Block pool calls happen on the engine thread only.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from . import keys, provenance
from .adapters import CONTENT_UNKNOWN, Adapters
from .client import Client, Held, Reply
from .controls import Uncacheable, namespace, parse_controls
from .jobs import StepMetadata, WorkerReport
from .keys import Chunks, Geometry
from .kv_events import event_group
from .loads import Loads
from .local_hits import held_by
from .lookups import STALE_AFTER_S, Heard, Lookup, Patience, Plan, unasked, weigh
from .messages import HelloReply, Probe, Register, Release
from .metrics import CacheStats, Counters, hit_sources
from .prefill import PrefillSpeed
from .requests import Hold, RequestState
from .stores import MAX_CHUNKS_PER_STEP, Stores
from .telling import Telling
from .wire import Op

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvcachepool")

_NOTHING: tuple[int, bool] = (0, False)
_ASK_AGAIN: tuple[None, bool] = (None, False)
#: A preprocessed request that vLLM never added is forgotten after this.
_ORPHAN_S = 60.0


class Scheduler:
    """One per EngineCore. `start` connects; before HELLO's answer every lookup is a miss by reason `unconnected`."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, socket_path: str, engine_version: str
    ) -> None:
        """Raises `layout.Unserved` where a KV group cannot be served."""
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._lock = threading.RLock()
        self._algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        transfer = vllm_config.kv_transfer_config
        instance = str((transfer.engine_id if transfer is not None else None) or "")
        self._client = Client("scheduler", instance, 0, engine_version, socket_path, self)
        self._world = int(vllm_config.parallel_config.world_size)
        self._geometry = keys.geometry(vllm_config, kv_cache_config, self._client.settings.chunk_tokens)
        self._counters = Counters()
        self._patience = Patience()
        self._speed = PrefillSpeed()
        job_ids = itertools.count(1)
        self._loads = Loads(self._client, job_ids)
        events = vllm_config.kv_events_config
        wanted = events is not None and events.enable_kv_cache_events
        group = event_group(kv_cache_config, self._geometry) if wanted else None
        self._telling = Telling(self._client, self._counters, group, self._ask_anew)
        self._stores = Stores(self._client, self._lock, self._counters, self._world, job_ids, self._telling.note)
        self._adapters = Adapters(self._adapter_known)
        self._states: dict[str, RequestState] = {}
        self._unnamed: dict[str, None] = {}  # requests whose early PROBE waits for their adapter's content
        self._release: dict[str, None] = {}  # requests, in order, whose RELEASE goes out with the step
        self._epoch = ""
        self._idle = False  # the last step computed nothing, and nothing is under way that further steps move on
        self._old_local = False  # vLLM's own prefix cache may hold KV of earlier weights
        self._version = 0  # changes with what all requests that wait depend on: connection, epoch
        self._registered_on = 0  # connection that REGISTER went out on
        self._aged: deque[tuple[RequestState, Lookup]] = deque()  # to be asked for anew, by the telling thread
        self._swept_s = time.monotonic()
        self._timed = 0  # number of the step that `ship` is about to send, where it is timed
        self._pool: Any = None

    def start(self) -> None:
        """Connects in the background."""
        self._client.start()
        self._telling.start()

    def bind(self, manager: KVCacheManager) -> None:
        """Takes vLLM's block tables and block pool."""
        with self._lock:
            self._pool = manager.block_pool
            self._stores.bind(manager)

    @property
    def counters(self) -> Counters:
        """What is counted, for hooks that fail outside of this class."""
        return self._counters

    # -- arrival

    def arrive(self, request: Request) -> None:
        """The early PROBE, from the input thread or the engine's; a request that is known already keeps its state."""
        with self._lock:
            state = self._states.get(request.request_id)
            if state is None:
                self._probe_early(self._add(request))
            elif request is not state.request:
                provenance.proven(request)  # more input of a session: names are remembered

    def _probe_early(self, state: RequestState) -> None:
        """The PROBE before the first poll; where the adapter's content is not known yet, once it is."""
        if self._why_not(state) is None:
            self._probe(state, self._held_locally(state))
        elif state.refusal == CONTENT_UNKNOWN:
            self._unnamed[state.request.request_id] = None

    def _adapter_known(self, path: str) -> None:
        """The content of an adapter is known, on the thread that looked at its files."""
        with self._lock:
            for request_id in list(self._unnamed):
                state = self._states.get(request_id)
                if state is not None and state.request.lora_request.lora_path != path:
                    continue
                del self._unnamed[request_id]
                if state is not None and not state.holds_blocks and state.lookup is None and state.asked is None:
                    self._probe_early(state)

    def on_new_request(self, request: Request) -> None:
        """vLLM's scheduler has added a request."""
        self.arrive(request)
        with self._lock:
            state = self._states[request.request_id]
            state.request = request
            state.attached = True

    def _add(self, request: Request) -> RequestState:
        state = RequestState(request, parse_controls(getattr(request, "kv_transfer_params", None)), time.monotonic())
        state.decode = self._client.settings.save == "PromptAndDecode"
        for name in state.controls.ignored:
            self._counters.event(f"parameterIgnored/{name}")
        self._states[request.request_id] = state
        lora = request.lora_request
        if lora is not None:
            self.adapter_loaded(lora)
        self._name(state)
        return state

    def adapter_loaded(self, lora: Any) -> None:
        """vLLM is about to load this adapter, or to make sure that it is loaded. Requests that run with the weights it
        replaces are not cached from here on.
        """
        with self._lock:
            if not self._adapters.loaded(lora):
                return
            self._version += 1
            for request_id, state in self._states.items():
                mine = state.request.lora_request
                if mine is not None and mine.lora_int_id == lora.lora_int_id:
                    self._name(state)
                    self._loads.outdate([request_id])

    def _name(self, state: RequestState) -> None:
        """Gives the request its namespace, or the reason why it is not cached."""
        try:
            digest = functools.partial(self._adapters.digest, since_s=state.since_s)
            state.namespace = namespace(state.request, state.controls, self._epoch, digest)
            state.refusal = ""
            self._telling.serve(state.namespace, state.request.lora_request, state.controls.tags)
        except Uncacheable as reason:
            state.namespace = None
            state.refusal = str(reason)

    def _held_locally(self, state: RequestState) -> int | None:
        """A hint of what the engine holds itself, in tokens; None = unknown."""
        if self._pool is None or len(self._geometry.groups) != 1:
            return None
        return held_by(self._pool, state.request.block_hashes, self._geometry)

    # -- PROBE

    def _why_not(self, state: RequestState) -> str | None:
        """Why this request cannot load anything now; None = it can."""
        if state.failed:
            return "failedBefore"
        if state.request.skip_reading_prefix_cache:
            return "skipReadingPrefixCache"
        if state.namespace is None:
            self._name(state)
            if state.namespace is None:
                return state.refusal
        if state.request.num_tokens < max(self._geometry.scheduler_block, self._client.settings.min_load_tokens):
            return "short"
        if not self._registered():
            return "unconnected"
        return None

    def _registered(self) -> bool:
        """Whether PROBEs and GRANTs are behind a REGISTER on this connection; sends it where it is time."""
        client = self._client
        if not client.connected:
            return False
        if self._registered_on == client.connection:
            return True
        hashing = keys.hashing(self._algorithm, self._geometry.hash_block)
        if hashing is None:
            return False
        body = Register(
            world=self._world,
            local_world=int(getattr(self._config.parallel_config, "local_world_size", 0) or self._world),
            scheduler_block_tokens=self._geometry.scheduler_block,
            chunk_tokens=self._geometry.chunk,
            hashing=hashing,
        )
        if client.ask(Op.REGISTER, body, self._on_registered) is None:
            return False
        self._registered_on = client.connection
        self._telling.ask_events(client.connection)
        return True

    def _on_registered(self, reply: Reply) -> None:
        if reply.error is not None:
            self._counters.event(f"registerRefused/{reply.error.code}")
            logger.warning("the sidecar refused this engine: %s: %s", reply.error.code, reply.error.message)

    def _probe(self, state: RequestState, local: int | None) -> None:
        """Sends a PROBE; its answer will replace that of the request's earlier one."""
        request = state.request
        chunks = Chunks(self._geometry, request.num_tokens)
        if request.num_tokens > request.num_prompt_tokens:
            prompt = Chunks(self._geometry, request.num_prompt_tokens)
            if prompt.full == chunks.full:
                chunks = prompt
        try:
            hashes = keys.packed_hashes(self._geometry, chunks, request.block_hashes)
        except IndexError:
            self._counters.event("hashesMissing")
            return
        if not hashes or len(hashes) != len(chunks) * keys.HASH_BYTES:
            return
        lookup = Lookup(self._geometry, chunks, hashes, request.num_tokens, local, self._client.connection, self._epoch)
        now_s = time.monotonic()
        budget_s = state.deadline_s - now_s if state.deadline_s else self._client.settings.load_timeout_ms / 1000
        body = Probe(
            request=request.request_id,
            hashes=hashes,
            namespace=state.namespace or b"",
            tail_tokens=chunks.tail_tokens,
            local_tokens=local,
            budget_ms=max(1, int(budget_s * 1000)),
            max_load_tokens=state.controls.max_load_tokens,
            prefill_tokens_per_s=self._speed.tokens_per_s,
        )
        if request.request_id in self._release:
            self._send_releases()  # it ends what was asked before, not this
        lookup.tag = self._client.ask(Op.PROBE, body, lookup.on_reply)
        if lookup.tag is None:
            return
        if state.asked is not None and state.asked.tag is not None:
            self._client.drop(state.asked.tag)
        state.asked = lookup

    def _usable(self, state: RequestState, now_s: float) -> Lookup | None:
        """The request's lookup, unless it is of another connection, epoch or prompt, or too old."""
        asked = state.asked
        if asked is not None and (
            asked.heard is not None or state.lookup is None or not self._fits(state, state.lookup, now_s)
        ):
            state.lookup, state.asked = asked, None
        lookup = state.lookup
        return lookup if lookup is not None and self._fits(state, lookup, now_s) else None

    def _fits(self, state: RequestState, lookup: Lookup, now_s: float) -> bool:
        return not (
            lookup.tag is None
            or lookup.connection != self._client.connection
            or lookup.epoch != self._epoch
            or lookup.geometry is not self._geometry
            or now_s - (lookup.heard.arrived_s if lookup.heard is not None else lookup.sent_s) > STALE_AFTER_S
            or not lookup.matches(state.request.block_hashes, state.request.num_tokens)
        )

    # -- vLLM asks

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Tokens beyond `local` that will be loaded asynchronously; None = ask again."""
        state = self._states.get(request.request_id)
        if state is not None and state.hold is not None and self._unchanged(state, state.hold, local):
            came = self._rest(state, state.hold)
            if not came:
                return _ASK_AGAIN
        version = self._version
        with self._lock:
            state = state or self._add(request)
            if self._old_local:
                self._look_for_reset()
            state.hold = None
            state.local = local
            state.plan = None
            why = self._why_not(state)
            if why == CONTENT_UNKNOWN and self._adapters.soon(state.request.lora_request):
                return _ASK_AGAIN
            if why is not None:
                state.missed = ((why, math.inf),)
                return _NOTHING
            now_s = time.monotonic()
            lookup = self._usable(state, now_s)
            if lookup is None:
                state.first_poll_s = state.deadline_s = 0.0
                self._probe(state, local)
                lookup = self._usable(state, now_s)
            if lookup is None:
                state.missed = (("unconnected", math.inf),)
                return _NOTHING
            first = not state.first_poll_s
            if first:
                state.first_poll(now_s, self._client.settings.load_timeout_ms / 1000)
            settings = self._client.settings
        if first and lookup.heard is None:
            self._patience.wait(lookup, settings.first_poll_wait_us / 1e6, settings.step_wait_us / 1e6)
        with self._lock:
            heard = lookup.heard
            decided = self._decide(state, lookup, heard, local)
            if decided is _ASK_AGAIN:
                arrived_s = heard.arrived_s if heard is not None else 0.0
                renew_s = math.inf if lookup.renewed else arrived_s + lookup.renew_after_s
                until_s = min(state.deadline_s, renew_s)
                state.hold = Hold(local, version, heard, state.blocker, until_s)
            return decided

    def _unchanged(self, state: RequestState, hold: Hold, local: int) -> bool:
        """Whether a poll would be decided as the last one: the common case of a queue that waits."""
        lookup, asked = state.lookup, state.asked
        return (
            hold.version == self._version
            and hold.local == local
            and lookup is not None
            and lookup.heard is hold.heard
            and (asked is None or asked.heard is None)
            and (not hold.blocker or hold.blocker in self._loads)
            and time.monotonic() < hold.until_s
        )

    def _rest(self, state: RequestState, hold: Hold) -> bool:
        """Where vLLM has nothing else to do, waits for what the request waits for. Whether something came."""
        lookup = state.asked or state.lookup
        known = lookup.heard if lookup is not None else None
        if not self._idle or hold.blocker or lookup is None or known is None or known.final:
            return False
        return self._patience.rest(lookup, known)

    def _decide(self, state: RequestState, lookup: Lookup, heard: Heard | None, local: int) -> tuple[int | None, bool]:
        if heard is None:
            if self._patience.may_be_late(state.first_poll_s):
                return _ASK_AGAIN
            state.missed = (("unanswered", math.inf),)
            return _NOTHING
        self._patience.answered()
        answer = heard.answer
        if answer is None or heard.error:
            state.missed = ((heard.error or "refused", math.inf),)
            return _NOTHING
        state.blocker = ""
        worth = weigh(lookup, answer, local, self._load_limit(state, local))
        plan, settings, now_s = worth.ready, self._client.settings, time.monotonic()
        left_ms = (state.deadline_s - now_s) * 1000
        in_time = left_ms > 0 and answer.pending_ms <= left_ms
        end, why = worth.pending_end, answer.declined
        if end - worth.held_end < settings.min_load_tokens:
            end, why = worth.held_end, "minLoadTokens"  # lower tiers are left alone for so little
        longer = end > plan.end and end - local >= settings.min_load_tokens
        left = worth.pending_end - max(plan.end, worth.held_end) if why else 0
        # The early PROBE fetches nothing, or not enough; what memory holds it waits for by itself.
        more = longer and end > worth.held_end if lookup.local is None else unasked(lookup, answer, local)
        if more and in_time and state.asked is None:
            self._probe(state, local)
        self._renew(state, lookup, now_s - heard.arrived_s)
        if in_time and ((longer and not heard.final) or ((longer or more) and state.asked is not None)):
            return _ASK_AGAIN
        if plan.tokens and left_ms > 0:
            state.blocker = self._loads.loader_of(state, lookup.hash_of(plan.first))
        return _ASK_AGAIN if state.blocker else self._take(state, plan, why, left)

    def _take(self, state: RequestState, plan: Plan, why: str, left: int) -> tuple[int, bool]:
        """Promises a hit, if it is worth it. `left` tokens behind it stay in a lower tier, and `why`."""
        state.missed = ((why, left),) if left > 0 else ()
        if plan.tokens <= 0:
            return _NOTHING
        if plan.tokens < self._client.settings.min_load_tokens:
            state.missed = (("minLoadTokens", plan.tokens), *state.missed)
            return _NOTHING
        state.plan = plan
        return plan.tokens, True

    def _renew(self, state: RequestState, lookup: Lookup, age_s: float) -> None:
        """Soft pins expire: a request that still waits asks again in the background, and goes on with what it knows."""
        if state.asked is None and not lookup.renewed and age_s > lookup.renew_after_s:
            lookup.renewed = True
            self._aged.append((state, lookup))

    def _ask_anew(self) -> None:
        """PROBEs of requests whose answers have aged. A frame that wakes the sidecar costs the kernel some 0.1 ms, and
        these have time: the engine's thread does not wait for them, nor for more than one at once.
        """
        while self._aged:
            with self._lock:
                state, lookup = self._aged.popleft()
                alive = self._states.get(state.request.request_id) is state
                if alive and state.lookup is lookup and state.asked is None:
                    self._probe(state, state.local)
            time.sleep(0.001)

    def _load_limit(self, state: RequestState, local: int) -> int:
        tokens: int = state.request.num_tokens
        most = state.controls.max_load_tokens
        if most is not None and local + most < tokens:
            tokens = (local + most) // self._geometry.scheduler_block * self._geometry.scheduler_block
        return tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM has allocated blocks for `tokens` external tokens (fewer than promised, or none), or after the load."""
        with self._lock:
            state = self._states.get(request.request_id)
            if state is None:
                if tokens:
                    self._loads.doom(request.request_id)
                return
            plan, state.plan = state.plan, None
            state.holds_blocks = True
            if self._old_local and state.local:
                state.stale = True
            self._known_to_exist(state)
            if tokens > 0:
                state.hit_tiers = self._loads.begin(state, plan, blocks.get_block_ids(), tokens)
                state.loading = True
            if not state.counted:
                self._count(state, tokens)
            if not tokens and not state.loading and (state.lookup is not None or state.asked is not None):
                self._release[request.request_id] = None
            self._consume(state)

    def _consume(self, state: RequestState) -> None:
        """Answers are used once: the request's next poll asks anew."""
        if state.asked is not None and state.asked.tag is not None:
            self._client.drop(state.asked.tag)
        state.lookup = state.asked = None
        state.first_poll_s = state.deadline_s = 0.0

    def _known_to_exist(self, state: RequestState) -> None:
        """Chunks that the sidecar has need no GRANT (those with windows may lack sections)."""
        lookup = state.lookup
        answer = lookup.heard.answer if lookup is not None and lookup.heard is not None else None
        if lookup is None or answer is None or lookup.geometry is not self._geometry or lookup.epoch != self._epoch:
            return
        if not self._geometry.has_windows:
            state.progress.mark_present(answer, lookup.chunks.full)
        self._telling.learn(state.request, lookup, answer.states)

    def _count(self, state: RequestState, tokens: int) -> None:
        """Counts the request's admission, once."""
        state.counted = True
        requested = max(0, state.request.num_prompt_tokens - state.local)
        missed = [(reason, requested if count == math.inf else int(count)) for reason, count in state.missed]
        self._counters.admitted(requested, state.hit_tiers if tokens else {}, missed)

    def sources(self, request: Request, tokens: int) -> dict[Any, int]:
        """vLLM's hit sources of a load that was just planned."""
        with self._lock:
            state = self._states.get(request.request_id)
            return hit_sources(state.hit_tiers if state is not None else {}, tokens)

    # -- a step

    def step(self, output: SchedulerOutput) -> None:
        """Ends a `schedule()`: stores begin here. Jobs stay queued until `ship` takes them, so a step that fails loses
        none.
        """
        now_s = time.monotonic()
        with self._lock:
            self._timed = 0
            self._patience.new_step()
            self._idle = not (
                output.total_num_scheduled_tokens
                or self._stores.pending
                or any(state.holds_blocks for state in self._states.values())
            )
            for request_id in output.preempted_req_ids or ():
                self._preempted(request_id)
            settings = self._client.settings
            self._stores.process(now_s, settings.grant_timeout_ms / 1000)
            if output.num_scheduled_tokens:
                self._offer(output.num_scheduled_tokens, now_s)
                self._timed = self._time(now_s, output.num_scheduled_tokens, output.total_num_scheduled_tokens)
            if now_s - self._swept_s > _ORPHAN_S:
                self._sweep(now_s)
            self._send_releases()

    def ship(self, metadata: StepMetadata) -> None:
        """Moves all queued jobs into the metadata of a step. vLLM waits for a promised load for ever, and blocks are
        held for a store until all ranks have ended it: so this also runs where `step` failed.
        """
        with self._lock:
            self._loads.take(metadata.jobs, metadata.forget)
            self._stores.take(metadata.jobs)
            metadata.timed, self._timed = self._timed, 0

    def _time(self, now_s: float, scheduled: dict[str, int], all_tokens: int) -> int:
        """Times a step that computes prompts. Returns its number, 0 = it is not timed."""
        tokens = 0
        if all_tokens <= 2 * len(scheduled):
            return 0  # decode
        for request_id, count in scheduled.items():
            state = self._states.get(request_id)
            if state is not None and state.request.num_computed_tokens + count <= state.request.num_prompt_tokens:
                tokens += count
        return self._speed.began(now_s, tokens, all_tokens)

    def _send_releases(self) -> None:
        """One RELEASE for all requests that need one; what no connection takes, the next HELLO does not name."""
        if self._release:
            self._client.send(Op.RELEASE, Release(requests=list(self._release)))
            self._release.clear()

    def _offer(self, scheduled: dict[str, int], now_s: float) -> None:
        settings = self._client.settings
        tokens = 2 * int(self._config.scheduler_config.max_num_batched_tokens)
        bound = max(settings.store_bytes_in_flight, tokens * self._geometry.token_bytes * self._world)
        room = MAX_CHUNKS_PER_STEP
        states = self._states
        for request_id, count in scheduled.items():
            state = states.get(request_id)
            if state is None:
                continue
            request = state.request
            if request.num_prompt_tokens != state.prompt_tokens:
                state.new_prompt(request.num_prompt_tokens)
                self._name(state)  # a session may have got an image that a user named
            end = min(request.num_computed_tokens + count, request.num_tokens)
            if state.stale or state.loading or not state.controls.store:
                continue
            if end < state.progress.next_end or now_s < state.progress.retry_s:
                continue
            if state.namespace is None:
                self._name(state)
            if room <= 0 or state.namespace is None or not self._registered():
                continue
            room -= self._stores.offer(request_id, state, end, self._geometry, bound, room)

    def _preempted(self, request_id: str) -> None:
        """Its blocks are gone; what it will ask for when it resumes is asked for now."""
        state = self._states.get(request_id)
        if state is None:
            return
        state.plan = None
        self._consume(state)
        self._begin_anew(state)
        self._probe_early(state)

    def _begin_anew(self, state: RequestState) -> None:
        """The request holds no blocks: what it will hold is of the present epoch, and is stored from the beginning."""
        state.holds_blocks = state.stale = False
        state.forget_stores()
        state.since_s = time.monotonic()
        self._name(state)

    def _sweep(self, now_s: float) -> None:
        self._swept_s = now_s
        for request_id, state in list(self._states.items()):
            if not state.attached and not state.counted and now_s - state.created_s > _ORPHAN_S:
                self._end(request_id)

    def output(self, output: KVConnectorOutput) -> None:
        """What the workers reported, aggregated over all ranks. After an exception it is called once more: what was
        taken note of is not counted twice.
        """
        with self._lock:
            failed = set(output.failed_recving or ())
            if output.invalid_block_ids:
                failed |= self._loads.writing(output.invalid_block_ids)
            self._fail_outdated(output, failed)
            for request_id in output.finished_recving or ():
                self._load_ended(request_id, request_id in failed)
            report = output.kv_connector_worker_meta
            if isinstance(report, WorkerReport):
                self._stores.ended(report.stores)
            self._speed.ended(time.monotonic(), report.timed if isinstance(report, WorkerReport) else 0)

    def _fail_outdated(self, output: KVConnectorOutput, failed: set[str]) -> None:
        """Loads that went well, of KV that must not be used any more. vLLM has looked for failures already: it hears of
        such a load when it has ended once more, as one.
        """
        for request_id in self._loads.outdated & (output.finished_recving or set()) - failed:
            if request_id in self._states:
                self._loads.again.add(request_id)
                output.finished_recving.discard(request_id)
        for request_id in tuple(self._loads.again):
            self._release[request_id] = None
            self._loads.doom(request_id, self._loads.tokens(request_id))

    def _load_ended(self, request_id: str, failed: bool) -> None:
        if request_id not in self._loads:
            return
        self._release[request_id] = None
        tokens = self._loads.ended(request_id)
        state = self._states.get(request_id)
        if state is not None:
            state.loading = False
        if failed:
            self._counters.load_failed(tokens)
            if state is not None:
                state.failed = True
                self._begin_anew(state)

    def finished(self, request_id: str) -> None:
        """The request has ended in any way. A load under way keeps its lease until all ranks have reported it."""
        with self._lock:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is None:
            return
        self._unnamed.pop(request_id, None)
        if state.loading:
            self._loads.forget(request_id)
        elif state.lookup is not None or state.asked is not None:
            self._consume(state)
            self._release[request_id] = None

    def recover(self) -> None:
        """A hook has failed half-way: nothing is trusted that is not written down elsewhere. Requests that are here
        load and store nothing any more; stores that the workers do not have are given up.
        """
        with self._lock:
            self._version += 1
            for request_id, state in self._states.items():
                state.plan = state.hold = state.lookup = state.asked = None
                state.failed = state.stale = True
                state.loading = request_id in self._loads
            self._stores.give_up()
            self._send_releases()

    def turn_off(self, reason: str) -> None:
        """Ends the session with the sidecar: lookups are misses from now on, nothing is stored. What workers have goes
        on to its end."""
        threading.Thread(target=self._client.go_off, args=(reason,), name="kvcachepool-off", daemon=True).start()

    def doom(self, request_id: str) -> None:
        """vLLM waits for a load that could not be planned: it is reported as failed."""
        with self._lock:
            self._loads.doom(request_id)

    def is_busy(self) -> bool:
        """An idle engine must go on stepping: blocks are held for stores or written by loads, leases have ended, or KV
        events are to be published.
        """
        with self._lock:
            return self._stores.pending or self._loads.pending or bool(self._release) or self._telling.pending

    def reset(self) -> None:
        """A fresh epoch: nothing that was cached before is found, or kept under its name, by this process any more."""
        with self._lock:
            self._draw_epoch()

    def weights_changed(self, what: str) -> None:
        """A fresh epoch, because the engine computes with other weights from here on. vLLM's own prefix cache may go on
        with KV of the old ones: what is computed behind that is not stored.
        """
        with self._lock:
            self._counters.event(f"epoch/{what}")
            self._old_local = True
            self._draw_epoch()

    def _draw_epoch(self) -> None:
        self._epoch = os.urandom(16).hex()
        self._version += 1
        self._telling.forget()
        self._loads.outdate(self._loads.request_ids())
        for state in self._states.values():
            state.plan = None
            self._consume(state)
            if state.holds_blocks:
                state.stale = True
            else:
                self._begin_anew(state)
        self._stores.give_up()

    def _look_for_reset(self) -> None:
        """vLLM's own prefix cache holds nothing from before a change of weights once it was empty, and no request that
        ran then is left."""
        cached = getattr(self._pool, "cached_block_hash_to_block", None)
        if cached is not None and not len(cached) and not any(state.stale for state in self._states.values()):
            self._old_local = False

    def shutdown(self) -> None:
        """Ends all threads and the connection."""
        self._telling.stop()
        self._client.go_off("Shutdown")
        self._adapters.close()

    # -- vLLM's numbers

    def stats(self) -> CacheStats | None:
        """Stats since the last call."""
        return self._counters.take_stats()

    def events(self) -> list[Any]:
        """KV events since the last call."""
        return self._telling.events(self._pool)

    # -- client.Hooks, on the reader thread

    def held(self, region: int | None) -> Held:
        """Requests whose leases go on: those with a load under way."""
        with self._lock:
            return Held(requests=self._loads.request_ids())

    def behind_hello(self) -> None:
        """Every GRANT that the last connection left unanswered is aborted."""
        with self._lock:
            self._stores.repeat_aborts()

    def on_hello(self, reply: HelloReply) -> None:
        """Takes the settings; another chunk size makes all that is known of requests worthless."""
        with self._lock:
            chunk = keys.effective_chunk_tokens(reply.settings.chunk_tokens, self._geometry.scheduler_block)
            if chunk != self._geometry.chunk:
                self._geometry = Geometry(
                    self._geometry.scheduler_block, self._geometry.hash_block, chunk, self._geometry.groups
                )
                for state in self._states.values():
                    self._consume(state)
                    state.forget_stores()
            self._version += 1
            self._registered()

    def on_lost(self) -> None:
        """Nothing that was asked on this connection will be answered."""
        with self._lock:
            self._stores.lose()
            self._version += 1

    def before_unmap(self) -> None:
        """This side touches no memory."""

    def on_off(self, reason: str) -> None:
        """The client has ended; lookups are misses from now on."""
