"""Counters of API server and operator: writes by the operator's account, and histograms between two readings."""

from __future__ import annotations

import math

from bench.operator.api import Api
from cluster.kubernetes import Object
from cluster.product import SYSTEM
from servers.prometheus import Samples

#: Each matches a kind of write by the operator, and counts it.
_SCHEMAS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "lease": (["*"], ["coordination.k8s.io"], ["leases"]),
    "canary": (["create"], [""], ["pods"]),
    "pools": (["create", "update", "patch", "delete"], ["kvcachepool.io"], ["*"]),
    "children": (["create", "update", "patch", "delete"], [""], ["configmaps"]),
    "others": (["create", "update", "patch", "delete", "deletecollection"], ["*"], ["*"]),
}
#: Not writes to pools: renewals of the lease, and the canary, a dry run that stores nothing.
APART = ("lease", "canary")


def count_by_account(api: Api) -> None:
    """Lets the API server count the operator's requests: a FlowSchema matches by account, and counts what it matches.

    They wait where requests of service accounts wait anyway.
    """
    account = {"kind": "ServiceAccount", "serviceAccount": {"name": "kvcachepool-operator", "namespace": SYSTEM}}
    for precedence, (name, (verbs, groups, resources)) in enumerate(_SCHEMAS.items(), 10):
        rule = {"verbs": verbs, "apiGroups": groups, "resources": resources, "namespaces": ["*"], "clusterScope": True}
        schema: Object = {
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
            "kind": "FlowSchema",
            "metadata": {"name": f"bench-operator-{name}"},
            "spec": {
                "priorityLevelConfiguration": {"name": "workload-low"},
                "matchingPrecedence": precedence,
                "distinguisherMethod": {"type": "ByUser"},
                "rules": [{"subjects": [account], "resourceRules": [rule]}],
            },
        }
        api.request("POST", "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas", schema)


def writes(before: Samples, after: Samples) -> dict[str, int]:
    """Requests of the operator between two readings of the API server, by purpose."""

    def count(samples: Samples, name: str) -> float:
        schema = f"bench-operator-{name}"
        return samples.total("apiserver_flowcontrol_dispatched_requests_total", flow_schema=schema)

    return {name: round(count(after, name) - count(before, name)) for name in _SCHEMAS}


def quantile(share: float, name: str, before: Samples | None, after: Samples, **labels: str) -> tuple[float, int]:
    """A quantile of a histogram between two readings, and the number of samples. Linear within a bucket, as in
    Prometheus.
    """
    later = after.by(f"{name}_bucket", "le", **labels)
    earlier = before.by(f"{name}_bucket", "le", **labels) if before else {}
    counts = sorted((float(bound), count - earlier.get(bound, 0.0)) for bound, count in later.items())
    if not counts or not counts[-1][1]:
        return math.nan, 0
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            inside = (wanted - below) / (count - below) if count > below else 1.0
            return (low if math.isinf(bound) else low + (bound - low) * inside), round(counts[-1][1])
        low, below = bound, count
    raise AssertionError("a histogram's last bucket holds everything")
