"""The stand-in engine in a pod: what it finds in the cache per round, and its containers as seen from their node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import cgroups, images, product
from cluster.cluster import Cluster
from cluster.kubernetes import Object, Refused
from servers import web
from servers.process import alive
from servers.waiting import wait_for

SIDECAR = "kvcachepool"
MAIN = "vllm"

# Uses memory of a cgroup, argument 1, until the process of argument 2 is gone.
_EATER = """
import os, sys
with open(sys.argv[1], "w") as group:
    group.write(str(os.getpid()))
eaten = []
while os.path.exists(f"/proc/{sys.argv[2]}"):
    eaten.append(b"x" * (1 << 20))
"""


def pool(name: str, **spec: object) -> Object:
    """A pool whose sidecars are small enough for several pods on a node with two cores."""
    sidecar = {"resources": {"requests": {"cpu": "50m"}}, **spec.pop("sidecar", {})}  # type: ignore[dict-item]
    return product.pool(name, sidecar=sidecar, **spec)


# A sidecar opens its tiers in the background. An earlier engine would find nothing in them, and its stores would be
# missing there.
_ONCE_OPEN = """
up() { wget -qO- http://127.0.0.1:9797/metrics | grep -c '^kvcachepool_tier_up{[^}]*} 1$'; }
until [ "$(up)" -ge "$1" ]; do sleep 0.2; done
shift
exec stand_in_engine "$@"
"""


def command(*, tiers: int = 0, prompts: int = 1, chunks: int = 16) -> list[str]:
    """Endless rounds, started when this many lower tiers are open."""
    return ["sh", "-c", _ONCE_OPEN, "sh", str(tiers), "/kvcachepool", "0", str(prompts), str(chunks)]


class Engine:
    """A pod `name` without clients. It stores what it does not find, and loads and compares it in each round."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.name = name
        self.namespace = namespace
        self._cluster = cluster
        self._kubernetes = cluster.kubernetes

    def manifest(self, of: str, **how: int) -> Object:
        """The pod with the pool's label. Pod Security `restricted` admits it."""
        pod = product.pod(images.STAND_IN, self.name, of, terminationGracePeriodSeconds=30)
        pod["spec"]["containers"][0]["command"] = command(**how)
        return pod

    def pod(self) -> Object:
        """The pod."""
        return self._kubernetes.pod(self.namespace, self.name)

    def container(self, name: str) -> Object:
        """The status of a container; empty before the first."""
        status = self.pod()["status"]
        listed = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        return next((each for each in listed if each["name"] == name), {"state": {}, "restartCount": 0})

    def restarts(self) -> tuple[int, int]:
        """Restart counts of the sidecar and of the main container."""
        return self.container(SIDECAR)["restartCount"], self.container(MAIN)["restartCount"]

    def wait_running(self, container: str, restarts: int, seconds: float = 30) -> None:
        """Waits until a container runs after this many restarts."""

        def runs() -> bool:
            now = self.container(container)
            return "running" in now["state"] and now["restartCount"] == restarts

        self.wait_for(runs, f"{container} runs after {restarts} restarts", seconds)

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
        """Waits for a condition of this pod."""
        return self._kubernetes.wait_for(condition, seconds, f"{self.name}: {what}", namespace=self.namespace)

    def set_sidecar_image(self, image: str) -> None:
        """Changes the image of the running sidecar, as the operator does for an upgrade in place."""
        self._kubernetes.kubectl("set", "image", f"pod/{self.name}", f"{SIDECAR}={image}", namespace=self.namespace)

    def output(self) -> list[Object]:
        """The main container's output: rounds, and when it lost the sidecar."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/log?container={MAIN}"
        try:
            text = self._kubernetes.request("GET", path)
        except Refused:
            # It is being started.
            return []
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_warm(self, seconds: float = 60) -> Object:
        """Waits until it has loaded what it had stored. Returns that round."""

        def warm() -> Object | None:
            last = [line for line in self.output() if line.get("hits") == line.get("chunks", 0)]
            return last[-1] if last else None

        found: Object = self.wait_for(warm, "loads what it has stored", seconds)
        return found

    def wait_attached(self) -> None:
        """Waits until the current sidecar has the engine's session."""
        address = self.pod()["status"]["podIP"]

        def attached() -> bool:
            status, body = web.get(f"http://{address}:9797/v1/status")
            return status == 200 and any(one["registered"] and one["connected"] for one in json.loads(body)["sessions"])

        self.wait_for(attached, "attaches", 60)

    def wait_first_round(self, *, after_loss: bool) -> Object:
        """The first round since the main container started, or since it lost the previous sidecar."""
        self.wait_attached()

        def first() -> Object | None:
            lines = self.output()
            losses = [number for number, line in enumerate(lines) if "lost" in line]
            if after_loss and not losses:
                return None
            rounds = lines[losses[-1] + 1 if after_loss else 0 :]
            return rounds[0] if rounds else None

        found: Object = self.wait_for(first, "plays a round", 60)
        return found

    def kill(self) -> None:
        """Kills the main container from the node."""
        for pid in self._processes(MAIN):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def exhaust_memory(self, container: str) -> None:
        """Fills the container's memory limit from its node until the kernel has killed its first process."""
        (first,) = [pid for pid in self._processes(container) if _number_inside(pid) == 1]
        (group,) = [group for group in self._groups(container) if (group / "memory.stat").exists()]
        command = [sys.executable, "-c", _EATER, str(group / "cgroup.procs"), str(first)]

        def killed() -> bool:
            subprocess.run(command, timeout=30)
            return not alive(first)

        wait_for(killed, 60, f"the kernel kills the first process of {container} in {self.name}")

    def _groups(self, container: str) -> list[Path]:
        number = self.container(container)["containerID"].removeprefix("containerd://")
        return cgroups.find(number, self._cluster.slot.cgroup)

    def _processes(self, container: str) -> list[int]:
        found = {int(pid) for group in self._groups(container) for pid in (group / "cgroup.procs").read_text().split()}
        assert found, f"no process in {container} of {self.name}"
        return sorted(found)


def _number_inside(pid: int) -> int:
    """The id of a process in the innermost of its namespaces."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("NSpid:")]
    return int(line.split()[-1])
