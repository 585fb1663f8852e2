"""Many owners that one cause keeps from running at the same time: all run without a sidecar soon, with a bounded
number of writes, and injection resumes when the cause is gone.
"""

from __future__ import annotations

import time

from cluster.kubernetes import Kubernetes, Object
from cluster.leadership import leader
from cluster.product import SYSTEM, Operator, conditions, deployment, injected, pod, pool, status

_OWNERS = 50
#: From the creation of the owners until all have a running pod.
_WITHIN = 180
_ABSENT = "localhost/absent:1"
#: Counters of what the leader writes: statuses of pools, and pods that it replaces.
_WRITES = ("status_writes", "replacements")


def _writes(kubernetes: Kubernetes) -> dict[str, float]:
    """What the leader has written since its start."""
    first = kubernetes.wait_for(lambda: leader(kubernetes), 30, "a leader", namespace=SYSTEM)
    metrics = first.metrics()
    return {name: metrics.total(f"kvcachepool_{name}") for name in _WRITES}


def _small(found: Object) -> Object:
    resources = {"cpu": "5m", "memory": "8Mi"}
    template = found["spec"]["template"]
    template["spec"]["containers"][0]["resources"] = {"requests": resources, "limits": resources}
    return found


def test_fifty_owners_run_soon_after_one_cause_holds_all_of_them_back(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    few = {"resources": {"requests": {"cpu": "5m"}}}
    broken = pool("demo", local={"memory": {"perPod": "64Mi"}}, sidecar={"image": _ABSENT, **few})
    kubernetes.apply(broken, namespace=namespace)
    before = _writes(kubernetes)
    started = time.monotonic()
    names = [f"web-{number}" for number in range(_OWNERS)]
    kubernetes.apply([_small(deployment(base_image, name, "demo")) for name in names], namespace=namespace)

    def running() -> bool:
        pods = kubernetes.pods(namespace, "kvcachepool.io/pool=demo")
        up = {each["metadata"]["labels"]["app"] for each in pods if each["status"].get("phase") == "Running"}
        return up == set(names)

    kubernetes.wait_for(running, _WITHIN + 120, f"all {_OWNERS} owners have a pod that runs", namespace=namespace)
    took = time.monotonic() - started
    after = _writes(kubernetes)
    written = {name: after[name] - before[name] for name in _WRITES}
    print(f"{_OWNERS} owners ran after {took:.0f} s; the leader wrote {written}")
    assert took <= _WITHIN
    assert written["replacements"] <= 2 * _OWNERS, "not many more than one replaced pod for each owner"
    assert written["status_writes"] <= took, "less than one write of the status per second"
    assert conditions(status(kubernetes, namespace, "demo"))["InjectionReady"] == ("False", "PodsHeldBack")

    # The cause is gone: new pods get a sidecar, without another action than the correction of the pool.
    started = time.monotonic()
    kubernetes.apply(pool("demo", local={"memory": {"perPod": "64Mi"}}, sidecar=few), namespace=namespace)

    def resumed() -> bool:
        path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
        found = status(kubernetes, namespace, "demo")
        ended = "injectionPaused" not in found and conditions(found)["InjectionReady"][0] == "True"
        return ended and injected(kubernetes.request("POST", path, pod(base_image, "asked", "demo")))

    kubernetes.wait_for(resumed, 120, "pods are injected again", namespace=namespace)
    print(f"injection resumed {time.monotonic() - started:.0f} s after the correction")
