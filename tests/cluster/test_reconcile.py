"""Objects of a pool and their other writers; effects of edits, deletion and the cluster's limits on pods."""

from __future__ import annotations

import json
import time

import pytest

from cluster.kubernetes import Kubernetes, Object, Refused
from cluster.leadership import replicas
from cluster.product import (
    SYSTEM,
    Operator,
    conditions,
    deployment,
    injected,
    operator_events,
    pod,
    pool,
    report,
    sidecar,
    status,
)

_MAPS = "/api/v1/namespaces/{}/configmaps"
_CONFIG = "config.v1.yaml"


def _child(kubernetes: Kubernetes, namespace: str, of: str) -> Object:
    """The ConfigMap of a pool, as soon as it exists."""

    def found() -> Object | None:
        maps = kubernetes.request("GET", _MAPS.format(namespace))["items"]
        return next((each for each in maps if each["metadata"]["name"] == f"kvcachepool-{of}"), None)

    child: Object = kubernetes.wait_for(found, 30, f"the ConfigMap of {of}", namespace=namespace)
    return child


def _foreign(name: str, data: dict[str, str]) -> Object:
    """A ConfigMap of another owner."""
    metadata = {"name": name, "labels": {"team": "search"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def test_a_changed_field_of_a_child_is_restored_once_and_foreign_fields_stay(
    kubernetes: Kubernetes, operator: Operator, namespace: str
) -> None:
    kubernetes.apply(pool("demo"), namespace=namespace)
    made = _child(kubernetes, namespace, "demo")
    kubernetes.wait_for(
        lambda: "Ready" in conditions(status(kubernetes, namespace, "demo")), 30, "a status", namespace=namespace
    )
    apply = ("apply", "--server-side", "--field-manager=somebody", "-f", "-")
    text = json.dumps(_foreign("kvcachepool-demo", {_CONFIG: "memory: {}", "notes": "ours too"}))
    with pytest.raises(Refused, match='conflict with "kvcachepool-operator"'):
        kubernetes.kubectl(*apply, stdin=text, namespace=namespace)
    kubernetes.kubectl(*apply, "--force-conflicts", stdin=text, namespace=namespace)

    def right() -> bool:
        return bool(_child(kubernetes, namespace, "demo")["data"][_CONFIG] == made["data"][_CONFIG])

    kubernetes.wait_for(right, 30, "the config is as the pool wants it", namespace=namespace)
    restored = _child(kubernetes, namespace, "demo")
    assert restored["metadata"]["labels"] == made["metadata"]["labels"] | {"team": "search"}
    assert restored["data"]["notes"] == "ours too"

    def named() -> bool:
        return any(
            (kind, name, reason) == ("KVCachePool", "demo", "ChangeReverted") and "kvcachepool-demo" in note
            for kind, name, reason, note in operator_events(kubernetes, namespace)
        )

    kubernetes.wait_for(named, 30, "an event on the pool", namespace=namespace)
    # Another reconcile pass, which any change of the pool causes, has nothing to do.

    def passes() -> float:
        return replicas(kubernetes)[0].metrics().total("kvcachepool_reconciles", result="done")

    before = passes()
    kubernetes.kubectl("label", "kvcachepool", "demo", "touched=yes", namespace=namespace)
    kubernetes.wait_for(lambda: passes() > before, 30, "another pass", namespace=SYSTEM)
    assert kubernetes.changes(_MAPS.format(namespace), restored["metadata"]["resourceVersion"], seconds=2) == []


def test_a_foreign_object_with_a_childs_name_is_not_changed_and_is_named(
    kubernetes: Kubernetes, operator: Operator, namespace: str
) -> None:
    theirs = _foreign("kvcachepool-demo", {_CONFIG: "theirs"})
    kubernetes.apply([theirs, pool("demo")], namespace=namespace)

    def named() -> bool:
        return any(
            (kind, name, reason) == ("KVCachePool", "demo", "NameTaken")
            for kind, name, reason, _ in operator_events(kubernetes, namespace)
        )

    kubernetes.wait_for(named, 30, "an event on the pool", namespace=namespace)
    assert _child(kubernetes, namespace, "demo")["data"] == theirs["data"]


def test_a_pool_without_the_right_to_purge_gets_an_event_and_is_deleted(
    kubernetes: Kubernetes, operator: Operator, namespace: str
) -> None:
    asks = pool("demo", shared={"s3": {"bucket": "kv-cache"}}, deletionPolicy="Delete")
    kubernetes.apply(asks, namespace=namespace)

    def named() -> bool:
        return any(
            (name, reason) == ("demo", "ApplyFailed") and "kvcachepools" in note and "forbidden" in note
            for _, name, reason, note in operator_events(kubernetes, namespace)
        )

    kubernetes.wait_for(named, 30, "an event on the pool", namespace=namespace)
    _child(kubernetes, namespace, "demo")
    kubernetes.kubectl("delete", "kvcachepool", "demo", "--timeout=20s", namespace=namespace)


def test_running_pods_outlive_their_pool_and_new_ones_start_without_it(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply([pool("demo"), deployment(base_image, "web", "demo", replicas=2)], namespace=namespace)
    kubernetes.wait("deployment", "web", "condition=Available", namespace=namespace)
    _child(kubernetes, namespace, "demo")
    kubernetes.kubectl("delete", "kvcachepool", "demo", namespace=namespace)
    own = "kvcachepool.io/pool=demo"
    maps = f"{_MAPS.format(namespace)}?labelSelector={own}"
    kubernetes.wait_for(
        lambda: not kubernetes.request("GET", maps)["items"], 60, "the pool's objects go with it", namespace=namespace
    )
    stays, goes = kubernetes.pods(namespace)
    kubernetes.kubectl("delete", "pod", goes["metadata"]["name"], namespace=namespace)

    def new() -> Object | None:
        old = {each["metadata"]["name"] for each in (stays, goes)}
        return next((each for each in kubernetes.pods(namespace) if each["metadata"]["name"] not in old), None)

    name = kubernetes.wait_for(new, 30, "another pod", namespace=namespace)["metadata"]["name"]
    kubernetes.wait("pod", name, "condition=Ready", namespace=namespace)
    again = kubernetes.pod(namespace, name)
    assert not injected(again)
    assert (report(again)["result"], report(again)["reason"]) == ("Refused", "PoolNotFound")

    def named() -> bool:
        return any(
            (kind, reason) == ("ReplicaSet", "PoolNotFound") and name in note
            for kind, _, reason, note in operator_events(kubernetes, namespace)
        )

    kubernetes.wait_for(named, 30, "an event on the pod's owner", namespace=namespace)
    name = stays["metadata"]["name"]
    now = kubernetes.pod(namespace, name)["status"]
    containers = now["initContainerStatuses"] + now["containerStatuses"]
    assert [each["restartCount"] for each in containers] == [0, 0, 0]
    assert all(each["ready"] for each in containers)
    assert sidecar(kubernetes, namespace, name)["state"] == "ready"


def test_edits_reach_running_pods_or_count_them_as_outdated(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    def edit(**spec: object) -> int:
        kubernetes.apply(pool("demo", **spec), namespace=namespace)
        path = f"/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools/demo"
        generation: int = kubernetes.request("GET", path)["metadata"]["generation"]

        def seen() -> bool:
            return status(kubernetes, namespace, "demo").get("observedGeneration") == generation

        kubernetes.wait_for(seen, 30, "the operator has seen the edit", namespace=namespace)
        return generation

    def outdated(count: int) -> bool:
        return bool(status(kubernetes, namespace, "demo")["pods"]["outdated"] == count)

    kubernetes.apply([pool("demo"), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)

    live = edit(cache={"minLoadTokens": 64})
    assert "minLoadTokens: 64" in _child(kubernetes, namespace, "demo")["data"][_CONFIG]
    # The kubelet syncs a pod's volumes once a minute, and when the pod changes.
    kubernetes.kubectl("annotate", "pod", "one", f"touched={time.time()}", namespace=namespace)

    def reloaded() -> bool:
        reported = sidecar(kubernetes, namespace, "one")
        return reported["config_generation"] == live and not reported["restart_needed"]

    kubernetes.wait_for(reloaded, 100, "the sidecar has the new config", namespace=namespace)
    assert outdated(0)

    edit(cache={"minLoadTokens": 64, "chunkTokens": 128})
    assert outdated(1)
    edit(cache={"minLoadTokens": 64})
    assert outdated(0)
    edit(local={"memory": {"perPod": "128Mi"}})
    assert outdated(1)
    kubernetes.apply(pod(base_image, "two", "demo"), namespace=namespace)
    kubernetes.wait("pod", "two", "condition=Ready", namespace=namespace)
    one, two = (sidecar(kubernetes, namespace, name)["memory"]["capacity_bytes"] for name in ("one", "two"))
    assert (one, two) == (64 << 20, 128 << 20)
    assert outdated(1)


def _limited(name: str, kind: str, spec: Object) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def test_an_injected_pod_fits_a_quota_on_every_resource(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    hard = {"requests.cpu": "4", "requests.memory": "1Gi", "limits.cpu": "4", "limits.memory": "1Gi"}
    quota = _limited("limit", "ResourceQuota", {"hard": hard})
    one = pod(base_image, "one", "demo")
    one["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "10m", "memory": "16Mi"},
        "limits": {"cpu": "20m", "memory": "16Mi"},
    }
    kubernetes.apply([quota, pool("demo"), one], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    assert injected(kubernetes.pod(namespace, "one"))
