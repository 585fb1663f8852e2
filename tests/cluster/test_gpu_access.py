"""Pods whose sidecar sees the GPUs of vLLM's container, on a node with fake GPUs, by device plugin and by claim."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster import cgroups, devices
from cluster.cluster import Cluster
from cluster.engine import MAIN, SIDECAR, pool
from cluster.kubernetes import Kubernetes, Object
from cluster.product import Operator, injected, operator_events, plugin, pod, report, sidecar
from cluster.webhook import mutating

_GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(scope="module")
def pools(cluster: Cluster, operator: Operator) -> Iterator[str]:
    """A namespace with Pod Security `restricted` and a pool for each kind of GPU access, with its name."""
    name = f"gpus-{os.urandom(3).hex()}"
    kubernetes = cluster.kubernetes
    kubernetes.create_namespace(name, {"pod-security.kubernetes.io/enforce": "restricted"})
    for access in ("None", "VisibleDevices", "ResourceClaim"):
        kubernetes.apply(pool(access.lower(), sidecar={"gpuAccess": access}), namespace=name)
    yield name
    kubernetes.delete_namespace(name)


def _asking(image: str, name: str, of: str, resources: Object | None = None, **spec: object) -> Object:
    made = pod(image, name, of, **spec)
    made["spec"]["containers"][0]["resources"] = resources or {}
    return made


def _claiming(image: str, name: str, of: str, template: str) -> Object:
    claims = [{"name": "gpus", "resourceClaimTemplateName": template}]
    used = {"claims": [{"name": "gpus", "request": "gpu"}]}
    return _asking(image, name, of, used, resourceClaims=claims)


def _ready(kubernetes: Kubernetes, namespace: str, made: Object) -> Object:
    name = made["metadata"]["name"]
    kubernetes.apply(made, namespace=namespace)
    kubernetes.wait("pod", name, "condition=Ready", namespace=namespace)
    return kubernetes.pod(namespace, name)


def _sidecar_of(found: Object) -> Object:
    (container,) = [each for each in found["spec"]["initContainers"] if each["name"] == SIDECAR]
    return dict(container)


def _status(found: Object, container: str) -> Object:
    status = [*found["status"]["initContainerStatuses"], *found["status"]["containerStatuses"]]
    (one,) = [each for each in status if each["name"] == container]
    return dict(one)


def _processes(cluster: Cluster, found: Object, container: str) -> list[int]:
    number = _status(found, container)["containerID"].removeprefix("containerd://")
    group = cgroups.find(number, cluster.slot.cgroup)[0]
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def _environment(cluster: Cluster, found: Object, container: str) -> dict[str, str]:
    """The environment that the container runtime gave to a container."""
    pid = _processes(cluster, found, container)[0]
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(each.split("=", 1) for each in variables if each)


def _limit(found: Object) -> int:
    """The memory limit of the sidecar in MiB."""
    return int(_sidecar_of(found)["resources"]["limits"]["memory"].removesuffix("Mi"))


def test_the_sidecar_sees_the_device_plugins_gpu_through_variables(
    cluster: Cluster, pools: str, base_image: str
) -> None:
    kubernetes, node = cluster.kubernetes, cluster.nodes[0]
    asks = {"limits": {devices.RESOURCE: "1"}}
    with devices.device_plugin(kubernetes, node, [_GPU]) as given:
        # There is one GPU, so a pod whose sidecar took a second one would never start.
        found = _ready(kubernetes, pools, _asking(base_image, "plugin", "visibledevices", asks))
        assert given == [[_GPU]]
        held = devices.held(node, pools, "plugin")
        assert (held[MAIN], held[SIDECAR]) == ([_GPU], [])
    assert injected(found)
    assert "reason" not in report(found)
    assert _environment(cluster, found, MAIN)["NVIDIA_VISIBLE_DEVICES"] == _GPU
    environment = _environment(cluster, found, SIDECAR)
    assert (environment["NVIDIA_VISIBLE_DEVICES"], environment["NVIDIA_DRIVER_CAPABILITIES"]) == (
        "all",
        "compute,utility",
    )

    def serves() -> bool:
        return bool(sidecar(kubernetes, pools, "plugin")["state"] == "ready")

    kubernetes.wait_for(serves, 30, "the sidecar serves in the memory that is left", namespace=pools)


def test_a_claim_is_shared_by_vllm_and_the_sidecar(cluster: Cluster, pools: str, base_image: str) -> None:
    kubernetes, node = cluster.kubernetes, cluster.nodes[0]
    if kubernetes.minor() < 34:
        pytest.skip("resource claims need Kubernetes 1.34")
    kubernetes.apply(devices.claim_template("one-gpu"), namespace=pools)
    with devices.dra_driver(kubernetes, node, ["gpu-0"]) as prepared:
        # There is one GPU, so a pod whose sidecar had its own claim would never start.
        found = _ready(kubernetes, pools, _claiming(base_image, "claims", "resourceclaim", "one-gpu"))
        claims = kubernetes.request("GET", f"/apis/resource.k8s.io/v1/namespaces/{pools}/resourceclaims")["items"]
        (claim,) = claims
        results = claim["status"]["allocation"]["devices"]["results"]
        assert [(each["request"], each["device"]) for each in results] == [("gpu", "gpu-0")]
        assert prepared == [claim["metadata"]["uid"]]
        held = devices.held(node, pools, "claims")
        assert held == {MAIN: [claim["metadata"]["name"]], SIDECAR: [claim["metadata"]["name"]]}
        for pid in _processes(cluster, found, SIDECAR):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            now = _status(kubernetes.pod(pools, "claims"), SIDECAR)
            return now["restartCount"] == 1 and "running" in now["state"]

        kubernetes.wait_for(back, 30, "the sidecar runs again", namespace=pools)
        assert len(prepared) == 1, "it has the claim that its pod was given"
        kubernetes.kubectl("delete", "pod", "claims", "--grace-period=1", namespace=pools)
    assert "reason" not in report(found)
    assert _sidecar_of(found)["resources"]["claims"] == [{"name": "gpus", "request": "gpu"}]


def test_pods_without_a_gpu_run_with_a_sidecar_and_a_shortfall(
    kubernetes: Kubernetes, pools: str, base_image: str
) -> None:
    plain = _ready(kubernetes, pools, _asking(base_image, "plain", "none"))
    for of, reason in (("visibledevices", "GpuNotRequested"), ("resourceclaim", "NoResourceClaim")):
        name = f"cpu-{of}"
        found = _ready(kubernetes, pools, _asking(base_image, name, of))
        reported = report(found)
        assert (reported["result"], reported["reason"]) == ("Injected", reason)
        assert _limit(found) == _limit(plain)
        assert not any(each["name"].startswith("NVIDIA") for each in _sidecar_of(found).get("env", []))
        assert "claims" not in _sidecar_of(found)["resources"]
        explained = plugin(kubernetes, "explain", f"pod/{name}", "-n", pools).stdout
        assert f"injection  {reason}: the pod has a sidecar, but container vllm" in explained

        def told_so(name: str = name, reason: str = reason) -> bool:
            return any((about, why) == (name, reason) for _, about, why, _ in operator_events(kubernetes, pools))

        kubernetes.wait_for(told_so, 60, f"an event about {name}", namespace=pools)


def test_pod_security_and_the_class_of_the_pod_are_as_without_a_gpu(
    kubernetes: Kubernetes, pools: str, base_image: str
) -> None:
    """By dry run, so no node has to have these resources."""
    path = f"/api/v1/namespaces/{pools}/pods?dryRun=All"
    full = {"cpu": "1", "memory": "1Gi"}
    claims = [{"name": "gpus", "resourceClaimName": "somewhere"}]
    asked = {
        "visibledevices": _asking(base_image, "one", "visibledevices", {"limits": {**full, devices.RESOURCE: "1"}}),
        "resourceclaim": _asking(
            base_image, "two", "resourceclaim", {"limits": full, "claims": [{"name": "gpus"}]}, resourceClaims=claims
        ),
    }
    for of, made in asked.items():
        found = kubernetes.request("POST", path, made)
        without = {**made, "metadata": {**made["metadata"], "labels": {"kvcachepool.io/pool": "none"}}}
        assert injected(found)
        assert report(found).get("reason", "") == "", of
        assert found["status"]["qosClass"] == "Guaranteed"
        assert _limit(found) - _limit(kubernetes.request("POST", path, without)) == 512
        memory = _sidecar_of(found)["resources"]
        assert memory["limits"]["memory"] == memory["requests"]["memory"]


def _take_claims(found: Object) -> list[Object]:
    """A webhook that moves a pod to a node without GPUs: it removes the user's claims, and does not know the
    sidecar's.
    """
    if "resourceClaims" not in found["spec"]:
        return []
    paths = ("/spec/resourceClaims", "/spec/containers/0/resources/claims")
    return [{"op": "remove", "path": path} for path in paths]


def test_a_pod_that_lost_its_claims_between_two_calls_is_not_refused(
    cluster: Cluster, pools: str, base_image: str
) -> None:
    made = _claiming(base_image, "lost", "resourceclaim", "one-gpu")
    with mutating(cluster, "zz-after-ours", pools, _take_claims):
        found = cluster.kubernetes.request("POST", f"/api/v1/namespaces/{pools}/pods?dryRun=All", made)
    assert injected(found)
    assert "resourceClaims" not in found["spec"]
    assert "claims" not in _sidecar_of(found)["resources"]
    assert report(found)["reason"] == "NoResourceClaim"
