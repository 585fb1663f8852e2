"""The rows of the operator's benchmark."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from bench.operator.attached import Age
from bench.operator.changes import Changed, Takeover
from bench.operator.counts import APART, quantile
from bench.operator.load import Load
from bench.operator.pods import Started
from bench.operator.webhook import Measured
from bench.results import Row
from servers.prometheus import Samples

#: Seconds that a leader's lease lasts after its last renewal.
_LEASE = 12.0
_LOOKS = "kvcachepool_reconcile_seconds"
_REQUESTS = "apiserver_request_duration_seconds"


@dataclass(frozen=True)
class Loaded:
    """Seconds from the first pool until all pools were reconciled."""

    pools_per_second: float
    pods_per_second: float
    missed: int
    empty_mib: float
    rss_mib: float
    operator: Samples
    server: Samples


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    size: Load
    loaded: Loaded
    started: Started
    webhook: Measured
    still: dict[str, int]
    minutes: float
    still_mib: float
    changed: Changed
    age: Age
    taken: Takeover

    def rows(self) -> list[Row]:
        """One row per number."""
        first = [self._rss(), self._reconcile(), *self._writes(), self._webhook(), self._started()]
        return [*first, self._attached(), self._takeover()]

    def _rss(self) -> Row:
        what = (
            f"RssAnon of the leader with {self.size.pools} pools and {self.size.pods} pods; of the next one, after its"
            f" takeover, {self.taken.rss_mib:.1f}; reference: the leader before there were any"
        )
        value = max(self.loaded.rss_mib, self.still_mib)
        return _row("operator_rss_mib", value, "MiB", what, self.loaded.empty_mib, digits=1)

    def _reconcile(self) -> Row:
        loaded = self.loaded
        p50, _ = quantile(0.5, _LOOKS, None, loaded.operator)
        p99, looks = quantile(0.99, _LOOKS, None, loaded.operator)
        get, _ = quantile(0.5, _REQUESTS, None, loaded.server, verb="GET", resource="pods")
        status = {"resource": "kvcachepools", "subresource": "status"}
        write, _ = quantile(0.99, _REQUESTS, None, loaded.server, **status)
        what = (
            f"while objects were created ({loaded.pools_per_second:.0f} pools, {loaded.pods_per_second:.0f} pods per"
            f" second; {loaded.missed} pods without a sidecar), p50 {1000 * p50:.1f}; the API server's own p99 of the"
            f" status writes {1000 * write:.1f}; while {self.changed.pools} pools change p99"
            f" {self.changed.reconcile_p99_ms:.1f}; reference: the API server's p50 of a GET"
        )
        reference = None if math.isnan(get) else 1000 * get
        return _row("reconcile_p99_ms", 1000 * p99, "ms", what, reference, looks, digits=1)

    def _writes(self) -> list[Row]:
        spoken = sum(count for name, count in self.still.items() if name not in APART)
        still = (
            f"counted by the API server by account, {self.minutes:.1f} min; apart: {self.still['lease']} requests for"
            f" the Lease, {self.still['canary']} dry runs of the canary"
        )
        changed = (
            f"most writes to one of {self.changed.pools} pools within 59 s, while their pods were changed"
            f" {self.changed.changes} times; {self.changed.writes} writes in all"
        )
        return [
            _row("api_writes_per_min_unchanged", spoken / self.minutes, "1/min", still, None),
            _row("api_writes_per_min_changed_pool", self.changed.most, "1/min", changed, None, self.changed.pools),
        ]

    def _webhook(self) -> Row:
        seen = self.webhook
        what = (
            f"handler, 100 reviews of {seen.bytes_each} bytes per second to one replica; p50 {seen.handler_p50:.2f},"
            f" {seen.cpu_each:.1f} ms of CPU each; client p50 {seen.client.percentile(0.5):.1f}; an empty request there"
            f" p50 {seen.empty.percentile(0.5):.1f}, p99 {seen.empty.percentile(0.99):.1f};"
            " reference: the client's p99"
        )
        return _row("webhook_p99_ms", seen.handler_p99, "ms", what, seen.client.percentile(0.99), seen.reviews)

    def _started(self) -> Row:
        started = self.started
        what = (
            f"median of pairs; Running after {statistics.median(started.labelled):.2f} s with the label,"
            f" {statistics.median(started.plain):.2f} s without; reference: two containers in the same places that do"
            " nothing"
        )
        rounds = len(started.labelled)
        return _row("label_to_running_added_s", started.added(), "s", what, started.added_by_shape(), rounds)

    def _attached(self) -> Row:
        seconds = ", ".join(f"{one:.0f}" for one in self.age.seconds)
        what = (
            f"longest time from a change in all sidecars of a pool of {self.age.pods} pods until its status showed it"
            f" for all ({seconds}); reference: two rounds of queries and the pause between two writes of the status"
        )
        return _row("attached_age_s", max(self.age.seconds), "s", what, 180, len(self.age.seconds), digits=0)

    def _takeover(self) -> Row:
        taken = self.taken
        requests = sum(count for name, count in taken.writes.items() if name not in APART)
        what = (
            f"from SIGKILL until the next leader has observed an edit; it held the lease after {taken.held:.1f} s, and"
            f" had looked at all pools after {taken.all_looked_at:.1f} s with {requests} writing requests;"
            " reference: the lease's duration"
        )
        return _row("takeover_s", taken.observed, "s", what, _LEASE, digits=1)


def _row(name: str, value: float, unit: str, what: str, reference: float | None, runs: int = 1, digits: int = 2) -> Row:
    return Row(
        name=name,
        value=round(value, digits),
        unit=unit,
        reference=what,
        reference_value=round(reference, digits) if reference else None,
        ratio=round(value / reference, 3) if reference else None,
        runs=runs,
        command="make bench-operator",
    )
