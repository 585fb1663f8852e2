"""The product from a user's view: helm install, one pool, one label."""

from __future__ import annotations

from cluster import images
from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes
from cluster.product import Operator, conditions, plugin, pod, pool, report, status
from servers.models import model, token_ids
from servers.vllm_server import VllmClient


def test_a_pool_and_a_labelled_pod_can_be_applied_together(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    kubernetes.apply([pool("demo"), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    one = kubernetes.pod(namespace, "one")
    assert [each["name"] for each in one["spec"]["initContainers"]] == ["kvcachepool", "kvcachepool-init"]
    assert one["spec"]["initContainers"][0]["image"] == operator.image
    assert report(one)["result"] == "Injected"
    assert one["spec"]["containers"][0]["command"] == ["sleep", "1000"]
    listed = kubernetes.exec(namespace, "one", "ls", "/kvcachepool", container="vllm")
    assert {"kvcachepool", "sidecar.sock"} <= set(listed.split())

    def ready() -> bool:
        now = status(kubernetes, namespace, "demo")
        return conditions(now).get("Ready") == ("True", "Ready") and now["pods"]["injected"] == 1

    kubernetes.wait_for(ready, 30, "the pool says Ready with one injected pod", namespace=namespace)


def test_a_pod_of_a_missing_pool_starts_and_has_the_reason(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply(pod(base_image, "alone", "nowhere"), namespace=namespace)
    kubernetes.wait("pod", "alone", "condition=Ready", namespace=namespace)
    alone = kubernetes.pod(namespace, "alone")
    assert "initContainers" not in alone["spec"]
    assert (report(alone)["result"], report(alone)["reason"]) == ("Refused", "PoolNotFound")


def test_a_deleted_child_is_created_again(kubernetes: Kubernetes, operator: Operator, namespace: str) -> None:
    kubernetes.apply(pool("demo"), namespace=namespace)
    find = ("get", "configmap", "kvcachepool-demo", "-o", "jsonpath={.metadata.uid}", "--ignore-not-found")

    def uid() -> str:
        return kubernetes.kubectl(*find, namespace=namespace)

    first = kubernetes.wait_for(uid, 30, "the pool's ConfigMap", namespace=namespace)
    kubernetes.kubectl("delete", "configmap", "kvcachepool-demo", namespace=namespace)
    kubernetes.wait_for(lambda: uid() not in ("", first), 30, "another ConfigMap", namespace=namespace)


def test_a_vllm_with_only_the_label_added_hits_after_its_container_was_killed(
    cluster: Cluster, operator: Operator, namespace: str
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.vllm_host())
    spec = images.vllm_pod(model("tiny"), "--dtype", "float32", "--max-model-len", "8192")
    labelled = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vllm", "labels": {"kvcachepool.io/pool": "demo"}},
        "spec": spec,
    }
    kubernetes.apply([pool("demo"), labelled], namespace=namespace)
    kubernetes.wait("pod", "vllm", "condition=Ready", namespace=namespace, seconds=240)
    vllm = VllmClient(kubernetes.pod(namespace, "vllm")["status"]["podIP"], 8000)
    prompt = token_ids(1500, 501)

    def attached() -> bool:
        return status(kubernetes, namespace, "demo").get("pods", {}).get("attached") == 1

    cold = vllm.complete(prompt, 1500)
    kubernetes.wait_for(attached, 90, "the pool counts the pod as attached", namespace=namespace)
    vllm.reset_prefix_cache()
    warm = vllm.complete(prompt, 1500)
    explained = plugin(kubernetes, "explain", "pod/vllm", "-n", namespace).stdout
    assert explained.startswith(f"pod/vllm in namespace {namespace}: attached\n"), explained
    kubernetes.exec(
        namespace, "vllm", "sh", "-c", "kill -9 $(pidof -s python3 || pgrep -o vllm) || kill -TERM 1", container="vllm"
    )

    def restarted() -> bool:
        (now,) = kubernetes.pod(namespace, "vllm")["status"]["containerStatuses"]
        return now["restartCount"] == 1 and now["ready"]

    kubernetes.wait_for(restarted, 240, "vLLM's container runs again", namespace=namespace)
    # The scheduler side registers at its first request. Before that a probe has no domain.
    vllm.complete(token_ids(300, 502), 300, max_tokens=1)
    again = vllm.complete(prompt, 1500)
    assert (cold.sources["computed"], warm.sources["external"], again.sources["external"]) == (1500, 1408, 1408)
    assert cold.text == warm.text == again.text
