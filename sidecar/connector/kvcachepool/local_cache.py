"""Reads the content of vLLM's own prefix cache without its scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .keys import Geometry
from .requests import RequestState


class LocalCache:
    """`pool`: vLLM's block pool, once it is known. `outdated`: the cache may hold KV that the engine's current weights
    did not compute: of earlier weights, or of a peer.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.outdated = False

    def check_outdated(self, requests: Mapping[str, RequestState]) -> None:
        """Clears `outdated` once the cache has been empty and no request with such KV is left."""
        cached = getattr(self.pool, "cached_block_hash_to_block", None)
        if cached is not None and not len(cached) and not any(state.stale for state in requests.values()):
            self.outdated = False

    def held(self, hashes: Sequence[bytes], geometry: Geometry) -> int | None:
        """A hint: number of tokens of a prompt that the only KV group holds, in whole scheduler blocks; None = unknown.

        It only reads, so any thread may call it. Concurrent changes by the engine's thread make the hint stale, not
        wrong, and may make a read raise.
        """
        pool = self.pool
        if len(geometry.groups) != 1 or not getattr(pool, "enable_caching", False):
            return None
        try:
            tokens = _held(pool, hashes) * geometry.hash_block
        except Exception:
            return None
        return tokens - tokens % geometry.scheduler_block


def _held(pool: Any, hashes: Sequence[bytes]) -> int:
    """Number of leading blocks in the cache. A galloping binary search, so about a dozen reads suffice for 128k
    tokens.
    """
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
    return low
