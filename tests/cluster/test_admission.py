"""What the API server stores for labelled pods: every launch shape, and other webhooks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes, Object
from cluster.product import Operator, pod, pool, report
from cluster.webhook import Mutation, mutating
from servers.paths import ROOT

_SHAPES = ROOT / "operator" / "tests"
_LABEL = "kvcachepool.io/pool"
#: From the first that is evicted.
_CLASSES = ("BestEffort", "Burstable", "Guaranteed")


@pytest.fixture(scope="module")
def serving(kubernetes: Kubernetes, operator: Operator) -> Iterator[str]:
    """A namespace with the pool of all shapes."""
    name = f"serving-{os.urandom(3).hex()}"
    kubernetes.create_namespace(name)
    injection = {"memoryMax": "64Gi", "existingConnector": "Compose"}
    kubernetes.apply(pool("llama", injection=injection), namespace=name)
    yield name
    kubernetes.delete_namespace(name)


def _admitted(kubernetes: Kubernetes, namespace: str, shape: Object) -> Object:
    """The pod as the API server would store it."""
    found: Object = kubernetes.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", shape)
    return found


def _without_pool(shape: Object) -> Object:
    bare: dict[str, Any] = {**shape, "metadata": dict(shape["metadata"])}
    for kind in ("labels", "annotations"):
        kept = {key: value for key, value in bare["metadata"].get(kind, {}).items() if key != _LABEL}
        bare["metadata"][kind] = kept
    return bare


@pytest.mark.parametrize("name", sorted(file.stem for file in (_SHAPES / "pods").glob("*.yaml")))
def test_every_launch_shape_keeps_its_qos_class(kubernetes: Kubernetes, serving: str, name: str) -> None:
    shape = yaml.safe_load((_SHAPES / "pods" / f"{name}.yaml").read_text())
    before = _admitted(kubernetes, serving, _without_pool(shape))["status"]["qosClass"]
    admitted = _admitted(kubernetes, serving, shape)
    after = admitted["status"]["qosClass"]
    injected = (_SHAPES / "golden" / f"{name}.json").exists()
    assert report(admitted)["result"] == ("Injected" if injected else "Refused"), report(admitted)
    if injected:
        assert _CLASSES.index(after) >= max(_CLASSES.index(before), _CLASSES.index("Burstable"))
    else:
        assert after == before


def test_both_guaranteed_shapes_are_guaranteed(kubernetes: Kubernetes, serving: str) -> None:
    # Before 1.34 the resources of a pod are behind a feature gate.
    for name in ("guaranteed", "pod-resources") if kubernetes.minor() >= 34 else ("guaranteed",):
        shape = yaml.safe_load((_SHAPES / "pods" / f"{name}.yaml").read_text())
        assert _admitted(kubernetes, serving, shape)["status"]["qosClass"] == "Guaranteed", name


def _drop_restart_policies(found: Object) -> list[Object]:
    """A webhook that was built before init containers had a restart policy."""
    listed = enumerate(found["spec"].get("initContainers", []))
    return [
        {"op": "remove", "path": f"/spec/initContainers/{place}/restartPolicy"}
        for place, container in listed
        if "restartPolicy" in container
    ]


def _append_init_container(found: Object) -> list[Object]:
    late = {"name": "late", "image": "localhost/base:1", "command": ["true"]}
    return [{"op": "add", "path": "/spec/initContainers/-", "value": late}]


@pytest.mark.parametrize(
    ("mutation", "expected"),
    [
        (_drop_restart_policies, ["kvcachepool", "kvcachepool-init"]),
        (_append_init_container, ["late", "kvcachepool", "kvcachepool-init"]),
    ],
)
def test_changes_of_another_webhook_are_repaired(
    cluster: Cluster, operator: Operator, namespace: str, base_image: str, mutation: Mutation, expected: list[str]
) -> None:
    kubernetes = cluster.kubernetes
    undone: list[Object] = []

    def undo(found: Object) -> list[Object]:
        undone.extend(mutation(found))
        return mutation(found)

    kubernetes.apply(pool("demo"), namespace=namespace)
    with mutating(cluster, "zz-after-ours", namespace, undo):
        kubernetes.apply(pod(base_image, "one", "demo"), namespace=namespace)
    assert undone
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    containers = kubernetes.pod(namespace, "one")["spec"]["initContainers"]
    assert [each["name"] for each in containers] == expected
    assert containers[-2]["restartPolicy"] == "Always"
