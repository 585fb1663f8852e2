"""A slot: the folder, the lock and the addresses of one cluster, found by its number."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from servers import paths

SLOTS = 10


class Slot:
    """One of the clusters that can run concurrently on this machine."""

    def __init__(self, number: int) -> None:
        if not 0 <= number < SLOTS:
            raise ValueError(f"cluster {number}: there are 0 to {SLOTS - 1}")
        self.number = number
        #: Prefix of every address: nodes, pods and services are in one /16.
        self.prefix = f"10.{77 + number}"
        self.network = f"{self.prefix}.0.0/16"
        self.services = f"{self.prefix}.128.0/17"
        self.pods = f"{self.prefix}.64.0/18"
        self.api_service = f"{self.prefix}.128.1"
        self.dns = f"{self.prefix}.128.10"
        self.host = f"{self.prefix}.0.254"
        self.server = f"https://{self.prefix}.0.1:6443"
        #: The link to this machine, and the cgroup below every controller.
        self.interface = self.cgroup = f"kvcp{number}"
        root = paths.cache() / "cluster" / "slots"
        self.folder = root / str(number)
        self._lock = root / f"{number}.lock"
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self.logs = self.folder / "logs"
        # The kernel's limit for a socket's path. Those of kubelet and containerd are below the folder.
        if len(str(self.folder)) > 70:
            raise ValueError(f"{self.folder} is too long for sockets in it: set KVCACHEPOOL_CACHE to a shorter folder")

    def acquire(self) -> int | None:
        """The lock as a file descriptor, or None if the slot has a cluster."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def taken(self) -> bool:
        """Whether the slot has a cluster."""
        descriptor = self.acquire()
        if descriptor is None:
            return True
        os.close(descriptor)
        return False


def chosen() -> Slot:
    """The slot in KVCACHEPOOL_CLUSTER."""
    return Slot(int(os.environ.get("KVCACHEPOOL_CLUSTER", "0")))


def others() -> Iterator[Slot]:
    """Slots for clusters of tests, the last one first, to avoid those that people start."""
    return (Slot(number) for number in reversed(range(1, SLOTS)))


def binaries() -> Path:
    """Kubernetes, helm, CoreDNS and Debian's daemons, as tools/setup/cluster.sh leaves them."""
    version = os.environ.get("KVCACHEPOOL_TEST_KUBERNETES", "")
    folder = paths.cache() / "cluster" / (f"bin-{version}" if version else "bin")
    if not (folder / "kubelet").exists():
        raise FileNotFoundError(f"{folder}/kubelet is missing: run tools/setup.sh cluster {version}".rstrip())
    return folder


def search_path() -> str:
    """PATH of the cluster's processes."""
    return f"{binaries()}:/usr/sbin:/usr/bin:/sbin:/bin"
