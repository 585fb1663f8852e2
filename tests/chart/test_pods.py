"""The operator's pods: Pod Security `restricted`, mounts, spreading and Services."""

from __future__ import annotations

from typing import Any

import pytest

from chart import SETS, one


def _pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        o["spec"]["template"]["spec"] if o["kind"] == "Deployment" else o["spec"]
        for o in objects
        if o["kind"] in ("Deployment", "Pod")
    ]


@pytest.mark.parametrize("name", SETS)
def test_every_pod_passes_the_restricted_standard_and_says_what_it_needs(render, name):
    pods = _pods(render(SETS[name]))
    assert len(pods) == 2, "operator and test"
    for pod in pods:
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not set(pod) & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        for volume in pod.get("volumes", []):
            assert set(volume) == {"name", "secret"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


def test_only_the_operator_gets_a_token(render):
    objects = render()
    assert one(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    operator, test = _pods(objects)
    assert operator["automountServiceAccountToken"] is True
    assert test["automountServiceAccountToken"] is False


def test_replicas_are_spread_and_one_of_them_stays(render):
    objects = render()
    deployment = one(objects, "Deployment")["spec"]
    assert deployment["replicas"] == 2
    selector = deployment["selector"]["matchLabels"]
    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()
    spread = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert [s["topologyKey"] for s in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert all(s["labelSelector"] == {"matchLabels": selector} for s in spread)
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["selector"]["matchLabels"] == selector
    assert budget["maxUnavailable"] == 1
    assert not [o for o in render({"replicas": 1}) if o["kind"] == "PodDisruptionBudget"]


def test_the_service_leads_to_the_ports_that_are_open(render):
    objects = render()
    service = one(objects, "Service")["spec"]
    (operator, _) = _pods(objects)
    ports = {p["name"]: p["containerPort"] for p in operator["containers"][0]["ports"]}
    assert ports == {"webhook": 10250, "admin": 8080}
    assert {p["port"]: p["targetPort"] for p in service["ports"]} == {10250: "webhook", 8080: "admin"}
    assert service["selector"] == one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    probes = [operator["containers"][0][p]["httpGet"] for p in ("livenessProbe", "readinessProbe")]
    assert probes == [{"path": "/healthz", "port": "admin"}, {"path": "/readyz", "port": "admin"}]


def test_one_image_serves_operator_sidecars_and_test(render):
    objects = render({"image": {"repository": "registry.example/kv", "tag": "7"}})
    operator, test = (pod["containers"][0] for pod in _pods(objects))
    environ = {e["name"]: e.get("value") for e in operator["env"]}
    assert operator["image"] == test["image"] == environ["KVCACHEPOOL_IMAGE"] == "registry.example/kv:7"
    digest = "sha256:" + "1" * 64
    operator, test = (pod["containers"][0] for pod in _pods(render({"image": {"digest": digest}})))
    assert operator["image"] == test["image"] == f"kvcachepool@{digest}"


def test_extra_arguments_come_last(render):
    args = _pods(render({"extraArgs": ["--a=b c", "--d"]}))[0]["containers"][0]["args"]
    assert args[-2:] == ["--a=b c", "--d"]


def test_the_network_policy_selects_the_operators_pods_only(render):
    for egress in (False, True):
        objects = render({"networkPolicy": {"egress": egress}})
        policy = one(objects, "NetworkPolicy")["spec"]
        assert policy["podSelector"]["matchLabels"] == one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
        assert policy["policyTypes"] == (["Ingress", "Egress"] if egress else ["Ingress"])
        assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == ["webhook", "admin"]
        if egress:
            assert [p["port"] for rule in policy["egress"] for p in rule["ports"]] == [53, 53, 443, 6443, 9797]


def test_the_test_asks_for_a_sidecar_by_a_pool_of_its_own(render):
    objects = render({"imagePullSecrets": [{"name": "regcred"}]})
    pod, pool = one(objects, "Pod"), one(objects, "KVCachePool")
    assert pod["metadata"]["labels"]["kvcachepool.io/pool"] == pool["metadata"]["name"]
    assert pod["metadata"]["namespace"] == pool["metadata"]["namespace"]
    weights = [int(o["metadata"]["annotations"]["helm.sh/hook-weight"]) for o in (pool, pod)]
    assert weights[0] < weights[1], "the pool is there before its pod"
    for o in (pool, pod):
        assert o["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pool["spec"]["sidecar"]["imagePullSecrets"] == pod["spec"]["imagePullSecrets"] == [{"name": "regcred"}]
    assert pod["spec"]["activeDeadlineSeconds"] <= 120, "a test that waits for ever says nothing"
