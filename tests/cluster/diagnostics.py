"""The content of a namespace, for the message of a failed test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.kubernetes import Kubernetes

_LOG_LINES = 25


def collect(kubernetes: Kubernetes, namespace: str | None) -> str:
    """Pods, their descriptions and logs, and events, as far as they are available."""
    if namespace is None:
        return kubernetes.kubectl("get", "nodes,pods", "-A", "-o", "wide", check=False)
    parts = [f"--- namespace {namespace}"]
    parts.append(kubernetes.kubectl("get", "all", "-o", "wide", namespace=namespace, check=False))
    parts.append(kubernetes.kubectl("describe", "pods", namespace=namespace, check=False))
    listed = kubernetes.kubectl("get", "pods", "-o", "json", namespace=namespace, check=False)
    for pod in json.loads(listed or '{"items": []}')["items"]:
        name = pod["metadata"]["name"]
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            for previous in ([], ["--previous"]):
                command = ("logs", name, "-c", container["name"], f"--tail={_LOG_LINES}", *previous)
                text = kubernetes.kubectl(*command, namespace=namespace, check=False)
                if text:
                    parts.append(f"--- {name} {container['name']} {' '.join(previous)}\n{text}")
    parts.append(kubernetes.kubectl("get", "events", "--sort-by=.lastTimestamp", namespace=namespace, check=False))
    return "\n".join(parts)
