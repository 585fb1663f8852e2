"""The operator at scale: 1,000 pools and 10,000 pods on a Kubernetes of its own, which it starts (root is needed).

    python -m bench.operator [--pools 1000] [--pods 10000] [--seconds 130] [--rounds 9]

Only a run of the full size replaces rows of the results; others print them. KVCACHEPOOL_CLUSTER=0..9 chooses the
cluster's number. The operator is the one that `cargo build --bins` left in Cargo's target folder.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from bench.operator import attached, changes, counts, load, pods, webhook
from bench.operator.api import Api, say
from bench.operator.load import Load
from bench.operator.rows import Loaded, Run
from bench.results import RESULTS, merge
from cluster import images
from cluster.cluster import Cluster
from cluster.leadership import Replica, holder, replicas
from cluster.node import Node
from cluster.product import SYSTEM, installed
from cluster.slot import chosen, others
from servers.process import rss_anon_mib
from servers.waiting import wait_for

#: Metadata of a results file.
FULL = Load(pools=1000, pods=10_000)
#: Pools whose pods change continuously, in one of the phases.
CHANGING = 20


def measure(size: Load, seconds: float, rounds: int) -> Run:
    """Runs all phases, one after another, on one cluster."""
    free = (slot for slot in others() if not slot.taken())
    slot = chosen() if "KVCACHEPOOL_CLUSTER" in os.environ else next(free)
    cluster = Cluster.start(slot)
    try:
        product = images.Product()
        cluster.import_image(product)
        api = Api(slot)
        counts.count_by_account(api)
        # Tests have a shorter interval.
        with installed(cluster.kubernetes, product.name, "--set", "statusInterval=60s"):
            try:
                return _measure(cluster, api, size, seconds, rounds)
            except Exception:
                _tell_logs(cluster)
                raise
    finally:
        cluster.stop()


def _measure(cluster: Cluster, api: Api, size: Load, seconds: float, rounds: int) -> Run:
    node = cluster.nodes[0]

    def leader() -> Replica:
        # On an overloaded machine the lease may change its holder between two phases.
        found = replicas(api)[0]
        say(f"  leader: {found.name}")
        return found

    wait_for(lambda: len(replicas(api)) == 2 and holder(api), 30, "two replicas and a leader")
    _phase("pools and pods")
    loaded = _load(api, size, node, leader)
    _phase("pods that start")
    started = pods.measure(api, images.base().name, rounds)
    _phase("webhook")
    reviews = webhook.measure(api, size, asked := leader(), asked.pid(node))
    _phase(f"nothing changes for {seconds:.0f} s")
    still, minutes = changes.unchanged(api, seconds)
    still_mib = rss_anon_mib([leader().pid(node)])
    _phase(f"{CHANGING} pools change for {seconds:.0f} s")
    changed = changes.changed(api, size, leader(), CHANGING, seconds)
    _phase("a large pool")
    age = attached.measure(api, node)
    _phase("takeover")
    taken = changes.takeover(api, node, size)
    return Run(size, loaded, started, reviews, still, minutes, still_mib, changed, age, taken)


def _load(api: Api, size: Load, node: Node, leader: Callable[[], Replica]) -> Loaded:
    empty = rss_anon_mib([leader().pid(node)])
    pools = load.create_pools(api, size)
    wait_for(lambda: len(load.counted(api)) == size.pools, 600, "every pool has a status", pause=1)
    pods = load.create_pods(api, size)
    start = time.monotonic()

    def reconciled() -> bool:
        done = sum(pods["matched"] == size.pods_each for pods in load.counted(api))
        say(f"  {done} of {size.pools} pools count all their pods")
        return done == size.pools

    wait_for(reconciled, 900, "every pool counts its pods", pause=4)
    say(f"  reconciled {time.monotonic() - start:.0f} s after the last pod")
    missed = size.pods - sum(pods["injected"] for pods in load.counted(api))
    last = leader()
    return Loaded(pools, pods, missed, empty, rss_anon_mib([last.pid(node)]), last.metrics(), api.metrics())


def _tell_logs(cluster: Cluster) -> None:
    """Prints the operator's log without the lines about reviewed pods."""
    select = ("--selector=app.kubernetes.io/name=kvcachepool", "--prefix", "--tail=-1")
    lines = cluster.kubernetes.kubectl("logs", *select, namespace=SYSTEM, check=False).splitlines()
    say("\n".join([line for line in lines if '"pod reviewed"' not in line][-100:]))


def _phase(name: str) -> None:
    say(f"{name} (load {os.getloadavg()[0]:.1f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pools", type=int, default=FULL.pools)
    parser.add_argument("--pods", type=int, default=FULL.pods)
    parser.add_argument("--seconds", type=float, default=130)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    size = Load(options.pools, options.pods)
    path = RESULTS if size == FULL else RESULTS.with_name("operator-small.json")
    merge(measure(size, options.seconds, options.rounds).rows(), path)
