"""Pools and pods as API objects, spread over namespaces. A scheduling gate keeps the pods pending."""

from __future__ import annotations

from dataclasses import dataclass

from bench.operator.api import Api
from cluster.kubernetes import Object
from servers.waiting import wait_for

POOLS = "/apis/kvcachepool.io/v1alpha1"
_ENV = {
    "HF_HOME": "/models/.cache",
    "HF_HUB_OFFLINE": "1",
    "NCCL_DEBUG": "WARN",
    "NCCL_IB_DISABLE": "0",
    "NCCL_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "8",
    "PROMETHEUS_MULTIPROC_DIR": "/tmp/metrics",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_USE_V1": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@dataclass(frozen=True)
class Load:
    """Number of objects."""

    pools: int
    pods: int
    namespaces: int = 20

    @property
    def pods_each(self) -> int:
        """Pods per pool."""
        return self.pods // self.pools

    def pool(self, number: int) -> tuple[str, str]:
        """Namespace and name of a pool."""
        number %= self.pools
        return f"bench-{number % self.namespaces:02}", f"llama-{number:04}"


def pool(name: str) -> Object:
    """A pool as users write one."""
    return {
        "apiVersion": "kvcachepool.io/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name, "labels": {"team": "serving", "model": "llama-70b"}},
        "spec": {
            "cache": {"chunkTokens": 256, "minLoadTokens": 512, "loadTimeout": "2s"},
            "local": {"memory": {"perPod": "64Gi"}},
            "sidecar": {"resources": {"requests": {"cpu": "2"}}, "logLevel": "info"},
        },
    }


def vllm(name: str, of: str) -> Object:
    """A pod of vLLM on a GPU as a Deployment's template makes it, labelled for a pool."""
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "failureThreshold": 3}
    arguments = ["--served-model-name=llama-70b", "--tensor-parallel-size=8", "--max-model-len=131072"]
    arguments += ["--gpu-memory-utilization=0.92", "--max-num-seqs=256", "--enable-chunked-prefill"]
    container = {
        "name": "vllm",
        "image": "registry.example/vllm/vllm-openai:v0.32.0",
        "args": ["--model=/models/llama-70b", *arguments],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}},
            *({"name": key, "value": value} for key, value in _ENV.items()),
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        "resources": {
            "requests": {"cpu": "16", "memory": "256Gi", "nvidia.com/gpu": "8"},
            "limits": {"memory": "256Gi", "nvidia.com/gpu": "8"},
        },
        "startupProbe": {**probe, "failureThreshold": 120},
        "readinessProbe": probe,
        "livenessProbe": probe,
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "sleep 15"]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/name": "llama-70b",
                "app.kubernetes.io/part-of": "serving",
                "pod-template-hash": "6d5f8c7b9",
                "kvcachepool.io/pool": of,
            },
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8000"},
        },
        "spec": {
            "schedulingGates": [{"name": "kvcachepool.io/bench"}],
            "containers": [container],
            "volumes": [
                {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
            ],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
            "terminationGracePeriodSeconds": 120,
        },
    }


def create_namespace(api: Api, name: str) -> None:
    """A namespace that is ready for pods."""
    api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    wait_for(lambda: api.request("GET", accounts)["items"], 60, f"the default account of {name}", pause=0.1)


def create_pools(api: Api, load: Load) -> float:
    """Creates all namespaces and pools. Returns pools per second."""
    api.each("namespaces", lambda n: create_namespace(api, f"bench-{n:02}"), range(load.namespaces))

    def create(number: int) -> None:
        namespace, name = load.pool(number)
        api.request("POST", f"{POOLS}/namespaces/{namespace}/kvcachepools", pool(name))

    return api.each("pools", create, range(load.pools))


def create_pods(api: Api, load: Load) -> float:
    """Creates all pods through the webhook. Returns pods per second."""

    def create(number: int) -> None:
        namespace, of = load.pool(number)
        api.request("POST", f"/api/v1/namespaces/{namespace}/pods", vllm(f"vllm-{number:05}", of))

    return api.each("pods", create, range(load.pods))


def counted(api: Api) -> list[Object]:
    """`status.pods` of all pools whose status is of the current spec."""
    pools = api.request("GET", f"{POOLS}/kvcachepools")["items"]
    return [
        one["status"]["pods"]
        for one in pools
        if one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"]
    ]
