"""What vLLM's own prefix cache holds of a prompt, without asking its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .keys import Geometry


def held_by(pool: Any, hashes: Sequence[bytes], geometry: Geometry) -> int | None:
    """Tokens of a prompt that the block pool's only KV group holds, in whole scheduler blocks; None without a cache.

    Galloping, then halving: a prefix is held or not, so a dozen looks do for 128k tokens. Only reads, so any thread may
    ask; what changes meanwhile makes the hint stale, not wrong.
    """
    if not getattr(pool, "enable_caching", False):
        return None
    low, high = 0, 1
    while high <= len(hashes) and pool.get_cached_block(hashes[high - 1], [0]):
        low, high = high, high * 2
    high = min(high, len(hashes) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if pool.get_cached_block(hashes[middle - 1], [0]):
            low = middle
        else:
            high = middle
    tokens = low * geometry.hash_block
    return tokens - tokens % geometry.scheduler_block
