"""Which replica of the operator leads, what its metrics say, and how to kill one."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

from cluster.kubernetes import Kubernetes
from cluster.node import Node
from cluster.product import SYSTEM

_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/kvcachepool-operator"


def holder(kubernetes: Kubernetes) -> str:
    """The Lease's holder: its pod's name, `_`, and what tells it from the same pod before a restart; empty = nobody."""
    found: str = kubernetes.request("GET", _LEASE)["spec"].get("holderIdentity", "")
    return found


def metrics(kubernetes: Kubernetes, pod: str) -> dict[str, float]:
    """All metrics of a replica, as `name{labels}` without the prefix."""
    address = kubernetes.pod(SYSTEM, pod)["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:8080/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^kvcachepool_(\S+) (\S+)$", text, re.MULTILINE)}


def leads(kubernetes: Kubernetes) -> dict[str, float]:
    """The leader's metrics; none while nobody that runs is the leader."""
    name = holder(kubernetes).partition("_")[0]
    running = {pod["metadata"]["name"] for pod in kubernetes.pods(SYSTEM) if pod["status"].get("podIP")}
    found = metrics(kubernetes, name) if name in running else {}
    return found if found.get("leader") else {}


def kill(node: Node, pod: str) -> None:
    """SIGKILL for the operator of this pod."""
    for pid in node.processes():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"POD_NAME={pod}".encode() in variables and b"kvcachepool" in Path(f"/proc/{pid}/comm").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no operator of pod {pod} runs on {node.name}")
