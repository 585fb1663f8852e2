"""The test cluster itself: pods, Services, DNS, native sidecars, restarts, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cluster import cgroups
from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes, Object
from cluster.slot import others
from servers import web
from servers.process import alive
from servers.waiting import wait_for

_WEB = "mkdir /www && echo hello > /www/index.html && exec httpd -f -p 8080 -h /www"


def _pod(image: str, name: str, *command: str, **spec: object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [{"name": "main", "image": image, "command": list(command)}],
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def _service(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]},
    }


def test_this_machine_reaches_the_api_server(kubernetes: Kubernetes) -> None:
    assert kubernetes.request("GET", "/version")["major"] == "1"
    nodes = kubernetes.request("GET", "/api/v1/nodes")["items"]
    conditions = [{each["type"]: each["status"] for each in node["status"]["conditions"]} for node in nodes]
    assert [each["Ready"] for each in conditions] == ["True"] * len(nodes)


def test_service_is_found_by_name_from_pods_and_by_address_from_this_machine(
    cluster: Cluster, namespace: str, base_image: str
) -> None:
    kubernetes = cluster.kubernetes
    kubernetes.apply(
        [_pod(base_image, "web", "sh", "-c", _WEB), _service("web"), _pod(base_image, "client", "sleep", "1000")],
        namespace=namespace,
    )
    for name in ("web", "client"):
        kubernetes.wait("pod", name, "condition=Ready", namespace=namespace)

    def by_name() -> str:
        command = ("exec", "client", "--", "wget", "-qO-", f"http://web.{namespace}")
        return kubernetes.kubectl(*command, namespace=namespace, check=False)

    assert kubernetes.wait_for(by_name, 20, "an answer by the Service's name", namespace=namespace) == "hello\n"
    address = kubernetes.request("GET", f"/api/v1/namespaces/{namespace}/services/web")["spec"]["clusterIP"]
    assert web.get(f"http://{address}/") == (200, "hello\n")
    assert kubernetes.logs(namespace, "web") == ""


def test_native_sidecar_is_ready_before_the_main_container_starts(
    kubernetes: Kubernetes, namespace: str, base_image: str
) -> None:
    volume = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    sidecar = {
        "name": "sidecar",
        "image": base_image,
        **volume,
        "command": ["sh", "-c", "touch /shared/up && exec sleep 1000"],
        "restartPolicy": "Always",
        "startupProbe": {"exec": {"command": ["test", "-e", "/shared/up"]}, "periodSeconds": 1},
    }
    pod = _pod(base_image, "pod", "sh", "-c", "test -e /shared/up && exec sleep 1000", initContainers=[sidecar])
    pod["spec"]["volumes"] = [{"name": "shared", "emptyDir": {}}]
    pod["spec"]["containers"][0].update(volume)
    kubernetes.apply(pod, namespace=namespace)
    kubernetes.wait("pod", "pod", "condition=Ready", namespace=namespace)
    status = kubernetes.pod(namespace, "pod")["status"]
    (beside,), (main,) = status["initContainerStatuses"], status["containerStatuses"]
    assert beside["started"]
    assert "running" in beside["state"]
    assert main["restartCount"] == 0


def test_pods_outlive_a_kubelet_and_an_api_server(cluster: Cluster, namespace: str, base_image: str) -> None:
    kubernetes = cluster.kubernetes
    kubernetes.apply(_pod(base_image, "before", "sleep", "1000"), namespace=namespace)
    kubernetes.wait("pod", "before", "condition=Ready", namespace=namespace)
    container = kubernetes.pod(namespace, "before")["status"]["containerStatuses"][0]["containerID"]
    kubelet = cluster.nodes[0].kubelet
    killed = kubelet.pid()
    kubelet.restart()
    assert kubelet.pid() not in (None, killed)
    cluster.restart_apiserver()
    kubernetes.apply(_pod(base_image, "after", "sleep", "1000"), namespace=namespace)
    kubernetes.wait("pod", "after", "condition=Ready", namespace=namespace)
    (status,) = kubernetes.pod(namespace, "before")["status"]["containerStatuses"]
    assert (status["containerID"], status["restartCount"]) == (container, 0)


def test_a_failed_wait_reports_the_content_of_the_namespace(
    kubernetes: Kubernetes, namespace: str, base_image: str
) -> None:
    kubernetes.apply(_pod(base_image, "broken", "sh", "-c", "echo why it broke; exit 3"), namespace=namespace)
    waits = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=CrashLoopBackOff"
    kubernetes.wait("pod", "broken", waits, namespace=namespace)
    try:
        # It is Ready shortly after each start, but never completes.
        kubernetes.wait("pod", "broken", "jsonpath={.status.phase}=Succeeded", namespace=namespace, seconds=1)
    except AssertionError as error:
        message = str(error)
    assert "why it broke" in message
    assert "BackOff" in message


_OWNER = """
import sys
from cluster.cluster import Cluster
from cluster.slot import Slot
Cluster.start(Slot(int(sys.argv[1])), nodes=2)
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_nodes_are_removed_after_the_death_of_their_owner(cluster: Cluster, base_image: str) -> None:
    slot = next(slot for slot in others() if not slot.taken())
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _OWNER, str(slot.number)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "ready\n"
        second = Cluster.attach(slot)
        kubernetes = second.kubernetes
        kubernetes.create_namespace("across")
        kubernetes.apply(
            [
                _pod(base_image, "web", "sh", "-c", _WEB, nodeName="node2"),
                _service("web"),
                _pod(base_image, "client", "sleep", "1000", nodeName="node1"),
            ],
            namespace="across",
        )
        for name in ("web", "client"):
            kubernetes.wait("pod", name, "condition=Ready", namespace="across")

        def across() -> str:
            command = ("exec", "client", "--", "wget", "-qO-", "http://web.across")
            return kubernetes.kubectl(*command, namespace="across", check=False)

        assert kubernetes.wait_for(across, 20, "an answer from the other node", namespace="across") == "hello\n"
        kubernetes.close()
        processes = [pid for node in second.nodes for pid in node.processes()]
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes}
        assert {"pause", "etcd", "kube-apiserver", "kubelet", "containerd", "httpd"} <= names
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_for(lambda: not slot.taken(), 30, "end of the cluster after its owner's death")
    assert not [pid for pid in processes if alive(pid)]
    assert not cgroups.exists(slot.cgroup)
    assert not slot.folder.exists()
    assert str(slot.folder) not in Path("/proc/self/mountinfo").read_text()
    assert not Path(f"/sys/class/net/{slot.interface}").exists()
    # The other cluster was not affected.
    assert cluster.control_plane.ready()
