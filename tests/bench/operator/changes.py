"""How often the operator writes: without changes, while some pools change, and after a change of leader."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import NamedTuple

from bench.operator.api import MERGE, Api, say
from bench.operator.counts import quantile, writes
from bench.operator.load import POOLS, Load, vllm
from cluster.leadership import Replica, holder, replicas
from cluster.node import Node
from servers.process import rss_anon_mib
from servers.waiting import wait_for


class Changed(NamedTuple):
    """The cost of pools that change continuously."""

    pools: int
    changes: int
    #: Maximum writes to one pool within slightly less than a minute.
    most: int
    writes: int
    reconcile_p99_ms: float


class Takeover(NamedTuple):
    """Seconds after the leader was killed."""

    held: float
    observed: float
    all_looked_at: float
    writes: dict[str, int]
    rss_mib: float


def unchanged(api: Api, seconds: float) -> tuple[dict[str, int], float]:
    """The operator's write requests by kind without changes, and the minutes measured."""
    before, start = api.metrics(), time.monotonic()
    # Waiting is the measurement here.
    time.sleep(seconds)
    after, took = api.metrics(), time.monotonic() - start
    return writes(before, after), took / 60


def changed(api: Api, load: Load, leader: Replica, count: int, seconds: float) -> Changed:
    """Repeatedly adds and removes a pod in some pools. A watch observes every write to a pool."""
    listed = api.request("GET", f"{POOLS}/kvcachepools?limit=1")
    since = listed["metadata"]["resourceVersion"]
    seen: dict[str, list[float]] = defaultdict(list)

    def watch() -> None:
        path = f"{POOLS}/kvcachepools?watch=1&resourceVersion={since}&timeoutSeconds={seconds:.0f}"
        for at, event in api.watch(path, seconds + 30):
            if event["type"] == "MODIFIED":
                metadata = event["object"]["metadata"]
                seen[f"{metadata['namespace']}/{metadata['name']}"].append(at)

    before = leader.metrics()
    watching = threading.Thread(target=watch)
    watching.start()
    changes = 0
    while watching.is_alive():
        for number in range(count):
            namespace, of = load.pool(number)
            path = f"/api/v1/namespaces/{namespace}/pods"
            if changes // count % 2:
                api.request("DELETE", f"{path}/vllm-more-{number}?gracePeriodSeconds=0")
            else:
                api.request("POST", path, vllm(f"vllm-more-{number}", of))
            changes += 1
        watching.join(1)
    p99, _ = quantile(0.99, "kvcachepool_reconcile_seconds", before, leader.metrics())
    most = max((_most_within(59, times) for times in seen.values()), default=0)
    return Changed(count, changes, most, sum(map(len, seen.values())), 1000 * p99)


def _most_within(seconds: float, times: list[float]) -> int:
    return max(sum(1 for other in times if 0 <= other - first < seconds) for first in times)


def takeover(api: Api, node: Node, load: Load) -> Takeover:
    """Kills the leader and edits a pool. Measures the time until another process holds the lease, and until it has
    observed the edit.
    """
    namespace, name = max(load.pool(number) for number in range(load.pools))
    path = f"{POOLS}/namespaces/{namespace}/kvcachepools/{name}"
    old, before = holder(api), api.metrics()
    replicas(api)[0].kill(node)
    start = time.monotonic()
    edited = api.request("PATCH", path, {"spec": {"cache": {"minLoadTokens": 1024}}}, kind=MERGE)
    generation = edited["metadata"]["generation"]
    wait_for(lambda: holder(api) not in ("", old), 60, "another holder of the lease")
    held = time.monotonic() - start
    say(f"  lease: {held:.1f} s, {old} was followed by {holder(api)}")

    def seen() -> bool:
        return bool(api.request("GET", path)["status"].get("observedGeneration") == generation)

    wait_for(seen, 120, "the edit was observed")
    observed = time.monotonic() - start
    say(f"  reconciles: {observed:.1f} s")
    # Usually the second replica. The killed one, restarted, may check the lease earlier.
    new = replicas(api)[0]

    def all_looked_at() -> bool:
        return new.metrics().total("kvcachepool_reconciles_total", result="done") >= load.pools

    wait_for(all_looked_at, 300, "the new leader looks at all pools", pause=0.2)
    looked = time.monotonic() - start
    say(f"  all pools: {looked:.1f} s")
    return Takeover(held, observed, looked, writes(before, api.metrics()), rss_anon_mib([new.pid(node)]))
