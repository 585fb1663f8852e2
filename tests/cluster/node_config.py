"""Configuration of a node's programs: containerd, its network plugin, kubelet, kube-proxy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.node import Node


def write(node: Node) -> None:
    """Writes all files into the node's folder."""
    (node.folder / "containerd.toml").write_text(_CONTAINERD.format(folder=node.folder))
    # Pods with the node's resolver, such as CoreDNS, get an empty one.
    (node.folder / "resolv.conf").write_text("")
    for name, content in {
        "cni/10-pods.conflist": _cni(node),
        "kubelet.json": _kubelet(node),
        "kube-proxy.json": _kube_proxy(node),
    }.items():
        (node.folder / name).write_text(json.dumps(content, indent=1))


# restrict_oom_score_adj: without CAP_SYS_RESOURCE runc could not lower the score, and no pod would start.
_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def _cni(node: Node) -> dict[str, Any]:
    """Every pod has its own link to the node. All traffic is routed, so Services also work between neighbours."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(node.folder / "cni-addresses"),
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]}


def _kubelet(node: Node) -> dict[str, Any]:
    pki = node.slot.folder / "pki"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.ip,
        "port": 10250,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{node.name}.crt",
        "tlsPrivateKeyFile": f"{pki}/{node.name}.key",
        "containerRuntimeEndpoint": f"unix://{node.folder}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        # Version 1 of cgroups is still supported. With version 2 the line has no effect.
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [node.slot.dns],
        "resolvConf": str(node.folder / "resolv.conf"),
        "volumePluginDir": str(node.folder / "volume-plugins"),
        "podLogsDir": str(node.folder / "pod-logs"),
        # Images come only from archives, so none may be removed. A full disk of the machine does not concern the test.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    }


def _kube_proxy(node: Node) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": node.slot.pods,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": str(node.slot.folder / "kube-proxy.kubeconfig")},
        "hostnameOverride": node.name,
        # The size of the table belongs to the machine and cannot be changed from here.
        "conntrack": {"maxPerCore": 0},
    }
