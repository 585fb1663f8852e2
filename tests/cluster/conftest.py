"""One cluster for all tests of this folder.

It is started for the session, unless KVCACHEPOOL_TEST_KUBECONFIG names another cluster, or KVCACHEPOOL_CLUSTER one that
`python -m cluster up` started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes
from cluster.product import Operator, Release
from cluster.slot import chosen, others
from servers import paths

_OTHER = os.environ.get("KVCACHEPOOL_TEST_KUBECONFIG")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of the tests, with nodes, images and programs to kill."""
    if _OTHER:
        pytest.skip("reaches into nodes and control plane: needs a cluster of the test's own")
    if os.geteuid() != 0:
        pytest.skip("a cluster of the test's own needs root, for namespaces, mounts and cgroups")
    if "KVCACHEPOOL_CLUSTER" in os.environ:
        found = Cluster.attach(chosen())
        yield found
        found.kubernetes.close()
        return
    free = next((slot for slot in others() if not slot.taken()), None)
    assert free is not None, "ten clusters run already: python -m cluster status"
    started = Cluster.start(free)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def kubernetes(request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """The cluster under test, own or given."""
    if not _OTHER:
        yield request.getfixturevalue("cluster").kubernetes
        return
    given = Kubernetes(Path(_OTHER))
    yield given
    given.close()


@pytest.fixture(scope="session")
def base_image() -> str:
    """An image with busybox; in a given cluster the one of KVCACHEPOOL_TEST_BASE_IMAGE."""
    return os.environ.get("KVCACHEPOOL_TEST_BASE_IMAGE", "busybox:1.36") if _OTHER else "localhost/base:1"


@pytest.fixture(scope="session")
def product_image(request: pytest.FixtureRequest) -> str:
    """Operator and sidecar as cargo built them; in a given cluster the image of KVCACHEPOOL_TEST_IMAGE."""
    if _OTHER:
        if name := os.environ.get("KVCACHEPOOL_TEST_IMAGE"):
            return name
        pytest.skip("KVCACHEPOOL_TEST_IMAGE names no image that the given cluster can pull")
    image = images.Product()
    request.getfixturevalue("cluster").import_image(image)
    return image.name


@pytest.fixture(scope="session")
def redis_image(cluster: Cluster) -> str:
    """Debian's Redis, in the cluster."""
    image = images.redis()
    cluster.import_image(image)
    return image.name


@pytest.fixture(scope="session")
def valkey_image(cluster: Cluster) -> str:
    """Valkey, as pools run it that name no image, in the cluster."""
    image = images.valkey()
    cluster.import_image(image)
    return image.name


@pytest.fixture(scope="session")
def exporter_image(cluster: Cluster) -> str:
    """redis_exporter, in the cluster."""
    image = images.redis_exporter()
    cluster.import_image(image)
    return image.name


@pytest.fixture
def volume(cluster: Cluster, namespace: str) -> Iterator[tuple[str, Path]]:
    """A storage class with one volume, a folder of this machine that any user may write to."""
    name, folder = f"disk-{namespace[-6:]}", paths.short_folder()
    folder.chmod(0o777)
    made = {
        "kind": "StorageClass",
        "apiVersion": "storage.k8s.io/v1",
        "metadata": {"name": name},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    spec = {
        "capacity": {"storage": "8Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": name,
        "hostPath": {"path": str(folder), "type": "Directory"},
    }
    volume = {"kind": "PersistentVolume", "apiVersion": "v1", "metadata": {"name": name}, "spec": spec}
    cluster.kubernetes.apply([made, volume])
    yield name, folder
    cluster.kubernetes.kubectl("delete", "storageclass,persistentvolume", name, "--wait=false")


def _values(of: object) -> tuple[str, ...]:
    """The chart values (VALUES) that a file of tests needs, as arguments of helm."""
    values: tuple[str, ...] = getattr(of, "VALUES", ())
    return values


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups files with the same values, so that they share one release."""
    items.sort(key=lambda item: _values(item.getparent(pytest.Module).obj))  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def release(kubernetes: Kubernetes, product_image: str) -> Iterator[Release]:
    """The chart's release, if any."""
    made = Release(kubernetes, product_image)
    yield made
    made.end()


@pytest.fixture(scope="module")
def operator(request: pytest.FixtureRequest, release: Release) -> Operator:
    """The chart, installed with the VALUES of the file or its defaults."""
    return release.installed(_values(request.module))


@pytest.fixture
def namespace(kubernetes: Kubernetes, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new namespace, named after the test, ready for pods."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_")).strip("-")
    name = f"{words[:40].strip('-')}-{os.urandom(3).hex()}"
    kubernetes.create_namespace(name)
    yield name
    kubernetes.delete_namespace(name)


@pytest.fixture(scope="module")
def space(cluster: Cluster, operator: Operator, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for all stand-ins for vLLM of a module, with Pod Security `restricted`."""
    cluster.import_image(images.stand_in())
    module = request.path.stem.removeprefix("test_").replace("_", "-")
    name = f"{module}-{os.urandom(3).hex()}"
    cluster.kubernetes.create_namespace(name, {"pod-security.kubernetes.io/enforce": "restricted"})
    yield name
    cluster.kubernetes.delete_namespace(name)
