"""Counts of each kind of event, across restarts of the sidecar."""

from __future__ import annotations

from collections import Counter

from servers.engine import Engine
from servers.prometheus import Samples
from servers.sidecar import Sidecar

#: Kinds that the sidecar counts, by metric and labels.
_SIDECAR = {
    "hits_memory_tokens": ("kvcachepool_hit_tokens", {"tier": "memory"}),
    "hits_disk_tokens": ("kvcachepool_hit_tokens", {"tier": "disk"}),
    "chunks_stored": ("kvcachepool_stored_chunks", {}),
    "chunks_adopted": ("kvcachepool_adopted_chunks", {}),
    "chunks_evicted": ("kvcachepool_evicted_chunks", {}),
    "chunks_corrupt": ("kvcachepool_corrupt_chunks", {}),
    "chunks_from_disk": ("kvcachepool_tier_fetch_chunks", {"tier": "disk", "result": "landed"}),
}


class Counts:
    """Counts of one configuration."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._seen: dict[str, float] = {}
        self._before: Samples | None = None

    def add(self, kind: str, count: int = 1) -> None:
        """Counts an event."""
        self.kinds[kind] += count

    def collect(self, sidecar: Sidecar) -> None:
        """Collects the sidecar's counters since the last call. Counts between a call and its death are lost."""
        metrics = sidecar.metrics()
        for kind, (name, labels) in _SIDECAR.items():
            value = metrics.total(name, **labels)
            self.add(kind, int(value - self._seen.get(kind, 0)))
            self._seen[kind] = value

    def died(self) -> None:
        """The sidecar's counters restart at 0."""
        self._seen.clear()

    def collect_vllm(self, engine: Engine) -> None:
        """Collects vLLM's preemptions since the last call."""
        now = engine.counters()
        before = self._before.total("vllm:num_preemptions") if self._before is not None else 0
        self.add("preempted", int(now.total("vllm:num_preemptions") - before))
        self._before = now

    def restarted(self) -> None:
        """vLLM's counters restart at 0."""
        self._before = None

    def missing(self, kinds: frozenset[str]) -> list[str]:
        """Kinds that did not occur."""
        return sorted(kind for kind in kinds if not self.kinds[kind] and not self.kinds[f"{kind}_tokens"])

    def __str__(self) -> str:
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()) if count)
