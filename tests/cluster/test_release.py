"""The helm release: upgrade, test, removal, and its NetworkPolicy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes, Object
from cluster.load import DryRuns
from cluster.product import SYSTEM, Operator, Release, conditions, deployment, helm, injected, pod, pool, status

#: Rules for both directions.
VALUES = ("--set", "networkPolicy.egress=true", "--set", "networkPolicy.apiServerPorts={6443}")
_POLICY = f"/apis/networking.k8s.io/v1/namespaces/{SYSTEM}/networkpolicies/kvcachepool-operator"
#: The same programs with the tag of a next version, because this checkout has no earlier chart.
_NEXT = images.Product("localhost/kvcachepool:next")


def _sound(kubernetes: Kubernetes, namespace: str, name: str) -> bool:
    """Whether a pod is unchanged: no container was restarted, and all are ready."""
    now = kubernetes.pod(namespace, name)["status"]
    containers = now["initContainerStatuses"] + now["containerStatuses"]
    return all(each["ready"] and each["restartCount"] == 0 for each in containers)


def _ports(rules: list[Object]) -> list[set[tuple[str, object]]]:
    assert all(set(rule) == {"ports"} for rule in rules), "from everywhere and to everywhere"
    return [{(port["protocol"], port["port"]) for port in rule["ports"]} for rule in rules]


def test_the_network_policy_has_only_the_operators_pods_and_ports(kubernetes: Kubernetes, operator: Operator) -> None:
    spec = kubernetes.request("GET", _POLICY)["spec"]
    selector = ",".join(f"{key}={value}" for key, value in spec["podSelector"]["matchLabels"].items())
    selected = kubernetes.kubectl("get", "pods", "-A", "-l", selector, "-o", "name").split()
    assert sorted(selected) == sorted(f"pod/{each['metadata']['name']}" for each in operator.pods())
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (container,) = operator.pods()[0]["spec"]["containers"]
    served = {("TCP", each["name"]) for each in container["ports"]}
    assert _ports(spec["ingress"]) == [served] == [{("TCP", "webhook"), ("TCP", "admin")}]
    dns, server, sidecars = {("UDP", 53), ("TCP", 53)}, {("TCP", 6443)}, {("TCP", 9797)}
    assert _ports(spec["egress"]) == [dns, server, sidecars]
    # A policy that selected pods of vLLM would disconnect them.
    policies = kubernetes.kubectl("get", "networkpolicies", "-A", "-o", "name").split()
    assert policies == ["networkpolicy.networking.k8s.io/kvcachepool-operator"]


def test_helm_test_proves_injection_and_fails_without_it(kubernetes: Kubernetes, operator: Operator) -> None:
    output = helm(kubernetes, "test", "kvcachepool", "--timeout", "90s")
    assert "Phase:          Succeeded" in output, output
    left = kubernetes.kubectl("get", "pods,kvcachepools", "-o", "name", namespace=SYSTEM)
    assert "kvcachepool-test" not in left
    kubernetes.kubectl("label", "namespace", SYSTEM, "kvcachepool.io/injection=disabled")
    try:
        with pytest.raises(AssertionError, match="kvcachepool-test"):
            helm(kubernetes, "test", "kvcachepool", "--timeout", "10s")
    finally:
        kubernetes.kubectl("label", "namespace", SYSTEM, "kvcachepool.io/injection-")
        kubernetes.kubectl("delete", "pod,kvcachepool", "kvcachepool-test", "--ignore-not-found", namespace=SYSTEM)


def test_an_upgrade_to_another_image_and_other_values_misses_no_pod_and_restarts_none(
    cluster: Cluster, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(_NEXT)
    kubernetes.apply([pool("demo"), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    kubernetes.wait_for(
        lambda: conditions(status(kubernetes, namespace, "demo")).get("Ready") == ("True", "Ready"),
        60,
        "the pool is ready",
        namespace=namespace,
    )
    values = ("--set", "allowPodPatch=true", "--set", "logLevel=debug")
    with DryRuns(kubernetes, namespace, base_image, "demo") as load:
        replace(operator, image=_NEXT.name).upgrade(*values)
    assert load.missed == [], f"{len(load.missed)} of {load.count} pods came back without a sidecar"
    own = [each for each in operator.pods() if "deletionTimestamp" not in each["metadata"]]
    assert {each["spec"]["containers"][0]["image"] for each in own} == {_NEXT.name}
    # The pool sets no image. New pods get the operator's, and running pods have an older one.
    kubernetes.wait_for(
        lambda: status(kubernetes, namespace, "demo")["pods"]["outdated"] == 1,
        90,
        "the running pod counts as outdated",
        namespace=namespace,
    )
    assert _sound(kubernetes, namespace, "one")
    kubernetes.apply(pod(base_image, "two", "demo"), namespace=namespace)
    kubernetes.wait("pod", "two", "condition=Ready", namespace=namespace)
    assert kubernetes.pod(namespace, "two")["spec"]["initContainers"][0]["image"] == _NEXT.name
    assert conditions(status(kubernetes, namespace, "demo"))["Ready"] == ("True", "Ready")


def test_after_uninstall_pods_run_on_new_ones_start_and_pools_are_kept(
    kubernetes: Kubernetes, release: Release, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply([pool("demo"), deployment(base_image, "web", "demo")], namespace=namespace)
    kubernetes.wait("deployment", "web", "condition=Available", namespace=namespace)
    (web,) = (each["metadata"]["name"] for each in kubernetes.pods(namespace))
    assert injected(kubernetes.pod(namespace, web))
    release.end()
    kubernetes.kubectl("scale", "deployment", "web", "--replicas=2", namespace=namespace)
    kubernetes.wait("deployment", "web", "jsonpath={.status.readyReplicas}=2", namespace=namespace)
    assert sorted(injected(each) for each in kubernetes.pods(namespace)) == [False, True]
    assert _sound(kubernetes, namespace, web)
    left = "clusterrole,clusterrolebinding,mutatingwebhookconfiguration"
    named = kubernetes.kubectl("get", left, "-l", "app.kubernetes.io/name=kvcachepool", "-o", "name")
    assert named == ""
    assert status(kubernetes, namespace, "demo")["conditions"], "the pool is still there, with its status"


def test_names_ports_and_selectors_of_ones_own_work_together(
    kubernetes: Kubernetes, release: Release, namespace: str, base_image: str
) -> None:
    """Certificate, Service and configuration of the webhook agree on its name, and the canary reaches it."""
    operator = release.installed(VALUES)
    values = {
        "fullnameOverride": "caches",
        "adminPort": "18080",
        "logFormat": "text",
        "webhook.namespaceSelector.matchLabels.caches": "allowed",
        "webhook.objectSelector.matchLabels.model": "llama",
    }
    try:
        operator.upgrade(*(part for key, value in values.items() for part in ("--set", f"{key}={value}")))
        kubernetes.apply(pool("demo"), namespace=namespace)
        chosen = pod(base_image, "chosen", "demo")
        chosen["metadata"]["labels"]["model"] = "llama"
        kubernetes.apply(chosen, namespace=namespace)
        assert not injected(kubernetes.pod(namespace, "chosen")), "its namespace is not selected"
        kubernetes.kubectl("delete", "pod", "chosen", "--now", namespace=namespace)
        kubernetes.kubectl("label", "namespace", namespace, "caches=allowed")
        kubernetes.apply([chosen, pod(base_image, "other", "demo")], namespace=namespace)
        assert injected(kubernetes.pod(namespace, "chosen"))
        assert not injected(kubernetes.pod(namespace, "other")), "its labels are not selected"
        kubernetes.wait_for(
            lambda: (
                conditions(status(kubernetes, namespace, "demo")).get("InjectionReady") == ("True", "WebhookAnswers")
            ),
            60,
            "the canary reaches the webhook",
            namespace=namespace,
        )
    finally:
        release.end()
