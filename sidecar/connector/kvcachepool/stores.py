"""From computed blocks to store jobs: which chunks are requested, whose blocks are held, and until when.

Reference counts protect blocks: `touch` in the step that schedules a chunk's last token, and a release once all ranks
have reported, on refusal, or when the sidecar does not answer for too long. Only the engine thread calls the block
pool.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .connection import Reply
from .held_blocks import HeldBlocks
from .jobs import STORE, Chunk, Ended, Job
from .keys import Geometry, last_hash, packed_blocks
from .messages import GRANT_EXISTS, GRANT_GRANTED, GRANT_INVALID, GRANT_NO_PARENT, Abort, Grant, GrantChunk, GrantReply
from .namespaces import Namespaces
from .registration import Registration
from .requests import DONE, NEVER, REQUESTED, TODO, Progress, RequestState
from .wire import Op

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

#: Maximum chunks requested per step, over all requests. The rest follows in later steps.
MAX_CHUNKS_PER_STEP = 64
#: Delay before a refused chunk is requested again.
RETRY_S = 0.05
#: Delay before a chunk that the workers dropped, or whose parent was evicted, is requested again, a few times.
REWIND_S = 1.0
MAX_REWINDS = 3
_REF_BYTES = 16


@dataclass(slots=True, eq=False)
class _RequestedChunk:
    """One chunk of a GRANT: its position, the ids of its blocks, and the number under which they are held."""

    index: int
    blocks: tuple[tuple[int, ...], ...]
    hold: int = 0


@dataclass(slots=True, eq=False)
class _Grant:
    """A sent GRANT, or the store job that it became. `given_up`: its answer is ignored. `reports`: ranks that ended the
    job.
    """

    request_id: str
    progress: Progress
    chunks: list[_RequestedChunk] = field(default_factory=list)
    tag: int | None = None
    sent_s: float = field(default_factory=time.monotonic)
    answer: GrantReply | None = None
    error: str = ""
    given_up: bool = False
    reports: list[Ended] = field(default_factory=list)
    adapter: tuple[int, bytes] | None = None


class Stores:
    """All stores in flight. Its methods are called with the scheduler side's lock held.

    An exception may leave any method half-way. `recover` then aborts what the workers do not have.
    """

    def __init__(
        self,
        registration: Registration,
        namespaces: Namespaces,
        lock: threading.RLock,
        job_ids: itertools.count[int],
        step_tokens: int,
        chunks_per_grant: int,
    ) -> None:
        """`lock`: the scheduler side's. `step_tokens`: maximum tokens per step; blocks of two steps may always be
        held.
        """
        self._registration = registration
        self._client = registration.client
        self._counters = registration.counters
        self._world = registration.world
        self._reporter = registration.reporter
        self._namespaces = namespaces
        self._lock = lock
        self._job_ids = job_ids
        self._step_tokens = step_tokens
        self._chunks_per_grant = chunks_per_grant
        self._manager: KVCacheManager | None = None
        self._held = HeldBlocks()
        self._open: dict[int, _Grant] = {}  # by tag: sent, not answered
        self._answered: deque[_Grant] = deque()  # to be processed by the engine thread
        self._lost: list[_Grant] = []  # unanswered when the connection was lost: their blocks are to be released
        self._ready: deque[tuple[Job, _Grant]] = deque()  # to be sent to the workers
        self._shipped: dict[int, _Grant] = {}  # by job
        self._ended: deque[int] = deque()  # jobs that all ranks have ended
        self._given_up = False  # stores were given up, and their blocks are still to be released
        self._aborts: dict[int, bool] = {}  # tags of GRANTs to be aborted until it is answered; sent on this connection

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._held.bind(manager.block_pool)

    @property
    def pending(self) -> bool:
        """Whether blocks are held: an idle engine must keep stepping."""
        return bool(self._open or self._answered or self._lost or self._ready or self._shipped or self._held)

    # -- requests

    def offer_step(self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState], now_s: float) -> None:
        """Requests slots for the chunks that a step completes. `scheduled`: its tokens by request."""
        settings, geometry = self._client.settings, self._registration.geometry
        bound = max(settings.store_bytes_in_flight, self._size(0, 2 * self._step_tokens, geometry))
        room, least = MAX_CHUNKS_PER_STEP, self._size(0, geometry.scheduler_block, geometry)
        for request_id, count in scheduled.items():
            state = requests.get(request_id)
            if state is None:
                continue
            request = state.request
            if request.num_prompt_tokens != state.prompt_tokens:
                state.new_prompt(request.num_prompt_tokens)
                self._namespaces.assign(state)  # a session may have got an image that a user named
            end = min(request.num_computed_tokens + count, request.num_tokens)
            if state.stale or state.loading or not state.controls.store or settings.save == "None":
                continue
            if end < state.progress.next_end or now_s < state.progress.retry_s:
                continue
            if room <= 0 or (self._held.bytes and self._held.bytes + least > bound):
                continue  # no chunk fits any more
            if state.namespace is None or request.mm_features:
                self._namespaces.assign(state)  # meanwhile a user may have given one of its images' names to another
            if state.namespace is None or not self._registration.ensure():
                continue
            room -= self.offer(request_id, state, end, geometry, bound, room)

    def offer(self, request_id: str, state: RequestState, end: int, geometry: Geometry, bound: int, room: int) -> int:
        """Requests slots for the chunks of a request that are complete at token `end`. Returns the number of requested
        chunks.

        Args:
            end: tokens that will be computed when this step has ended, only accepted ones.
            bound: maximum bytes in flight.
            room: maximum chunks to request in this step.
        """
        if self._manager is None or state.namespace is None:
            return 0
        wanted = self._wanted(state, end, geometry, bound, room)
        if not wanted:
            return 0
        table = self._manager.get_blocks(request_id).blocks
        requested: list[_RequestedChunk] = []
        held: list[tuple[list[Any], int]] = []
        chunks: list[GrantChunk] = []
        hashes = state.request.block_hashes
        for index, begin, stop in wanted:
            found = _blocks_of(table, begin, stop, geometry, self._state_hash(state, geometry, stop))
            if found is None:
                state.progress.mark(index, DONE)
                self._counters.event("store_blocks_gone")
                continue
            groups, blocks, objects = found
            self._reporter.note(state.request, begin, stop)
            requested.append(_RequestedChunk(index, blocks))
            held.append((objects, self._size(begin, stop, geometry)))
            chunks.append(
                GrantChunk(
                    hash=last_hash(geometry, stop, hashes),
                    parent=last_hash(geometry, begin, hashes),
                    first_token=begin,
                    tokens=stop - begin,
                    groups=groups,
                    block_hashes=packed_blocks(geometry, hashes, begin, stop),
                )
            )
        sent, namespace = 0, state.namespace or b""
        for begin in range(0, len(chunks), self._chunks_per_grant):
            part = slice(begin, begin + self._chunks_per_grant)
            body = Grant(request=request_id, chunks=chunks[part], namespace=namespace, ttl_s=state.controls.ttl_s)
            grant = _Grant(request_id, state.progress, requested[part], adapter=state.adapter)
            if not self._send(grant, body, held[part]):
                break
            sent += len(chunks[part])
        return sent

    def _send(self, grant: _Grant, body: Grant, held: list[tuple[list[Any], int]]) -> bool:
        """Holds the blocks, then sends the GRANT. Returns False if there is no connection."""
        for chunk, (blocks, size) in zip(grant.chunks, held, strict=True):
            chunk.hold = self._held.hold(blocks, size)
        tag = self._client.request(Op.GRANT, body, lambda reply: self._on_reply(grant, reply))
        if tag is None:
            self._release(grant, RETRY_S)
            return False
        grant.tag = tag
        self._open[tag] = grant
        for chunk in grant.chunks:
            grant.progress.mark(chunk.index, REQUESTED)
        return True

    def _on_reply(self, grant: _Grant, reply: Reply) -> None:
        """Takes the answer, on the reader thread. The engine thread processes it."""
        error, answer = "", None
        if reply.error is not None:
            error = reply.error.code
        else:
            with contextlib.suppress(Exception):  # an unreadable answer is aborted, like one that does not match
                answer = reply.read(GrantReply)
        with self._lock:
            if grant.given_up:
                return
            grant.answer, grant.error = answer, error
            if self._open.pop(reply.tag, None) is not None:
                self._answered.append(grant)
            elif answer is not None:  # sent, but not recorded
                self._aborts[reply.tag] = False

    def _state_hash(self, state: RequestState, geometry: Geometry, end: int) -> bytes:
        """Hash of vLLM's blocks with the states at token `end`; empty if they are not stored.

        With speculation and pipeline stages, a state behind generated tokens is written after the step that registers
        it, on some ranks later than the store.
        """
        if not geometry.has_states or (self._registration.speculates and end > state.request.num_prompt_tokens):
            return b""
        return last_hash(geometry, end, state.request.block_hashes)

    def _wanted(
        self, state: RequestState, end: int, geometry: Geometry, bound: int, room: int
    ) -> list[tuple[int, int, int]]:
        """(index, first token, end) of the chunks to request now, in prefix order. Sets the time of the next check."""
        chunk, progress = geometry.chunk, state.progress
        limit, prompt = state.store_limits(self._client.settings.skip_last_tokens)
        full = min(end, limit) // chunk
        statuses = progress.statuses
        if len(statuses) < full:
            statuses.extend(bytes(full - len(statuses)))
        in_flight, chunk_bytes = self._held.bytes, self._size(0, chunk, geometry)
        most = min(room, max((bound - in_flight) // chunk_bytes, 0 if in_flight else 1))
        found = _todo(statuses, full, most + 1)
        wanted = [(index, index * chunk, (index + 1) * chunk) for index in found[:most]]
        waiting = len(found) > most
        tail_begin, tail_end = prompt // chunk * chunk, prompt - prompt % geometry.scheduler_block
        if progress.tail_status == TODO and tail_begin < tail_end <= end and not waiting:
            in_flight += len(wanted) * chunk_bytes
            tail_bytes = self._size(tail_begin, tail_end, geometry)
            waiting = len(wanted) >= room or (in_flight > 0 and in_flight + tail_bytes > bound)
            if not waiting:
                wanted.append((progress.tail, tail_begin, tail_end))
        if waiting:
            progress.next_end = 0
        elif end >= limit and end >= tail_end:
            progress.next_end = (full + 1) * chunk if state.decode else NEVER
        else:
            progress.next_end = min((full + 1) * chunk, tail_end if tail_end > end else NEVER)
        return wanted

    # -- answers, on the engine thread

    def process(self, now_s: float, timeout_s: float) -> None:
        """Processes answers, aborts GRANTs without an answer for too long, repeats ABORTs."""
        self._release_given_up()
        while self._lost:
            self._release(self._lost[-1], RETRY_S)
            self._lost.pop()
        while self._answered:
            self._settle(self._answered[0])
            self._answered.popleft()
        for tag, grant in list(self._open.items()):
            if now_s - grant.sent_s < timeout_s:
                break
            self._counters.event("grant_unanswered", len(grant.chunks))
            self._give_up(grant)
            self._release(grant, REWIND_S)
            del self._open[tag]
        self._finish_ended()
        self.send_aborts()

    def take(self, jobs: list[Job]) -> None:
        """Moves the jobs to send, one by one, so that no job is moved twice."""
        while self._ready:
            job, grant = self._ready[0]
            self._shipped[job.id] = grant
            jobs.append(self._ready.popleft()[0])

    def _settle(self, grant: _Grant) -> None:
        answer = grant.answer
        results = answer.results if answer is not None and len(answer.results) == len(grant.chunks) else b""
        granted = results.count(GRANT_GRANTED)
        size = len(answer.refs) if answer is not None else 0
        per_chunk = size // granted if granted else 0
        if granted and (per_chunk == 0 or size != granted * per_chunk or per_chunk % _REF_BYTES):
            results = b""
        if not results:
            self._counters.event(f"grant_refused/{grant.error or 'BadAnswer'}", len(grant.chunks))
            if not grant.error:
                self._give_up(grant)
            self._release(grant, REWIND_S)
            return
        chunks, kept, at = [], [], 0
        assert answer is not None
        if answer.partly:
            self._give_up(grant)
        for chunk, result in zip(grant.chunks, results, strict=True):
            if result == GRANT_GRANTED:
                chunks.append(Chunk(answer.refs[at : at + per_chunk], chunk.blocks))
                kept.append(chunk)
                grant.progress.mark(chunk.index, DONE)
                at += per_chunk
            else:
                self._held.release(chunk.hold)
                self._refused(grant, chunk, result)
        grant.chunks = kept
        if kept:
            where = answer.region, chunks, answer.regions
            job = Job(next(self._job_ids), STORE, grant.request_id, *where, grant.adapter)
            self._ready.append((job, grant))

    def _refused(self, grant: _Grant, chunk: _RequestedChunk, result: int) -> None:
        progress = grant.progress
        if result == GRANT_EXISTS:
            progress.mark(chunk.index, DONE)
            return
        if result == GRANT_INVALID:
            progress.mark(chunk.index, DONE)
            self._counters.event("grant_refused/Invalid")
            return
        if result == GRANT_NO_PARENT:
            self._counters.event("grant_refused/NoParent")
            if progress.parent_status(chunk.index) == DONE:
                self._rewind(progress, chunk.index)
            else:  # the parent was refused too, and is requested again before this one
                progress.retry(chunk.index, RETRY_S)
            return
        self._counters.event("grant_refused/NoRoom" if result == 3 else "grant_refused/NotReady")
        progress.retry(chunk.index, RETRY_S)

    @staticmethod
    def _rewind(progress: Progress, index: int) -> None:
        """The chunks before this one were evicted. Requests all of them again, a few times per request."""
        progress.drops += 1
        if progress.drops > MAX_REWINDS:
            progress.mark(index, DONE)
            return
        upto = len(progress.statuses) if index < 0 else index
        progress.statuses[:upto] = progress.statuses[:upto].replace(bytes([DONE]), bytes([TODO]))
        progress.retry(index, REWIND_S)

    def ended(self, reports: dict[int, Ended]) -> None:
        """Removes the workers' reports from `reports`. Blocks are released once all ranks have ended a job."""
        while reports:
            job = next(iter(reports))
            grant = self._shipped.get(job)
            if grant is None:
                del reports[job]
                continue
            grant.reports.append(reports.pop(job))
            if self._has_ended(grant):
                self._ended.append(job)
        self._finish_ended()
        self.send_aborts()  # the engine may be idle from now on

    def _has_ended(self, grant: _Grant) -> bool:
        return sum(ended.ranks for ended in grant.reports) >= self._world

    def _finish_ended(self) -> None:
        while self._ended:
            grant = self._shipped.get(self._ended[0])
            if grant is not None:
                self._finish(grant)
                del self._shipped[self._ended[0]]
            self._ended.popleft()

    def _finish(self, grant: _Grant) -> None:
        if not any(ended.dropped for ended in grant.reports):
            self._let_go(grant)
            self._counters.event("stored_chunks", len(grant.chunks))
            return
        self._counters.event("store_dropped", len(grant.chunks))
        self._abort(grant)  # a rank that is off cannot, and no rank writes any more
        grant.progress.drops += 1
        if grant.progress.drops <= MAX_REWINDS:
            self._release(grant, REWIND_S)
        else:
            self._let_go(grant)

    def _release(self, grant: _Grant, retry_s: float) -> None:
        self._let_go(grant)
        for chunk in reversed(grant.chunks):
            grant.progress.retry(chunk.index, retry_s)

    def _let_go(self, grant: _Grant) -> None:
        for chunk in reversed(grant.chunks):
            self._held.release(chunk.hold)

    # -- ABORT

    def _give_up(self, grant: _Grant) -> None:
        grant.given_up = True
        if grant.tag is not None:
            self._client.drop(grant.tag)
            self._abort(grant)

    def _abort(self, grant: _Grant) -> None:
        """The next `send_aborts` sends the ABORT."""
        if grant.tag is not None:
            self._aborts[grant.tag] = False

    def lose(self) -> None:
        """The connection was lost, so pending requests will not be answered. The engine thread releases their
        blocks.
        """
        for grant in self._open.values():
            self._give_up(grant)
            self._lost.append(grant)
        self._open.clear()
        for tag in self._aborts:
            self._aborts[tag] = False

    def repeat_aborts(self) -> None:
        """HELLO was sent. Sends every ABORT again after it."""
        for tag in self._aborts:
            self._aborts[tag] = False
        self.send_aborts()

    def give_up(self, on_engine_thread: bool = True) -> None:
        """Aborts every store that the workers do not have: its blocks may have other content, or its record may be
        incomplete. Blocks of stores that the workers have stay held until all ranks have reported.

        On another thread it leaves the blocks to the next `process`.
        """
        for job, grant in self._ready:
            self._shipped.pop(job.id, None)
            self._give_up(grant)
        for grant in (*self._open.values(), *self._answered):
            self._give_up(grant)
        self._open.clear()
        self._answered.clear()
        self._ready.clear()
        self._lost.clear()
        self._ended.clear()
        self._ended.extend(job for job, grant in self._shipped.items() if self._has_ended(grant))
        self._given_up = True
        if on_engine_thread:
            self._release_given_up()
            self._finish_ended()
        self.send_aborts()

    def _release_given_up(self) -> None:
        if self._given_up:
            self._held.release_all_but({chunk.hold for grant in self._shipped.values() for chunk in grant.chunks})
            self._given_up = False

    def send_aborts(self) -> None:
        """Sends every ABORT that was not sent on this connection yet."""
        for tag, sent in list(self._aborts.items()):
            if sent:
                continue
            on_reply = functools.partial(self._aborted, tag)
            if self._client.request(Op.ABORT, Abort(grant=tag), on_reply) is None:
                return
            if tag in self._aborts:
                self._aborts[tag] = True

    def _aborted(self, tag: int, reply: Reply) -> None:
        with self._lock:
            self._aborts.pop(tag, None)

    def _size(self, begin: int, end: int, geometry: Geometry) -> int:
        return (end - begin) * geometry.token_bytes * self._world


