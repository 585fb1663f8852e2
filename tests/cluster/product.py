"""The product in a cluster: the chart's release, pools, labelled pods, and their reports."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cluster.kubernetes import Kubernetes, Object
from servers.paths import ROOT, target

#: Where the operator runs.
SYSTEM = "kvcachepool-system"
CHART = ROOT / "charts" / "kvcachepool"
_RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def helm(kubernetes: Kubernetes, *arguments: str, check: bool = True) -> str:
    """Runs helm in the operator's namespace and returns its output."""
    command = ["helm", "--namespace", SYSTEM, *arguments]
    done = subprocess.run(command, env=kubernetes.env(), capture_output=True, text=True, timeout=180)
    assert not (check and done.returncode), f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Operator:
    """An installed chart."""

    kubernetes: Kubernetes
    image: str

    def upgrade(self, *arguments: str) -> None:
        """`helm upgrade` to this checkout's chart with other values, until everything is ready."""
        values = (*_image(self.image), *_OFTEN, *arguments)
        helm(self.kubernetes, "upgrade", "kvcachepool", str(CHART), *values, *_WAIT)

    def pods(self) -> list[Object]:
        """The operator's own pods."""
        return self.kubernetes.pods(SYSTEM, "app.kubernetes.io/name=kvcachepool")

    def scale(self, replicas: int) -> None:
        """Scales to this many replicas and waits until all are ready or gone."""
        deployment = ("deployment", "kvcachepool-operator")
        self.kubernetes.kubectl("scale", *deployment, f"--replicas={replicas}", namespace=SYSTEM)
        if replicas:
            self.kubernetes.kubectl("rollout", "status", *deployment, "--timeout=60s", namespace=SYSTEM, seconds=70)
            return
        self.kubernetes.wait_for(lambda: not self.pods(), 60, "no replica is left", namespace=SYSTEM)


#: For tests with optional rights and an operator that stops quickly, all with one release.
RIGHTS = (
    *("--set", "allowManagedRedis=true"),
    *("--set", "allowPurge=true"),
    *("--set", "extraArgs={--drain=1s}"),
)
_WAIT = ("--wait", "--timeout", "120s")
#: Tests do not wait a minute for counts.
_OFTEN = ("--set", "statusInterval=3s")


def _image(name: str) -> list[str]:
    repository, tag = name.rsplit(":", 1)
    return ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]


class Release:
    """The chart's release in a cluster. Kept while tests use the same values."""

    def __init__(self, kubernetes: Kubernetes, image: str) -> None:
        self._kubernetes, self._image = kubernetes, image
        self._values: tuple[str, ...] | None = None
        self._stack = ExitStack()

    def installed(self, values: tuple[str, ...]) -> Operator:
        """The chart, installed with these arguments of helm."""
        if self._values != values:
            self.end()
            self._stack.enter_context(installed(self._kubernetes, self._image, *values))
            self._values = values
        return Operator(self._kubernetes, self._image)

    def end(self) -> None:
        """Uninstalls what is installed."""
        self._values = None
        self._stack.close()


@contextmanager
def installed(kubernetes: Kubernetes, image: str, *arguments: str) -> Iterator[Operator]:
    """The chart, installed with these arguments of helm; its release ends with the block."""
    values = (*_image(image), *_OFTEN, *arguments)
    helm(kubernetes, "install", "kvcachepool", str(CHART), "--create-namespace", *values, *_WAIT)
    try:
        kubernetes.wait_for(
            lambda: _webhook_responds(kubernetes), 30, "the API server asks the webhook", namespace=SYSTEM
        )
        yield Operator(kubernetes, image)
    finally:
        helm(kubernetes, "uninstall", "kvcachepool", "--wait")
        own = "--selector=app.kubernetes.io/name=kvcachepool"
        kubernetes.kubectl("delete", "pods", own, "--grace-period=1", "--ignore-not-found", namespace=SYSTEM)
        # Replicas without rights cannot release the lease, and the next installation would wait for its end.
        kubernetes.kubectl("delete", "lease", "kvcachepool-operator", "--ignore-not-found", namespace=SYSTEM)


