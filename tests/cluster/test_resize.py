"""Another `local.memory.perPod`: the memory of running pods changes without a restart, and refusals are named."""

from __future__ import annotations

import json

from cluster.cluster import Cluster
from cluster.engine import MAIN, SIDECAR, Engine, pool
from cluster.kubernetes import Kubernetes, Object
from cluster.product import Operator, conditions, message, operator_events, pod, sidecar, status

#: The right to patch pods and to resize them.
VALUES = ("--set", "allowPodPatch=true")
_MI = 1 << 20


def _pool(name: str, size: str) -> Object:
    return pool(name, local={"memory": {"perPod": size}})


def _memory(found: Object) -> tuple[Object, Object]:
    """Requests and limits of the sidecar's container, as the kubelet reports them."""
    (container,) = [each for each in found["status"]["initContainerStatuses"] if each["name"] == SIDECAR]
    return container["resources"]["requests"], container["resources"]["limits"]


def _identity(engine: Engine) -> tuple[object, ...]:
    """Equal as long as neither the pod nor a container of it was replaced or restarted."""
    containers = [engine.container(name) for name in (SIDECAR, MAIN)]
    return engine.pod()["metadata"]["uid"], *[(each["containerID"], each["restartCount"]) for each in containers]


def _wait_lowered(engine: Engine) -> None:
    """Waits until the operator has lowered the memory of the sidecar's container, or has been refused."""

    def lowered() -> bool:
        record = engine.pod()["metadata"]["annotations"].get("kvcachepool.io/lowered")
        return record is None or "refused" in json.loads(record)

    engine.wait_for(lowered, "its container is lowered", 60)


class _Pool:
    """A pool `name` with one pod of the same name."""

    def __init__(self, kubernetes: Kubernetes, namespace: str, name: str) -> None:
        self.kubernetes = kubernetes
        self.namespace = namespace
        self.name = name

    def set(self, size: str) -> None:
        """Edits `perPod`."""
        self.kubernetes.apply(_pool(self.name, size), namespace=self.namespace)

    def capacity(self) -> int:
        """Bytes of the memory tier, as the sidecar reports them."""
        reported: int = sidecar(self.kubernetes, self.namespace, self.name)["memory"]["capacity_bytes"]
        return reported

    def wait_capacity(self, size: int) -> None:
        """Waits until the memory tier has this many MiB."""
        what = f"{self.name} has {size}Mi"
        self.kubernetes.wait_for(lambda: self.capacity() == size * _MI, 90, what, namespace=self.namespace)

    def reason(self) -> str:
        """Reason of SidecarsReady while it is True."""
        found = conditions(status(self.kubernetes, self.namespace, self.name)).get("SidecarsReady", ("", ""))
        return found[1] if found[0] == "True" else ""

    def wait_reason(self, reason: str) -> str:
        """Waits for a reason of SidecarsReady, and returns its message."""
        what = f"{self.name}: {reason}"
        self.kubernetes.wait_for(lambda: self.reason() == reason, 90, what, namespace=self.namespace)
        return message(status(self.kubernetes, self.namespace, self.name), "SidecarsReady")

    def wait_current(self) -> None:
        """Waits until no pod is outdated."""

        def current() -> bool:
            return bool(status(self.kubernetes, self.namespace, self.name)["pods"]["outdated"] == 0)

        self.kubernetes.wait_for(current, 30, f"{self.name} is current", namespace=self.namespace)


def _wait_full_round(engine: Engine) -> None:
    """Waits for a round from now on that finds all its chunks."""
    before = len(engine.output())

    def full() -> bool:
        return any("hits" in line and line["hits"] == line["chunks"] for line in engine.output()[before:])

    engine.wait_for(full, "finds all its chunks", 60)


