"""Existing tiers, and a volume for the disk: every field of a pool reaches its sidecars and works."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cluster import images
from cluster.cluster import Cluster
from cluster.engine import Engine, pool
from cluster.kubernetes import Object
from cluster.product import RIGHTS, Operator, conditions, message, sidecar, status
from servers import certificates, paths, web
from servers.process import Process
from servers.prometheus import Samples
from servers.redis import RedisServer
from servers.s3 import BUCKET, S3Server

VALUES = RIGHTS

_PASSWORD = "only-for-this-test"
#: The permissions that docs/guides/tiers.md requires, and no others.
_PAGE = (paths.ROOT / "docs/guides/tiers.md").read_text()
_COMMANDS = _PAGE.split("on keys `kvcp:*`: `")[1].split("`")[0].lower().split()
#: The same for a bucket, without writes.
_PERMISSIONS = ("s3:GetObject", "s3:ListBucket", "s3:DeleteObject")
#: Prompts of 16 chunks, more than 2% of the bucket's capacity.
_PROMPTS = 13
_ADMIN = ("admin", "on", f">{_PASSWORD}", "~*", "&*", "+@all")


def _users(*more: str) -> list[str]:
    """Users of a server, as settings: one for sidecars, one for this test."""
    may = [f"+{command}" for command in (*_COMMANDS, *more)]
    user = ["--user", "kv", "on", f">{_PASSWORD}", "~kvcp:*", "-@all", *may]
    return [*user, "--user", *_ADMIN, "--user", "default", "off"]


def _ask(server: RedisServer, *words: str) -> list[str]:
    """Lines of a response."""
    command = ["redis-cli", "-h", server.host, "-p", str(server.port), "--user", "admin", "--pass", _PASSWORD]
    done = subprocess.run([*command, "--no-auth-warning", *words], check=True, capture_output=True, text=True)
    return done.stdout.split()


def _heads(server: RedisServer) -> list[str]:
    """Keys of objects; those of their segments are longer."""
    return [key for key in _ask(server, "KEYS", "kvcp:*") if key.count(":") == 3]


@dataclass(frozen=True)
class Outside:
    """Servers on this machine, reachable from pods."""

    #: Folder with the certificates: of the authority, and of a server that is also a client.
    pki: Path
    #: Two independent ones, with TLS, which ask clients for a certificate.
    shards: list[RedisServer]
    #: One with a sentinel at this port.
    watched: tuple[RedisServer, int]
    #: One that is a complete cluster.
    whole: RedisServer
    bucket: S3Server


@pytest.fixture(scope="module")
def outside(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """All of them."""
    host = cluster.slot.host
    pki = tmp_path_factory.mktemp("outside") / "pki"
    certificates.for_server(pki, host)
    with ExitStack() as stack:

        def started(*settings: str, may: tuple[str, ...] = (), tls: Path | None = None) -> RedisServer:
            server = RedisServer(host, memory="64mb", settings=[*_users(*may), *settings], certificates=tls)
            stack.callback(server.stop)
            return server

        shards = [started("--tls-auth-clients", "yes", tls=pki) for _ in range(2)]
        master = started(may=("role",))
        whole = started("--cluster-enabled", "yes", "--cluster-port", str(paths.free_port()), may=("cluster|slots",))
        assert _ask(whole, "CLUSTER", "ADDSLOTSRANGE", "0", "16383") == ["OK"]
        bucket = S3Server(host, region="eu-central-1", certificates=pki)
        stack.callback(bucket.stop)
        yield Outside(
            pki=pki,
            shards=shards,
            watched=(master, _sentinel(stack, pki.parent, master)),
            whole=whole,
            bucket=bucket,
        )


def _sentinel(stack: ExitStack, folder: Path, master: RedisServer) -> int:
    """Starts a sentinel that watches a master as `kv`. Returns its port."""
    port = paths.free_port()
    config = folder / "sentinel.conf"
    lines = [f"monitor kv {master.host} {master.port} 1", "auth-user kv admin", f"auth-pass kv {_PASSWORD}"]
    config.write_text("".join(f"sentinel {line}\n" for line in lines))
    command = ["redis-server", str(config), "--sentinel", "--port", str(port), "--bind", master.host]
    process = Process("sentinel", [*command, "--protected-mode", "no"], folder / "sentinel.log")
    stack.callback(process.kill)
    return port


def _objects(outside: Outside, user: str, key: tuple[str, str]) -> list[Object]:
    """Objects that pools reference: credentials for Redis and S3, the authority, and a client's certificate."""
    authority, certificate, private = [(outside.pki / f).read_text() for f in ("ca.crt", "server.crt", "server.key")]
    keys = dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), key, strict=True))

    def made(kind: str, name: str, **data: object) -> Object:
        return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **data}

    return [
        made("Secret", "redis", stringData={"username": user, "password": _PASSWORD}),
        made("Secret", "bucket", stringData=keys),
        made("Secret", "bundle", stringData={"all.pem": authority}),
        made("ConfigMap", "bundle", data={"ca.crt": authority}),
        made("Secret", "client", stringData={"tls.crt": certificate, "tls.key": private}),
    ]


