"""The lookups of all requests: PROBEs, polls, the bounded wait at a request's first poll, and RELEASEs.

A PROBE is sent when the request arrives, when vLLM's scheduler polls it and lower tiers have to fetch more, and when
its answer has aged. `probes` computes how many tokens an answer allows to load.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping

from . import keys
from .keys import Chunks
from .loads import Loads
from .local_cache import LocalCache
from .messages import Probe, Release
from .namespaces import CONTENT_UNKNOWN, Namespaces
from .prefill import PrefillSpeed
from .probes import STALE_AFTER_S, Lookup, LookupResult, Plan, longest_hits, not_queried
from .registration import Registration
from .requests import PendingPoll, RequestState
from .wire import Op

#: Results of a poll: nothing will be loaded, and "poll again".
NOTHING: tuple[int, bool] = (0, False)
POLL_AGAIN: tuple[None, bool] = (None, False)


class Lookups:
    """Called with the scheduler side's lock held, except for `is_unchanged`, `poll`, `renew_aged` and
    `adapter_known`.
    """

    def __init__(
        self,
        registration: Registration,
        namespaces: Namespaces,
        lock: threading.RLock,
        requests: Mapping[str, RequestState],
        loads: Loads,
        local_cache: LocalCache,
        speed: PrefillSpeed,
        wait_budget: WaitBudget,
        composed: bool,
    ) -> None:
        """`lock`: the scheduler side's. `requests`: all requests that have not ended. `composed`: there is another
        connector.
        """
        self._registration = registration
        self._client = registration.client
        self._namespaces = namespaces
        self._lock = lock
        self._requests = requests
        self._loads = loads
        self._local_cache = local_cache
        self._speed = speed
        self._wait_budget = wait_budget
        self._composed = composed
        self._idle = False  # the last step computed nothing, and nothing is in flight that needs further steps
        self._version = 0  # changes with state that all waiting requests depend on: connection, epoch
        self._unnamed: dict[str, None] = {}  # requests whose early PROBE waits for their adapter's content
        self._to_release: dict[str, None] = {}  # requests, in order, whose RELEASE is sent with the step
        self._aged: deque[tuple[RequestState, Lookup]] = deque()  # to be renewed by the reporting thread

    # -- PROBE

    def probe_early(self, state: RequestState) -> None:
        """Sends the PROBE before the first poll, or once the adapter's content is known."""
        if self._why_not(state) is None:
            self._probe(state, self._local_cache.held(state.request.block_hashes, self._registration.geometry))
        elif state.refusal == CONTENT_UNKNOWN:
            self._unnamed[state.request.request_id] = None

    def adapter_known(self, path: str) -> None:
        """The content of an adapter is known. Called on the thread that read its files."""
        with self._lock:
            for request_id in list(self._unnamed):
                state = self._requests.get(request_id)
                if state is not None and state.request.lora_request.lora_path != path:
                    continue
                del self._unnamed[request_id]
                if state is not None and not (state.holds_blocks or state.lookup or state.pending_lookup):
                    self.probe_early(state)

    def _why_not(self, state: RequestState) -> str | None:
        """Why this request cannot load anything now, or None."""
        if self._composed and _comes_from_peer(state):
            return "remote_prefill"
        if state.failed:
            return "failed_before"
        if not state.controls.load:
            return "kv_producer"
        if state.request.skip_reading_prefix_cache:
            return "skip_reading_prefix_cache"
        if state.namespace is None:
            self._namespaces.assign(state)
            if state.namespace is None:
                return state.refusal
        lora = state.request.lora_request
        if lora is not None and not self._namespaces.is_read(lora):
            return "lora_not_loaded"
        least = max(self._registration.geometry.scheduler_block, self._client.settings.min_load_tokens)
        if state.request.num_tokens < least:
            return "short"
        if not self._registration.ensure():
            return "unconnected"
        return None

    def _probe(self, state: RequestState, local: int | None) -> None:
        """Sends a PROBE. Its answer replaces that of the request's earlier one."""
        request, geometry = state.request, self._registration.geometry
        chunks = Chunks(geometry, request.num_tokens)
        if request.num_tokens > request.num_prompt_tokens:
            prompt = Chunks(geometry, request.num_prompt_tokens)
            if prompt.full == chunks.full:
                chunks = prompt
        try:
            hashes = keys.packed_hashes(geometry, chunks, request.block_hashes)
        except IndexError:
            self._registration.counters.event("hashes_missing")
            return
        if not hashes or len(hashes) != len(chunks) * keys.HASH_BYTES:
            return
        connection, epoch = self._client.connection, self._namespaces.epoch
        lookup = Lookup(geometry, chunks, hashes, request.num_tokens, local, connection, epoch)
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
        if request.request_id in self._to_release:
            self.send_releases()  # before this PROBE, because RELEASE ends all earlier ones
        lookup.tag = self._client.request(Op.PROBE, body, lookup.on_reply)
        if lookup.tag is None:
            return
        self._drop(state.pending_lookup)
        state.pending_lookup = lookup

    def _drop(self, lookup: Lookup | None) -> None:
        """Ignores further answers."""
        if lookup is not None and lookup.tag is not None:
            self._client.drop(lookup.tag)

    def _usable(self, state: RequestState, now_s: float) -> Lookup | None:
        """The request's lookup, unless it belongs to another connection, epoch or prompt, or is too old."""
        pending_lookup = state.pending_lookup
        if pending_lookup is not None and (
            pending_lookup.result is not None or state.lookup is None or not self._fits(state, state.lookup, now_s)
        ):
            self._drop(state.lookup)
            state.lookup, state.pending_lookup = pending_lookup, None
        lookup = state.lookup
        return lookup if lookup is not None and self._fits(state, lookup, now_s) else None

    def _fits(self, state: RequestState, lookup: Lookup, now_s: float) -> bool:
        return not (
            lookup.tag is None
            or lookup.connection != self._client.connection
            or lookup.epoch != self._namespaces.epoch
            or lookup.geometry is not self._registration.geometry
            or now_s - (lookup.result.arrived_s if lookup.result is not None else lookup.sent_s) > STALE_AFTER_S
            or not lookup.matches(state.request.block_hashes, state.request.num_tokens)
        )

    # -- polls

    def new_step(self, idle: bool) -> None:
        """A `schedule()` has ended. `idle`: it computed nothing, and nothing is in flight."""
        self._wait_budget.new_step()
        self._idle = idle

    def invalidate(self) -> None:
        """State that all waiting requests depend on has changed. Their next polls are decided again."""
        self._version += 1

    def is_unchanged(self, state: RequestState, pending: PendingPoll, local: int) -> bool:
        """Whether a poll has the same result as the last one, the common case of a waiting request. If vLLM has nothing
        else to do, this first waits for a newer answer. Call without the lock.
        """
        lookup, pending_lookup = state.lookup, state.pending_lookup
        if not (
            pending.version == self._version
            and pending.local == local
            and lookup is not None
            and lookup.result is pending.result
            and (pending_lookup is None or pending_lookup.result is None)
            and (not pending.blocker or pending.blocker in self._loads)
            and time.monotonic() < pending.until_s
        ):
            return False
        if not self._idle or pending.blocker:
            return True
        newest = pending_lookup or lookup
        known = newest.result
        return known is None or known.final or not self._wait_budget.wait_idle(newest, known)

    def poll(self, state: RequestState, local: int) -> tuple[int | None, bool]:
        """Tokens beyond `local` that will be loaded asynchronously; None = poll again. Call without the lock."""
        version = self._version
        with self._lock:
            if self._local_cache.outdated:
                self._local_cache.check_outdated(self._requests)
            state.pending_poll = None
            state.local = local
            state.plan = None
            why = self._why_not(state)
            if why == CONTENT_UNKNOWN and self._namespaces.known_soon(state.request.lora_request):
                return POLL_AGAIN
            if why is not None:
                state.missed = ((why, math.inf),)
                return NOTHING
            now_s = time.monotonic()
            lookup = self._usable(state, now_s)
            if lookup is None:
                state.first_poll_s = state.deadline_s = 0.0
                self._probe(state, local)
                lookup = self._usable(state, now_s)
            if lookup is None:
                state.missed = (("unconnected", math.inf),)
                return NOTHING
            first = not state.first_poll_s
            settings = self._client.settings
            if first:
                state.first_poll_s, state.deadline_s = now_s, now_s + settings.load_timeout_ms / 1000
        if first and lookup.result is None:
            self._wait_budget.wait(lookup, settings.first_poll_wait_us / 1e6, settings.step_wait_us / 1e6)
        with self._lock:
            result = lookup.result
            decided = self._decide(state, lookup, result, local)
            if decided is POLL_AGAIN:
                arrived_s = result.arrived_s if result is not None else 0.0
                renew_s = math.inf if lookup.renewed else arrived_s + lookup.renew_after_s
                until_s = min(state.deadline_s, renew_s)
                state.pending_poll = PendingPoll(local, version, result, state.blocker, until_s)
            return decided

    def _decide(
        self, state: RequestState, lookup: Lookup, result: LookupResult | None, local: int
    ) -> tuple[int | None, bool]:
        if result is None:
            if self._wait_budget.may_poll_again(state.first_poll_s):
                return POLL_AGAIN
            state.missed = (("unanswered", math.inf),)
            return NOTHING
        self._wait_budget.answered()
        answer = result.answer
        if answer is None or result.error:
            state.missed = ((result.error or "refused", math.inf),)
            return NOTHING
        state.blocker = ""
        hits = longest_hits(lookup, answer, local, self._load_limit(state, local))
        plan, settings, now_s = hits.ready, self._client.settings, time.monotonic()
        left_ms = (state.deadline_s - now_s) * 1000
        in_time = left_ms > 0 and answer.pending_ms <= left_ms
        end, why = hits.pending_end, answer.declined
        if end - hits.held_end < settings.min_load_tokens:
            end, why = hits.held_end, "min_load_tokens"  # too few tokens to fetch from lower tiers
        longer = end > plan.end and end - local >= settings.min_load_tokens
        left = hits.pending_end - max(plan.end, hits.held_end) if why else 0
        # The early PROBE fetches nothing, or not enough. Chunks in memory need no second PROBE.
        more = longer and end > hits.held_end if lookup.local is None else not_queried(lookup, answer, local)
        if more and in_time and state.pending_lookup is None:
            self._probe(state, local)
        self._renew(state, lookup, now_s - result.arrived_s)
        if in_time and ((longer and not result.final) or ((longer or more) and state.pending_lookup is not None)):
            return POLL_AGAIN
        if plan.tokens and left_ms > 0 and not lookup.geometry.has_states:
            # Of a load with states, vLLM can use only what ends at its end, which another request need not pass.
            state.blocker = self._loads.loader_of(state, lookup.hash_of(plan.first))
        return POLL_AGAIN if state.blocker else self._promise(state, plan, why, left)

    def _promise(self, state: RequestState, plan: Plan, why: str, left: int) -> tuple[int, bool]:
        """Promises a hit if it is large enough. `left` tokens behind it stay in a lower tier for the reason `why`."""
        state.missed = ((why, left),) if left > 0 else ()
        if plan.tokens <= 0:
            return NOTHING
        if plan.tokens < self._client.settings.min_load_tokens:
            state.missed = (("min_load_tokens", plan.tokens), *state.missed)
            return NOTHING
        state.plan = plan
        return plan.tokens, True

    def _load_limit(self, state: RequestState, local: int) -> int:
        tokens: int = state.request.num_tokens
        most = state.controls.max_load_tokens
        if most is not None and local + most < tokens:
            block = self._registration.geometry.scheduler_block
            tokens = (local + most) // block * block
        return tokens

    def _renew(self, state: RequestState, lookup: Lookup, age_s: float) -> None:
        """Soft pins expire, so a waiting request sends another PROBE in the background and keeps its current answer."""
        if state.pending_lookup is None and not lookup.renewed and age_s > lookup.renew_after_s:
            lookup.renewed = True
            self._aged.append((state, lookup))

    def renew_aged(self) -> None:
        """Sends PROBEs of requests whose answers have aged. Waking the sidecar costs about 0.1 ms in the kernel, and
        these are not urgent, so the engine's thread does not wait for more than one of them.
        """
        while self._aged:
            with self._lock:
                state, lookup = self._aged.popleft()
                alive = self._requests.get(state.request.request_id) is state
                if alive and state.lookup is lookup and state.pending_lookup is None:
                    self._probe(state, state.local)
            time.sleep(0.001)

    # -- the end of a lookup

    def learn_present(self, state: RequestState) -> None:
        """Chunks that the sidecar has need no GRANT. Those with windows may lack sections."""
        lookup, geometry = state.lookup, self._registration.geometry
        answer = lookup.result.answer if lookup is not None and lookup.result is not None else None
        if not lookup or not answer or lookup.geometry is not geometry or lookup.epoch != self._namespaces.epoch:
            return
        if not geometry.has_windows:
            state.progress.mark_present(answer, lookup.chunks.full)
        self._registration.reporter.learn(state.request, lookup, answer.states)

    def consume(self, state: RequestState) -> None:
        """Drops the lookup. An answer is used once, and the request's next poll sends another PROBE."""
        self._drop(state.lookup)
        self._drop(state.pending_lookup)
        state.lookup = state.pending_lookup = None
        state.first_poll_s = state.deadline_s = 0.0

    def end(self, state: RequestState) -> None:
        """The request no longer needs its lookup. Its leases end unless it loads."""
        self._unnamed.pop(state.request.request_id, None)
        if not state.loading and (state.lookup is not None or state.pending_lookup is not None):
            self.release(state.request.request_id)
        self.consume(state)

    @property
    def pending(self) -> bool:
        """Whether leases have ended: an idle engine must keep stepping."""
        return bool(self._to_release)

    def release(self, request_id: str) -> None:
        """The request's leases end with the next `send_releases`."""
        self._to_release[request_id] = None

    def send_releases(self) -> None:
        """Sends one RELEASE for all requests that need one. If it cannot be sent, the next HELLO does not name them."""
        if self._to_release:
            self._client.send(Op.RELEASE, Release(requests=list(self._to_release)))
            self._to_release.clear()


