"""An operator for some namespaces only, with a policy for their pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.kubernetes import Kubernetes
from cluster.leadership import leader
from cluster.product import SYSTEM, Operator, Release, conditions, injected, pod, pool, report, status

_WATCHED = "watched-by-operator"
#: Tests of the webhook use the namespace default.
VALUES = (
    *("--set", f"watchNamespaces={{default,{_WATCHED}}}"),
    *("--set", "policy.maxMemoryPerPod=128Mi"),
    *("--set", "policy.gpuAccess={ResourceClaim}"),
)


@pytest.fixture(scope="module")
def watched(kubernetes: Kubernetes, release: Release) -> Iterator[str]:
    """A namespace of the operator, which is installed after it."""
    kubernetes.create_namespace(_WATCHED)
    release.installed(VALUES)
    yield _WATCHED
    kubernetes.delete_namespace(_WATCHED)


@pytest.fixture
def operator(watched: str, release: Release) -> Operator:
    return release.installed(VALUES)


def _accepted(kubernetes: Kubernetes, namespace: str, name: str) -> tuple[str, str] | None:
    return conditions(status(kubernetes, namespace, name)).get("Accepted")


def test_only_pools_of_watched_namespaces_are_served(
    kubernetes: Kubernetes, watched: str, operator: Operator, namespace: str, base_image: str
) -> None:
    for each in (namespace, watched, "default"):
        kubernetes.apply(pool("demo"), namespace=each)
    for each in (watched, "default"):

        def accepted(each: str = each) -> bool:
            return _accepted(kubernetes, each, "demo") == ("True", "Accepted")

        kubernetes.wait_for(accepted, 30, f"the pool in {each} is reconciled", namespace=each)
    for each in (watched, namespace):
        kubernetes.apply(pod(base_image, "one", "demo"), namespace=each)
        kubernetes.wait("pod", "one", "condition=Ready", namespace=each)
    assert injected(kubernetes.pod(watched, "one"))
    outside = kubernetes.pod(namespace, "one")
    assert not injected(outside)
    assert "kvcachepool.io/injection" not in outside["metadata"].get("annotations", {})
    assert status(kubernetes, namespace, "demo") == {}

    def counted() -> bool:
        return bool(status(kubernetes, watched, "demo").get("pods", {}).get("injected") == 1)

    kubernetes.wait_for(counted, 30, "the pod is counted", namespace=watched)
    first = kubernetes.wait_for(lambda: leader(kubernetes), 30, "a leader", namespace=SYSTEM)
    # Pools cannot be watched before their CRD is established, which is installed with the operator.
    assert set(first.metrics().by("kvcachepool_watch_errors_total", "kind")) <= {"KVCachePool"}
    account = f"--as=system:serviceaccount:{SYSTEM}:kvcachepool-operator"
    for each, answer in ((watched, "yes"), (namespace, "no")):
        asked = ("auth", "can-i", "patch", "configmaps", account)
        assert kubernetes.kubectl(*asked, namespace=each, check=False).strip() == answer
    kubernetes.kubectl("delete", "kvcachepool", "demo", namespace="default")


def test_a_pool_beyond_the_policy_is_named_by_status_and_webhook(
    kubernetes: Kubernetes, watched: str, operator: Operator, base_image: str
) -> None:
    sidecar = {"gpuAccess": "VisibleDevices"}
    kubernetes.apply(pool("greedy", local={"memory": {"perPod": "129Mi"}}, sidecar=sidecar), namespace=watched)
    kubernetes.wait_for(
        lambda: _accepted(kubernetes, watched, "greedy") == ("False", "PolicyViolated"),
        30,
        "the policy is named",
        namespace=watched,
    )
    kubernetes.apply(pod(base_image, "greedy", "greedy"), namespace=watched)
    found = report(kubernetes.pod(watched, "greedy"))
    assert found["reason"] == "PoolNotAccepted"
    for word in ("maxMemoryPerPod", "128Mi", "spec.sidecar.gpuAccess"):
        assert word in found["message"], found


def test_a_namespace_that_is_deleted_stops_nothing_in_the_others(
    kubernetes: Kubernetes, watched: str, operator: Operator, base_image: str
) -> None:
    """The operator's Role in it is deleted, too, so it may not list anything there."""
    kubernetes.delete_namespace(watched)
    kubernetes.kubectl("wait", "--for=delete", f"namespace/{watched}", "--timeout=60s")
    try:
        deployment = "deployment/kvcachepool-operator"
        kubernetes.kubectl("rollout", "restart", deployment, namespace=SYSTEM)
        kubernetes.kubectl("rollout", "status", deployment, "--timeout=90s", namespace=SYSTEM)
        kubernetes.apply([pool("other"), pod(base_image, "other", "other")], namespace="default")
        kubernetes.wait("pod", "other", "condition=Ready", namespace="default")
        assert injected(kubernetes.pod("default", "other"))

        def counted() -> bool:
            return bool(status(kubernetes, "default", "other").get("pods", {}).get("injected") == 1)

        kubernetes.wait_for(counted, 60, "the pod is counted", namespace="default")
        kubernetes.kubectl("delete", "pod,kvcachepool", "other", namespace="default")
    finally:
        kubernetes.create_namespace(watched)
