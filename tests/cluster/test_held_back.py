"""Whatever injection adds that keeps a pod from running: vLLM runs without it within 90 s, and the pool says why.

All cases run side by side, each in a namespace of its own, with the causes spread over the kinds of owners.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

import pytest

from cluster.cluster import Cluster
from cluster.engine import pool
from cluster.images import Image, base
from cluster.kubernetes import Kubernetes, Object
from cluster.leadership import leader
from cluster.product import Operator, conditions, injected, operator_events, pod, report, status

_WITHIN = 90
_ABSENT = "localhost/absent:1"
_PATH_IMAGE = "localhost/python-path:1"
# Stands for a vLLM that its image finds by ENV PYTHONPATH.
_IMPORTS = 'case ":$PYTHONPATH:" in *:/app:*) exec sleep 1000;; esac; echo "No module named vllm"; exit 1'


@dataclass(frozen=True)
class Case:
    """A pool and an owner whose pods it keeps from running, and the expected reason."""

    kind: str
    reason: str
    replicas: int = 1
    spec: Object = field(default_factory=dict)
    #: Objects that exist in the namespace before.
    limits: tuple[Object, ...] = ()
    #: Changes the spec of the owner's pods.
    change: Callable[[Object], object] = lambda spec: None
    #: The owner ran without the label before, and a rollout adds it.
    rollout: bool = False
    #: Failures that a Job tolerates.
    backoff_limit: int = 6


def _object(version: str, kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _quota(**hard: str) -> Object:
    spec = {"hard": {key.replace("_", "."): value for key, value in hard.items()}}
    return _object("v1", "ResourceQuota", "limit", spec)


def _small(spec: Object) -> None:
    memory = {"cpu": "10m", "memory": "16Mi"}
    spec["containers"][0]["resources"] = {"requests": memory, "limits": memory}


def _runs_python(spec: Object) -> None:
    spec["containers"][0] |= {"image": _PATH_IMAGE, "command": ["sh", "-c", _IMPORTS]}


def _as_root_image(spec: Object) -> None:
    """The user is that of the image, which the added containers refuse if it is root."""
    spec["securityContext"].pop("runAsUser")
    spec["securityContext"].pop("runAsNonRoot")


def _disk(storage_class: str) -> Object:
    disk = {"perPod": "1Gi", "ephemeral": {"storageClassName": storage_class}}
    return {"local": {"memory": {"perPod": "64Mi"}, "disk": disk}}


def _file_system(claim: str) -> Object:
    return {"shared": {"fileSystem": {"persistentVolumeClaim": {"claimName": claim}}}}


def _memory(**memory: str) -> Object:
    return {"local": {"memory": memory}}


_LIMIT = _object("v1", "LimitRange", "limit", {"limits": [{"type": "Container", "max": {"memory": "32Mi"}}]})
_CLAIMS = _quota(persistentvolumeclaims="0")
_IMAGE = {"sidecar": {"image": _ABSENT}}
_WEB = {"matchLabels": {"app": "web"}}
_BUDGET = _object("policy/v1", "PodDisruptionBudget", "web", {"minAvailable": 1, "selector": _WEB})

CASES = {
    "image": Case("Deployment", "ErrImagePull|ImagePullBackOff", spec=_IMAGE),
    "image-ordered": Case("StatefulSet", "ErrImagePull|ImagePullBackOff", 2, spec=_IMAGE),
    "configuration": Case(
        "Job", "CreateContainerConfigError", spec={"sidecar": {"image": "localhost/base:1"}}, change=_as_root_image
    ),
    "quota": Case(
        "Deployment", "PodsRefused", 3, limits=(_quota(requests_memory="100Mi"),), change=_small, rollout=True
    ),
    "limit-range": Case("Job", "PodsRefused", limits=(_LIMIT,), change=_small),
    "admission": Case("StatefulSet", "PodsRefused", 2),
    "room": Case("Deployment", "NoNodeWithRoom", 3, spec=_memory(perPod="2Ti"), rollout=True),
    "huge-pages": Case("Job", "NoNodeWithRoom", spec=_memory(perPod="64Mi", hugePages="2Mi")),
    "storage-class": Case("StatefulSet", "NoNodeWithRoom", 2, spec=_disk("none")),
    "claims": Case("Deployment", "NoNodeWithRoom", spec=_disk("none"), limits=(_CLAIMS,)),
    "absent-claim": Case("Deployment", "NoNodeWithRoom", spec=_file_system("absent")),
    "mount": Case("Deployment", "DiskNotMounted", spec=_disk("unmountable")),
    "python-path": Case("Deployment", "PythonPathUnknown", limits=(_BUDGET,), change=_runs_python),
    "python-path-rollout": Case("Deployment", "PythonPathUnknown", 3, change=_runs_python, rollout=True),
    "python-path-job": Case("Job", "PythonPathUnknown", change=_runs_python),
}
#: Its only pod must stay available.
LAST_TRY = "last-try"


def _owner(case: Case, image: str, *, labelled: bool) -> Object:
    """The owner of a case."""
    made = pod(image, "web", "demo")
    case.change(made["spec"])
    labels = {"app": "web", **(made["metadata"]["labels"] if labelled else {})}
    template: Object = {"metadata": {"labels": labels}, "spec": made["spec"]}
    if case.kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
        return _object("batch/v1", "Job", "web", {"template": template, "backoffLimit": case.backoff_limit})
    spec = {"replicas": case.replicas, "selector": _WEB, "template": template}
    if case.kind == "StatefulSet":
        spec["serviceName"] = "web"
    return _object("apps/v1", case.kind, "web", spec)


#: Refuses every pod with the sidecar, like a policy of the cluster might.
_POLICY: list[Object] = [
    _object(
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicy",
        "no-sidecars",
        {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
                "namespaceSelector": {"matchLabels": {"no-sidecars": "yes"}},
            },
            "validations": [
                {"expression": "!has(object.spec.initContainers)", "message": "no init containers in this namespace"}
            ],
        },
    ),
    _object(
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding",
        "no-sidecars",
        {"policyName": "no-sidecars", "validationActions": ["Deny"]},
    ),
]


def _unmountable() -> list[Object]:
    """A storage class with a volume whose folder does not exist."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "unmountable"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "unmountable",
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": "/nowhere", "type": "Directory"},
    }
    return [storage_class, _object("v1", "PersistentVolume", "unmountable", spec)]


