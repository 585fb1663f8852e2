"""Servers that the operator runs as one Redis Cluster: formed, repaired after a loss, and re-sharded under load."""

from __future__ import annotations

import json
from typing import Any

from cluster import images
from cluster.cluster import Cluster
from cluster.engine import Engine
from cluster.kubernetes import Kubernetes, Object
from cluster.product import RIGHTS, Operator, conditions, pool, sidecar, status

VALUES = RIGHTS

_RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
_SERVERS = "app.kubernetes.io/name=kvcachepool-redis"
_MANAGER = "app.kubernetes.io/name=kvcachepool-redis-cluster"
#: valkey-cli in the pod of a server, with its certificate and a password that it accepts.
_CLI = """REDISCLI_AUTH="$(head -n 1 /run/kvcachepool/password)" valkey-cli --tls --cacert /etc/kvcachepool/tls.crt"""
#: Prompts of one chunk, more than the memory of a pod holds.
_PROMPTS = 560


def _pool(image: str, shards: int) -> Object:
    few: dict[str, Any] = {"requests": {"cpu": "20m"}}
    managed = {
        "mode": "Cluster",
        "shards": shards,
        "replicasPerShard": 1,
        "memoryPerShard": "192Mi",
        "image": image,
        "tls": True,
        "resources": few,
    }
    # The oldest chunks are evicted first, so a client that cycles through more than fits never finds any in memory.
    local = {"memory": {"perPod": "64Mi", "evictionPolicy": "FIFO"}}
    return pool("demo", local=local, shared={"redis": {"managed": managed}}, cache={"minLoadTokens": 0})


def _ready(kubernetes: Kubernetes, namespace: str, labels: str) -> set[str]:
    """Names of pods that are Ready and stay."""
    return {
        each["metadata"]["name"]
        for each in kubernetes.pods(namespace, labels)
        if "deletionTimestamp" not in each["metadata"]
        and any(c["type"] == "Ready" and c["status"] == "True" for c in each["status"].get("conditions", []))
    }


def _names(servers: int) -> set[str]:
    return {f"kvcachepool-demo-{number}" for number in range(servers)}


def _held(kubernetes: Kubernetes, namespace: str, servers: int) -> dict[str, int]:
    """Chunks in each master. Each is a head and a segment."""
    held = {}
    for name in sorted(_names(servers)):
        text = kubernetes.exec(namespace, name, "sh", "-c", f"{_CLI} info replication; {_CLI} dbsize")
        if "role:master" in text:
            held[name] = int(text.split()[-1]) // 2
    return held


def _is_complete(kubernetes: Kubernetes, namespace: str, shards: int) -> bool:
    """Whether a manager of this many shards is Ready, and exactly its servers run and are Ready."""
    managers = kubernetes.pods(namespace, _MANAGER)
    if len(managers) != 1 or not _ready(kubernetes, namespace, _MANAGER):
        return False
    servers = {each["metadata"]["name"] for each in kubernetes.pods(namespace, _SERVERS)}
    if not servers == _ready(kubernetes, namespace, _SERVERS) == _names(2 * shards):
        return False
    command: list[str] = managers[0]["spec"]["containers"][0]["command"]
    return command[command.index("--shards") + 1] == str(shards)


def _wait_complete(kubernetes: Kubernetes, namespace: str, shards: int) -> None:
    kubernetes.wait_for(
        lambda: _is_complete(kubernetes, namespace, shards), 180, f"a cluster of {shards} shards", namespace=namespace
    )


