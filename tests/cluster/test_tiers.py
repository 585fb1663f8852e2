"""Lower tiers: the disk of a pod, and servers that the operator runs for a pool."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.engine import MAIN, Engine
from cluster.kubernetes import Kubernetes, Object, Refused
from cluster.leadership import leader, replicas
from cluster.product import RIGHTS, SYSTEM, Operator, conditions, plugin, pod, pool, sidecar, status
from servers.sidecar import SidecarClient

VALUES = RIGHTS

_KINDS = ("statefulset", "service", "poddisruptionbudget", "networkpolicy", "secret")
_RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


#: Settings of the servers' pods, besides image and resources.
_PLACED: Object = {
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "cache", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}]
            }
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 3,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {},
        }
    ],
    "priorityClassName": "system-cluster-critical",
}
#: valkey-cli in the pod of a server, with its certificate and, logged in, with its password.
_CLI = "valkey-cli --tls --cacert /etc/kvcachepool/tls.crt"
_LOGGED_IN = f'REDISCLI_AUTH="$(cat /etc/kvcachepool/password)" {_CLI}'
#: Number of Redis among the tiers.
_REDIS = 3
#: Prompts of one chunk, more than the memory of a pod holds.
_PROMPTS = 560


def _pool(image: str, shards: int) -> Object:
    few: dict[str, Any] = {"requests": {"cpu": "100m"}}
    managed = {"shards": shards, "memoryPerShard": "192Mi", "image": image, "tls": True, "resources": few, **_PLACED}
    # The oldest chunks are evicted first, so a client that cycles through more than fits never finds any in memory.
    local = {"memory": {"perPod": "64Mi", "evictionPolicy": "FIFO"}}
    shared = {"redis": {"managed": managed}}
    return pool("demo", local=local, shared=shared, cache={"minLoadTokens": 0})


def _children(kubernetes: Kubernetes, namespace: str, kind: str) -> dict[str, str]:
    """Uids of the pool's objects of a kind, by name."""
    own = ("-l", "kvcachepool.io/pool=demo", "-o", "json")
    items = json.loads(kubernetes.kubectl("get", kind, *own, namespace=namespace))["items"]
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in items}


def _servers(kubernetes: Kubernetes, namespace: str) -> dict[str, str]:
    """Uids of the servers that are Ready, by name."""
    found = kubernetes.pods(namespace, "app.kubernetes.io/name=kvcachepool-redis")
    return {
        each["metadata"]["name"]: each["metadata"]["uid"]
        for each in found
        if any(c["type"] == "Ready" and c["status"] == "True" for c in each["status"].get("conditions", []))
    }


def _tier(kubernetes: Kubernetes, namespace: str, name: str, of: str) -> tuple[str, str]:
    """State and reason of a tier as reported by a pod's sidecar."""
    tiers = sidecar(kubernetes, namespace, name)["tiers"]
    return next((each["state"], each["reason"]) for each in tiers if each["name"] == of)


def _shards_up(kubernetes: Kubernetes, namespace: str, name: str) -> int:
    """Redis servers that answer a pod's sidecar, if there are several."""
    tiers = sidecar(kubernetes, namespace, name)["tiers"]
    servers = next(each.get("servers", []) for each in tiers if each["name"] == "redis")
    return sum(each["state"] == "ready" for each in servers)