@dataclass(frozen=True)
class Scene:
    """A case in its namespace, and when its pods were created."""

    kubernetes: Kubernetes
    namespace: str
    case: Case
    began: float

    def running(self) -> list[Object]:
        """Pods of the owner whose vLLM runs without a sidecar, because injection is paused."""
        return [
            found
            for found in self.kubernetes.pods(self.namespace, "kvcachepool.io/pool=demo")
            if "deletionTimestamp" not in found["metadata"]
            and any("running" in each["state"] for each in found["status"].get("containerStatuses", []))
            and not injected(found)
            and report(found)["reason"] == "InjectionPaused"
        ]

    def delays(self) -> list[float]:
        """Seconds from the start of the case to the start of vLLM, for each such pod."""
        starts = [found["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] for found in self.running()]
        return sorted(datetime.fromisoformat(start).timestamp() - self.began for start in starts)


def _scene(kubernetes: Kubernetes, name: str, case: Case) -> Scene:
    namespace = f"held-{name}-{os.urandom(3).hex()}"
    kubernetes.create_namespace(namespace, {"no-sidecars": "yes"} if name == "admission" else None)
    kubernetes.apply([*case.limits, pool("demo", **copy.deepcopy(case.spec))], namespace=namespace)
    return Scene(kubernetes, namespace, case, 0)


@pytest.fixture(scope="module")
def scenes(cluster: Cluster, operator: Operator, base_image: str) -> Iterator[dict[str, Scene]]:
    """All cases, started at the same time."""
    kubernetes = cluster.kubernetes
    built = base()
    cluster.import_image(Image(_PATH_IMAGE, built.layers, command=["sh"], env={"PATH": "/bin", "PYTHONPATH": "/app"}))
    kubernetes.apply([*_POLICY, *_unmountable()])
    cases = CASES | {LAST_TRY: Case("Job", "", spec=_IMAGE, backoff_limit=0)}
    made = {name: _scene(kubernetes, name, case) for name, case in cases.items()}
    try:
        for scene in made.values():
            if scene.case.rollout:
                kubernetes.apply(_owner(scene.case, base_image, labelled=False), namespace=scene.namespace)
        for scene in made.values():
            if scene.case.rollout:
                kubernetes.wait("deployment", "web", "condition=Available", namespace=scene.namespace)
        begun = {}
        for name, scene in made.items():
            kubernetes.apply(_owner(scene.case, base_image, labelled=True), namespace=scene.namespace)
            begun[name] = Scene(kubernetes, scene.namespace, scene.case, time.time())
        yield begun
    finally:
        for scene in made.values():
            kubernetes.delete_namespace(scene.namespace)
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            kubernetes.kubectl("delete", kind, "no-sidecars", "--ignore-not-found")
        for kind in ("persistentvolume", "storageclass"):
            kubernetes.kubectl("delete", kind, "unmountable", "--ignore-not-found", "--wait=false")


@pytest.mark.parametrize("name", CASES)
def test_vllm_runs_without_a_sidecar_within_ninety_seconds(scenes: dict[str, Scene], name: str) -> None:
    scene = scenes[name]
    kubernetes, case, namespace = scene.kubernetes, scene.case, scene.namespace

    def enough() -> bool:
        return len(scene.running()) >= case.replicas

    kubernetes.wait_for(enough, 240, f"{case.replicas} pods of {name} run", namespace=namespace)
    delays = scene.delays()
    print(f"{name}: {case.kind} of {case.replicas}: vLLM ran after {', '.join(f'{each:.0f}' for each in delays)} s")
    assert delays[0] <= _WITHIN, f"the first pod ran after {delays[0]:.0f} s"

    found = status(kubernetes, namespace, "demo")
    (owner,) = found["injectionPaused"]["owners"]
    assert owner["reason"] in case.reason.split("|")
    assert owner["kind"] == ("ReplicaSet" if case.kind == "Deployment" else case.kind)
    assert conditions(found)["InjectionReady"] == ("False", "PodsHeldBack")

    def named() -> bool:
        notes = {
            (kind, reason)
            for kind, _, reason, note in operator_events(kubernetes, namespace)
            if owner["reason"] in note
        }
        return {(owner["kind"], "PodsHeldBack"), ("KVCachePool", "PodsHeldBack")} <= notes

    kubernetes.wait_for(named, 30, "events on the owner and on the pool", namespace=namespace)
    first = leader(kubernetes)
    assert first is not None
    label = re.sub(r"(?<!^)(?=[A-Z])", "_", owner["reason"]).lower()
    assert first.metrics().total("kvcachepool_injection_pauses", reason=label) >= 1


def test_a_disruption_budget_does_not_protect_a_failing_pod(scenes: dict[str, Scene]) -> None:
    scene = scenes["python-path"]

    def deleted() -> bool:
        notes = [
            note for _, _, reason, note in operator_events(scene.kubernetes, scene.namespace) if reason == "PodReplaced"
        ]
        return any("hung because of injection and was deleted" in note for note in notes)

    scene.kubernetes.wait_for(deleted, 30, "the pod that the budget protects deleted", namespace=scene.namespace)


def test_the_last_attempt_of_a_job_is_not_replaced(scenes: dict[str, Scene]) -> None:
    scene = scenes[LAST_TRY]
    why = "Job web would count it as its last failure"

    def named() -> bool:
        events = operator_events(scene.kubernetes, scene.namespace)
        return {kind for kind, _, reason, note in events if reason == "PodNotReplaced" and note.endswith(why)} == {
            "Job",
            "KVCachePool",
        }

    scene.kubernetes.wait_for(named, 120, "events on the Job and on the pool", namespace=scene.namespace)
    (left,) = scene.kubernetes.pods(scene.namespace, "kvcachepool.io/pool=demo")
    assert injected(left)
    assert "deletionTimestamp" not in left["metadata"]


def test_injection_continues_for_a_vllm_that_fails_without_a_sidecar_too(
    kubernetes: Kubernetes, operator: Operator, scenes: dict[str, Scene], namespace: str, base_image: str
) -> None:
    def fails(spec: Object) -> None:
        spec["containers"][0]["command"] = ["sh", "-c", "sleep 1; exit 3"]

    kubernetes.apply(
        [pool("demo"), _owner(Case("Deployment", "", change=fails), base_image, labelled=True)], namespace=namespace
    )

    def acquitted() -> bool:
        return ("ReplicaSet", "NotCausedByInjection") in {
            (kind, reason) for kind, _, reason, _ in operator_events(kubernetes, namespace)
        }

    kubernetes.wait_for(acquitted, 90, "the comparison acquits the sidecar", namespace=namespace)
    assert "injectionPaused" not in status(kubernetes, namespace, "demo")
    assert conditions(status(kubernetes, namespace, "demo"))["InjectionReady"] == ("True", "WebhookAnswers")


def test_a_missing_secret_does_not_block_pods_and_is_named(
    kubernetes: Kubernetes, operator: Operator, scenes: dict[str, Scene], namespace: str, base_image: str
) -> None:
    env = [
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k"}}},
        {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "absent", "key": "k"}}},
    ]
    owner = _owner(Case("StatefulSet", ""), base_image, labelled=True)
    kubernetes.apply([pool("demo", sidecar={"env": env}), owner], namespace=namespace)
    kubernetes.wait("pod", "web-0", "condition=Ready", namespace=namespace)
    assert injected(kubernetes.pod(namespace, "web-0"))

    def named() -> bool:
        found = status(kubernetes, namespace, "demo")
        messages = [each["message"] for each in found["conditions"] if each["reason"] == "SomeDegraded"]
        return any("A: Secret absent has no key k; B: ConfigMap absent has no key k" in each for each in messages)

    kubernetes.wait_for(named, 90, "the missing objects in the pool's status", namespace=namespace)


