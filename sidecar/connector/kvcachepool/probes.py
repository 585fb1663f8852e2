"""One PROBE, its answers, and how many tokens of a request they allow to load. This module sends nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .connection import Reply
from .keys import HASH_BYTES, Chunks, Geometry, GroupSize
from .messages import CHUNK_READY, MEMORY, TIERS, ProbeReply
from .shared import NO_SLOT

_REF_BYTES = 16
_READY = bytes([CHUNK_READY])
_READY_OR_PENDING = b"\x01\x02"
#: Age at which an answer is renewed while a request waits (soft pins expire after 30 s). Random per lookup, so that
#: requests that arrived together are not renewed together.
RENEW_AFTER_S = (8.0, 16.0)
#: Answers of this age are no longer used.
STALE_AFTER_S = 25.0


class LookupResult(NamedTuple):
    """The answers to a lookup so far.

    answer: the newest that matches the PROBE.
    error: why there is no better one.
    final: no more follow.
    """

    answer: ProbeReply | None
    error: str
    final: bool
    arrived_s: float


@dataclass(slots=True, eq=False)
class Lookup:
    """One PROBE and its answers.

    The reader thread replaces `result` as a whole, so its fields are always consistent. All other fields belong to the
    engine.
    """

    geometry: Geometry
    chunks: Chunks
    hashes: bytes
    num_tokens: int
    local: int | None
    connection: int
    epoch: str
    tag: int | None = None
    sent_s: float = field(default_factory=time.monotonic)
    renew_after_s: float = field(default_factory=lambda: random.uniform(*RENEW_AFTER_S))
    renewed: bool = False
    result: LookupResult | None = None
    waiter: threading.Event | None = None

    def on_reply(self, reply: Reply) -> None:
        """Takes one answer, on the reader thread. One that does not match the request counts as an empty final one."""
        before = self.result or LookupResult(None, "", False, 0.0)
        answer, error = before.answer, before.error
        if reply.error is not None:
            error = reply.error.code
        else:
            try:
                read = reply.read(ProbeReply)
            except Exception:
                read = None
            if read is None or not self._fits(read):
                error = "BadAnswer"
            else:
                answer, error = read, read.reason or error
        self.result = LookupResult(answer, error, before.final or not reply.partial, time.monotonic())
        waiter = self.waiter
        if waiter is not None:
            waiter.set()

    def _fits(self, answer: ProbeReply) -> bool:
        if answer.reason and not answer.states:
            answer.states = bytes(len(self.chunks))
        ready = answer.states.count(_READY)
        size = len(answer.refs)
        whole = ready == 0 or (size > 0 and size % (ready * _REF_BYTES) == 0)
        return whole and len(answer.states) == len(self.chunks)

    def wait(self, timeout_s: float, known: LookupResult | None = None) -> bool:
        """Waits with the GIL released for an answer newer than `known`. Returns whether it arrived. Call without any
        lock.
        """
        if self.result is known:
            self.waiter = threading.Event()
            if self.result is known:
                self.waiter.wait(timeout_s)
        return self.result is not known

    def matches(self, block_hashes: list[bytes], num_tokens: int) -> bool:
        """Whether the request still has the tokens of the PROBE (a session may have edited them)."""
        if self.num_tokens != num_tokens:
            return False
        index = self.chunks.tokens // self.geometry.hash_block - 1
        return index < len(block_hashes) and block_hashes[index] == self.hashes[-HASH_BYTES:]

    def end_of(self, chunk: int) -> int:
        """Number of tokens up to and including the first `chunk` chunks."""
        if chunk <= self.chunks.full:
            return chunk * self.geometry.chunk
        return self.chunks.tokens

    def hash_of(self, chunk: int) -> bytes:
        """Hash of a chunk in the PROBE."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


def refs_of(answer: ProbeReply, first: int, last: int) -> list[bytes]:
    """Packed references of chunks `first..last`, one entry per chunk. All of them are ready in this answer."""
    if first >= last:
        return []
    per_chunk = len(answer.refs) // answer.states.count(_READY)
    begin = answer.states.count(_READY, 0, first) * per_chunk
    return [answer.refs[at : at + per_chunk] for at in range(begin, begin + (last - first) * per_chunk, per_chunk)]