def _rotate_passwords(kubernetes: Kubernetes, namespace: str) -> None:
    """Changes both passwords, and waits until all servers accept them. No server is restarted."""
    (secret,) = (
        each["metadata"]["name"]
        for each in kubernetes.request("GET", f"/api/v1/namespaces/{namespace}/secrets")["items"]
        if each["metadata"]["name"].endswith("-cluster")
    )
    new = {"password": "new-password", "manager-password": "new-manager-password"}
    before = {each["metadata"]["uid"] for each in kubernetes.pods(namespace, _SERVERS)}
    kubernetes.kubectl("patch", "secret", secret, "--patch", json.dumps({"stringData": new}), namespace=namespace)
    # The kubelet updates the volumes of a changed pod at once.
    kubernetes.kubectl("annotate", "pods", "--all", "rotated=once", namespace=namespace)
    newest = "head -qn 1 /run/kvcachepool/password /run/kvcachepool/manager-password"
    kubernetes.wait_for(
        lambda: all(
            kubernetes.exec(namespace, name, "sh", "-c", newest).split() == list(new.values()) for name in _names(6)
        ),
        150,
        "the new passwords",
        namespace=namespace,
    )
    assert {each["metadata"]["uid"] for each in kubernetes.pods(namespace, _SERVERS)} == before


def _wait_without_miss(engine: Engine) -> None:
    """Waits for a whole round from now on that finds everything."""
    begun = len(engine.output())
    engine.wait_for(
        lambda: any(line.get("hits") == line.get("chunks", 0) for line in engine.output()[begun + 1 :]),
        "finds everything",
        180,
    )


def test_a_cluster_is_formed_repaired_and_resharded_under_load_without_loss(
    cluster: Cluster, operator: Operator, namespace: str, valkey_image: str
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, _RESTRICTED)
    kubernetes.apply(_pool(valkey_image, 3), namespace=namespace)
    _wait_complete(kubernetes, namespace, 3)
    held = _held(kubernetes, namespace, 6)
    assert list(held.values()) == [0, 0, 0]
    # Port 16379 admits servers by their certificate, and servers know each other by name.
    slots = kubernetes.exec(namespace, "kvcachepool-demo-0", "sh", "-c", f"{_CLI} cluster slots")
    assert f"kvcachepool-demo-0.kvcachepool-demo.{namespace}.svc" in slots

    engine = Engine(cluster, namespace, "one")
    kubernetes.apply(engine.manifest("demo", tiers=1, prompts=_PROMPTS, chunks=1), namespace=namespace)
    engine.wait_warm(180)
    held = _held(kubernetes, namespace, 6)
    assert sum(held.values()) == _PROMPTS
    assert min(held.values()) > 0

    # The pod of a master is lost. Its replica has all of its chunks, and the next pod becomes a replica.
    lost = next(iter(held))
    kubernetes.kubectl("delete", "pod", lost, "--force", "--grace-period=0", namespace=namespace)
    kubernetes.wait_for(
        lambda: lost not in _held_if_ready(kubernetes, namespace), 90, "another master", namespace=namespace
    )
    _wait_complete(kubernetes, namespace, 3)
    assert sum(_held(kubernetes, namespace, 6).values()) == _PROMPTS

    # Servers that start from now on know the new passwords only.
    _rotate_passwords(kubernetes, namespace)
    for shards in (4, 3):
        kubernetes.apply(_pool(valkey_image, shards), namespace=namespace)
        _wait_complete(kubernetes, namespace, shards)
        held = _held(kubernetes, namespace, 2 * shards)
        assert (len(held), sum(held.values())) == (shards, _PROMPTS), held
    _wait_without_miss(engine)
    assert engine.restarts() == (0, 0)
    found = status(kubernetes, namespace, "demo")
    assert found["managedServers"] == {"desired": 6, "ready": 6}
    assert conditions(found)["SharedTiersReady"] == ("True", "TiersServe")
    tiers = {each["name"]: each for each in sidecar(kubernetes, namespace, "one")["tiers"]}
    assert tiers["redis"]["state"] == "ready"


def _held_if_ready(kubernetes: Kubernetes, namespace: str) -> dict[str, int]:
    """Chunks in each master, once all six servers are Ready; before that, all names."""
    if _ready(kubernetes, namespace, _SERVERS) != _names(6):
        return dict.fromkeys(_names(6), 0)
    return _held(kubernetes, namespace, 6)
