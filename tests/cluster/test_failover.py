"""Replicas of the operator that stop: gracefully, killed, all at once."""

from __future__ import annotations

import time

from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes, Object
from cluster.leadership import holder, leader, replicas
from cluster.product import (
    RIGHTS,
    SYSTEM,
    Operator,
    conditions,
    deployment,
    injected,
    operator_events,
    pod,
    pool,
    status,
)
from servers.prometheus import Samples

VALUES = RIGHTS
_POOLS = "/apis/kvcachepool.io/v1alpha1/namespaces/{}/kvcachepools"
_MAPS = "/api/v1/namespaces/{}/configmaps"
#: A killed leader must be replaced within this many seconds.
_TAKEOVER_MAX = 20


def _looked(kubernetes: Kubernetes) -> bool:
    """A leader has the canary's result, pools, and the sidecars of this test."""
    wanted = {"canary_checks": "injected", "reconciles": "done", "sidecar_questions": "answered"}
    first = leader(kubernetes)
    now = first.metrics() if first else Samples([])
    return all(now.total(f"kvcachepool_{name}", result=result) for name, result in wanted.items())


def _settled(now: Object) -> bool:
    """One injected pod whose sidecar runs and has reported its content."""
    return (
        conditions(now).get("Ready") == ("True", "Ready")
        and now["pods"]["injected"] == 1
        and [tier["state"] for tier in now.get("tiers", [])] == ["Ready"]
    )


def test_restarted_replicas_write_nothing(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply([pool("demo"), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    # A new leader writes at once what the old one would have delayed for up to a minute.
    first = holder(kubernetes)
    kubernetes.kubectl("rollout", "restart", "deployment/kvcachepool-operator", namespace=SYSTEM)
    operator.scale(2)
    kubernetes.wait_for(lambda: holder(kubernetes) not in ("", first), 30, "another holder of the lease")
    kubernetes.wait_for(
        lambda: _looked(kubernetes) and _settled(status(kubernetes, namespace, "demo")),
        60,
        "the status is right again",
        namespace=namespace,
    )
    before = status(kubernetes, namespace, "demo")
    since = kubernetes.request("GET", _POOLS.format(namespace))["metadata"]["resourceVersion"]
    events = sorted(operator_events(kubernetes, namespace))

    operator.scale(0)
    operator.scale(2)
    kubernetes.wait_for(lambda: _looked(kubernetes), 60, "a leader has looked at everything", namespace=SYSTEM)
    for path in (_POOLS, _MAPS):
        changes = kubernetes.changes(path.format(namespace), since, seconds=3)
        written = [change["object"].get("status") for change in changes]
        assert written == [], "written although nothing had changed"
    assert status(kubernetes, namespace, "demo") == before
    assert sorted(operator_events(kubernetes, namespace)) == events


def test_a_killed_leader_is_replaced_and_pools_are_reconciled_again(
    cluster: Cluster, operator: Operator, namespace: str
) -> None:
    kubernetes = cluster.kubernetes
    kubernetes.wait_for(lambda: leader(kubernetes), 30, "a leader", namespace=SYSTEM)
    old = holder(kubernetes)
    replicas(kubernetes)[0].kill(cluster.nodes[0])
    killed = time.monotonic()
    kubernetes.apply(pool("after"), namespace=namespace)

    def reconciled() -> bool:
        return conditions(status(kubernetes, namespace, "after")).get("Accepted") == ("True", "Accepted")

    kubernetes.wait_for(reconciled, 60, "the pool is reconciled", namespace=namespace)
    seconds = time.monotonic() - killed
    assert holder(kubernetes) not in ("", old)
    assert seconds < _TAKEOVER_MAX, f"followed after {seconds:.1f} s"


def test_pods_created_without_the_webhook_start_are_counted_and_evicted_on_request(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply(pool("demo"), namespace=namespace)
    operator.scale(0)
    kubernetes.apply([pod(base_image, "bare", "demo"), deployment(base_image, "web", "demo")], namespace=namespace)
    kubernetes.wait("pod", "--all", "condition=Ready", namespace=namespace)
    pods = kubernetes.pods(namespace)
    assert [injected(each) for each in pods] == [False, False]
    assert not any("kvcachepool.io/injection" in each["metadata"].get("annotations", {}) for each in pods)
    (web,) = kubernetes.pods(namespace, "app=web")

    operator.scale(2)

    def missed(count: int) -> bool:
        return status(kubernetes, namespace, "demo").get("pods", {}).get("missed") == count

    kubernetes.wait_for(lambda: missed(2), 60, "two missed pods", namespace=namespace)
    (replicas,) = (owner["name"] for owner in web["metadata"]["ownerReferences"])

    def named() -> bool:
        notes = {
            (kind, name): note
            for kind, name, reason, note in operator_events(kubernetes, namespace)
            if reason == "Missed"
        }
        return (
            web["metadata"]["name"] in notes.get(("ReplicaSet", replicas), "")
            and "bare" in notes.get(("Pod", "bare"), "")
            and ("KVCachePool", "demo") in notes
        )

    kubernetes.wait_for(named, 30, "events name the missed pods", namespace=namespace)

    kubernetes.apply(pool("demo", injection={"onMissed": "Evict"}), namespace=namespace)

    def replaced() -> bool:
        pods = [each for each in kubernetes.pods(namespace, "app=web") if "deletionTimestamp" not in each["metadata"]]
        return [injected(each) for each in pods] == [True]

    kubernetes.wait_for(replaced, 60, "the Deployment's pod has a sidecar", namespace=namespace)

    def evicted() -> list[tuple[str, str]]:
        events = operator_events(kubernetes, namespace)
        return sorted((kind, name) for kind, name, reason, _ in events if reason == "Evicted")

    # The pod is replaced before its events are written, one after the other.
    kubernetes.wait_for(lambda: len(evicted()) > 1, 30, "events name the evicted pod", namespace=namespace)
    assert evicted() == [("KVCachePool", "demo"), ("ReplicaSet", replicas)]
    kubernetes.wait_for(lambda: missed(1), 90, "only the pod that nobody would make again is left", namespace=namespace)
    assert kubernetes.pod(namespace, "bare")["status"]["phase"] == "Running"


def test_missed_pods_of_an_excluded_namespace_are_not_evicted(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.kubectl("label", "namespace", namespace, "kvcachepool.io/injection=disabled")
    kubernetes.apply(pool("demo", injection={"onMissed": "Evict"}), namespace=namespace)
    kubernetes.wait_for(
        lambda: conditions(status(kubernetes, namespace, "demo")).get("InjectionReady") == ("True", "WebhookAnswers"),
        30,
        "pods may be evicted",
        namespace=namespace,
    )
    kubernetes.apply(deployment(base_image, "web", "demo"), namespace=namespace)

    def skipped() -> bool:
        events = operator_events(kubernetes, namespace)
        notes = [note for kind, _, reason, note in events if (kind, reason) == ("ReplicaSet", "NotEvicted")]
        return any("excludes its namespace" in note for note in notes)

    kubernetes.wait_for(skipped, 60, "an event says why the pod is not evicted", namespace=namespace)
    assert not [event for event in operator_events(kubernetes, namespace) if event[2] == "Evicted"]
