"""The scheduler side's state of one request."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .controls import Controls
from .messages import CHUNK_PENDING, CHUNK_READY, MEMORY, ProbeReply

if TYPE_CHECKING:
    from .probes import Lookup, LookupResult, Plan

#: States of a chunk on its way into the cache.
TODO, REQUESTED, DONE = 0, 1, 2
NEVER = math.inf


class PendingPoll(NamedTuple):
    """The inputs of a poll with the result "poll again". A poll before `until_s` with the same inputs has the same
    result.
    """

    local: int
    version: int
    result: LookupResult | None
    blocker: str
    until_s: float


@dataclass(slots=True, eq=False)
class Progress:
    """Progress of storing a request's chunks, for one chunk size and one namespace.

    If one of these changes, the request gets a new object. GRANTs of the old one end there, unused.

    statuses, tail_status: of full chunks, of the tail.
    tail: its index, below 0; each prompt of a session has its own tail.
    retry_s: monotonic time before which nothing is requested.
    drops: chunks that were requested again.
    next_end: token at which the next chunk is complete; the request needs no work before that.
    """

    statuses: bytearray = field(default_factory=bytearray)
    tail: int = -1
    tail_status: int = TODO
    retry_s: float = 0.0
    drops: int = 0
    next_end: float = 0

    def new_prompt(self) -> None:
        """Full chunks keep their status. The tail is a new one."""
        self.tail -= 1
        self.tail_status = TODO
        self.next_end = 0

    def mark(self, index: int, status: int) -> None:
        """Sets the status of a full chunk or of the tail. Tails of earlier prompts are ignored."""
        if index == self.tail:
            self.tail_status = status
        elif 0 <= index < len(self.statuses):
            self.statuses[index] = status

    def mark_present(self, answer: ProbeReply, full: int) -> None:
        """Applies an answer to PROBE, of whose chunks the first `full` are full ones.

        Pending chunks that the engine holds itself are in memory too, but were not checked.
        """
        if len(self.statuses) < full:
            self.statuses.extend(bytes(full - len(self.statuses)))
        for index in range(full):
            state = answer.states[index]
            there = state == CHUNK_READY or (state == CHUNK_PENDING and answer.tiers[index : index + 1] == MEMORY)
            if there and self.statuses[index] == TODO:
                self.statuses[index] = DONE

    def parent_status(self, index: int) -> int:
        """Status of the chunk before this one. Indices below 0 are tails."""
        before = len(self.statuses) if index < 0 else index
        return self.statuses[before - 1] if 0 < before <= len(self.statuses) else DONE

    def retry(self, index: int, after_s: float) -> None:
        """Moves the chunk to the backlog, to be requested again after this many seconds."""
        self.mark(index, TODO)
        self.next_end = 0
        self.retry_s = max(self.retry_s, time.monotonic() + after_s)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival to its end, guarded by the scheduler side's lock.

    request: vLLM's object; before `on_new_request`, the preprocessed one of the input thread.
    namespace: who may share; None if the request is not cached (`refusal` has the reason) or if it is not known yet.
    adapter: id and `Content.stamp` of the LoRA adapter behind the namespace.
    since_s: monotonic time since which vLLM may have loaded its adapter for it: its arrival or its last preemption.
    first_poll_s, deadline_s: monotonic times of its first poll and of the end of its `loadTimeout`; 0 before.
    lookup: the PROBE that polls read.
    pending_lookup: a newer PROBE, whose answer will replace it.
    plan: the promise of the last poll.
    missed: why it did not promise more.
    blocker: the request whose load it waits for, or "".
    pending_poll: the last poll, if its result was "poll again".
    loading: its load was promised and not reported yet; no byte of it is known to have arrived.
    holds_blocks: vLLM has allocated blocks for it.
    stale: its blocks are from before `reset_cache`, or partly of a peer, and are not stored.
    counted: its admission was counted.
    decode: generated tokens are stored too.
    progress: progress of its stores.
    """

    request: Any
    controls: Controls
    created_s: float
    attached: bool = False
    since_s: float = field(init=False)
    namespace: bytes | None = None
    adapter: tuple[int, bytes] | None = None
    refusal: str = ""
    local: int = 0
    first_poll_s: float = 0.0
    deadline_s: float = 0.0
    pending_poll: PendingPoll | None = None
    blocker: str = ""
    lookup: Lookup | None = None
    pending_lookup: Lookup | None = None
    plan: Plan | None = None
    missed: tuple[tuple[str, float], ...] = ()
    hit_tiers: dict[str, int] = field(default_factory=dict)
    loading: bool = False
    failed: bool = False
    counted: bool = False
    holds_blocks: bool = False
    stale: bool = False
    decode: bool = False
    prompt_tokens: int = field(init=False)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.since_s = self.created_s
        self.prompt_tokens = self.request.num_prompt_tokens

    def restart(self) -> None:
        """The request holds no blocks."""
        self.holds_blocks = self.stale = False
        self.progress = Progress()
        self.since_s = time.monotonic()

    def new_prompt(self, prompt_tokens: int) -> None:
        """A streaming session got more input."""
        self.prompt_tokens = prompt_tokens
        self.progress.new_prompt()

    def store_limits(self, skip_last_tokens: int) -> tuple[int, int]:
        """(tokens whose full chunks may be stored, tokens of the prompt that may be stored).

        Args:
            skip_last_tokens: that of the pool; the request may have a larger one.
        """
        controls = self.controls
        skipped = max(skip_last_tokens, controls.skip_last_tokens)
        prompt = max(0, self.request.num_prompt_tokens - skipped)
        limit = self.request.num_tokens if self.decode and not skipped else prompt
        if controls.max_offload_tokens is not None:
            limit, prompt = min(limit, controls.max_offload_tokens), min(prompt, controls.max_offload_tokens)
        return limit, prompt
