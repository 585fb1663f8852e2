"""The webhook configuration: which pods it selects, and that it never delays a pod for long."""

from __future__ import annotations

import base64

from chart import ROOT, one


def test_it_is_called_before_the_webhook_that_gives_pods_their_cloud_identity(render):
    name = one(render(), "MutatingWebhookConfiguration")["metadata"]["name"]
    assert name == "kvcachepool-injector"
    assert name < "pod-identity-webhook"


def test_no_pod_waits_for_it_longer_than_three_seconds_or_is_refused_without_it(render):
    entries = one(render(), "MutatingWebhookConfiguration")["webhooks"]
    assert [e["name"] for e in entries] == ["label.kvcachepool.io", "annotation.kvcachepool.io"]
    for entry in entries:
        assert entry["failurePolicy"] == "Ignore"
        assert entry["reinvocationPolicy"] == "IfNeeded"
        assert entry["sideEffects"] == "None"
        assert entry["timeoutSeconds"] == 3
        assert entry["admissionReviewVersions"] == ["v1"]
        assert entry["rules"] == [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "operations": ["CREATE"],
                "scope": "Namespaced",
            }
        ]
        assert entry["namespaceSelector"]["matchExpressions"] == [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]},
            {"key": "kvcachepool.io/injection", "operator": "NotIn", "values": ["disabled"]},
        ]


def test_only_pods_with_the_label_or_annotation_are_reviewed(render):
    label, annotation = one(render(), "MutatingWebhookConfiguration")["webhooks"]
    assert label["objectSelector"] == {"matchExpressions": [{"key": "kvcachepool.io/pool", "operator": "Exists"}]}
    assert "matchConditions" not in label
    assert "objectSelector" not in annotation
    (condition,) = annotation["matchConditions"]
    assert condition["expression"].strip() == (
        "has(object.metadata.annotations) && 'kvcachepool.io/pool' in object.metadata.annotations"
    )


def test_selectors_narrow_what_is_injected_and_never_the_canary(render):
    """Dry runs of the canary have none of the user's labels, and would report a webhook that is not called."""
    namespaces = {"matchLabels": {"gpu": "yes"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]}
    pods = {"matchLabels": {"model": "llama"}}
    values = {"webhook": {"namespaceSelector": namespaces, "objectSelector": pods}}
    label, annotation, canary = one(render(values), "MutatingWebhookConfiguration")["webhooks"]
    for entry in (label, annotation):
        assert entry["namespaceSelector"]["matchLabels"] == {"gpu": "yes"}
        keys = [e["key"] for e in entry["namespaceSelector"]["matchExpressions"]]
        assert keys == ["kubernetes.io/metadata.name", "kvcachepool.io/injection", "tier"]
        assert entry["objectSelector"]["matchLabels"] == {"model": "llama"}
    assert label["objectSelector"]["matchExpressions"] == [{"key": "kvcachepool.io/pool", "operator": "Exists"}]
    assert canary["name"] == "canary.kvcachepool.io"
    assert canary["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kv"}}
    assert canary["objectSelector"] == {"matchLabels": {"kvcachepool.io/pool": "kvcachepool-canary"}}
    assert canary["failurePolicy"] == "Ignore"
    names = (ROOT / "operator" / "src" / "names.rs").read_text()
    assert 'CANARY_POOL: &str = "kvcachepool-canary"' in names


def test_the_canary_has_an_entry_of_its_own_where_the_operators_namespace_is_excluded(render):
    for excluded, entries in (["kube-system"], 2), (["kube-system", "kv"], 3):
        found = one(render({"webhook": {"excludedNamespaces": excluded}}), "MutatingWebhookConfiguration")["webhooks"]
        assert len(found) == entries
    assert found[2]["name"] == "canary.kvcachepool.io"
    assert found[2]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kv"}}


def test_annotations_of_the_configuration_join_those_of_cert_manager(render):
    values = {"webhook": {"annotations": {"a": "b"}}, "pki": {"mode": "cert-manager"}}
    annotations = one(render(values), "MutatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations == {"a": "b", "cert-manager.io/inject-ca-from": "kv/kvcachepool-webhook"}


def test_both_entries_lead_to_the_service(render):
    objects = render({"webhook": {"port": 9443}})
    service = one(objects, "Service")
    for entry in one(objects, "MutatingWebhookConfiguration")["webhooks"]:
        assert entry["clientConfig"]["service"] == {
            "name": service["metadata"]["name"],
            "namespace": "kv",
            "path": "/inject",
            "port": 9443,
        }
        assert 9443 in [p["port"] for p in service["spec"]["ports"]]


def test_the_tool_that_creates_the_certificate_writes_the_bundle(render):
    for values in ({}, {"pki": {"mode": "cert-manager"}}):
        for entry in one(render(values), "MutatingWebhookConfiguration")["webhooks"]:
            assert "caBundle" not in entry["clientConfig"]
    external = {"pki": {"mode": "external", "external": {"secretName": "tls", "caBundle": "PEM"}}}
    for entry in one(render(external), "MutatingWebhookConfiguration")["webhooks"]:
        assert base64.b64decode(entry["clientConfig"]["caBundle"]) == b"PEM"


def test_a_ca_bundle_is_refused_if_another_tool_writes_it(template):
    for mode in ("self", "cert-manager"):
        refused = template({"pki": {"mode": mode, "external": {"caBundle": "PEM"}}})
        assert refused.returncode != 0
        assert "pki.mode external only" in refused.stderr


def test_cert_manager_injects_the_bundle_of_the_mounted_certificate(render):
    objects = render({"pki": {"mode": "cert-manager"}})
    configuration, certificate = one(objects, "MutatingWebhookConfiguration"), one(objects, "Certificate")
    wanted = f"{certificate['metadata']['namespace']}/{certificate['metadata']['name']}"
    assert configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == wanted
    assert certificate["spec"]["dnsNames"][0] == "kvcachepool-webhook.kv.svc"
    assert certificate["spec"]["issuerRef"]["name"] == one(objects, "Issuer")["metadata"]["name"]
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "tls", "secret": {"secretName": certificate["spec"]["secretName"]}}]
    mounts = pod["containers"][0]["volumeMounts"]
    assert mounts == [{"name": "tls", "mountPath": "/etc/kvcachepool/webhook", "readOnly": True}]


def test_a_users_issuer_replaces_the_charts_own(render):
    reference = {"name": "corp", "kind": "ClusterIssuer"}
    objects = render({"pki": {"mode": "cert-manager", "certManager": {"issuerRef": reference}}})
    assert one(objects, "Certificate")["spec"]["issuerRef"] == reference
    assert not [o for o in objects if o["kind"] == "Issuer"]
