"""One node: its namespaces, its network, containerd, kubelet and kube-proxy."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

from cluster import cgroups, node_config
from cluster.daemon import Daemon
from cluster.slot import Slot, search_path

# tmpfs on every folder outside of the node's own that kubelet, containerd or CNI write to, so that nothing stays.
_SET_UP = """
mount --make-rshared /
mount -t tmpfs tmpfs /run
mkdir -p /run/lock
for folder in /var/lib/kubelet /var/log/containers /var/lib/cni; do
    mkdir -p $folder
    mount -t tmpfs tmpfs $folder
done
hostname $NAME
ip link set lo up
[ $NUMBER != 1 ] || ip link add node0 type bridge
ip address add $IP/24 dev node0
ip link set node0 up
ip route add default dev node0
sysctl -qw net.ipv4.ip_forward=1
"""


class Node:
    """A node of a cluster. Node 1 runs the control plane and the bridge between the nodes."""

    def __init__(self, slot: Slot, number: int, pid: int) -> None:
        self.slot = slot
        self.number = number
        #: The first process of its namespaces.
        self.pid = pid
        self.name = f"node{number}"
        self.ip = f"{slot.prefix}.0.{number}"
        self.pods = f"{slot.prefix}.{64 + number}.0/24"
        self.cgroup = f"{slot.cgroup}/{self.name}"
        self.folder = slot.folder / self.name
        self._socket = self.folder / "containerd.sock"
        self.containerd = self.daemon("containerd", "-c", f"{self.folder}/containerd.toml")
        self.kubelet = self.daemon(
            "kubelet",
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self.folder}/kubelet.kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self.ip}",
            f"--root-dir={self.folder}/kubelet",
            f"--cert-dir={self.folder}",
        )
        self.kube_proxy = self.daemon("kube-proxy", f"--config={self.folder}/kube-proxy.json")

    def daemon(self, program: str, *arguments: str) -> Daemon:
        """A program to run on this node."""
        return Daemon(program, self.entered([program, *arguments]), self.folder, self._env())

    def _env(self) -> dict[str, str]:
        return {"PATH": search_path(), "HOME": "/root", "KUBECONFIG": str(self.slot.kubeconfig), "LANG": "C.UTF-8"}

    def entered(self, command: list[str]) -> list[str]:
        """The command that runs another one in the node's namespaces."""
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "-i", "-u", "--wd=/", *command]

    def run(self, *command: str, seconds: float = 60, check: bool = True, **options: Any) -> str:
        """Runs a command in the node's namespaces to its end and returns its output."""
        env = self._env() | options.pop("env", {})
        done = subprocess.run(
            self.entered(list(command)), env=env, capture_output=True, text=True, timeout=seconds, **options
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{self.name}: {' '.join(command)}: status {done.returncode}\n{done.stderr}{done.stdout}"
            )
        return done.stdout

    def processes(self) -> list[int]:
        """All processes of the node, including those of its pods."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = set(cgroups.processes(self.cgroup))
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/pid") == own:
                    found.add(int(process.name))
        return sorted(found)

    def set_up(self, first: Node) -> None:
        """Mounts, network, cgroups and configuration."""
        for folder in (self.folder / "logs", self.folder / "cni", self.folder / "pod-logs"):
            folder.mkdir(parents=True, exist_ok=True)
        cgroups.create(self.cgroup)
        if first is not self:
            self._link(first)
        self.run("sh", "-ec", _SET_UP, env={"NAME": self.name, "NUMBER": str(self.number), "IP": self.ip})
        if first is self:
            self._link_machine()
        node_config.write(self)

    def _link_machine(self) -> None:
        """A link between this machine and the bridge. It is removed with the namespaces."""
        interface = self.slot.interface
        taken = subprocess.run(["ip", "-o", "route", "show", "root", self.slot.network], capture_output=True, text=True)
        if taken.stdout.strip():
            raise RuntimeError(
                f"this machine has routes in {self.slot.network}: choose another KVCACHEPOOL_CLUSTER\n{taken.stdout}"
            )
        _ip("link", "add", interface, "type", "veth", "peer", "name", "machine0", "netns", str(self.pid))
        self.run("ip", "link", "set", "machine0", "master", "node0", "up")
        _ip("address", "add", f"{self.slot.host}/24", "dev", interface)
        _ip("link", "set", interface, "up")
        _ip("route", "add", self.slot.network, "via", self.ip)

    def _link(self, first: Node) -> None:
        """A link to the bridge of the first node, and routes between their pods."""
        pair = ["ip", "link", "add", self.name, "type", "veth", "peer", "name", "node0", "netns", str(self.pid)]
        # Only the network namespace, because the process id of the other end is that outside.
        subprocess.run(["nsenter", "-t", str(first.pid), "-n", *pair], check=True)
        first.run("ip", "link", "set", self.name, "master", "node0", "up")

    def add_routes(self, nodes: list[Node]) -> None:
        """Routes to the pods of the other nodes."""
        for other in nodes:
            if other is not self:
                self.run("ip", "route", "add", other.pods, "via", other.ip)

    def import_image(self, archive: Path) -> None:
        """Makes an image known to containerd, under the name that its archive has."""
        self.run("ctr", "-a", str(self._socket), "-n", "k8s.io", "images", "import", str(archive), seconds=120)

    def tag_image(self, name: str, other: str) -> None:
        """Gives an image that the node has another name."""
        self.run("ctr", "-a", str(self._socket), "-n", "k8s.io", "images", "tag", "--force", name, other)

    def containerd_ready(self) -> bool:
        """Whether containerd answers."""
        return bool(self.run("ctr", "-a", str(self._socket), "version", check=False))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, env={**os.environ, "PATH": search_path()})
