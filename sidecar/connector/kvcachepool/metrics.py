"""The connector's counters: REPORTs to the sidecar, and vLLM's stats.

Requested tokens are counted once per request, at its admission, together with its hits by tier and misses by reason. So
requested = hits + misses in every REPORT.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from .messages import Report

_LOG_NAMES = {"hit": "Cached tokens loaded", "miss": "Tokens not in the pool", "failed": "Tokens whose load failed"}


class CacheStats(KVConnectorStats):
    """vLLM's view of the same numbers: flat counts that add up over ranks and intervals."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another interval, or another rank."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers in vLLM's log line."""
        return {_LOG_NAMES.get(name, name): value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class Counters:
    """Increments since the last REPORT, and since vLLM last collected its stats. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report = Report()
        self._stats: Counter[str] = Counter()
        #: Set while there is something to report.
        self.dirty = threading.Event()

    def _dirtied(self) -> None:
        if not self.dirty.is_set():  # setting it takes a lock and wakes a thread
            self.dirty.set()

    def event(self, name: str, count: int = 1) -> None:
        """Counts a skip, drop or refusal by name."""
        with self._lock:
            self._report.events[name] = self._report.events.get(name, 0) + count
        self._dirtied()

    def admitted(self, requested: int, hits: dict[str, int], misses: Iterable[tuple[str, int]]) -> None:
        """Counts one request. Requested tokens that are neither hits nor misses count as misses with the reason
        `absent`.

        Args:
            requested: prompt tokens that the engine did not hold itself.
            hits: of them, tokens that will be loaded, by tier.
            misses: of them, tokens that were not looked up or not used, by reason.
        """
        left = requested
        with self._lock:
            report = self._report
            report.requested_tokens += requested
            for tier, tokens in hits.items():
                tokens = min(tokens, left)
                left -= tokens
                _add(report.hit_tokens, tier, tokens)
                self._stats["hit"] += tokens
            for reason, tokens in misses:
                tokens = min(tokens, left)
                left -= tokens
                _add(report.miss_tokens, reason, tokens)
                self._stats["miss"] += tokens
            _add(report.miss_tokens, "absent", left)
            self._stats["miss"] += left
        self._dirtied()

    def load_failed(self, tokens: int) -> None:
        """Counts tokens whose load failed after admission. They stay counted as hits."""
        with self._lock:
            self._report.load_failed_tokens += tokens
            self._stats["failed"] += tokens
        self._dirtied()

    def take_report(self) -> Report:
        """The increments since the last call."""
        self.dirty.clear()
        with self._lock:
            report, self._report = self._report, Report()
        return report

    def put_back(self, report: Report) -> None:
        """A REPORT could not be sent. The next one includes its increments."""
        with self._lock:
            now = self._report
            now.requested_tokens += report.requested_tokens
            now.load_failed_tokens += report.load_failed_tokens
            for field in ("hit_tokens", "miss_tokens", "events"):
                for name, count in getattr(report, field).items():
                    _add(getattr(now, field), name, count)

    def take_stats(self) -> CacheStats | None:
        """vLLM's stats since the last call, or None if nothing changed."""
        with self._lock:
            data = {name: count for name, count in self._stats.items() if count}
            self._stats.clear()
        return CacheStats(data=data) if data else None


def _add(counts: dict[str, int], name: str, tokens: int) -> None:
    if tokens > 0:
        counts[name] = counts.get(name, 0) + tokens


def hit_sources(tiers: dict[str, int], tokens: int) -> dict[Any, int]:
    """vLLM's hit sources of a load of `tokens` tokens, mapped from this cache's tiers: host memory, disk, elsewhere."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources: dict[Any, int] = {}
    left = tokens
    for tier, count in tiers.items():
        source = names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        count = min(count, left)
        left -= count
        if count:
            sources[source] = sources.get(source, 0) + count
    if left:
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        sources[unknown] = sources.get(unknown, 0) + left
    return sources
