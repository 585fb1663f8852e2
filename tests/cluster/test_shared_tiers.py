"""Shared tiers: a replica is warm from another, and Jobs check a pool and purge a bucket or a file system."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.engine import MAIN, SIDECAR, Engine, command, pool
from cluster.kubernetes import Kubernetes, Object
from cluster.product import RIGHTS, Operator, deployment, operator_events, plugin, status
from servers import paths, web
from servers.models import model, token_ids
from servers.pod import settle, wait_attached
from servers.s3 import BUCKET, S3Server
from servers.sidecar import SidecarClient
from servers.vllm_server import VllmClient

VALUES = RIGHTS

#: Numbers of Redis, S3 and the file system among the tiers.
_REDIS, _S3, _FILE_SYSTEM = 3, 4, 5
# The pool's user may not delete everything at once.
_EMPTY = """
export REDISCLI_AUTH="$(cat /etc/kvcachepool/password)"
redis-cli --scan | while read -r key; do redis-cli del "$key"; done
redis-cli dbsize
"""


@pytest.fixture(scope="module")
def bucket(cluster: Cluster) -> Iterator[S3Server]:
    """A bucket on this machine, reachable from pods."""
    server = S3Server(cluster.slot.host)
    yield server
    server.stop()


def _s3(bucket: S3Server, prefix: str, secret: str) -> Object:
    endpoint = bucket.config()["endpoint"]
    return {"bucket": BUCKET, "endpoint": endpoint, "prefix": prefix, "auth": {"secretName": secret}}


def _secret(bucket: S3Server) -> Object:
    keys = {"AWS_ACCESS_KEY_ID": bucket.key_id, "AWS_SECRET_ACCESS_KEY": bucket.secret}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}, "stringData": keys}


def _replicas(number: int) -> Object:
    made = deployment(images.STAND_IN, "web", "demo", replicas=number)
    made["spec"]["template"]["spec"]["containers"][0]["command"] = command(tiers=2)
    return made


def _written(kubernetes: Kubernetes, namespace: str, name: str) -> set[str]:
    """Tiers that hold everything that a pod has stored."""
    address = kubernetes.pod(namespace, name)["status"]["podIP"]
    lines = web.get(f"http://{address}:9797/metrics")[1].splitlines()
    line = 'kvcachepool_tier_write_chunks_total{{result="stored",tier="{}"}} 16'
    return {tier for tier in ("redis", "filesystem", "s3") if line.format(tier) in lines}


def _checked(kubernetes: Kubernetes, namespace: str, name: str) -> tuple[bool, dict[str, tuple[str, str]]]:
    """The result of `check` for a pool: whether all is ready, and reason and message by tier."""
    done = plugin(kubernetes, "check", name, "-n", namespace, "-o", "json")
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) == report["ready"], done.stderr
    return report["ready"], {each["tier"]: (each["reason"], each["message"]) for each in report["tiers"]}


def test_a_replica_is_warm_from_another_and_objects_are_purged_with_the_pool(
    cluster: Cluster, operator: Operator, namespace: str, redis_image: str, bucket: S3Server
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    few: dict[str, Any] = {"requests": {"cpu": "10m"}}
    managed = {"memoryPerShard": "64Mi", "image": redis_image, "resources": few}
    shared = {"redis": {"managed": managed}, "s3": _s3(bucket, "demo", "bucket")}
    lacking = {"s3": _s3(bucket, "lacking", "absent")}
    kubernetes.apply(
        [
            _secret(bucket),
            pool("demo", shared=shared, deletionPolicy="Delete"),
            pool("lacking", shared=lacking),
        ],
        namespace=namespace,
    )
    # Chunks that are stored while a server starts stay in memory only.
    for until in ("create", "condition=Ready"):
        kubernetes.wait("pod", "kvcachepool-demo-0", until, namespace=namespace)
    kubernetes.apply(_replicas(1), namespace=namespace)

    def engines() -> list[Engine]:
        found = [each for each in kubernetes.pods(namespace, "app=web") if "podIP" in each["status"]]
        return [Engine(cluster, namespace, each["metadata"]["name"]) for each in found]

    (first,) = kubernetes.wait_for(engines, 30, "the first replica", namespace=namespace)
    first.wait_warm()
    first.wait_for(lambda: _written(kubernetes, namespace, first.name) == {"redis", "s3"}, "all is written down", 60)
    assert len(bucket.objects()) == 16

    # The second pod starts while Redis has everything, the third after it lost everything.
    known = {first.name}
    for number, tier in ((2, _REDIS), (3, _S3)):
        if tier == _S3:
            emptied = kubernetes.exec(namespace, "kvcachepool-demo-0", "sh", "-c", _EMPTY)
            assert emptied.split()[-1] == "0", emptied
        kubernetes.apply(_replicas(number), namespace=namespace)
        another = kubernetes.wait_for(
            lambda: next((each for each in engines() if each.name not in known), None),
            30,
            f"replica {number}",
            namespace=namespace,
        )
        known.add(another.name)
        found = another.wait_first_round(after_loss=False)
        assert (found["hits"], found["tiers"]) == (found["chunks"], [tier])

    assert _checked(kubernetes, namespace, "demo") == (True, {"redis": ("", ""), "s3": ("", "")})
    ready, tiers = _checked(kubernetes, namespace, "lacking")
    assert not ready
    assert tiers["s3"][0] == "Unauthenticated"
    assert "/etc/kvcachepool/s3/AWS_ACCESS_KEY_ID" in tiers["s3"][1]
    nobody = plugin(kubernetes, "check", "demo", "-n", namespace, "--service-account", "nobody")
    assert nobody.returncode == 1
    assert "PodNotCreated" in nobody.stderr
    left = json.loads(kubernetes.kubectl("get", "jobs", "-o", "json", namespace=namespace))["items"]
    assert [each for each in left if "deletionTimestamp" not in each["metadata"]] == []

    kubernetes.kubectl("delete", "deployment", "web", "--cascade=foreground", namespace=namespace)
    # With foreground deletion everything that the pool owns is deleted first, while its Job runs.
    kubernetes.kubectl("delete", "kvcachepool", "demo", "--cascade=foreground", "--timeout=60s", namespace=namespace)
    assert bucket.objects() == []

    def told_of() -> bool:
        return any(
            (name, reason) == ("demo", "Purged") for _, name, reason, _ in operator_events(kubernetes, namespace)
        )

    kubernetes.wait_for(told_of, 20, "an event on the pool that was", namespace=namespace)


def test_a_deleted_pod_flushes_its_chunks_for_the_next_one(
    cluster: Cluster, operator: Operator, namespace: str, bucket: S3Server
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    first, second = (Engine(cluster, namespace, name) for name in ("first", "second"))
    back = pool("demo", shared={"s3": _s3(bucket, "back", "bucket")}, write={"policy": "WriteBack"})
    kubernetes.apply([_secret(bucket), back, first.manifest("demo", tiers=1)], namespace=namespace)
    first.wait_warm()
    assert _written(kubernetes, namespace, first.name) == set()
    kubernetes.kubectl("delete", "pod", first.name, "--wait=false", namespace=namespace)
    first.wait_for(lambda: _written(kubernetes, namespace, first.name) == {"s3"}, "all is written down", 20)
    # It ignores SIGTERM: neither its end nor the sidecar's wrote anything.
    assert "running" in first.container(MAIN)["state"]
    kubernetes.apply(second.manifest("demo", tiers=1), namespace=namespace)
    second.wait_running(MAIN, 0)
    found = second.wait_first_round(after_loss=False)
    assert (found["hits"], found["tiers"]) == (found["chunks"], [_S3])


@pytest.fixture
def claim(cluster: Cluster, namespace: str) -> Iterator[tuple[str, Path]]:
    """A claim of access mode ReadWriteMany, and its volume: a folder of this machine that any user may write to."""
    name, folder = f"files-{namespace[-6:]}", paths.short_folder()
    folder.chmod(0o777)
    size, modes = {"storage": "8Gi"}, ["ReadWriteMany"]
    volume = {
        "kind": "PersistentVolume",
        "apiVersion": "v1",
        "metadata": {"name": name},
        "spec": {
            "capacity": size,
            "accessModes": modes,
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": namespace, "name": name},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "kind": "PersistentVolumeClaim",
        "apiVersion": "v1",
        "metadata": {"name": name},
        "spec": {"accessModes": modes, "resources": {"requests": size}, "storageClassName": "", "volumeName": name},
    }
    cluster.kubernetes.apply(volume)
    cluster.kubernetes.apply(claim, namespace=namespace)
    yield name, folder
    cluster.kubernetes.kubectl("delete", "persistentvolume", name, "--wait=false")
    shutil.rmtree(folder)


def test_a_pod_finds_in_a_shared_file_system_what_a_deleted_pod_stored(
    cluster: Cluster, operator: Operator, namespace: str, claim: tuple[str, Path]
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    name, folder = claim
    foreign = folder / "of-somebody-else"
    foreign.write_text("kept")
    shared = {"fileSystem": {"persistentVolumeClaim": {"claimName": name}, "capacity": "1Gi"}}
    # Two users: the permissions of the folder decide who may write, and new folders inherit them.
    first, second = (Engine(cluster, namespace, name) for name in ("first", "second"))
    pods = [engine.manifest("demo", tiers=1) for engine in (first, second)]
    pods[1]["spec"]["securityContext"]["runAsUser"] = 2000
    kubernetes.apply([pool("demo", shared=shared, deletionPolicy="Delete"), pods[0]], namespace=namespace)
    first.wait_warm()
    first.wait_for(lambda: _written(kubernetes, namespace, first.name) == {"filesystem"}, "all is written down", 60)
    mounts = {
        container["name"]: [mount["name"] for mount in container["volumeMounts"]]
        for container in (*first.pod()["spec"]["initContainers"], *first.pod()["spec"]["containers"])
    }
    assert [each for each, names in mounts.items() if "kvcachepool-filesystem" in names] == [SIDECAR]
    kubernetes.kubectl("delete", "pod", first.name, "--now", namespace=namespace)

    kubernetes.apply(pods[1], namespace=namespace)
    second.wait_running(MAIN, 0)
    found = second.wait_first_round(after_loss=False)
    assert (found["hits"], found["tiers"]) == (found["chunks"], [_FILE_SYSTEM])

    def reported() -> bool:
        tiers = status(kubernetes, namespace, "demo").get("tiers", [])
        return ("filesystem", "Ready", "1Gi") in [(t["name"], t["state"], t.get("capacity")) for t in tiers]

    kubernetes.wait_for(reported, 60, "the pool reports the tier", namespace=namespace)
    assert _checked(kubernetes, namespace, "demo") == (True, {"filesystem": ("", "")})

    kubernetes.kubectl("delete", "pod", second.name, "--now", namespace=namespace)
    kubernetes.kubectl("delete", "kvcachepool", "demo", "--timeout=60s", namespace=namespace)
    left = {each.name for each in folder.rglob("*") if each.is_file()}
    assert left - {"counted"} == {"format", foreign.name}


def _vllms(number: int) -> Object:
    """A Deployment of real vLLMs. Only the label refers to the cache."""
    labels = {"app": "vllm", "kvcachepool.io/pool": "demo"}
    spec = images.vllm_pod(model("tiny"), "--dtype", "float32", "--max-model-len", "4096")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {
            "replicas": number,
            "selector": {"matchLabels": {"app": "vllm"}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def test_a_replica_of_a_real_vllm_is_warm_from_redis_and_from_s3(
    cluster: Cluster, operator: Operator, namespace: str, redis_image: str, bucket: S3Server
) -> None:
    kubernetes = cluster.kubernetes
    cluster.import_image(images.vllm_host())
    managed = {"memoryPerShard": "256Mi", "image": redis_image, "resources": {"requests": {"cpu": "10m"}}}
    shared = {"redis": {"managed": managed}, "s3": _s3(bucket, "vllm", "bucket")}
    local, cache = {"memory": {"perPod": "256Mi"}}, {"loadTimeout": "20s"}
    kubernetes.apply(
        [_secret(bucket), pool("demo", local=local, cache=cache, shared=shared)],
        namespace=namespace,
    )
    for until in ("create", "condition=Ready"):
        kubernetes.wait("pod", "kvcachepool-demo-0", until, namespace=namespace)
    prompts, known = {"redis": token_ids(1500, 511), "s3": token_ids(1500, 513)}, set[str]()

    def another(number: int) -> tuple[VllmClient, SidecarClient]:
        """The additional pod of this many replicas, once it serves, its tiers are ready, and it is attached."""
        kubernetes.apply(_vllms(number), namespace=namespace)

        def new_replica() -> Object | None:
            pods = kubernetes.pods(namespace, "app=vllm")
            return next((each for each in pods if each["metadata"]["name"] not in known), None)

        name: str = kubernetes.wait_for(new_replica, 30, f"replica {number}", namespace=namespace)["metadata"]["name"]
        known.add(name)
        kubernetes.wait("pod", name, "condition=Ready", namespace=namespace, seconds=240)
        address = kubernetes.pod(namespace, name)["status"]["podIP"]
        vllm, beside = VllmClient(address, 8000), SidecarClient(address, 9797)
        kubernetes.wait_for(beside.tiers_ready, 30, "its tiers serve", namespace=namespace)
        vllm.complete(token_ids(300, 512), 300, max_tokens=1)
        wait_attached(beside)
        return vllm, beside

    vllm, beside = another(1)
    cold = {tier: vllm.complete(prompt, 1500) for tier, prompt in prompts.items()}
    assert [answer.sources["computed"] for answer in cold.values()] == [1500, 1500]
    settle(beside)
    kubernetes.wait_for(lambda: beside.written_to("redis", "s3"), 60, "all is written down", namespace=namespace)
    vllm, beside = another(2)
    for tier, prompt in prompts.items():
        if tier == "s3":
            emptied = kubernetes.exec(namespace, "kvcachepool-demo-0", "sh", "-c", _EMPTY)
            assert emptied.split()[-1] == "0", emptied
        warm = vllm.complete(prompt, 1500)
        assert (warm.sources["external"], warm.text) == (1408, cold[tier].text)

        def hit(tier: str = tier) -> bool:
            return beside.metrics().total("kvcachepool_hit_tokens_total", tier=tier) == 1408

        kubernetes.wait_for(hit, 10, f"the hit under {tier}", namespace=namespace)


def test_a_bucket_that_another_pool_uses_is_not_purged(
    kubernetes: Kubernetes, operator: Operator, namespace: str, bucket: S3Server
) -> None:
    both = {"s3": _s3(bucket, "both", "bucket")}
    kubernetes.apply(
        [pool("goes", shared=both, deletionPolicy="Delete"), pool("stays", shared=both)], namespace=namespace
    )
    kubernetes.wait_for(lambda: _held(kubernetes, namespace, "goes"), 30, "the finalizer", namespace=namespace)
    kubernetes.kubectl("delete", "kvcachepool", "goes", "--timeout=50s", namespace=namespace)

    def skipped() -> list[str]:
        return [
            f"{reason}: {note}" for _, _, reason, note in operator_events(kubernetes, namespace) if "Purge" in reason
        ]

    kubernetes.wait_for(skipped, 20, "an event on the pool that was", namespace=namespace)
    assert skipped() == [
        f"PurgeSkipped: objects of the deleted pool remain in s3, because pool {namespace}/stays uses it too"
    ]
    assert json.loads(kubernetes.kubectl("get", "jobs", "-o", "json", namespace=namespace))["items"] == []


def _held(kubernetes: Kubernetes, namespace: str, *pools: str) -> bool:
    """Whether the deletion of all these pools waits for their purge."""
    of = f"/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools/"
    found = (kubernetes.request("GET", of + name)["metadata"] for name in pools)
    return all("kvcachepool.io/purge" in metadata.get("finalizers", []) for metadata in found)


def test_the_deletion_of_a_namespace_is_not_blocked(
    kubernetes: Kubernetes, operator: Operator, namespace: str, bucket: S3Server
) -> None:
    shared = {"s3": _s3(bucket, "held", "bucket")}
    kubernetes.apply(pool("demo", shared=shared, deletionPolicy="Delete"), namespace=namespace)
    kubernetes.wait_for(lambda: _held(kubernetes, namespace, "demo"), 30, "the finalizer", namespace=namespace)
    kubernetes.delete_namespace(namespace)
    kubernetes.wait("namespace", namespace, "delete")
