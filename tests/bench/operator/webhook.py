"""The webhook under an open loop: a review is due every 10 ms, whether or not the previous one was answered."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.operator.api import Api
from bench.operator.counts import quantile
from bench.operator.load import Load, vllm
from cluster.kubernetes import Object
from cluster.leadership import Replica
from cluster.product import SYSTEM
from servers.process import cpu_seconds

_NAME = f"kvcachepool-webhook.{SYSTEM}.svc"
_CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/kvcachepool-injector"
#: Connections that stay open, like those of the API server.
_CONNECTIONS = 16


class Answers(NamedTuple):
    """Results of an open loop: seconds from the due time of a request to its answer, and patches."""

    seconds: list[float]
    patched: int

    def percentile(self, share: float) -> float:
        """One of the times, in ms."""
        return 1000 * sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


class Measured(NamedTuple):
    """Times in ms."""

    handler_p50: float
    handler_p99: float
    reviews: int
    client: Answers
    #: The same port and connections, with requests for nothing.
    empty: Answers
    cpu_each: float
    bytes_each: int


def reviews(api: Api, load: Load, count: int) -> list[bytes]:
    """Reviews as the API server sends them: a pod with all defaults and its account's token, as admission sees it."""
    namespace, name = load.pool(0)
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    unlabelled = vllm("vllm-asked", name)
    del unlabelled["metadata"]["labels"]["kvcachepool.io/pool"]
    stored = api.request("POST", path, unlabelled)
    for key in ("uid", "creationTimestamp", "resourceVersion"):
        stored["metadata"].pop(key, None)
    stored["status"] = {}
    return [_review(stored, number, load.pool(number)) for number in range(count)]


def _review(stored: Object, number: int, of: tuple[str, str]) -> bytes:
    namespace, pool = of
    pod = copy.deepcopy(stored)
    pod["metadata"]["name"] = f"vllm-asked-{number:05}"
    pod["metadata"]["namespace"] = namespace
    pod["metadata"]["labels"]["kvcachepool.io/pool"] = pool
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    resource = {"group": "", "version": "v1", "resource": "pods"}
    request = {
        "uid": f"705ab4f5-6393-11e8-b7cc-{number:012x}",
        "kind": kind,
        "resource": resource,
        "requestKind": kind,
        "requestResource": resource,
        "name": pod["metadata"]["name"],
        "namespace": namespace,
        "operation": "CREATE",
        "userInfo": {
            "username": "system:serviceaccount:kube-system:replicaset-controller",
            "groups": ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"],
        },
        "object": pod,
        "oldObject": None,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    return json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}).encode()


def measure(api: Api, load: Load, replica: Replica, pid: int, *, per_second: int = 100, seconds: int = 30) -> Measured:
    """Sends all reviews to one replica."""
    bodies = reviews(api, load, per_second * seconds)
    bundle = api.request("GET", _CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"]
    tls = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
    ask = b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % _NAME.encode()
    head = (
        "POST /inject?timeout=3s HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    )
    requests = [head.format(_NAME, len(body)).encode() + body for body in bodies]
    empty = asyncio.run(_open_loop(replica.ip, tls, [ask] * (5 * per_second), per_second))
    before, cpu = replica.metrics(), cpu_seconds([pid])
    client = asyncio.run(_open_loop(replica.ip, tls, requests, per_second))
    cpu = cpu_seconds([pid]) - cpu
    after = replica.metrics()
    assert client.patched == len(bodies), f"{client.patched} of {len(bodies)} answers carry a patch"
    p50, _ = quantile(0.5, "kvcachepool_injection_seconds", before, after)
    p99, count = quantile(0.99, "kvcachepool_injection_seconds", before, after)
    cpu_each = 1000 * cpu / len(bodies)
    return Measured(1000 * p50, 1000 * p99, count, client, empty, cpu_each, len(bodies[0]))


async def _open_loop(ip: str, tls: ssl.SSLContext, requests: Sequence[bytes], per_second: int) -> Answers:
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(_CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection(ip, 10250, ssl=tls, server_hostname=_NAME, limit=1 << 20))
    start = time.monotonic()
    patched = 0

    async def one(request: bytes, due: float) -> float:
        nonlocal patched
        await asyncio.sleep(due - time.monotonic())
        reader, writer = await idle.get()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(int(length.split(b":")[1]))
        took = time.monotonic() - due
        idle.put_nowait((reader, writer))
        patched += b'"patch":' in body
        return took

    due = [start + 0.1 + number / per_second for number in range(len(requests))]
    seconds = await asyncio.gather(*map(one, requests, due))
    while not idle.empty():
        idle.get_nowait()[1].close()
    return Answers(list(seconds), patched)
