"""etcd, API server, controller manager and scheduler: addresses, identities and start."""

from __future__ import annotations

import ssl
import urllib.request

from cluster import identities
from cluster.node import Node
from cluster.slot import Slot
from servers import certificates
from servers.certificates import Leaf
from servers.waiting import wait_for

_SERVICE_NAMES = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]


def create_identities(slot: Slot, nodes: list[str], addresses: list[str]) -> None:
    """Certificates and kubeconfigs of all components."""
    pki = slot.folder / "pki"
    served = [f"DNS:{name}" for name in _SERVICE_NAMES]
    served += [f"IP:{address}" for address in ("127.0.0.1", slot.api_service, addresses[0])]
    leaves = {
        "apiserver": Leaf("/CN=kube-apiserver", served, serves=True),
        "apiserver-kubelet": Leaf("/O=system:masters/CN=kube-apiserver-kubelet-client"),
        "front-proxy": Leaf("/CN=front-proxy-client"),
        "admin": Leaf("/O=system:masters/CN=admin"),
        "controller-manager": Leaf("/CN=system:kube-controller-manager"),
        "scheduler": Leaf("/CN=system:kube-scheduler"),
        "kube-proxy": Leaf("/CN=system:kube-proxy"),
    }
    for name, address in zip(nodes, addresses, strict=True):
        names = [f"DNS:{name}", f"IP:{address}"]
        leaves[name] = Leaf(f"/O=system:nodes/CN=system:node:{name}", names, serves=True)
    certificates.create(pki, leaves)
    identities.create_token_keys(pki)
    for name in ("admin", "controller-manager", "scheduler", "kube-proxy"):
        identities.write_kubeconfig(slot.folder / f"{name}.kubeconfig", slot.server, pki, name)
    for name in nodes:
        (slot.folder / name).mkdir(exist_ok=True)
        identities.write_kubeconfig(slot.folder / name / "kubelet.kubeconfig", slot.server, pki, name)


class ControlPlane:
    """The programs of the control plane; they run on the first node."""

    def __init__(self, slot: Slot, node: Node) -> None:
        self.slot = slot
        self.etcd = node.daemon("etcd", *_etcd(node))
        self.apiserver = node.daemon("kube-apiserver", *_apiserver(slot, node))
        self.controller_manager = node.daemon("kube-controller-manager", *_controller_manager(slot))
        self.scheduler = node.daemon("kube-scheduler", *_client("scheduler", slot))

    def start(self) -> None:
        """Starts the store and the API server."""
        self.etcd.start()
        self.apiserver.start()

    def start_controllers(self) -> None:
        """Starts what needs an API server."""
        self.controller_manager.start()
        self.scheduler.start()

    def ready(self) -> bool:
        """Whether the API server is ready, as seen from this machine."""
        trust = ssl.create_default_context(cafile=str(self.slot.folder / "pki" / "ca.crt"))
        try:
            with urllib.request.urlopen(f"{self.slot.server}/readyz", timeout=2, context=trust) as answer:
                return answer.status == 200
        except OSError:
            return False

    def wait_ready(self, seconds: float = 60) -> None:
        """Until the API server is ready."""

        def ready() -> bool:
            for daemon in (self.etcd, self.apiserver):
                if daemon.pid() is None:
                    raise AssertionError(f"{daemon.name} ended:\n{daemon.tail()}")
            return self.ready()

        wait_for(ready, seconds, "API server ready", pause=0.1)


def _etcd(node: Node) -> list[str]:
    # Durability across power cuts is not needed here.
    flags = [
        "--unsafe-no-fsync",
        f"--data-dir={node.folder}/etcd",
        "--name=etcd",
        "--initial-cluster=etcd=http://127.0.0.1:2380",
    ]
    flags += [f"--{kind}-client-urls=http://127.0.0.1:2379" for kind in ("listen", "advertise")]
    return flags + [f"--{kind}-peer-urls=http://127.0.0.1:2380" for kind in ("listen", "initial-advertise")]


def _apiserver(slot: Slot, node: Node) -> list[str]:
    pki = slot.folder / "pki"
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        "--secure-port=6443",
        # Not the loopback address, because pods reach the Service "kubernetes" by this one.
        f"--advertise-address={node.ip}",
        f"--cert-dir={node.folder}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={slot.services}",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
    ]


def _client(name: str, slot: Slot) -> list[str]:
    config = slot.folder / f"{name}.kubeconfig"
    flags = [f"--{use}kubeconfig={config}" for use in ("", "authentication-", "authorization-")]
    return [*flags, "--bind-address=127.0.0.1", "--leader-elect=false"]


def _controller_manager(slot: Slot) -> list[str]:
    pki = slot.folder / "pki"
    return [
        *_client("controller-manager", slot),
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
    ]
