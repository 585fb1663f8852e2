"""Other images for sidecars: updated in running pods, rolled back if they cannot be pulled, and not given to new
pods.
"""

from __future__ import annotations

import dataclasses

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.engine import MAIN, SIDECAR, Engine, pool
from cluster.kubernetes import Object
from cluster.product import Operator, conditions, pod, report, status

#: The right to patch pods.
VALUES = ("--set", "allowPodPatch=true")
#: An image that is in no registry.
_ABSENT = "localhost/absent:1"
#: Another name of the product's image.
_NEWER = "localhost/kvcachepool:newer"
_IN_PLACE = {"updateStrategy": {"type": "InPlace"}}


def _ready_since(found: Object) -> str:
    (time,) = [each["lastTransitionTime"] for each in found["status"]["conditions"] if each["type"] == "Ready"]
    return str(time)


@dataclasses.dataclass(frozen=True)
class Updated:
    """An engine whose sidecar got another image, and its state before."""

    engine: Engine
    region: int
    ready_since: str


@pytest.fixture(scope="module")
def updated(cluster: Cluster, operator: Operator, space: str) -> list[Updated]:
    """Two pods of one pool, after an upgrade of the operator to an image of another name."""
    engines = [Engine(cluster, space, f"updated-{number}") for number in (1, 2)]
    manifests = [engine.manifest("updated") for engine in engines]
    cluster.kubernetes.apply([pool("updated", sidecar=_IN_PLACE), *manifests], namespace=space)
    before = [Updated(engine, engine.wait_warm()["region"], _ready_since(engine.pod())) for engine in engines]
    for node in cluster.nodes:
        node.tag_image(operator.image, _NEWER)
    dataclasses.replace(operator, image=_NEWER).upgrade(*VALUES)
    return before


@pytest.mark.usefixtures("absent")  # Both take long, so they run concurrently.
def test_running_pods_get_a_new_image_without_a_restart_of_vllm(updated: list[Updated]) -> None:
    for before in updated:
        engine = before.engine
        # The image must run in one pod for half a minute before the next one gets it.
        engine.wait_running(SIDECAR, 1, 120)
        first = engine.wait_first_round(after_loss=True)
        assert (first["hits"], first["region"]) == (first["chunks"], before.region)
        assert engine.restarts() == (1, 0)
        found = engine.pod()
        assert [each["image"] for each in found["spec"]["initContainers"]] == [_NEWER, _NEWER]
        assert _ready_since(found) == before.ready_since, "it was not ready for a while"


@pytest.fixture(scope="module")
def absent(cluster: Cluster, space: str, updated: list[Updated]) -> Engine:
    """An image that cannot be pulled, for a running pod and a new one. Not before the update has its leader."""
    engine = Engine(cluster, space, "undone")
    cluster.kubernetes.apply([pool("undone", sidecar=_IN_PLACE), engine.manifest("undone")], namespace=space)
    engine.wait_warm()
    wrong = {"image": _ABSENT}
    cluster.kubernetes.apply([pool("stuck", sidecar=wrong), pod(images.STAND_IN, "stuck", "stuck")], namespace=space)
    cluster.kubernetes.apply(pool("undone", sidecar={**_IN_PLACE, **wrong}), namespace=space)
    engine.wait_for(lambda: "running" not in engine.container(SIDECAR)["state"], "the old sidecar is stopped", 60)
    return engine


def test_an_image_that_cannot_be_pulled_is_rolled_back_after_a_minute(
    cluster: Cluster, space: str, absent: Engine
) -> None:
    def condition(pool: str) -> tuple[str, str] | None:
        return conditions(status(cluster.kubernetes, space, pool)).get("SidecarsReady")

    absent.wait_for(lambda: condition("undone") == ("True", "UpdateRolledBack"), "UpdateRolledBack", 180)
    absent.wait_for(lambda: "running" in absent.container(SIDECAR)["state"], "the old sidecar runs again")
    first = absent.wait_first_round(after_loss=True)
    assert first["hits"] == first["chunks"]
    assert absent.container(MAIN)["restartCount"] == 0


def test_an_image_that_cannot_be_pulled_pauses_injection_until_it_is_corrected(
    cluster: Cluster, operator: Operator, space: str, absent: Engine
) -> None:
    kubernetes = cluster.kubernetes

    def condition() -> tuple[str, str] | None:
        return conditions(status(kubernetes, space, "stuck")).get("InjectionReady")

    kubernetes.wait_for(lambda: condition() == ("False", "PodsHeldBack"), 120, "PodsHeldBack", namespace=space)

    spared = pod(images.STAND_IN, "spared", "stuck")

    def paused() -> bool:
        # Webhooks learn of the condition by their watch.
        shown = kubernetes.request("POST", f"/api/v1/namespaces/{space}/pods?dryRun=All", spared)
        return report(shown).get("reason") == "InjectionPaused"

    kubernetes.wait_for(paused, 10, "new pods go without a sidecar", namespace=space)
    kubernetes.apply(spared, namespace=space)
    kubernetes.wait("pod", "spared", "condition=Ready", namespace=space)
    assert "initContainers" not in kubernetes.pod(space, "spared")["spec"]
    kubernetes.apply(pool("stuck", sidecar={"image": operator.image}), namespace=space)
    kubernetes.wait("pod", "stuck", "condition=Ready", namespace=space)
    kubernetes.wait_for(lambda: condition() == ("True", "WebhookAnswers"), 60, "injection again", namespace=space)


def test_restricted_engines_count_as_attached_and_as_current_after_the_update(
    cluster: Cluster, space: str, updated: list[Updated]
) -> None:
    # The last test here, because sidecars are queried and counts written once a minute.
    counted = {"matched": 2, "injected": 2, "attached": 2, "outdated": 0}

    def current() -> bool:
        now = status(cluster.kubernetes, space, "updated")
        return counted.items() <= now["pods"].items() and conditions(now)["SidecarsReady"] == ("True", "AllRunning")

    cluster.kubernetes.wait_for(current, 150, f"the pool counts {counted}", namespace=space)
