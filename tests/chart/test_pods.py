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
    assert [pod.get("hostNetwork", False) for pod in pods] == [SETS[name].get("hostNetwork", False), False]
    for pod in pods:
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not set(pod) & {"hostPID", "hostIPC", "initContainers"}
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
    digest = "sha256:" + "1" * 64
    for values, wanted in (
        ({"image": {"repository": "registry.example/kv", "tag": "7"}}, "registry.example/kv:7"),
        ({"image": {"registry": "registry.example", "tag": "7"}}, "registry.example/kvcachepool:7"),
        (
            {"image": {"registry": "registry.example", "tag": "7"}, "global": {"imageRegistry": "mirror:5000"}},
            "mirror:5000/kvcachepool:7",
        ),
        ({"image": {"digest": digest}}, f"kvcachepool@{digest}"),
    ):
        operator, test = (pod["containers"][0] for pod in _pods(render(values)))
        environ = {e["name"]: e.get("value") for e in operator["env"]}
        assert operator["image"] == test["image"] == environ["KVCACHEPOOL_IMAGE"] == wanted


def test_pull_secrets_of_all_charts_come_before_those_of_this_one(render):
    for shared in ({"name": "a"}, "a"):
        objects = render({"global": {"imagePullSecrets": [shared]}, "imagePullSecrets": [{"name": "b"}]})
        for pod in [*_pods(objects), one(objects, "KVCachePool")["spec"]["sidecar"]]:
            assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_names_of_ones_own_are_consistent(render):
    """A name that only one of two objects has would break what connects them."""
    values = {"fullnameOverride": "caches", "nameOverride": "kv", "pki": {"mode": "cert-manager"}}
    objects = render(values | {"monitoring": {"podMonitor": {"enabled": True}, "alerts": {"enabled": True}}})
    names = {(o["kind"], o["metadata"]["name"]) for o in objects}
    kept = {name for _, name in names if not name.startswith("caches")}
    assert kept == {"kvcachepool-injector", "kvcachepool-test", "kvcachepools.kvcachepool.io"}
    pod = one(objects, "Deployment")["spec"]["template"]
    service = one(objects, "Service")
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["selector"]["app.kubernetes.io/name"] == "kv"
    dns = [f"caches-webhook.kv.{end}" for end in ("svc", "svc.cluster.local")]
    assert one(objects, "Certificate")["spec"]["dnsNames"] == dns
    assert [a for a in pod["spec"]["containers"][0]["args"] if "webhook-name" in a] == [
        f"--webhook-name={name}" for name in dns
    ]
    for entry in one(objects, "MutatingWebhookConfiguration")["webhooks"]:
        assert entry["clientConfig"]["service"]["name"] == service["metadata"]["name"]
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        binding = one(objects, kind)
        assert one(objects, binding["roleRef"]["kind"], binding["roleRef"]["name"])
        assert binding["subjects"][0]["name"] == pod["spec"]["serviceAccountName"]


def test_pods_in_the_nodes_network_keep_the_clusters_dns(render):
    values = {"hostNetwork": True, "webhook": {"port": 9443}}
    pod = _pods(render(values))[0]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert _pods(render(values | {"dnsPolicy": "Default"}))[0]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in _pods(render())[0]


def test_the_admin_port_is_the_same_everywhere(render):
    objects = render({"adminPort": 18080})
    container = _pods(objects)[0]["containers"][0]
    assert "--health-listen=[::]:18080" in container["args"]
    assert {"name": "admin", "containerPort": 18080} in container["ports"]
    assert {"name": "admin", "port": 18080, "targetPort": "admin"} in one(objects, "Service")["spec"]["ports"]