def _todo(statuses: bytearray, full: int, most: int) -> list[int]:
    """Indices of the first `most` full chunks that were not requested."""
    found: list[int] = []
    index = statuses.find(TODO, 0, full)
    while index >= 0 and len(found) < most:
        found.append(index)
        index = statuses.find(TODO, index + 1, full)
    return found


def _blocks_of(
    table: Sequence[Sequence[Any]], begin: int, end: int, geometry: Geometry, state_hash: bytes
) -> tuple[int, tuple[tuple[int, ...], ...], list[Any]] | None:
    """(groups to store, block ids per group, blocks to hold) of tokens `begin..end`. None if a needed block was freed.

    A window group with a freed block and a state group without a state are left out: their ids are 0.

    Args:
        state_hash: hash of the blocks with the states at token `end`. vLLM keeps few states, and moves blocks between
            positions of a table, so a block is taken only if it is cached under this hash. It is the request's own
            one: another block of that hash may have a state of earlier weights.
    """
    groups = 0
    ids: list[tuple[int, ...]] = []
    held: list[Any] = []
    for number, (shape, row) in enumerate(zip(geometry.groups, table, strict=True)):
        first, last = begin // shape.block_tokens, end // shape.block_tokens
        blocks = row[first:last]
        if shape.state and not (state_hash and _is_cached_as(blocks, state_hash)):
            blocks = []
        if len(blocks) == last - first and not any(block.is_null for block in blocks):
            groups |= 1 << number
            ids.append(tuple(block.block_id for block in blocks))
            held.extend(blocks)
        elif shape.window_tokens:
            ids.append((0,) * (last - first))
        else:
            return None
    return groups, tuple(ids), held


def _is_cached_as(blocks: Sequence[Any], block_hash: bytes) -> bool:
    """Whether the last of these blocks is in vLLM's prefix cache under this hash. The key there ends with the group."""
    key = blocks[-1].block_hash if blocks else None
    return key is not None and bytes(key[: len(block_hash)]) == block_hash
