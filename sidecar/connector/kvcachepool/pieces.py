"""Computes the copies of a job on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .layout import Layout, section_starts
from .shared import NO_SLOT, ROW_BYTES, Refs


class Piece(NamedTuple):
    """Blocks of one group: block id `blocks[i]` has its section bytes at arena offset `offsets[i]` (bytes)."""

    group: int
    blocks: list[int]
    offsets: list[int]


class ChunkLike(Protocol):
    """The interface of `jobs.Chunk`. With it this file needs no vLLM."""

    @property
    def refs(self) -> bytes: ...
    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]: ...


class Plan(NamedTuple):
    """A job on this rank: pieces to copy, and the references of this rank's sections (packed, and decoded)."""

    pieces: list[Piece]
    packed: bytes
    refs: Refs
    nbytes: int


class Planner:
    """Turns jobs into pieces for one rank."""

    def __init__(self, layout: Layout) -> None:
        self._groups = layout.groups
        self._num_blocks = layout.num_blocks
        starts = section_starts([group.shape for group in layout.groups])
        self._sections = [start + group.mine.shard for start, group in zip(starts, layout.groups, strict=True)]
        self._count = sum(group.shape.shards for group in layout.groups)

    def plan(self, chunks: Sequence[ChunkLike], store: bool) -> Plan:
        """The plan of a job's chunks. Raises `ValueError` if they do not fit this rank's KV cache."""
        pieces = [Piece(group, [], []) for group in range(len(self._groups))]
        packed: list[bytes] = []
        nbytes = 0
        for chunk in chunks:
            if len(chunk.refs) != self._count * 16 or len(chunk.blocks) != len(self._groups):
                raise ValueError(f"a chunk has {len(chunk.refs) // 16} references, expected {self._count} sections")
            for index, (group, section) in enumerate(zip(self._groups, self._sections, strict=True)):
                blocks = chunk.blocks[index]
                if store and not group.mine.writer:
                    continue
                ref = chunk.refs[section * 16 : section * 16 + 16]
                slot = int.from_bytes(ref[:4], "little")
                length = int.from_bytes(ref[8:12], "little")
                wanted = [(i, block) for i, block in enumerate(blocks) if block]
                if slot == NO_SLOT:
                    if wanted and not store:
                        raise ValueError("the chunk lacks a section that the load needs")
                    continue
                if not store and not wanted:
                    continue
                if store and len(wanted) != len(blocks):
                    raise ValueError("a store lacks blocks of a section")
                if length != len(blocks) * group.block_bytes:
                    raise ValueError(f"a section has {length} bytes, expected {len(blocks)} x {group.block_bytes}")
                if any(not 0 < block < self._num_blocks for _, block in wanted):
                    raise ValueError("a block id is outside of the KV cache")
                start = slot * ROW_BYTES
                pieces[index].blocks.extend(block for _, block in wanted)
                pieces[index].offsets.extend(start + i * group.block_bytes for i, _ in wanted)
                nbytes += len(wanted) * group.block_bytes
                packed.append(ref)
        joined = b"".join(packed)
        return Plan([piece for piece in pieces if piece.blocks], joined, Refs.read(joined), nbytes)