def _webhook_responds(kubernetes: Kubernetes) -> bool:
    """Whether the webhook responds to a pod of a missing pool. The pod is never stored."""
    path = "/api/v1/namespaces/default/pods?dryRun=All"
    answer = kubernetes.request("POST", path, pod("none", "asked", "nowhere"))
    return "kvcachepool.io/injection" in answer["metadata"].get("annotations", {})


def pool(name: str, **spec: object) -> Object:
    """A pool with 64Mi per pod, and these keys of its spec."""
    return {
        "apiVersion": "kvcachepool.io/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name},
        "spec": {"local": {"memory": {"perPod": "64Mi"}}, **spec},
    }


def pod(image: str, name: str, of: str, **spec: object) -> Object:
    """A sleeping pod with the pool's label, which a namespace with Pod Security `restricted` admits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"kvcachepool.io/pool": of}},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {"name": "vllm", "image": image, "command": ["sleep", "1000"], "securityContext": _RESTRICTED}
            ],
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def deployment(image: str, name: str, of: str, *, replicas: int = 1) -> Object:
    """A Deployment of such pods; its pods carry the label `app: NAME`."""
    template = pod(image, name, of)
    template["metadata"] = {"labels": {"app": name, **template["metadata"]["labels"]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {key: template[key] for key in ("metadata", "spec")},
        },
    }


def injected(found: Object) -> bool:
    """Whether a pod has the two added init containers, as its last ones."""
    names = [each["name"] for each in found["spec"].get("initContainers", [])]
    return names[-2:] == ["kvcachepool", "kvcachepool-init"]


def report(found: Object) -> dict[str, str]:
    """The injection annotation of a pod."""
    answer: dict[str, str] = json.loads(found["metadata"]["annotations"]["kvcachepool.io/injection"])
    return answer


def status(kubernetes: Kubernetes, namespace: str, name: str) -> Object:
    """A pool's status; empty before the first."""
    path = f"/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools/{name}"
    answer: Object = kubernetes.request("GET", path).get("status", {})
    return answer


def sidecar(kubernetes: Kubernetes, namespace: str, name: str) -> Object:
    """The status of a pod's sidecar."""
    address = kubernetes.pod(namespace, name)["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:9797/v1/status", timeout=10) as answer:
        reply: Object = json.load(answer)
    return reply


def conditions(of: Object) -> dict[str, tuple[str, str]]:
    """Status and reason by type, of a pool's status."""
    return {each["type"]: (each["status"], each["reason"]) for each in of.get("conditions", [])}


def message(of: Object, kind: str) -> str:
    """Message of a condition of a pool's status, empty without it."""
    return next((str(each["message"]) for each in of.get("conditions", []) if each["type"] == kind), "")


def operator_events(kubernetes: Kubernetes, namespace: str) -> list[tuple[str, str, str, str]]:
    """Kind and name of the object, reason and note of each event of the operator in a namespace."""
    events = kubernetes.request("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"]
    return [
        (event["regarding"]["kind"], event["regarding"]["name"], event["reason"], event.get("note", ""))
        for event in events
        if event.get("reportingController") == "kvcachepool-operator"
    ]


def plugin(kubernetes: Kubernetes, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `kubectl kvcachepool ...` to its end."""
    process = plugin_process(kubernetes, *arguments)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def plugin_process(kubernetes: Kubernetes, *arguments: str) -> subprocess.Popen[str]:
    """Starts `kubectl kvcachepool ...`: kubectl finds the plugin on PATH."""
    env = kubernetes.env()
    env["PATH"] = f"{target() / 'debug'}:{env['PATH']}"
    command = ["kubectl", "kvcachepool", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
