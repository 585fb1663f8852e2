"""`kubectl kvcachepool status|explain` for pods at every step to the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster.kubernetes import Kubernetes, Object
from cluster.product import Operator, conditions, plugin, pod, pool, status


@pytest.fixture(scope="module")
def ways(kubernetes: Kubernetes, operator: Operator, base_image: str) -> Iterator[str]:
    """A namespace with a pod for every case, named in the tests."""
    namespace = "plugin"
    kubernetes.create_namespace(namespace)
    two = pod(base_image, "refused", "demo")
    two["spec"]["containers"].append(two["spec"]["containers"][0] | {"name": "engine"})
    plain = pod(base_image, "plain", "demo")
    del plain["metadata"]["labels"]
    kubernetes.apply(
        [pool("demo"), pod(base_image, "waits", "demo"), two, plain, pod(base_image, "lost", "nowhere")],
        namespace=namespace,
    )
    kubernetes.kubectl("label", "namespace", namespace, "kvcachepool.io/injection=disabled")
    kubernetes.apply(pod(base_image, "missed", "demo"), namespace=namespace)
    kubernetes.kubectl("label", "namespace", namespace, "kvcachepool.io/injection-")
    kubernetes.wait("pod", "--all", "condition=Ready", namespace=namespace)

    def counted() -> bool:
        now = status(kubernetes, namespace, "demo")
        pods = now.get("pods", {})
        counts = [pods.get(key) for key in ("matched", "injected", "skipped", "missed")]
        return counts == [3, 1, 1, 1] and conditions(now)["Ready"] == ("True", "Ready")

    # A count is written once a minute.
    kubernetes.wait_for(counted, 90, "all pods are counted", namespace=namespace)
    yield namespace
    kubernetes.delete_namespace(namespace)


def _explained(kubernetes: Kubernetes, namespace: str, name: str) -> Object:
    done = plugin(kubernetes, "explain", f"pod/{name}", "-n", namespace, "-o", "json")
    assert done.returncode == 0, done.stderr
    explained: Object = json.loads(done.stdout)
    return explained


@pytest.mark.parametrize(
    ("name", "step", "reason", "expected"),
    [
        ("plain", "label", "", "has no label kvcachepool.io/pool"),
        ("lost", "pool", "PoolNotFound", "there is no KVCachePool nowhere"),
        ("refused", "injection", "ContainerAmbiguous", "kvcachepool.io/container"),
        ("missed", "injection", "Missed", "the webhook was not called"),
        ("waits", "attached", "", "no vLLM has contacted the sidecar"),
    ],
)
def test_explain_ends_at_the_failing_step(
    kubernetes: Kubernetes, ways: str, name: str, step: str, reason: str, expected: str
) -> None:
    explained = _explained(kubernetes, ways, name)
    last = explained["steps"][-1]
    assert not explained["attached"]
    assert (last["step"], last.get("reason", "")) == (step, reason), explained
    assert expected in last["message"]
    text = plugin(kubernetes, "explain", name, "-n", ways).stdout
    assert text.startswith(f"pod/{name} in namespace {ways}: not attached\n")
    assert expected in text.splitlines()[-1]


def test_status_lists_pools_and_details_of_one(kubernetes: Kubernetes, ways: str) -> None:
    head, row = (line.split() for line in plugin(kubernetes, "status", "-n", ways).stdout.splitlines())
    counted = dict(zip(head, row, strict=True))
    assert (counted["NAME"], counted["READY"]) == ("demo", "True")
    assert [counted[name] for name in ("PODS", "ATTACHED", "SKIPPED", "MISSED")] == ["1", "0", "1", "1"]
    detail = plugin(kubernetes, "status", "demo", "-n", ways, "-o", "json")
    pods = {each["name"]: (each["sidecar"], each["reason"]) for each in json.loads(detail.stdout)["pods"]}
    assert pods == {"waits": ("running", ""), "refused": ("none", "ContainerAmbiguous"), "missed": ("none", "")}
    text = plugin(kubernetes, "status", "demo", "-n", ways).stdout
    assert "InjectionReady" in text
    assert "WebhookAnswers" in text


def test_missing_objects_are_reported_in_a_sentence_with_an_error(kubernetes: Kubernetes, ways: str) -> None:
    for arguments, expected in (
        (("explain", "pod/none"), f"there is no pod none in namespace {ways}"),
        (("status", "none"), f"there is no KVCachePool none in namespace {ways}"),
        (("explain", "deployment/web"), "deployment/web is not a pod; write pod/NAME"),
    ):
        done = plugin(kubernetes, *arguments, "-n", ways)
        assert done.returncode != 0
        assert expected in done.stderr
        assert "panicked" not in done.stderr
