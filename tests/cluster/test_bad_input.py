"""Invalid requests and stored objects are reported, and do not affect others."""

from __future__ import annotations

import base64
import copy
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from cluster.kubernetes import Kubernetes, Object, Refused
from cluster.leadership import leader, replicas
from cluster.product import SYSTEM, Operator, conditions, injected, pod, pool, report, status

_DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvcachepools.kvcachepool.io"
_CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/kvcachepool-injector"
_UID = "705ab4f5-6393-11e8-b7cc-42010a800002"


class Webhook:
    """The webhook's Service, called like the API server does."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        service = kubernetes.request("GET", f"/api/v1/namespaces/{SYSTEM}/services/kvcachepool-webhook")
        self.url = f"https://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
        bundle = kubernetes.request("GET", _CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"]
        self._tls = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        # The certificate is for the Service's name, but it is called by its address.
        self._tls.check_hostname = False

    def post(self, body: bytes, path: str = "/inject") -> tuple[int, str]:
        """Status and body of the answer."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._tls) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def webhook(kubernetes: Kubernetes, operator: Operator) -> Webhook:
    """The installed operator's webhook."""
    return Webhook(kubernetes)


def _review(**request: Any) -> bytes:
    return json.dumps(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": _UID,
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "operation": "CREATE",
                "namespace": "default",
                "object": pod("image", "asked", "nowhere"),
                **request,
            },
        }
    ).encode()


@pytest.mark.parametrize(
    ("request_of", "path"),
    [
        ({"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}}, "/inject"),
        ({"object": None}, "/inject"),
        ({"object": "text"}, "/inject"),
        ({"object": {}}, "/inject"),
        ({"object": {"metadata": "text", "spec": [1, 2]}}, "/inject"),
        ({"operation": "UPDATE"}, "/inject"),
        ({"subResource": "eviction"}, "/inject"),
        ({}, "/elsewhere"),
    ],
)
def test_a_review_of_anything_but_a_new_pod_is_allowed_without_a_patch(
    webhook: Webhook, request_of: Object, path: str
) -> None:
    code, answer = webhook.post(_review(**request_of), path)
    assert code == 200
    assert json.loads(answer)["response"] == {"uid": _UID, "allowed": True}


def test_a_review_of_a_new_pod_is_answered_with_a_patch(webhook: Webhook) -> None:
    code, answer = webhook.post(_review())
    response = json.loads(answer)["response"]
    assert (code, response["uid"], response["allowed"], response["patchType"]) == (200, _UID, True, "JSONPatch")
    assert "PoolNotFound" in base64.b64decode(response["patch"]).decode()


@pytest.mark.parametrize(
    ("body", "code", "expected"),
    [
        (b"", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[1, 2]", 400, "request.uid is missing"),
        (b'{"kind": "AdmissionReview", "request": {}}', 400, "request.uid is missing"),
    ],
)
def test_an_invalid_review_is_refused_with_an_explanation(
    webhook: Webhook, body: bytes, code: int, expected: str
) -> None:
    got, answer = webhook.post(body)
    assert got == code
    assert expected in answer


def test_a_large_pod_is_injected_unless_it_would_exceed_the_limit(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply(pool("demo"), namespace=namespace)
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"

    def answered(size: int) -> Object | None:
        """The pod in the webhook's response. On a busy machine the API server may continue without it."""
        large = pod(base_image, "large", "demo")
        large["spec"]["containers"][0]["env"] = [{"name": "LARGE", "value": "x" * size}]
        made: Object = kubernetes.request("POST", path, large)
        return made if "kvcachepool.io/injection" in made["metadata"].get("annotations", {}) else None

    assert injected(kubernetes.wait_for(lambda: answered(1 << 20), 30, "an answer about a pod of a megabyte"))
    larger = kubernetes.wait_for(lambda: answered((3 << 19) - 4096), 30, "an answer about a larger pod")
    assert not injected(larger)
    assert report(larger)["reason"] == "PodTooLarge"


@contextmanager
def _without_rules(kubernetes: Kubernetes) -> Iterator[None]:
    """Pools as stored by a version with other rules: the schema does not restrict their spec."""
    stored = kubernetes.request("GET", _DEFINITION)
    loose = copy.deepcopy(stored)
    root = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    root.pop("x-kubernetes-validations", None)
    root["properties"]["spec"] = {"x-kubernetes-preserve-unknown-fields": True}
    kubernetes.request("PUT", _DEFINITION, loose)
    try:
        yield
    finally:
        now = kubernetes.request("PUT", _DEFINITION, kubernetes.request("GET", _DEFINITION) | {"spec": stored["spec"]})
        # Only helm may own it again, or the next release with another schema would conflict.
        now["metadata"]["managedFields"] = stored["metadata"]["managedFields"]
        kubernetes.request("PUT", _DEFINITION, now)


def test_malformed_pools_are_named_and_do_not_block_others(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    path = f"/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools"
    newer = pool("newer", local={"memory": {"perPod": "64Mi", "evictionPolicy": "ARC"}})
    beyond = pool("beyond", local={"memory": {"perPod": "1Mi"}})
    bad = [pool("text") | {"spec": "text"}, pool("empty") | {"spec": {}}, newer, beyond]
    with _without_rules(kubernetes):

        def stored(made: Object) -> bool:
            try:
                return bool(kubernetes.request("POST", path, made))
            except Refused as refused:
                # The looser schema takes effect shortly after it was written.
                if ": 422: " in str(refused):
                    return False
                raise

        for made in bad:
            kubernetes.wait_for(partial(stored, made), 20, f"{made['metadata']['name']} is stored")

        # Once the rules are back, the API server accepts no write to a pool whose spec is no object, nor to its status.
        def reported() -> bool:
            return "Accepted" in conditions(status(kubernetes, namespace, "text"))

        kubernetes.wait_for(reported, 60, "an error in the text reported", namespace=namespace)

    accepted = {"text": "Malformed", "empty": "Malformed", "newer": "Malformed", "beyond": "InvalidSpec"}

    def named() -> bool:
        found = {name: conditions(status(kubernetes, namespace, name)).get("Accepted") for name in accepted}
        return found == {name: ("False", reason) for name, reason in accepted.items()}

    kubernetes.wait_for(named, 60, "each says what is wrong with it", namespace=namespace)

    def works(name: str) -> None:
        kubernetes.apply([pool(name), pod(base_image, name, name)], namespace=namespace)
        kubernetes.wait_for(
            lambda: conditions(status(kubernetes, namespace, name)).get("Accepted") == ("True", "Accepted"),
            30,
            f"the pool {name} is reconciled",
            namespace=namespace,
        )
        assert injected(kubernetes.pod(namespace, name))

    works("watched")
    for replica in replicas(kubernetes):
        assert replica.metrics().total("kvcachepool_pools_invalid") == 3
    kubernetes.apply(
        [pod(base_image, "of-newer", "newer"), pod(base_image, "of-beyond", "beyond")], namespace=namespace
    )
    for name in ("of-newer", "of-beyond"):
        kubernetes.wait("pod", name, "condition=Ready", namespace=namespace)
        assert report(kubernetes.pod(namespace, name))["reason"] == "PoolNotAccepted"
    # The same if they are in the first list.
    kubernetes.kubectl("delete", "pods", "--all", "--wait", namespace=SYSTEM)
    kubernetes.wait("deployment", "kvcachepool-operator", "condition=Available", namespace=SYSTEM)
    kubernetes.wait_for(lambda: leader(kubernetes), 30, "a leader", namespace=SYSTEM)
    works("listed")
