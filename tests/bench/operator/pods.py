"""What the label adds to the start of a pod: with the label, without it, and with idle containers of the same shape."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from bench.operator.api import Api, say
from bench.operator.load import POOLS, create_namespace
from cluster.kubernetes import Object, Refused
from cluster.product import pod, pool
from servers.waiting import wait_for

_NAMESPACE = "bench-started"


class Started(NamedTuple):
    """Seconds until Running, one of each per round."""

    labelled: list[float]
    plain: list[float]
    #: A native sidecar and an init container with the pod's image, in the positions of the added ones.
    shaped: list[float]

    def added(self) -> float:
        """Median time that the label added."""
        return statistics.median(a - b for a, b in zip(self.labelled, self.plain, strict=True))

    def added_by_shape(self) -> float:
        """Median time that two idle containers added."""
        return statistics.median(a - b for a, b in zip(self.shaped, self.plain, strict=True))


def measure(api: Api, image: str, rounds: int) -> Started:
    """Starts the pods one after another."""
    create_namespace(api, _NAMESPACE)
    api.request("POST", f"{POOLS}/namespaces/{_NAMESPACE}/kvcachepools", pool("here"))

    def known() -> bool:
        conditions = api.request("GET", f"{POOLS}/namespaces/{_NAMESPACE}/kvcachepools/here").get("status", {})
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions.get("conditions", []))

    wait_for(known, 60, "the pool is ready", pause=0.2)
    times: dict[str, list[float]] = {"labelled": [], "plain": [], "shaped": []}
    for number in range(-1, rounds):
        # The order rotates, and the first round is a warm-up.
        kinds = list(times)[number % 3 :] + list(times)[: number % 3]
        for kind in kinds:
            took = _start(api, _pod(kind, image))
            if number >= 0:
                times[kind].append(took)
        if number >= 0:
            say("  " + ", ".join(f"{kind} {values[-1]:.2f} s" for kind, values in times.items()))
    api.request("DELETE", f"/api/v1/namespaces/{_NAMESPACE}")
    wait_for(lambda: _gone(api), 120, f"end of namespace {_NAMESPACE}", pause=0.5)
    return Started(**times)


def _pod(kind: str, image: str) -> Object:
    made = pod(image, kind, "here")
    if kind != "labelled":
        del made["metadata"]["labels"]
    if kind == "shaped":
        container = made["spec"]["containers"][0]
        made["spec"]["initContainers"] = [
            {**container, "name": "sidecar", "restartPolicy": "Always"},
            {**container, "name": "init", "command": ["true"]},
        ]
    return made


def _start(api: Api, made: Object) -> float:
    """Seconds from the creation request to the event with phase Running. Deletes the pod."""
    name = made["metadata"]["name"]
    pods = f"/api/v1/namespaces/{_NAMESPACE}/pods"
    start = time.monotonic()
    version = api.request("POST", pods, made)["metadata"]["resourceVersion"]
    running = 0.0
    query = f"watch=1&resourceVersion={version}&fieldSelector=metadata.name={name}"
    for at, event in api.watch(f"{pods}?{query}", 60):
        if event["object"]["status"].get("phase") == "Running" and not running:
            running = at - start
            injected = "kvcachepool.io/injection" in event["object"]["metadata"].get("annotations", {})
            assert injected == (name == "labelled"), f"pod {name} was injected: {injected}"
            api.request("DELETE", f"{pods}/{name}?gracePeriodSeconds=0")
        if event["type"] == "DELETED":
            return running
    raise AssertionError(f"the watch of pod {name} ended before the pod did")


def _gone(api: Api) -> bool:
    try:
        api.request("GET", f"/api/v1/namespaces/{_NAMESPACE}")
    except Refused as error:
        return ": 404: " in str(error)
    return False
