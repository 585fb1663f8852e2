"""Path of the chart, sets of values that reach every branch of it, and lookups of rendered objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "charts" / "kvcachepool"

#: Several sets that together reach every branch of the templates.
SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one replica without extras": {
        "replicas": 1,
        "allowPodEviction": False,
        "aggregateRoles": False,
        "networkPolicy": {"enabled": False},
        "crds": {"enabled": False},
    },
    "all rights": {
        "allowPodPatch": True,
        "allowPodEviction": True,
        "allowPodMonitors": True,
        "allowManagedRedis": True,
        "allowPurge": True,
    },
    "two namespaces": {"watchNamespaces": ["serving", "kv"], "allowManagedRedis": True, "allowPurge": True},
    "cert-manager": {"pki": {"mode": "cert-manager"}},
    "cert-manager with an issuer": {
        "pki": {"mode": "cert-manager", "certManager": {"issuerRef": {"name": "corp", "kind": "ClusterIssuer"}}}
    },
    "external": {"pki": {"mode": "external", "external": {"secretName": "tls", "caBundle": "-----BEGIN"}}},
    "names, account and roles of one's own": {
        "fullnameOverride": "caches",
        "nameOverride": "kv",
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False},
    },
    "host network": {
        "hostNetwork": True,
        "adminPort": 18080,
        "webhook": {"port": 9443, "namespaceSelector": {"matchLabels": {"gpu": "yes"}}},
    },
    "keys whose entries are commented out": {
        "commonLabels": None,
        "podLabels": None,
        "podAnnotations": None,
        "service": {"labels": None},
        "monitoring": {"alerts": {"enabled": True, "labels": None, "alertLabels": None}},
    },
    "labels and annotations that the chart sets itself": {
        "commonLabels": {"app.kubernetes.io/version": "x", "helm.sh/chart": "x", "team": "ml"},
        "podLabels": {"app.kubernetes.io/component": "x", "team": "web"},
        "podAnnotations": {"kubectl.kubernetes.io/default-container": "x", "a": "b"},
        "service": {"labels": {"app.kubernetes.io/name": "x"}},
        "webhook": {"objectSelector": {"matchLabels": {"app.kubernetes.io/name": "vllm"}}},
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"app.kubernetes.io/instance": "x"}},
            "serviceMonitor": {"enabled": True, "labels": {"app.kubernetes.io/instance": "x"}},
            "alerts": {"enabled": True, "labels": {"app.kubernetes.io/instance": "x"}},
            "dashboard": {"enabled": True, "labels": {"app.kubernetes.io/instance": "x"}},
        },
    },
    "everything": {
        "global": {"anything": 1, "imageRegistry": "mirror.example", "imagePullSecrets": [{"name": "mirror"}]},
        "enabled": True,
        "image": {
            "registry": "registry.example:5000",
            "repository": "kv",
            "digest": "sha256:" + "0" * 64,
            "pullPolicy": "Always",
        },
        "imagePullSecrets": [{"name": "regcred"}],
        "replicas": 3,
        "logLevel": "debug",
        "logFormat": "text",
        "extraArgs": ["--one=1", "--two"],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraEnvFrom": [{"configMapRef": {"name": "environment"}}],
        "extraVolumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
        "service": {"annotations": {"a": "b"}, "labels": {"c": "d"}, "ipFamilyPolicy": "PreferDualStack"},
        "podDisruptionBudget": {"minAvailable": "50%", "unhealthyPodEvictionPolicy": "IfHealthyBudget"},
        "strategy": {"type": "Recreate"},
        "deploymentAnnotations": {"a": "b"},
        "dnsConfig": {"nameservers": ["10.0.0.10"]},
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["x"]}],
        "policy": {
            "maxMemoryPerPod": "256Gi",
            "images": ["registry.example/*", "other:1"],
            "gpuAccess": ["ResourceClaim"],
            "serviceAccounts": ["cleaner"],
        },
        "defaults": {
            "redisImage": "valkey@sha256:00",
            "redisExporterImage": "redis_exporter@sha256:00",
            "redisRunAsUser": "platform",
            "imagePullSecrets": [{"name": "a"}, {"name": "b"}],
        },
        "serviceAccount": {"name": "kv", "annotations": {"a": "b"}},
        "networkPolicy": {"egress": True, "apiServerPorts": [16443]},
        "webhook": {"timeoutSeconds": 5, "port": 9443, "excludedNamespaces": ["kube-system", "other"]},
        "livenessProbe": {"timeoutSeconds": 5},
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"release": "prom"}, "annotations": {"a": "b"}},
            "serviceMonitor": {"enabled": True, "interval": "1m"},
            "alerts": {"enabled": True, "labels": {"release": "prom"}},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
        },
        "commonLabels": {"team": "ml"},
        "podLabels": {"tier": "infra"},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "topologySpreadConstraints": [
            {"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"},
        ],
    },
}


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only object of a kind, or the one with a name."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{kind} {name}: {[o['metadata']['name'] for o in found]}"
    return found[0]
