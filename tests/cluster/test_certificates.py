"""The operator's own certificates, rotated many times while pods are created."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import pytest

from cluster.kubernetes import Kubernetes
from cluster.leadership import replicas
from cluster.load import DryRuns
from cluster.product import SYSTEM, Operator, Release, pool

#: Shortest consistent times: an authority is replaced after 20 s, a leaf after 10 s.
_TIMES = (
    "--pki-authority-lifetime=30s",
    "--pki-leaf-lifetime=15s",
    "--pki-settle=2s",
    "--pki-interval=1s",
    "--drain=1s",
)
VALUES = ("--set", f"extraArgs={{{','.join(_TIMES)}}}")
_CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/kvcachepool-injector"


@pytest.fixture(scope="module")
def operator(kubernetes: Kubernetes, release: Release) -> Iterator[Operator]:
    """The chart with certificates that live for seconds."""
    # An authority of an earlier installation is kept with its original lifetime.
    remove = ("delete", "secret", "kvcachepool-webhook-ca", "--ignore-not-found")
    release.end()
    kubernetes.kubectl(*remove, namespace=SYSTEM)
    yield release.installed(VALUES)
    release.end()
    kubernetes.kubectl(*remove, namespace=SYSTEM)


def _trusted(kubernetes: Kubernetes) -> list[str]:
    """The authorities that the API server trusts, the same in every entry of the configuration."""
    hooks = kubernetes.request("GET", _CONFIGURATION)["webhooks"]
    (bundle,) = {base64.b64decode(hook["clientConfig"].get("caBundle", "")).decode() for hook in hooks}
    return re.findall(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", bundle, re.DOTALL)


def test_every_pod_is_injected_through_rotations_of_authority_and_leaf(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply(pool("demo"), namespace=namespace)
    seen = _trusted(kubernetes)
    first = seen[0]

    def rotated() -> bool:
        """Two more authorities were added, and the first was removed."""
        now = _trusted(kubernetes)
        seen.extend(each for each in now if each not in seen)
        return len(seen) >= 3 and first not in now

    with DryRuns(kubernetes, namespace, base_image, "demo") as load:
        kubernetes.wait_for(rotated, 120, "two rotations of the authority", namespace=SYSTEM)
    assert load.missed == [], f"{len(load.missed)} of {load.count} pods came back without a sidecar"
    assert load.count > 100
    for replica in replicas(kubernetes):
        made = replica.metrics()
        assert made.total("kvcachepool_certificate_rotations_total", certificate="leaf") >= 3
        assert made.total("kvcachepool_operator_ready", part="certificate") == 1
