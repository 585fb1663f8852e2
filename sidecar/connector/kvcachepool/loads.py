"""Loads in flight, from a promised hit to the report of all ranks."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from .jobs import LOAD, Chunk, Job
from .keys import GroupSize
from .messages import Pin
from .metrics import Counters
from .nodes import Client
from .probes import Plan, refs_of, slots_of, tier_tokens
from .requests import RequestState
from .shared import NO_SLOT
from .wire import Op

logger = logging.getLogger("kvcachepool")


class _Load(NamedTuple):
    job: Job
    tokens: int
    keys: tuple[tuple[bytes, bytes], ...]


class Loads:
    """All loads of the engine. Its methods are called with the scheduler side's lock held."""

    def __init__(self, client: Client, counters: Counters, job_ids: itertools.count[int]) -> None:
        self._client = client
        self._counters = counters
        self._job_ids = job_ids
        self._jobs: deque[Job] = deque()
        self._forget: deque[int] = deque()
        self._loads: dict[str, _Load] = {}
        #: Requests whose loads must not be used any more, and those of them that were not reported to vLLM yet.
        self.outdated: set[str] = set()
        self._again: set[str] = set()
        self._keys: dict[tuple[bytes, bytes], str] = {}  # (namespace, chunk hash) -> request that loads it

    @property
    def pending(self) -> bool:
        """Whether workers write into blocks, or are about to."""
        return bool(self._loads)

    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def loader_of(self, state: RequestState, chunk_hash: bytes) -> str:
        """The request that loads this chunk, or "". Once it has ended, the engine holds the chunk itself."""
        return self._keys.get((state.namespace or b"", chunk_hash), "")

    def begin(
        self, state: RequestState, plan: Plan | None, tables: Sequence[Sequence[int]], tokens: int
    ) -> dict[str, int]:
        """Pins the chunks and plans the job. From now on vLLM waits for the request's load, whatever happens here.

        Args:
            tables: block ids of the request per group, from its first token on; 0 where the engine keeps no block.
            tokens: how many of the promised tokens vLLM accepted.

        Returns:
            Tokens by tier, of `tokens`.
        """
        request_id = state.request.request_id
        if plan is None or tokens > plan.tokens or state.namespace is None:
            self.fail_load(request_id, tokens)
            return {"memory": tokens}
        lookup = plan.lookup
        firsts = (plan.local // group.block_tokens for group in lookup.geometry.groups)
        beyond = [table[first:] for first, table in zip(firsts, tables, strict=False)]
        plan = plan._replace(end=plan.local + tokens)
        block = lookup.geometry.scheduler_block
        end = -(-plan.end // block) * block
        last = plan.last
        while last > plan.first and lookup.end_of(last - 1) >= end:
            last -= 1
        chunks = []
        for index, refs in enumerate(refs_of(plan.answer, plan.first, last), plan.first):
            bounds = index * lookup.geometry.chunk, lookup.end_of(index + 1)
            chunk = _chunk(refs, lookup.geometry.groups, tables, bounds, (plan.local, end))
            if chunk is None:
                logger.warning("request %s: a found block cannot be loaded, vLLM recomputes it", request_id)
                self.fail_load(request_id, tokens, beyond)
                return {"memory": tokens}
            chunks.append(chunk)
        tag = lookup.tag
        if tag is None or not chunks:
            self.fail_load(request_id, tokens, beyond)
            return {"memory": tokens}
        self._client.send(Op.PIN, Pin(request=request_id, probe=tag, from_=plan.first, to=last))
        answer = plan.answer
        job = Job(next(self._job_ids), LOAD, request_id, answer.region, chunks, answer.regions, state.adapter)
        keys = tuple((state.namespace or b"", lookup.hash_of(chunk)) for chunk in range(plan.first, last))
        tiers = tier_tokens(plan)
        self._register(_Load(job, tokens, keys))
        for key in keys:
            self._keys.setdefault(key, request_id)
        return tiers

    def fail_load(self, request_id: str, tokens: int = 0, tables: Sequence[Sequence[int]] = ()) -> None:
        """Plans a load that every rank reports as failed, because no rank maps region 0. vLLM then recomputes.

        Args:
            tables: known blocks of the request without content.
        """
        chunks = [Chunk(b"", tuple(map(tuple, tables)))] if tables else []
        job = Job(next(self._job_ids), LOAD, request_id, 0, chunks)
        self._register(_Load(job, tokens, ()))
        self.outdated.discard(request_id)
        self._again.discard(request_id)

    def _register(self, load: _Load) -> None:
        """Registers a load. Replaces one that was planned for the request and not sent, because each rank reports
        one.
        """
        request_id = load.job.request_id
        planned = [job for job in self._jobs if job.request_id == request_id]
        for job in planned:
            self._jobs.remove(job)
        if request_id in self._loads:
            self._remove_keys(self._loads[request_id])
        self._loads[request_id] = load
        self._jobs.append(load.job)

    def take(self, jobs: list[Job], forget: list[int]) -> None:
        """Moves the jobs to send and the jobs to cancel, one by one, so that no job is moved twice."""
        while self._jobs:
            jobs.append(self._jobs.popleft())
        while self._forget:
            forget.append(self._forget.popleft())

    def forget(self, request_id: str) -> None:
        """The request ended during its load. Workers need not start it, but must report."""
        load = self._loads.get(request_id)
        if load is not None:
            self._forget.append(load.job.id)

    def outdate(self, request_ids: Iterable[str]) -> None:
        """These requests load KV of other weights, so their loads end as failed."""
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is not None and request_id not in self.outdated:
                self.outdated.add(request_id)
                self._forget.append(load.job.id)

    def tokens(self, request_id: str) -> int:
        load = self._loads.get(request_id)
        return load.tokens if load is not None else 0

    def writing(self, blocks: set[int]) -> set[str]:
        """Requests whose loads write one of these blocks."""
        return {name for name, load in self._loads.items() if not blocks.isdisjoint(load.job.block_ids())}

    def withhold_outdated(self, finished: set[str], failed: set[str], present: Container[str]) -> tuple[str, ...]:
        """Removes successful loads of outdated KV from `finished`. Returns the requests whose loads are to be planned
        again, as failed, because vLLM has already checked for failures.

        Args:
            present: requests that have not ended.
        """
        for request_id in self.outdated & (finished - failed):
            if request_id in present:
                self._again.add(request_id)
                finished.discard(request_id)
        return tuple(self._again)

    def ended(self, request_id: str, state: RequestState | None, failed: bool) -> None:
        """All ranks have reported. `state`: of the request, unless it has ended."""
        load = self._loads.pop(request_id)
        self.outdated.discard(request_id)
        self._remove_keys(load)
        if state is not None:
            state.loading = False
            state.failed |= failed
        if failed:
            self._counters.load_failed(load.tokens)

    def _remove_keys(self, load: _Load) -> None:
        for key in load.keys:
            if self._keys.get(key) == load.job.request_id:
                del self._keys[key]


def _chunk(
    refs: bytes,
    groups: Sequence[GroupSize],
    tables: Sequence[Sequence[int]],
    bounds: tuple[int, int],
    wanted: tuple[int, int],
) -> Chunk | None:
    """A chunk of tokens `bounds`, of which only blocks inside `wanted` are written. None if one cannot be written.

    Blocks that the engine holds itself are shared with running requests, so their ids become 0, like those of freed
    window blocks.
    """
    ids: list[tuple[int, ...]] = []
    section = 0
    slots = slots_of(refs, groups)
    if slots is None:
        return None
    for group, table in zip(groups, tables, strict=True):
        size = group.block_tokens
        first, last = bounds[0] // size, bounds[1] // size
        begin, end = max(first, wanted[0] // size), min(last, wanted[1] // size)
        if end < begin:
            begin = end = first
        row = tuple(table[begin:end])
        if len(row) != end - begin:
            return None
        sections = slots[:, section : section + group.shards]
        section += group.shards
        if any(row) and (sections == NO_SLOT).any():
            return None
        ids.append((0,) * (begin - first) + row + (0,) * (last - end))
    return Chunk(refs, tuple(ids))
