"""What travels between the scheduler side and the worker side of the connector: copy jobs out, their ends back.

Everything here is pickled by vLLM once per step, so it is flat and small: references stay packed as the sidecar sent
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

LOAD: Literal["load"] = "load"
STORE: Literal["store"] = "store"


class Chunk(NamedTuple):
    """One chunk of a job.

    refs: packed `SectionRef`s (16 bytes each), one per section of the domain; slot NO_SLOT = not part of the job.
    blocks: per KV group, in vLLM's order, the block ids of the chunk's blocks, first to last. Id 0 (vLLM's null
        block) means "do not touch": the block is freed already, or it is held locally and shared with running requests.
    """

    refs: bytes
    blocks: tuple[tuple[int, ...], ...]


class Job(NamedTuple):
    """Chunks that are copied together, and end together.

    id: unique per engine process, counts up.
    kind: "load" (arena to KV cache) or "store" (KV cache to arena).
    request_id: vLLM's request id; a load reports it, in `finished_recving`.
    region: arena region of all references.
    """

    id: int
    kind: Literal["load", "store"]
    request_id: str
    region: int
    chunks: list[Chunk]

    def block_ids(self) -> set[int]:
        return {block for chunk in self.chunks for group in chunk.blocks for block in group if block}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler side tells all workers in one engine step.

    jobs: to be queued, in this order.
    forget: ids of jobs that need not be done any more: cancelled where not begun, and reported like ended ones.
    idle: the step has no tokens, so no forward pass.
    timed: number of the step, where its end is to be reported; 0 = it is not.
    """

    jobs: list[Job] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    idle: bool = False
    timed: int = 0


class Ended(NamedTuple):
    """How many ranks ended a store job, and how many of them dropped it (nothing, or not all, was committed)."""

    ranks: int
    dropped: int


class EndedLoad(NamedTuple):
    """A load that ended on one rank. failed: None, or the blocks of a failed load, as far as they are known."""

    request_id: str
    failed: set[int] | None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Store jobs that ended since the last report, by job id (loads are reported by `finished_recving`).

    timed: number of the step that this report is of; 0 = it is not timed.
    """

    stores: dict[int, Ended] = field(default_factory=dict)
    timed: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        if not isinstance(other, WorkerReport):
            return self
        stores = dict(self.stores)
        for job, ended in other.stores.items():
            before = stores.get(job, Ended(0, 0))
            stores[job] = Ended(before.ranks + ended.ranks, before.dropped + ended.dropped)
        return WorkerReport(stores, max(self.timed, other.timed))
