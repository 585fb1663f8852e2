"""The whole way on a Kubernetes of its own: helm install, one pool, and a plain vLLM Deployment that gets one label.

The cluster is that of tests/cluster, in namespaces of this machine; it ends with the demo. KVCACHEPOOL_CLUSTER=0..9
chooses its network and folder; without it a free one is taken.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cluster import images, product
from cluster.cluster import Cluster
from cluster.kubernetes import Object
from cluster.slot import binaries, others
from cluster.slot import chosen as chosen_slot
from demo.progress import Failed, at_work, main, say
from demo.workload import KV_SPACE, Model, Workload
from servers import paths
from servers.sidecar import SidecarClient
from servers.vllm_server import VllmClient
from servers.waiting import TimedOut, wait_for

POOL = "manifests/kvcachepool.yaml"
NAMESPACE = "default"
LABEL = "kvcachepool.io/pool"
PATCH = {"spec": {"template": {"metadata": {"labels": {LABEL: "demo"}}}}}
SIDECAR_PORT = 9797
#: Maximum start time of a vLLM on a busy machine.
_START_SECONDS = 600
#: The operator queries sidecars once a minute, and writes a status at most once a minute.
_STATUS_SECONDS = 180


def start_cluster() -> Cluster:
    """Starts the demo's cluster."""
    slots = [chosen_slot()] if "KVCACHEPOOL_CLUSTER" in os.environ else others()
    slot = next((slot for slot in slots if not slot.taken()), None)
    if slot is None:
        raise Failed(
            "no free place for a cluster: python -m cluster status, or choose another KVCACHEPOOL_CLUSTER=0..9"
        )
    try:
        with at_work("a Kubernetes starts: etcd, control plane, containerd and kubelet in namespaces of their own"):
            return Cluster.start(slot)
    except (OSError, RuntimeError, AssertionError, subprocess.CalledProcessError) as error:
        raise Failed(
            f"no Kubernetes on this machine: {error}\n`make demo-local` shows the cache without one"
        ) from error


def deployment(chosen: Model) -> Object:
    """A plain vLLM Deployment without any reference to a cache."""
    spec = images.vllm_pod(chosen.folder, *chosen.arguments())
    container = spec["containers"][0]
    for variable in container["env"]:
        if variable["name"] == "VLLM_CPU_KVCACHE_SPACE":
            variable["value"] = KV_SPACE
    for number, folder in enumerate(linked_folders(chosen.folder)):
        spec["volumes"].append({"name": f"linked{number}", "hostPath": {"path": folder, "type": "Directory"}})
        container["volumeMounts"].append({"name": f"linked{number}", "mountPath": folder, "readOnly": True})
    labels = {"app": "vllm"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
    }


def linked_folders(folder: Path) -> list[str]:
    """Other folders that the model's files link to, as in the cache of a model hub."""
    targets = {file.resolve().parent for file in folder.rglob("*") if file.is_symlink()}
    return sorted(str(target) for target in targets if target.is_dir() and not target.is_relative_to(folder))


