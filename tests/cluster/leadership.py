"""The operator's replicas: the leader, their metrics, and how to kill one."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.kubernetes import Refused
from cluster.node import Node
from cluster.product import SYSTEM
from servers import web
from servers.prometheus import Samples

_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/kvcachepool-operator"
_PODS = f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/name=kvcachepool"


class Asks(Protocol):
    """A client of the API server."""

    def request(self, method: str, path: str) -> Any:
        """Sends a request. Returns the JSON of the response."""


@dataclass(frozen=True)
class Replica:
    """A pod of the operator that has its address."""

    name: str
    ip: str

    def metrics(self) -> Samples:
        """Its metrics. Empty if it does not answer."""
        return Samples.parse(web.get(f"http://{self.ip}:8080/metrics")[1])

    def pid(self, node: Node) -> int:
        """Its process on this node."""
        for pid in node.processes():
            process = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                if f"POD_NAME={self.name}".encode() in variables and b"kvcachepool" in (process / "comm").read_bytes():
                    return pid
        raise AssertionError(f"no operator of pod {self.name} runs on {node.name}")

    def kill(self, node: Node) -> None:
        """SIGKILL for its process."""
        os.kill(self.pid(node), signal.SIGKILL)


def holder(api: Asks) -> str:
    """The Lease's holder: its pod's name, `_`, and a suffix per process; empty without one."""
    try:
        found: str = api.request("GET", _LEASE)["spec"].get("holderIdentity", "")
    except Refused:
        return ""
    return found


def replicas(api: Asks) -> list[Replica]:
    """All replicas, the Lease's holder first."""
    pods = api.request("GET", _PODS)["items"]
    found = [Replica(pod["metadata"]["name"], pod["status"]["podIP"]) for pod in pods if pod["status"].get("podIP")]
    leading = holder(api).partition("_")[0]
    return sorted(found, key=lambda replica: replica.name != leading)


def leader(api: Asks) -> Replica | None:
    """The replica that holds the Lease and reports that it leads."""
    first = next(iter(replicas(api)), None)
    return first if first and first.metrics().total("kvcachepool_leader") else None
