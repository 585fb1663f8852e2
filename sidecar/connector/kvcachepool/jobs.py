"""The messages between the scheduler side and the worker side: copy jobs, and their results.

vLLM pickles them once per step, so they are flat and small: references stay packed as the sidecar sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from .nodes import Passed, Report

LOAD: Literal["load"] = "load"
STORE: Literal["store"] = "store"


class Chunk(NamedTuple):
    """One chunk of a job.

    refs: packed `SectionRef`s (16 bytes each), one per section of the domain; slot NO_SLOT = not part of the job. With
        several nodes, those of each node, in order.
    blocks: per KV group, in vLLM's order, the block ids of the chunk's blocks, first to last. Id 0 (vLLM's null block)
        means that the block is not copied: it was freed, or the engine holds it and shares it with running requests.
    """

    refs: bytes
    blocks: tuple[tuple[int, ...], ...]


class Job(NamedTuple):
    """Chunks that are copied together, and end together.

    id: unique per engine process, increasing.
    kind: "load" (arena to KV cache) or "store" (KV cache to arena).
    request_id: vLLM's request id; a load reports it in `finished_recving`.
    region: arena region of all references.
    regions: that of each node, if the engine has several.
    adapter: the LoRA adapter that the KV belongs to: its id, and the `Content.stamp` of its files.
    """

    id: int
    kind: Literal["load", "store"]
    request_id: str
    region: int
    chunks: list[Chunk]
    regions: Sequence[int] = ()
    adapter: tuple[int, bytes] | None = None

    def of_node(self, node: int) -> Job:
        """The part of a job that one node does."""
        if not self.regions:
            return self
        chunks = []
        for chunk in self.chunks:
            size = len(chunk.refs) // len(self.regions)
            chunks.append(chunk._replace(refs=chunk.refs[node * size : (node + 1) * size]))
        return self._replace(region=self.regions[node], chunks=chunks, regions=())

    def block_ids(self) -> set[int]:
        return {block for chunk in self.chunks for group in chunk.blocks for block in group if block}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler side's message to all workers in one engine step.

    jobs: to be queued, in this order.
    forget: ids of jobs to cancel; those that have not started are dropped and reported as ended.
    idle: the step has no tokens, so no forward pass.
    timed: number of the step if its end is to be reported, 0 otherwise.
    passed: messages for the sidecars of other nodes, by node.
    """

    jobs: list[Job] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    idle: bool = False
    timed: int = 0
    passed: dict[int, list[Passed]] = field(default_factory=dict)


class Ended(NamedTuple):
    """Number of ranks that ended a store job, and of ranks that dropped it (not all of it was committed)."""

    ranks: int
    dropped: int


class EndedLoad(NamedTuple):
    """A load that ended on one rank. failed: None, or the known blocks of a failed load."""

    job: Job
    failed: set[int] | None

    @property
    def request_id(self) -> str:
        return self.job.request_id


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Store jobs that ended since the last report, by job id. Loads are reported by `finished_recving`.

    timed: number of the step of this report, 0 if it is not timed.
    nodes: what the first rank of each node reports of its sidecar, if the engine has several.
    adapters_changed: ids of LoRA adapters for which vLLM has read other files than were hashed, or several.
    """

    stores: dict[int, Ended] = field(default_factory=dict)
    timed: int = 0
    nodes: dict[int, list[Report]] = field(default_factory=dict)
    adapters_changed: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        if not isinstance(other, WorkerReport):
            return self
        stores = dict(self.stores)
        for job, ended in other.stores.items():
            before = stores.get(job, Ended(0, 0))
            stores[job] = Ended(before.ranks + ended.ranks, before.dropped + ended.dropped)
        changed = self.adapters_changed | other.adapters_changed
        return WorkerReport(stores, max(self.timed, other.timed), self.nodes | other.nodes, changed)
