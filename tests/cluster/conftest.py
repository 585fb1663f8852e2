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

from cluster.cluster import Cluster
from cluster.kubernetes import Kubernetes
from cluster.slot import chosen, others

_OTHER = os.environ.get("KVCACHEPOOL_TEST_KUBECONFIG")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of our own, with nodes to enter, images to import and programs to kill."""
    if _OTHER:
        pytest.skip("reaches into nodes and control plane: needs a cluster of the test's own")
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
    """The cluster under test, ours or the one that was given."""
    if not _OTHER:
        yield request.getfixturevalue("cluster").kubernetes
        return
    given = Kubernetes(Path(_OTHER))
    yield given
    given.close()


@pytest.fixture
def namespace(kubernetes: Kubernetes, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace, named after the test, in which pods can be made at once."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_")).strip("-")
    name = f"{words[:40].strip('-')}-{os.urandom(3).hex()}"
    kubernetes.create_namespace(name)
    yield name
    kubernetes.delete_namespace(name)