def test_the_memory_of_a_running_pod_follows_its_pool_without_a_restart(cluster: Cluster, space: str) -> None:
    kubernetes = cluster.kubernetes
    engine = Engine(cluster, space, "follows")
    kubernetes.apply([_pool("follows", "64Mi"), engine.manifest("follows")], namespace=space)
    region = engine.wait_warm()["region"]
    found = _Pool(kubernetes, space, "follows")
    found.wait_current()
    before = _identity(engine)
    small = _memory(engine.pod())

    found.set("128Mi")
    found.wait_capacity(128)
    found.wait_current()
    found.wait_reason("AllRunning")
    large = _memory(engine.pod())
    assert large[0]["memory"] == large[1]["memory"]
    assert large != small
    assert any(
        reason == "MemoryResizing" and "128Mi" in note for *_, reason, note in operator_events(kubernetes, space)
    )

    found.set("64Mi")
    found.wait_capacity(64)
    _wait_lowered(engine)
    if kubernetes.minor() < 34:
        # This version lowers requests and no limits.
        assert "cannot be decreased" in found.wait_reason("MemoryNotResized")
        engine.wait_for(lambda: _memory(engine.pod()) == (small[0], large[1]), "its request is lowered")
    else:
        assert _memory(engine.pod()) == small
        found.wait_reason("AllRunning")
    found.wait_current()
    _wait_full_round(engine)
    assert _identity(engine) == before
    assert {line["region"] for line in engine.output() if "region" in line} == {region}
    assert not [line for line in engine.output() if "lost" in line]


def test_memory_that_no_node_has_is_refused_by_name_and_can_be_taken_back(cluster: Cluster, space: str) -> None:
    kubernetes = cluster.kubernetes
    engine = Engine(cluster, space, "greedy")
    kubernetes.apply([_pool("greedy", "64Mi"), engine.manifest("greedy")], namespace=space)
    engine.wait_warm()
    found = _Pool(kubernetes, space, "greedy")
    before = _identity(engine)

    found.set("8Ti")
    said = found.wait_reason("MemoryNotResized")
    assert "pod greedy" in said
    assert "node didn't have enough" in said.lower()
    assert found.capacity() == 64 * _MI
    found.set("64Mi")
    _wait_lowered(engine)
    found.set("96Mi")
    found.wait_capacity(96)
    found.wait_current()
    _wait_full_round(engine)
    assert _identity(engine) == before


def test_memory_beyond_a_quota_is_refused_until_the_quota_is_raised(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    def quota(memory: str) -> Object:
        spec = {"hard": {"requests.memory": memory}}
        return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "limit"}, "spec": spec}

    small = pod(base_image, "limited", "limited")
    small["spec"]["containers"][0]["resources"] = {"requests": {"memory": "16Mi"}}
    kubernetes.apply([quota("512Mi"), _pool("limited", "64Mi"), small], namespace=namespace)
    kubernetes.wait("pod", "limited", "condition=Ready", namespace=namespace)
    found = _Pool(kubernetes, namespace, "limited")
    found.wait_reason("AllRunning")
    found.set("1Gi")
    said = found.wait_reason("MemoryNotResized")
    assert "exceeded quota: limit" in said
    assert found.capacity() == 64 * _MI
    kubernetes.apply(quota("2Gi"), namespace=namespace)
    found.wait_capacity(1024)
    found.wait_reason("AllRunning")


def test_a_pod_with_a_size_of_its_own_keeps_it(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    own = pod(base_image, "own", "own")
    own["metadata"]["annotations"] = {"kvcachepool.io/memory": "96Mi"}
    kubernetes.apply([_pool("own", "64Mi"), own], namespace=namespace)
    kubernetes.wait("pod", "own", "condition=Ready", namespace=namespace)
    found = _Pool(kubernetes, namespace, "own")
    found.wait_reason("AllRunning")
    before = _memory(kubernetes.pod(namespace, "own"))
    found.set("128Mi")

    def outdated() -> bool:
        return bool(status(kubernetes, namespace, "own")["pods"]["outdated"] == 1)

    kubernetes.wait_for(outdated, 30, "the operator has seen the edit", namespace=namespace)
    assert _memory(kubernetes.pod(namespace, "own")) == before
    assert found.capacity() == 96 * _MI
