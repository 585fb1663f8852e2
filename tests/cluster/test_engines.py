"""An engine and its sidecar in one pod, and how the death of one affects the other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.engine import MAIN, SIDECAR, Engine, pool
from cluster.product import Operator

#: An image that is in no registry.
_ABSENT = "localhost/absent:1"


@pytest.fixture(scope="module")
def engines(cluster: Cluster, operator: Operator) -> Iterator[dict[str, Engine]]:
    """Pods of one pool, started together, in a namespace with Pod Security `restricted`."""
    cluster.import_image(images.stand_in())
    namespace = f"engines-{os.urandom(3).hex()}"
    kubernetes = cluster.kubernetes
    kubernetes.create_namespace(namespace, {"pod-security.kubernetes.io/enforce": "restricted"})
    made = {name: Engine(cluster, namespace, name) for name in ("memory", "crash", "image", "kubelet")}
    kubernetes.apply([pool("demo"), *(engine.manifest("demo") for engine in made.values())], namespace=namespace)
    yield made
    kubernetes.delete_namespace(namespace)


def test_a_crashed_engine_finds_its_stored_chunks(engines: dict[str, Engine]) -> None:
    engine = engines["crash"]
    engine.wait_warm()
    engine.kill()
    engine.wait_running(MAIN, 1)
    first = engine.wait_first_round(after_loss=False)
    assert first["hits"] == first["chunks"]
    assert engine.restarts() == (0, 1)


def test_a_crashed_engine_restarts_while_its_sidecar_cannot_be_pulled(engines: dict[str, Engine]) -> None:
    engine = engines["image"]
    engine.wait_warm()
    engine.set_sidecar_image(_ABSENT)
    engine.wait_for(lambda: "running" not in engine.container(SIDECAR)["state"], "the sidecar is stopped")
    engine.kill()
    engine.wait_running(MAIN, 1)
    assert "running" not in engine.container(SIDECAR)["state"]


def test_a_crashed_engine_restarts_after_a_kubelet_restart(cluster: Cluster, engines: dict[str, Engine]) -> None:
    engine = engines["kubelet"]
    engine.wait_warm()
    cluster.nodes[0].kubelet.restart()
    engine.kill()
    engine.wait_running(MAIN, 1)
    first = engine.wait_first_round(after_loss=False)
    assert first["hits"] == first["chunks"]
    assert engine.restarts() == (0, 1)


def test_an_oom_killed_sidecar_restarts_in_place_with_its_content(
    engines: dict[str, Engine],
) -> None:
    engine = engines["memory"]
    before = engine.wait_warm()
    engine.exhaust_memory(SIDECAR)
    engine.wait_running(SIDECAR, 1)
    ended = engine.container(SIDECAR)["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")
    after = engine.wait_first_round(after_loss=True)
    assert (after["hits"], after["region"]) == (after["chunks"], before["region"])
    assert engine.restarts() == (1, 0)