class Demo:
    """The steps, each with the commands that a user would run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._kubernetes = cluster.kubernetes
        # kubectl finds the plugin on the PATH.
        self._env = {**cluster.kubernetes.env(), "HELM_CACHE_HOME": str(cluster.slot.folder / "helm")}
        self._env["PATH"] += f":{paths.target() / 'debug'}"

    def run(self, *command: str, why: str) -> None:
        """Runs a command and shows it with its output."""
        say(why)
        print(f"$ {shlex.join(command)}", flush=True)
        done = subprocess.run(command, env=self._env, cwd=paths.ROOT, capture_output=True, text=True, timeout=240)
        if done.returncode:
            raise Failed(f"{shlex.join(command)}: exit status {done.returncode}\n{done.stderr}{done.stdout}")
        print(f"{done.stdout.rstrip()}\n", flush=True)

    def install(self) -> None:
        """Installs the operator."""
        image = images.Product()
        with at_work(
            "images are imported: operator and sidecar as just built, and one that borrows this machine's vLLM"
        ):
            self._cluster.import_image(image)
            self._cluster.import_image(images.vllm_host())
        repository, tag = image.name.rsplit(":", 1)
        chart = str(product.CHART.relative_to(paths.ROOT))
        command = ["helm", "install", "kvcachepool", chart, "--namespace", product.SYSTEM, "--create-namespace"]
        command += ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}", "--hide-notes"]
        self.run(*command, "--wait", "--timeout", "3m", why="the operator is installed")

    def start_vllm(self, chosen: Model) -> None:
        """The pool, and the Deployment without the label."""
        self.run("kubectl", "apply", "-f", POOL, why=f"one pool, {POOL}")
        command = f"vllm serve {chosen.folder} {' '.join(chosen.arguments())}"
        with at_work(f"a plain vLLM Deployment, without the label: {command}"):
            self._kubernetes.apply(deployment(chosen), namespace=NAMESPACE)
            self._ready_pod(f"!{LABEL}")
        self.run("kubectl", "get", "pods", why="vLLM alone in its pod")

    def add_label(self) -> str:
        """Adds the label, which starts a rollout. Returns the name of the new pod."""
        patch = json.dumps(PATCH, separators=(",", ":"))
        command = ("kubectl", "patch", "deployment", "vllm", "--type", "merge", "-p", patch)
        self.run(*command, why="now only the label, on the pod template")
        with at_work("the rollout: a pod with a sidecar starts, then the old pod goes"):
            pod = self._ready_pod(f"{LABEL}=demo")
            wait_for(lambda: len(self._pods("app=vllm")) == 1, 60, "end of the old pod", pause=0.5)
        name: str = pod["metadata"]["name"]
        self.run("kubectl", "rollout", "status", "deployment/vllm", why="the rollout is over")
        self.run("kubectl", "get", "replicasets,pods", why="vLLM and its sidecar in one pod")
        columns = "INIT:.spec.initContainers[*].name,CONTAINERS:.spec.containers[*].name"
        self.run("kubectl", "get", "pod", name, "-o", f"custom-columns={columns}", why="the injected pod")
        annotation = r"jsonpath={.metadata.annotations.kvcachepool\.io/injection}"
        self.run("kubectl", "get", "pod", name, "-o", annotation, why="what the webhook wrote on it")
        return name

    def clients(self, pod: str) -> tuple[VllmClient, SidecarClient]:
        """Clients of a pod's vLLM and sidecar. This machine reaches pods by their addresses."""
        address: str = self._kubernetes.pod(NAMESPACE, pod)["status"]["podIP"]
        return VllmClient(address, 8000), SidecarClient(address, SIDECAR_PORT)

    def explain(self, pod: str) -> None:
        """Runs `explain` on the pod."""
        self.run("kubectl", "kvcachepool", "explain", f"pod/{pod}", why="is this pod cached, and why")

    def restart_vllm(self, pod: str) -> None:
        """Kills vLLM's container. The kubelet restarts it in the same pod."""
        (container,) = self._kubernetes.pod(NAMESPACE, pod)["status"]["containerStatuses"]
        (node,) = self._cluster.nodes
        task = container["containerID"].removeprefix("containerd://")
        say("vLLM's container is killed (SIGKILL); the pod and its sidecar stay")
        node.run("ctr", "-a", f"{node.folder}/containerd.sock", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", task)

        def back() -> bool:
            (now,) = self._kubernetes.pod(NAMESPACE, pod)["status"]["containerStatuses"]
            return now["restartCount"] > container["restartCount"] and now["ready"]

        with at_work("vLLM's container comes back"):
            wait_for(back, _START_SECONDS, f"vLLM's container in {pod} ready again", pause=0.5)
        self.run("kubectl", "get", "pods", why="the same pod, with one restart")

    def show_pools(self, sidecar: SidecarClient) -> bool:
        """`kubectl get kvcachepools`, once the status includes all requests. False if it does not in time."""
        metrics = sidecar.metrics()
        requested = metrics.total("kvcachepool_requested_tokens_total")
        percent = 100 * metrics.total("kvcachepool_hit_tokens_total") / max(1, requested)

        def reported() -> bool:
            status = product.status(self._kubernetes, NAMESPACE, "demo")
            rate = status.get("hitRatePercent")
            return status.get("pods", {}).get("attached") == 1 and rate is not None and abs(rate - percent) <= 1

        try:
            with at_work("the operator reads the sidecars once a minute: the pool's status follows"):
                wait_for(
                    reported, _STATUS_SECONDS, f"one pod attached and a hit rate of {percent:.0f} percent", pause=0.5
                )
        except TimedOut as error:
            say(f"the pool's status: {error}")
        self.run("kubectl", "get", "kvcachepools", why="what the pool says of it")
        return reported()

    def environment(self) -> str:
        """The line that lets a shell use the cluster."""
        programs = f"{binaries()}:{paths.target()}/debug"
        return f"export KUBECONFIG={self._cluster.kubeconfig} PATH={programs}:$PATH"

    def _pods(self, selector: str) -> list[Object]:
        return self._kubernetes.pods(NAMESPACE, selector)

    def _ready_pod(self, selector: str) -> Object:
        """The pod of vLLM, once it is ready."""

        def ready() -> Object | None:
            for pod in self._pods(f"app=vllm,{selector}"):
                status: dict[str, Any] = pod["status"]
                if any(each["restartCount"] for each in status.get("containerStatuses", [])):
                    log = self._kubernetes.kubectl(
                        "logs", pod["metadata"]["name"], "--previous", "--tail=30", check=False
                    )
                    raise Failed(f"vLLM ended in its pod:\n{log}")
                if {"type": "Ready", "status": "True"}.items() <= _condition(status, "Ready").items():
                    return pod
            return None

        return self._kubernetes.wait_for(ready, _START_SECONDS, "a pod of vLLM ready", namespace=NAMESPACE)


def _condition(status: Object, name: str) -> Object:
    return next((each for each in status.get("conditions", []) if each["type"] == name), {})


def demo() -> int:
    """Runs everything. Returns the exit status."""
    chosen = Model.chosen()
    with ExitStack() as ends:
        cluster = start_cluster()
        ends.callback(cluster.stop)
        steps = Demo(cluster)
        steps.install()
        steps.start_vllm(chosen)
        pod = steps.add_label()
        vllm, sidecar = steps.clients(pod)
        workload = Workload(vllm, sidecar, chosen)
        workload.attach()
        steps.explain(pod)

        def restart() -> VllmClient:
            steps.restart_vllm(pod)
            return vllm

        workload.run(restart)
        workload.print_table()
        workload.print_sidecar()
        reported = steps.show_pools(sidecar)
        workload.print_addresses()
        workload.keep("The cluster runs on", steps.environment(), "kubectl kvcachepool status demo")
        return workload.status() if reported else 1


if __name__ == "__main__":
    main(demo)