def test_environment_volumes_and_contexts_reach_the_operators_pods(render):
    values = SETS["everything"] | {"pki": {"mode": "external", "external": {"secretName": "tls"}}}
    values |= {"securityContext": {"runAsUser": 1000}, "podSecurityContext": {"fsGroup": 1000}}
    deployment = one(render(values), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["env"][-1] == values["extraEnv"][0]
    assert container["envFrom"] == values["extraEnvFrom"]
    assert [v["name"] for v in pod["volumes"]] == [m["name"] for m in container["volumeMounts"]] == ["tls", "ca"]
    assert container["securityContext"]["runAsUser"] == 1000
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["fsGroup"] == 1000
    assert container["livenessProbe"]["timeoutSeconds"] == 5
    assert container["livenessProbe"]["periodSeconds"] == 10
    assert pod["dnsConfig"] == values["dnsConfig"]
    assert pod["hostAliases"] == values["hostAliases"]
    assert "--log-format=text" in container["args"]
    assert deployment["metadata"]["annotations"] == {"a": "b"}


def test_a_strategy_has_only_the_fields_of_its_type(render):
    assert one(render({"strategy": {"type": "Recreate"}}), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert one(render(), "Deployment")["spec"]["strategy"] == rolling


def test_a_budget_has_one_of_both_limits(render):
    for values, limit in (
        ({"maxUnavailable": "50%"}, {"maxUnavailable": "50%"}),
        ({"minAvailable": 1}, {"minAvailable": 1}),
        ({"minAvailable": 0}, {"minAvailable": 0}),
    ):
        budget = one(render({"podDisruptionBudget": values}), "PodDisruptionBudget")["spec"]
        assert {key: budget[key] for key in ("maxUnavailable", "minAvailable") if key in budget} == limit


def test_the_service_takes_labels_annotations_and_address_families(render):
    values = {"annotations": {"a": "b"}, "labels": {"c": "d"}, "ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6"]}
    service = one(render({"service": values}), "Service")
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert service["metadata"]["labels"]["c"] == "d"
    assert (service["spec"]["ipFamilyPolicy"], service["spec"]["ipFamilies"]) == ("SingleStack", ["IPv6"])


def test_labels_and_annotations_of_values_do_not_replace_those_of_the_chart(render):
    """A selector must match, and a label for one kind of object is nearer to it than one for all."""
    objects = render(SETS["labels and annotations that the chart sets itself"])
    pod = one(objects, "Deployment")["spec"]["template"]["metadata"]
    assert pod["labels"]["app.kubernetes.io/component"] == "operator"
    assert pod["labels"]["team"] == "web"
    assert pod["annotations"]["kubectl.kubernetes.io/default-container"] == "operator"
    assert pod["annotations"]["a"] == "b"
    assert one(objects, "ServiceAccount")["metadata"]["labels"]["team"] == "ml"
    assert [o["kind"] for o in objects if "x" in o["metadata"].get("labels", {}).values()] == []
    assert one(objects, "Pod")["metadata"]["labels"]["app.kubernetes.io/name"] == "vllm", "else it is not selected"


def test_extra_arguments_come_last(render):
    args = _pods(render({"extraArgs": ["--a=b c", "--d"]}))[0]["containers"][0]["args"]
    assert args[-2:] == ["--a=b c", "--d"]


def test_policy_and_defaults_reach_the_operator(render):
    prefixes = ("KVCACHEPOOL_POLICY_", "KVCACHEPOOL_REDIS_", "KVCACHEPOOL_IMAGE_")

    def environ(values: dict[str, Any]) -> dict[str, str]:
        variables = _pods(render(values))[0]["containers"][0]["env"]
        return {each["name"]: each.get("value") for each in variables if each["name"].startswith(prefixes)}

    assert environ({}) == {}
    assert environ(SETS["everything"]) == {
        "KVCACHEPOOL_POLICY_MAX_MEMORY_PER_POD": "256Gi",
        "KVCACHEPOOL_POLICY_IMAGES": "registry.example/*,other:1",
        "KVCACHEPOOL_POLICY_GPU_ACCESS": "ResourceClaim",
        "KVCACHEPOOL_POLICY_SERVICE_ACCOUNTS": "cleaner",
        "KVCACHEPOOL_IMAGE_REGISTRY": "mirror.example",
        "KVCACHEPOOL_REDIS_IMAGE": "valkey@sha256:00",
        "KVCACHEPOOL_REDIS_EXPORTER_IMAGE": "redis_exporter@sha256:00",
        "KVCACHEPOOL_REDIS_RUN_AS_USER": "platform",
        "KVCACHEPOOL_IMAGE_PULL_SECRETS": "a,b",
    }


def test_the_network_policy_selects_the_operators_pods_only(render):
    for egress in (False, True):
        objects = render({"networkPolicy": {"egress": egress}})
        policy = one(objects, "NetworkPolicy")["spec"]
        assert policy["podSelector"]["matchLabels"] == one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
        assert policy["policyTypes"] == (["Ingress", "Egress"] if egress else ["Ingress"])
        assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == ["webhook", "admin"]
        if egress:
            assert [p["port"] for rule in policy["egress"] for p in rule["ports"]] == [53, 53, 443, 6443, 9797]


def test_the_test_is_in_a_namespace_and_has_labels_that_the_webhook_selects(render):
    selected = {"watchNamespaces": ["serving", "batch"], "webhook": {"objectSelector": {"matchLabels": {"a": "b"}}}}
    for values, namespace in (selected, "serving"), ({"watchNamespaces": ["serving", "kv"]}, "kv"), ({}, "kv"):
        objects = render(values)
        assert {one(objects, kind)["metadata"]["namespace"] for kind in ("Pod", "KVCachePool")} == {namespace}
        labels = one(objects, "Pod")["metadata"]["labels"]
        assert labels.get("a") == ("b" if values is selected else None)


def test_the_operator_starts_again_with_other_rights(render):
    def annotation(values):
        template = one(render(values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/rights"]

    assert annotation({"allowManagedRedis": True}) != annotation({}) == annotation({"logLevel": "debug"})


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