def _comes_from_peer(state: RequestState) -> bool:
    """Whether a transport loads the prompt, or more of it than vLLM holds. vLLM would wait for both connectors, and
    load from the transport.

    Once a transport has begun, it resets `do_remote_prefill`. If the peer fails, the prompt is looked up.
    """
    params = getattr(state.request, "kv_transfer_params", None)
    if not isinstance(params, dict):
        return False
    if params.get("do_remote_prefill"):
        return True
    tokens = params.get("remote_num_tokens")
    if not isinstance(tokens, int) or not (params.get("do_remote_decode") and params.get("remote_block_ids")):
        return False
    return tokens > state.local


class WaitBudget:
    """Limits how long the engine thread waits for answers: per request, per step, and not at all while the breaker is
    open.

    A request with a late answer is polled again for a short time, because another step costs less than recomputing what
    the sidecar holds. The breaker opens after three consecutive requests without an answer in that time, for 1 s at
    first and twice as long each time, up to 30 s.

    An engine that has nothing to compute waits longer in each step. Otherwise it would step continuously and take
    processor time from the sidecar, whose digests or fetches it waits for. It does not if other engines step together
    with it, and may have something to compute.
    """

    _MISSES = 3
    _LATE_S = 0.1
    _IDLE_S = 0.005
    _OPEN_FIRST_S = 1.0
    _OPEN_LAST_S = 30.0

    def __init__(self, steps_with_others: bool = False) -> None:
        self._idle_s = 0.0 if steps_with_others else self._IDLE_S
        self._spent_s = 0.0
        self._misses = 0
        self._open_s = self._OPEN_FIRST_S
        self._open_until_s = 0.0

    def new_step(self) -> None:
        """A `schedule()` has ended."""
        self._spent_s = 0.0

    def answered(self) -> None:
        """An answer arrived. Resets the breaker."""
        self._misses = 0
        self._open_s = self._OPEN_FIRST_S

    def may_poll_again(self, first_poll_s: float) -> bool:
        """Whether to poll a request again that was first polled at this time. If not, it counts as a miss of the
        breaker.
        """
        now_s = time.monotonic()
        if now_s < self._open_until_s:
            return False
        if not self._is_late(first_poll_s, now_s):
            return True
        self._misses += 1
        if self._misses >= self._MISSES:
            self._open_until_s = now_s + self._open_s
            self._open_s = min(2 * self._open_s, self._OPEN_LAST_S)
        return False

    def _is_late(self, first_poll_s: float, now_s: float) -> bool:
        return now_s - first_poll_s >= self._LATE_S

    def wait(self, lookup: Lookup, per_request_s: float, per_step_s: float) -> None:
        """One bounded wait for a lookup's first answer. Call without any lock."""
        begun = time.monotonic()
        allowed = min(per_request_s, per_step_s - self._spent_s)
        if lookup.result is not None or allowed <= 0 or begun < self._open_until_s:
            return
        lookup.wait(allowed)
        self._spent_s += time.monotonic() - begun

    def wait_idle(self, lookup: Lookup, known: LookupResult) -> bool:
        """One bounded wait of an idle engine for a newer answer. Returns whether it arrived. Call without any lock."""
        begun = time.monotonic()
        allowed = self._idle_s - self._spent_s
        if allowed <= 0:
            return False
        newer = lookup.wait(allowed, known)
        self._spent_s += time.monotonic() - begun
        return newer


class WaitForSteps(WaitBudget):
    """For an engine over several nodes. Answers come with its steps, of which several may be on their way: an answer is
    late only after some of them. Waiting inside of a step is useless.
    """

    _LATE_S = 0.5
    _LATEST_S = 10.0

    def __init__(self, batches: int) -> None:
        """`batches`: steps that vLLM has in flight at most."""
        super().__init__()
        self._steps = 2 * batches + 4
        self._begun_s: deque[float] = deque(maxlen=self._steps)  # times of the last steps

    def new_step(self) -> None:
        super().new_step()
        self._begun_s.append(time.monotonic())

    def _is_late(self, first_poll_s: float, now_s: float) -> bool:
        waited_s = now_s - first_poll_s
        if waited_s < self._LATE_S:
            return False
        return waited_s >= self._LATEST_S or (len(self._begun_s) == self._steps and self._begun_s[0] > first_poll_s)

    def wait(self, lookup: Lookup, per_request_s: float, per_step_s: float) -> None:
        """Does nothing."""

    def wait_idle(self, lookup: Lookup, known: LookupResult) -> bool:
        return False