def test_a_pod_has_its_own_disk_that_only_its_sidecar_mounts(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.kubectl("label", "namespace", namespace, _RESTRICTED)
    disk = {"memory": {"perPod": "64Mi"}, "disk": {"perPod": "1Gi", "emptyDir": {}}}
    kubernetes.apply([pool("demo", local=disk), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    ready = ("ready", "")
    kubernetes.wait_for(
        lambda: _tier(kubernetes, namespace, "one", "disk") == ready, 30, "the disk is ready", namespace=namespace
    )
    spec = kubernetes.pod(namespace, "one")["spec"]
    mounts = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
    assert "kvcachepool-disk" not in mounts
    assert "kvcachepool-config" not in mounts

    def listed() -> bool:
        tiers = {each["name"]: each["state"] for each in status(kubernetes, namespace, "demo").get("tiers", [])}
        return tiers.get("disk") == "Ready"

    kubernetes.wait_for(listed, 60, "the pool says that the disk serves", namespace=namespace)


def _held(kubernetes: Kubernetes, namespace: str, shards: int) -> list[int]:
    """Chunks in each server. Each is a head and a segment."""
    ask = f"{_LOGGED_IN} dbsize"
    names = [f"kvcachepool-demo-{shard}" for shard in range(shards)]
    return [int(kubernetes.exec(namespace, name, "sh", "-c", ask)) // 2 for name in names]


class Renewed(NamedTuple):
    """A pool with one server and one pod, whose Secret was deleted."""

    namespace: str
    #: Content of the new Secret.
    password: str


@pytest.fixture(scope="module")
def renewed(kubernetes: Kubernetes, operator: Operator, valkey_image: str, base_image: str) -> Iterator[Renewed]:
    """A pool whose server does not use the new password yet."""
    namespace = f"renewed-{os.urandom(3).hex()}"
    kubernetes.create_namespace(namespace)
    kubernetes.apply([_pool(valkey_image, 1), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    ready = ("ready", "")
    kubernetes.wait_for(
        lambda: _tier(kubernetes, namespace, "one", "redis") == ready, 60, "Redis is ready", namespace=namespace
    )
    ((name, before),) = _passwords(kubernetes, namespace).items()
    kubernetes.kubectl("delete", "secret", name, namespace=namespace)
    # Secrets are not watched. A leader checks them at first, and then every ten minutes.
    first = kubernetes.wait_for(lambda: leader(kubernetes), 30, "a leader", namespace=SYSTEM)
    kubernetes.kubectl("delete", "pod", first.name, namespace=SYSTEM)
    made = kubernetes.wait_for(lambda: _passwords(kubernetes, namespace), 60, "another Secret", namespace=namespace)
    assert list(made) == [name]
    assert made[name] != before
    # The kubelet syncs mounted Secrets once a minute, and when a pod changes.
    kubernetes.kubectl("annotate", "pod", "kvcachepool-demo-0", "one", "looked-at=now", namespace=namespace)
    yield Renewed(namespace, made[name])
    kubernetes.delete_namespace(namespace)


def _passwords(kubernetes: Kubernetes, namespace: str) -> dict[str, str]:
    """Passwords in the pool's Secrets, by name."""
    own = ("-l", "kvcachepool.io/pool=demo", "-o", "json")
    items = json.loads(kubernetes.kubectl("get", "secret", *own, namespace=namespace))["items"]
    return {each["metadata"]["name"]: base64.b64decode(each["data"]["password"]).decode() for each in items}


@pytest.mark.usefixtures("renewed")  # Its server takes a minute, so they run concurrently.
def test_a_pool_runs_its_own_servers_and_its_sidecars_use_them(
    cluster: Cluster, operator: Operator, namespace: str, valkey_image: str
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, _RESTRICTED)
    kubernetes.apply(_pool(valkey_image, 1), namespace=namespace)
    first = "kvcachepool-demo-0"
    kubernetes.wait_for(lambda: first in _servers(kubernetes, namespace), 60, "a server", namespace=namespace)
    spec = kubernetes.pod(namespace, first)["spec"]
    assert {key: spec[key] for key in _PLACED if key != "tolerations"} == {
        key: value for key, value in _PLACED.items() if key != "tolerations"
    }
    assert _PLACED["tolerations"][0] in spec["tolerations"]
    refused = kubernetes.exec(namespace, first, "sh", "-c", f"{_CLI} -h kvcachepool-demo-0.kvcachepool-demo ping 2>&1")
    assert "NOAUTH" in refused, refused
    emptied = kubernetes.exec(namespace, first, "sh", "-c", f"{_LOGGED_IN} flushall 2>&1")
    assert "NOPERM" in emptied, "nothing deletes a whole cache at once"
    plain = kubernetes.exec(namespace, first, "sh", "-c", "timeout 5 valkey-cli ping 2>&1; true")
    assert "PONG" not in plain
    assert "NOAUTH" not in plain, "the port takes no connection without TLS"

    engine = Engine(cluster, namespace, "one")
    kubernetes.apply(engine.manifest("demo", prompts=_PROMPTS, chunks=1), namespace=namespace)
    ready = ("ready", "")
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    engine.wait_for(lambda: _tier(kubernetes, namespace, "one", "redis") == ready, "Redis is ready", 60)

    def serve() -> bool:
        return conditions(status(kubernetes, namespace, "demo")).get("SharedTiersReady") == ("True", "TiersServe")

    kubernetes.wait_for(serve, 90, "SharedTiersReady=True/TiersServe", namespace=namespace)
    engine.wait_warm(180)
    held = _held(kubernetes, namespace, 1)
    assert held == [_PROMPTS]

    # Another number of shards keeps the existing ones, and running sidecars use them: an engine that requests
    # everything all the time misses only what has moved.
    server = _servers(kubernetes, namespace)[first]
    secret = _children(kubernetes, namespace, "secret")
    assert len(secret) == 1
    for shards in (3, 2):
        before = len(engine.output())
        kubernetes.apply(_pool(valkey_image, shards), namespace=namespace)
        names = {f"kvcachepool-demo-{shard}" for shard in range(shards)}

        def scaled(names: set[str] = names) -> bool:
            there = kubernetes.pods(namespace, "app.kubernetes.io/name=kvcachepool-redis")
            return set(_servers(kubernetes, namespace)) == names and len(there) == len(names)

        kubernetes.wait_for(scaled, 90, f"{shards} servers", namespace=namespace)
        find = ("get", "configmap", "kvcachepool-demo", "-o", "yaml")
        config = kubernetes.kubectl(*find, namespace=namespace)
        assert [f"{name}.kvcachepool-demo.{namespace}.svc:6379" in config for name in sorted(names)] == [True] * shards
        assert f"kvcachepool-demo-{shards}." not in config

        # The kubelet syncs a pod's volumes once a minute, and when the pod changes.
        kubernetes.kubectl("annotate", "pod", "one", f"shards-{shards}=now", namespace=namespace)

        def followed(shards: int = shards) -> bool:
            return _shards_up(kubernetes, namespace, "one") == shards

        engine.wait_for(followed, f"the sidecar uses {shards} servers", 90)
        settled = len(engine.output())

        def warm(settled: int = settled) -> bool:
            # The current round may end without a miss before the servers change.
            return any(line["hits"] == line["chunks"] for line in engine.output()[settled + 1 :])

        engine.wait_for(warm, "finds everything again", 180)
        missed = {prompt for line in engine.output()[before:] for prompt in line["missed"]}
        was, held = [*held, 0, 0], _held(kubernetes, namespace, shards)
        moved_in, gone = sum(held) - sum(was[:shards]), sum(was[shards:])
        assert held[0] == _PROMPTS
        # A server may stop before the sidecar's config says so.
        assert 0 < moved_in <= len(missed) <= max(moved_in, gone), (was, held, len(missed))
    assert engine.restarts() == (0, 0)
    assert status(kubernetes, namespace, "demo")["pods"]["outdated"] == 0
    assert _servers(kubernetes, namespace)[first] == server
    assert _children(kubernetes, namespace, "secret") == secret


def test_a_replaced_server_with_a_volume_has_its_chunks_and_an_exporter_its_metrics(
    cluster: Cluster,
    operator: Operator,
    namespace: str,
    valkey_image: str,
    exporter_image: str,
    volume: tuple[str, Path],
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, _RESTRICTED)
    storage_class, folder = volume
    prompts = 40
    demo = _pool(valkey_image, 1)
    managed = demo["spec"]["shared"]["redis"]["managed"]
    managed["persistence"] = {"size": "1Gi", "storageClassName": storage_class}
    managed["exporter"] = {"image": exporter_image}
    kubernetes.apply(demo, namespace=namespace)
    first = "kvcachepool-demo-0"
    kubernetes.wait_for(lambda: first in _servers(kubernetes, namespace), 90, "a server", namespace=namespace)
    one, two = (Engine(cluster, namespace, name) for name in ("one", "two"))
    kubernetes.apply(one.manifest("demo", tiers=1, prompts=prompts, chunks=1), namespace=namespace)
    one.wait_warm(60)

    def held() -> bool:
        return _held(kubernetes, namespace, 1) == [prompts]

    kubernetes.wait_for(held, 60, "all chunks are in the server", namespace=namespace)
    metrics = kubernetes.exec(namespace, first, "wget", "-qO-", "localhost:9121/metrics").splitlines()
    assert "redis_up 1" in metrics
    assert f'redis_db_keys{{db="db0"}} {2 * prompts}' in metrics
    assert not [line for line in metrics if line.startswith("redis_config_")], "settings include a password"

    kubernetes.kubectl("delete", "pod", "one", first, "--wait=false", namespace=namespace)
    kubernetes.kubectl("wait", "--for=delete", "pod/one", "--timeout=60s", namespace=namespace)
    kubernetes.apply(two.manifest("demo", tiers=1, prompts=prompts, chunks=1), namespace=namespace)
    two.wait_running(MAIN, 0)
    found = two.wait_first_round(after_loss=False)
    assert (found["hits"], found["tiers"]) == (found["chunks"], [_REDIS])

    def settled() -> bool:
        return {each.name for each in folder.iterdir()} == {"chunks.rdb"}

    kubernetes.wait_for(settled, 30, "the server has loaded its snapshot", namespace=namespace)

    refused = json.loads(json.dumps(demo))
    refused["spec"]["shared"]["redis"]["managed"]["persistence"]["size"] = "2Gi"
    with pytest.raises(Refused, match="persistence cannot be changed except for its snapshotInterval"):
        kubernetes.apply(refused, namespace=namespace)
    kubernetes.kubectl("delete", "kvcachepool", "demo", namespace=namespace)

    def gone() -> bool:
        return not kubernetes.kubectl("get", "persistentvolumeclaim", "-o", "name", namespace=namespace).strip()

    kubernetes.wait_for(gone, 90, "the claim is deleted with the pool", namespace=namespace)


def test_an_object_that_cannot_be_applied_keeps_no_other_from_being_applied(
    kubernetes: Kubernetes, operator: Operator, namespace: str, valkey_image: str
) -> None:
    config = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "kvcachepool-demo"}, "data": {"a": "b"}}
    kubernetes.apply([config, _pool(valkey_image, 1)], namespace=namespace)

    def named() -> bool:
        return conditions(status(kubernetes, namespace, "demo")).get("Ready") == ("False", "NameTaken")

    kubernetes.wait_for(named, 60, "the config's name is taken", namespace=namespace)
    kubernetes.wait_for(
        lambda: _children(kubernetes, namespace, "statefulset"), 30, "the servers are made", namespace=namespace
    )


def test_a_purge_on_request_counts_the_objects_of_a_pool_and_deletes_them(
    cluster: Cluster, operator: Operator, namespace: str, valkey_image: str
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, _RESTRICTED)
    kubernetes.apply(_pool(valkey_image, 1), namespace=namespace)
    first = "kvcachepool-demo-0"
    kubernetes.wait_for(lambda: first in _servers(kubernetes, namespace), 90, "a server", namespace=namespace)
    engine, prompts = Engine(cluster, namespace, "one"), 8
    kubernetes.apply(engine.manifest("demo", prompts=prompts, chunks=1), namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    engine.wait_for(lambda: _held(kubernetes, namespace, 1) == [prompts], "every chunk is in Redis", 90)
    kubernetes.kubectl("delete", "pod", "one", namespace=namespace)
    for flag, objects in (("--dry-run", prompts), ("--yes", prompts), ("--dry-run", 0)):
        purged = plugin(kubernetes, "purge", "demo", flag, "-n", namespace, "-o", "json")
        assert purged.returncode == 0, purged.stdout + purged.stderr
        answer = json.loads(purged.stdout)
        assert answer["dryRun"] == (flag == "--dry-run")
        assert [(each["tier"], each["objects"]) for each in answer["tiers"]] == [("redis", objects)]
    assert _held(kubernetes, namespace, 1) == [0]
    left = kubernetes.kubectl("get", "jobs", "-o", "name", namespace=namespace)
    assert left == "", "the plugin deletes its Jobs"
    unconfirmed = plugin(kubernetes, "purge", "demo", "-n", namespace)
    assert unconfirmed.returncode != 0
    assert "--yes" in unconfirmed.stderr


def test_deleted_objects_are_recreated_and_all_are_deleted_with_the_pool(
    kubernetes: Kubernetes, operator: Operator, renewed: Renewed
) -> None:
    namespace, server = renewed.namespace, "kvcachepool-demo-0"

    def restarted() -> bool:
        (now,) = kubernetes.pod(namespace, server)["status"]["containerStatuses"]
        return now["restartCount"] > 0 and now["ready"]

    kubernetes.wait_for(restarted, 150, "the server is restarted", namespace=namespace)
    asked = f"REDISCLI_AUTH={renewed.password} {_CLI} ping"
    assert kubernetes.exec(namespace, server, "sh", "-c", asked) == "PONG\n"
    beside = SidecarClient(kubernetes.pod(namespace, "one")["status"]["podIP"], 9797)

    def answers() -> float:
        return beside.metrics().total("kvcachepool_tier_operations", tier="redis", operation="usage", result="ok")

    before = answers()
    kubernetes.wait_for(lambda: answers() > before, 30, "the server answers the sidecar", namespace=namespace)
    assert _tier(kubernetes, namespace, "one", "redis") == ("ready", "")
    kubernetes.kubectl("delete", "pod", "one", namespace=namespace)
    for kind in _KINDS[:4]:
        ((name, uid),) = _children(kubernetes, namespace, kind).items()
        kubernetes.kubectl("delete", kind, name, namespace=namespace)

        def back(kind: str = kind, uid: str = uid) -> bool:
            found = _children(kubernetes, namespace, kind)
            return bool(found) and uid not in found.values()

        kubernetes.wait_for(back, 60, f"another {kind}", namespace=namespace)
    kubernetes.apply(pool("demo"), namespace=namespace)

    def left(kinds: tuple[str, ...]) -> list[str]:
        return [name for kind in kinds for name in _children(kubernetes, namespace, kind)]

    kubernetes.wait_for(lambda: not left(_KINDS[:4]), 60, "no servers any more", namespace=namespace)
    kubernetes.kubectl("delete", "kvcachepool", "demo", namespace=namespace)
    everything = (*_KINDS, "configmap", "pod")
    kubernetes.wait_for(lambda: not left(everything), 60, "nothing of the pool", namespace=namespace)


def test_a_managed_server_whose_image_cannot_be_pulled_is_named(
    kubernetes: Kubernetes, operator: Operator, namespace: str
) -> None:
    kubernetes.apply(_pool("registry.invalid/valkey:1", 1), namespace=namespace)

    def condition() -> Object:
        found: list[Object] = status(kubernetes, namespace, "demo").get("conditions", [])
        return next((each for each in found if each["type"] == "SharedTiersReady"), {})

    kubernetes.wait_for(
        lambda: condition().get("reason") == "ServersFailing", 60, "the condition names the server", namespace=namespace
    )
    message = condition()["message"]
    assert message.startswith("0 of 1 managed servers are ready; pod kvcachepool-demo-0: "), message
    assert "ImagePull" in message, message
    assert status(kubernetes, namespace, "demo")["managedServers"] == {"desired": 1, "ready": 0}
    first = kubernetes.wait_for(lambda: leader(kubernetes), 30, "a leader", namespace=SYSTEM)
    pools = {"namespace": namespace, "pool": "demo"}

    def exported(name: str, **labels: str) -> float:
        return first.metrics().total(f"kvcachepool_pool_{name}", **pools, **labels)

    assert exported("managed_servers", state="desired") == 1
    followers = [each for each in replicas(kubernetes) if each.name != first.name]
    assert [each.metrics().total("kvcachepool_pool_managed_servers") for each in followers] == [0] * len(followers)
    kubernetes.kubectl("delete", "kvcachepool", "demo", namespace=namespace)
    kubernetes.wait_for(
        lambda: exported("managed_servers", state="desired") == 0, 30, "the gauges are removed", namespace=namespace
    )


def _most_unready(history: list[Object], servers: set[str]) -> int:
    """The largest number of these servers that were not Ready at the same time, from the changes of their pods."""
    ready, most = dict.fromkeys(servers, True), 0
    for change in history:
        found = change["object"]
        name = found["metadata"]["name"]
        if name not in servers:
            continue
        conditions_of = found.get("status", {}).get("conditions", [])
        answers = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions_of)
        ready[name] = answers and change["type"] != "DELETED"
        most = max(most, sum(not each for each in ready.values()))
    return most


def test_another_default_image_replaces_one_server_at_a_time_in_all_pools_together(
    cluster: Cluster, operator: Operator, namespace: str, valkey_image: str
) -> None:
    kubernetes = cluster.kubernetes
    other = dataclasses.replace(images.valkey(), name="localhost/valkey:2")
    cluster.import_image(other)

    def default_image(image: str) -> None:
        operator.upgrade(*RIGHTS, "--set", f"defaults.redisImage={image}")

    few = {"requests": {"cpu": "50m"}}
    managed = {"shards": 2, "memoryPerShard": "192Mi", "resources": few}
    names = ("first", "second", "third")
    servers = {f"kvcachepool-{name}-{shard}" for name in names for shard in range(2)}

    def run(image: str) -> bool:
        found = kubernetes.pods(namespace, "app.kubernetes.io/name=kvcachepool-redis")
        there = {each["metadata"]["name"] for each in found if each["spec"]["containers"][0]["image"] == image}
        return there == servers == set(_servers(kubernetes, namespace))

    try:
        default_image(valkey_image)
        kubernetes.apply([pool(name, shared={"redis": {"managed": managed}}) for name in names], namespace=namespace)
        kubernetes.wait_for(lambda: run(valkey_image), 120, "all servers", namespace=namespace)

        # The operator has reported the pools, so what changes from here on is not due to an edit.
        def reported() -> bool:
            counts = [status(kubernetes, namespace, name).get("managedServers", {}) for name in names]
            return all(each.get("ready") == 2 for each in counts)

        kubernetes.wait_for(reported, 60, "the statuses", namespace=namespace)
        pods = f"/api/v1/namespaces/{namespace}/pods"
        since = kubernetes.request("GET", pods)["metadata"]["resourceVersion"]
        default_image(other.name)
        kubernetes.wait_for(lambda: run(other.name), 240, "all servers with the other image", namespace=namespace)
        assert _most_unready(kubernetes.changes(pods, since), servers) == 1
        # An edit of a pool does not wait, not even for the servers of another pool that do not start.
        stuck = managed | {"image": "registry.invalid/valkey:1"}
        kubernetes.apply(pool("first", shared={"redis": {"managed": stuck}}), namespace=namespace)
        edited = managed | {"image": valkey_image}
        kubernetes.apply(pool("second", shared={"redis": {"managed": edited}}), namespace=namespace)

        def replaced() -> bool:
            found = kubernetes.pods(namespace, "app.kubernetes.io/instance=second")
            return len(found) == 2 and all(each["spec"]["containers"][0]["image"] == valkey_image for each in found)

        kubernetes.wait_for(replaced, 90, "the servers of the edited pool", namespace=namespace)
    finally:
        operator.upgrade(*RIGHTS)