def _effective(engine: Engine) -> Object:
    """The effective config of a pod's sidecar. Its token is the password of Redis."""
    address = engine.pod()["status"]["podIP"]
    headers = {"Authorization": f"Bearer {_PASSWORD}"}
    request = urllib.request.Request(f"http://{address}:9797/v1/config", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: Object = yaml.safe_load(answer)
    return found


def test_every_field_of_existing_tiers_is_live(
    cluster: Cluster, operator: Operator, namespace: str, outside: Outside, volume: tuple[str, Path]
) -> None:
    kubernetes, host = cluster.kubernetes, cluster.slot.host
    cluster.import_image(images.stand_in())
    kubernetes.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    auth, token = {"secretName": "redis"}, {"settings": {"admin": {"tokenFile": "/etc/kvcachepool/redis/password"}}}
    urls = [server.url for server in outside.shards]
    files = {"auth": auth, "ca": {"name": "bundle"}, "clientCertificate": {"secretName": "client"}}
    redis = {"external": {"urls": urls, **files}, "ttl": "1h"}
    bucket: Object = {
        "bucket": BUCKET,
        "region": "eu-central-1",
        "endpoint": outside.bucket.endpoint,
        "prefix": "prod/llama",
        "addressingStyle": "Path",
        "checksums": "WhenSupported",
        "maxConcurrency": 8,
        "capacity": "1Gi",
        "evictAtPercent": 2,
        "evictToPercent": 1,
        "expireAfter": "168h",
    }
    s3 = {
        **bucket,
        "auth": {"secretName": "bucket"},
        "ca": {"kind": "Secret", "name": "bundle", "key": "all.pem"},
    }
    local = {
        "memory": {"perPod": "64Mi"},
        "disk": {"perPod": "1Gi", "ephemeral": {"storageClassName": volume[0]}},
    }
    write = {"policy": "WriteThrough", "admission": "All", "codec": "Lossless"}
    master, sentinel = outside.watched
    one = {
        "sentinel": f"redis-sentinel://{host}:{sentinel}/kv",
        "cluster": f"redis-cluster://{host}:{outside.whole.port}",
    }
    engines = {name: Engine(cluster, namespace, name) for name in ("all", *one)}
    gone = {"deletionPolicy": "Delete"}
    pools = [pool("all", local=local, shared={"redis": redis, "s3": s3}, sidecar=token, **gone)]
    for name, url in one.items():
        external = {"external": {"url": url, "auth": auth}}
        pools.append(pool(name, shared={"redis": external}, sidecar=token, write=write, **gone))
    pods = [engine.manifest(name, tiers=1) for name, engine in engines.items() if name in one]
    pods.append(engines["all"].manifest("all", tiers=3, prompts=_PROMPTS))
    owner = (outside.bucket.key_id, outside.bucket.secret)
    kubernetes.apply([*_objects(outside, "kv", owner), *pools, *pods], namespace=namespace)

    def tiers(name: str) -> dict[str, tuple[str, str]]:
        tiers = sidecar(kubernetes, namespace, name)["tiers"]
        return {each["name"]: (each["state"], each["message"]) for each in tiers}

    for name, engine in engines.items():
        kubernetes.wait("pod", name, "condition=Ready", namespace=namespace)

        def serve(name: str = name) -> bool:
            return set(tiers(name).values()) == {("ready", "")}

        engine.wait_for(serve, "its tiers serve", 60)
    assert list(tiers("all")) == ["memory", "disk", "redis", "s3"]

    config = _effective(engines["all"])
    assert config["redis"] == {
        "urls": urls,
        "auth": "/etc/kvcachepool/redis",
        "ca": "/etc/kvcachepool/redis-ca.crt",
        "clientCertificate": "/etc/kvcachepool/redis-client",
        "ttl": "1h",
        "mode": "Normal",
    }
    credentials = {"auth": "/etc/kvcachepool/s3", "ca": "/etc/kvcachepool/s3-ca.crt"}
    defaults = {"accelerate": False, "mode": "Normal"}
    assert config["s3"] == {**bucket, **credentials, **defaults, "expireAfter": "7d"}
    assert config["disk"] == {"path": "/var/lib/kvcachepool", "size": "1Gi", "mode": "Normal"}
    for name, url in one.items():
        config = _effective(engines[name])
        assert config["redis"]["urls"] == [url]
        assert config["write"] == {**write, "backAfter": "1m"}

    # Each shard has its share, each share its TTL, and objects are below the prefix until there are too many bytes.
    wanted = {"all": (outside.shards, _PROMPTS * 16), "sentinel": ([master], 16), "cluster": ([outside.whole], 16)}
    for name, (servers, count) in wanted.items():
        engines[name].wait_warm()

        def stored(servers: list[RedisServer] = servers, count: int = count) -> bool:
            return sum(len(_heads(server)) for server in servers) == count

        engines[name].wait_for(stored, "Redis has all of it", 60)
    for server in outside.shards:
        heads = _heads(server)
        assert heads
        assert all(0 < int(_ask(server, "PTTL", head)[0]) <= 3_600_000 for head in heads)
    assert (volume[1] / "format").read_text() == "kvcachepool-disk 1\n"
    below = outside.bucket.data / BUCKET / "prod" / "llama"

    def bounded() -> bool:
        _, text = web.get(f"http://{engines['all'].pod()['status']['podIP']}:9797/metrics")
        written = Samples.parse(text).total("kvcachepool_tier_write_chunks", tier="s3", result="stored")
        objects = outside.bucket.objects()
        assert all(each.is_relative_to(below) for each in objects)
        return written == _PROMPTS * 16 and 0 < sum(each.stat().st_size for each in objects) <= (1 << 30) // 50

    engines["all"].wait_for(bounded, "the bucket is within its bounds", 90)

    def reported() -> bool:
        found = status(kubernetes, namespace, "all").get("tiers", [])
        return {each["name"]: (each["state"], each.get("capacity")) for each in found} == {
            "memory": ("Ready", "64Mi"),
            "disk": ("Ready", "1Gi"),
            "redis": ("Ready", "128Mi"),
            "s3": ("Ready", "1Gi"),
        }

    kubernetes.wait_for(reported, 60, "the pool reports its tiers", namespace=namespace)

    # Deleting the pools deletes all their objects, and no others.
    others = [*outside.shards, master, outside.whole]
    for server in others:
        assert _ask(server, "SET", "other", "value") == ["OK"]
    foreign = {below / "other.kv", below.parent / "other.kv"}
    for file in foreign:
        file.write_bytes(b"of somebody else")
    kubernetes.kubectl("delete", "pod", *engines, "--now", namespace=namespace)
    kubernetes.kubectl("delete", "kvcachepool", *engines, "--timeout=120s", namespace=namespace)
    assert [_ask(server, "KEYS", "*") for server in others] == [["other"]] * len(others)
    assert set(outside.bucket.objects()) == foreign


def test_a_missing_permission_is_in_the_pools_status_until_it_is_granted(
    cluster: Cluster, operator: Operator, namespace: str, outside: Outside
) -> None:
    kubernetes, server, bucket = cluster.kubernetes, outside.watched[0], outside.bucket
    cluster.import_image(images.stand_in())
    may = [f"+{command}" for command in _COMMANDS if command != "info"]
    _ask(server, "ACL", "SETUSER", "bound", "on", f">{_PASSWORD}", "~kvcp:*", "-@all", *may)
    bucket.let_guest(*_PERMISSIONS)
    redis = {"external": {"url": f"redis://{server.host}:{server.port}", "auth": {"secretName": "redis"}}}
    place = {"bucket": BUCKET, "region": "eu-central-1", "endpoint": bucket.endpoint, "prefix": "bound"}
    s3 = {**place, "auth": {"secretName": "bucket"}, "ca": {"name": "bundle"}}
    engine, guest = Engine(cluster, namespace, "bound"), (bucket.guest_id, bucket.guest_secret)
    made = [*_objects(outside, "bound", guest), pool("bound", shared={"redis": redis, "s3": s3})]
    kubernetes.apply([*made, engine.manifest("bound")], namespace=namespace)

    def ready() -> tuple[str, str] | None:
        return conditions(status(kubernetes, namespace, "bound")).get("SharedTiersReady")

    def refused(*words: str) -> bool:
        why = message(status(kubernetes, namespace, "bound"), "SharedTiersReady")
        return ready() == ("False", "SharedTierDown") and all(word in why for word in words)

    kubernetes.wait_for(lambda: refused("Denied", "info"), 120, "Redis' missing right is named", namespace=namespace)
    # The memory tier keeps serving.
    engine.wait_warm()
    _ask(server, "ACL", "SETUSER", "bound", "+info")
    lacks = f"s3: Denied: s3:PutObject denied on bucket {BUCKET}"
    kubernetes.wait_for(lambda: refused(lacks), 120, "the bucket's missing right is named", namespace=namespace)
    bucket.let_guest(*_PERMISSIONS, "s3:PutObject")
    kubernetes.wait_for(lambda: ready() == ("True", "TiersServe"), 120, "the tiers serve", namespace=namespace)
