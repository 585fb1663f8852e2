"""References that stores hold on blocks of vLLM's block pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class HeldBlocks:
    """All held references, by number. For the engine's thread only.

    The records stay correct if a call into the pool raises half-way: a block's own reference count shows whether its
    reference was taken or released.

    bytes: of the chunks whose blocks are held.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[list[Any], int]] = {}
        self.bytes = 0

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, blocks: Sequence[Any], size: int) -> int:
        """Takes a reference on each block of a chunk of `size` bytes. Returns the number for `release`."""
        assert self._pool is not None
        number = next(self._numbers)
        counts = [block.ref_cnt for block in blocks]
        held: list[Any] = []
        self._held[number] = held, size
        try:
            self._pool.touch(blocks)
            held.extend(blocks)
        except BaseException:
            held[:] = [block for block, count in zip(blocks, counts, strict=True) if block.ref_cnt > count]
            raise
        self.bytes += size
        return number

    def release(self, number: int) -> None:
        """Releases the references, last block first. Does nothing for those that were already released."""
        if number not in self._held:
            return
        assert self._pool is not None
        blocks, size = self._held[number]
        counts = [block.ref_cnt for block in blocks]
        try:
            self._pool.free_blocks(reversed(blocks))
            del self._held[number]
        except BaseException:
            left = [block for block, count in zip(blocks, counts, strict=True) if block.ref_cnt == count]
            self._held[number] = left, size
            raise
        self.bytes -= size

    def release_all_but(self, numbers: set[int]) -> None:
        """Releases all references except for these, as far as the pool accepts it."""
        for number in self._held.keys() - numbers:
            self.release(number)
        self.bytes = sum(size for _, size in self._held.values())