def test_the_leader_stays_within_its_rights(kubernetes: Kubernetes, scenes: dict[str, Scene]) -> None:
    # Refused or endless evictions would show here.
    first = leader(kubernetes)
    assert first is not None
    refused = {
        name
        for name, scene in scenes.items()
        if any(reason == "PodNotReplaced" for _, _, reason, _ in operator_events(kubernetes, scene.namespace))
    }
    assert refused == {LAST_TRY}
    hung = sum(scene.case.replicas for scene in scenes.values())
    assert first.metrics().total("kvcachepool_replacements") <= 3 * hung


def test_a_successful_probe_ends_the_pause(scenes: dict[str, Scene], operator: Operator) -> None:
    scene = scenes["quota"]
    kubernetes, namespace = scene.kubernetes, scene.namespace
    kubernetes.kubectl("delete", "resourcequota", "limit", namespace=namespace)
    # The first probe starts ten minutes after the pause. The next leader reads that this time has passed.
    operator.scale(0)
    paused = status(kubernetes, namespace, "demo")["injectionPaused"]
    earlier = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 900))
    paused["owners"][0]["since"] = earlier
    path = f"/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools/demo/status"
    change = {"status": {"injectionPaused": paused}}
    kubernetes.request("PATCH", path, change, content_type="application/merge-patch+json")
    operator.scale(2)

    def probing() -> bool:
        owners = status(kubernetes, namespace, "demo")["injectionPaused"]["owners"]
        return bool(owners[0]["trial"])

    kubernetes.wait_for(probing, 60, "the next pod is a probe", namespace=namespace)
    kubernetes.kubectl("delete", "pod", scene.running()[0]["metadata"]["name"], namespace=namespace)

    def resumed() -> bool:
        return "injectionPaused" not in status(kubernetes, namespace, "demo")

    kubernetes.wait_for(resumed, 90, "a pod with a sidecar works", namespace=namespace)
    pods = kubernetes.pods(namespace, "kvcachepool.io/pool=demo")
    assert [injected(each) for each in pods].count(True) == 1
    assert conditions(status(kubernetes, namespace, "demo"))["InjectionReady"] == ("True", "WebhookAnswers")

    def published() -> bool:
        events = operator_events(kubernetes, namespace)
        return ("ReplicaSet", "InjectionResumed") in {(kind, reason) for kind, _, reason, _ in events}

    kubernetes.wait_for(published, 30, "an event of the owner", namespace=namespace)