def slots_of(refs: bytes, groups: Sequence[GroupSize]) -> np.ndarray | None:
    """Slots of a chunk's sections `[node, section]`. None unless they are those of one or more whole nodes."""
    sections = sum(group.shards for group in groups)
    if not refs or len(refs) % (_REF_BYTES * sections):
        return None
    return np.frombuffer(refs, dtype="<u4").reshape(-1, sections, 4)[:, :, 0]


class Plan(NamedTuple):
    """A promised hit: tokens `local..end` from chunks `first..last` of one answer to the lookup.

    The lookup may have a later answer in which one of these chunks was evicted, and its references belong to others.
    """

    lookup: Lookup
    answer: ProbeReply
    local: int
    end: int
    first: int
    last: int

    @property
    def tokens(self) -> int:
        """Tokens beyond what the engine holds itself."""
        return self.end - self.local


class Hits(NamedTuple):
    """The tokens of an answer that can be read now, and those that can be read once pending chunks have arrived.

    held_end: end of the latter without lower tiers.
    """

    ready: Plan
    pending_end: int
    held_end: int


def longest_hits(lookup: Lookup, answer: ProbeReply, local: int, limit: int) -> Hits:
    """The longest hits behind `local` tokens, up to `limit`, by one answer to the lookup.

    A hit is contiguous from the local boundary. If a group keeps only a window or a state, a hit ends where
    that exists too, and one token before the request's end.

    Args:
        limit: tokens of the request, or fewer if the caller limits the load; a multiple of the scheduler's block,
            or the end.
    """
    geometry = lookup.geometry
    first = local // geometry.chunk
    if local >= lookup.chunks.tokens:
        return Hits(Plan(lookup, answer, local, local, first, first), local, local)
    states = answer.states[first:]
    readable = ready = first + len(states) - len(states.lstrip(_READY))
    pending = first + len(states) - len(states.lstrip(_READY_OR_PENDING))
    there = answer.tiers[first:pending]
    held = first + len(there) - len(there.lstrip(MEMORY))
    if geometry.has_windows:
        limit = min(limit, lookup.num_tokens - 1)
        refs = refs_of(answer, first, ready)
        while ready > first and (lookup.end_of(ready) > limit or not _windows_there(lookup, refs, local, first, ready)):
            ready -= 1
        while pending > ready and lookup.end_of(pending) > limit:
            pending -= 1
    end = max(local, min(lookup.end_of(ready), limit))
    last = ready
    while last > first and lookup.end_of(last - 1) >= end:
        last -= 1
    # Without pending chunks, missing windows stay missing.
    pending_end = max(end, min(lookup.end_of(pending), limit)) if pending > readable else end
    held_end = max(local, min(lookup.end_of(held), pending_end))
    return Hits(Plan(lookup, answer, local, end, first, last), pending_end, held_end)


def _windows_there(lookup: Lookup, refs: list[bytes], local: int, first: int, last: int) -> bool:
    """Whether chunks `first..last` hold every window or state group as far back from their end as it looks.

    Args:
        refs: packed references of the chunks from `first` on.
    """
    end = lookup.end_of(last)
    section = 0
    for group in lookup.geometry.groups:
        count = group.shards
        if group.window_tokens:
            begin = max(local, group.first_needed(end))
            for chunk in range(last - 1, first - 1, -1):
                if lookup.end_of(chunk + 1) <= begin:
                    break
                slots = slots_of(refs[chunk - first], lookup.geometry.groups)
                if slots is None or (slots[:, section : section + count] == NO_SLOT).any():
                    return False
        section += count
    return True


def not_queried(lookup: Lookup, answer: ProbeReply, local: int) -> bool:
    """Whether lower tiers were not queried for a missing chunk between `local` and the tokens that the lookup named as
    local. vLLM has evicted it since then.
    """
    chunk = lookup.geometry.chunk
    states = answer.states[local // chunk : (lookup.local or 0) // chunk]
    return bool(states.strip(_READY))


def tier_tokens(plan: Plan) -> dict[str, int]:
    """Tokens of a plan by the name of their tier. They add up to `plan.tokens`."""
    lookup, tiers = plan.lookup, plan.answer.tiers
    tokens: dict[str, int] = {}
    begin = plan.local
    for chunk in range(plan.first, plan.last):
        end = min(plan.end, lookup.end_of(chunk + 1))
        name = TIERS.get(tiers[chunk], "memory") if chunk < len(tiers) else "memory"
        if end > begin:
            tokens[name] = tokens.get(name, 0) + end - begin
        begin = max(begin, end)
    return tokens
