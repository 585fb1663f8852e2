"""A whole cluster: start, use, faults and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster import control_plane, guard, images
from cluster.archive import Archived
from cluster.control_plane import ControlPlane
from cluster.kubernetes import Kubernetes
from cluster.node import Node
from cluster.slot import Slot, binaries
from servers.process import alive
from servers.waiting import wait_for

_MANIFESTS = Path(__file__).parent / "manifests"


class Cluster:
    """The cluster of one slot. `attach` finds a running one."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.kubeconfig = slot.kubeconfig
        self.nodes: list[Node] = []
        self._guard: subprocess.Popen[str] | None = None

    @classmethod
    def start(cls, slot: Slot, *, nodes: int = 1, owned: bool = True) -> Cluster:
        """Starts a cluster and waits until its nodes are ready and its DNS answers.

        An owned cluster ends with the process that started it; another one stays until `stop`.
        """
        cluster = cls(slot)
        lock = slot.acquire()
        if lock is None:
            raise RuntimeError(
                f"cluster {slot.number} is running: make cluster-down, or choose another KVCACHEPOOL_CLUSTER"
            )
        try:
            guard.sweep(slot)
            slot.logs.mkdir(parents=True)
            cluster._start_guard(lock, nodes, owned)
        finally:
            os.close(lock)
        try:
            cluster._start_all()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def attach(cls, slot: Slot) -> Cluster:
        """Attaches to the running cluster of a slot."""
        cluster = cls(slot)
        state = slot.folder / "cluster.json"
        if not slot.taken() or not state.exists():
            raise RuntimeError(f"cluster {slot.number} is not running: make cluster-up")
        cluster._found(json.loads(state.read_text())["nodes"])
        return cluster

    def _start_guard(self, lock: int, nodes: int, owned: bool) -> None:
        # The pause program is copied, because a rebuilt one could not replace a running file.
        pause = self.slot.folder / "pause"
        pause.write_bytes((binaries() / "pause").read_bytes())
        pause.chmod(0o755)
        arguments = [str(self.slot.number), str(nodes), str(lock), "owned" if owned else "kept"]
        with (self.slot.logs / "guard.log").open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "cluster.guard", *arguments],
                stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                pass_fds=(lock,),
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        if not line:
            raise RuntimeError(f"no namespaces (root is needed):\n{(self.slot.logs / 'guard.log').read_text()}")
        pids = json.loads(line)
        (self.slot.folder / "cluster.json").write_text(json.dumps({"guard": self._guard.pid, "nodes": pids}))
        self._found(pids)

    def _found(self, pids: list[int]) -> None:
        self.nodes = [Node(self.slot, number, pid) for number, pid in enumerate(pids, 1)]
        self.control_plane = ControlPlane(self.slot, self.nodes[0])
        self.kubernetes = Kubernetes(self.kubeconfig)

    def _start_all(self) -> None:
        with ThreadPoolExecutor() as pool:
            identities = pool.submit(
                control_plane.create_identities,
                self.slot,
                [node.name for node in self.nodes],
                [node.ip for node in self.nodes],
            )
            for node in self.nodes:
                node.set_up(self.nodes[0])
            for node in self.nodes:
                node.add_routes(self.nodes)
                node.containerd.start()
            identities.result()
            self.control_plane.start()
            imported = pool.map(self.import_image, [images.pause(), images.coredns(), images.base()])
            self.control_plane.wait_ready()
            self.control_plane.start_controllers()
            for node in self.nodes:
                node.kubelet.start()
                node.kube_proxy.start()
            dns = (_MANIFESTS / "coredns.yaml").read_text().replace("DNS_ADDRESS", self.slot.dns)
            self.kubernetes.apply(dns)
            list(imported)
        for node in self.nodes:
            # Objects that do not exist yet have no condition, and kubectl would fail at once.
            self.kubernetes.wait("node", node.name, "create", seconds=60)
            self.kubernetes.wait("node", node.name, "condition=Ready", seconds=60)
        self.kubernetes.wait("deployment", "coredns", "condition=Available", namespace="kube-system", seconds=60)

    def stop(self) -> None:
        """Ends everything and waits until nothing is left."""
        self.kubernetes.close()
        state = json.loads((self.slot.folder / "cluster.json").read_text())
        pid = state["guard"]
        if alive(pid):
            os.kill(pid, signal.SIGTERM)
        if self._guard is not None:
            self._guard.wait(60)
        wait_for(lambda: not self.slot.taken(), 60, f"end of cluster {self.slot.number}")

    def import_image(self, image: Archived) -> None:
        """Makes an image known to all nodes; use it with imagePullPolicy Never or IfNotPresent."""
        name = image.name.replace("/", "-").replace(":", "-")
        archive = image.write(self.slot.folder / f"{name}.tar")
        for node in self.nodes:
            wait_for(node.containerd_ready, 20, f"containerd of {node.name}", pause=0.1)
            node.import_image(archive)
        archive.unlink()

    def restart_apiserver(self) -> None:
        """Kills the API server and waits until the next one is ready."""
        self.control_plane.apiserver.restart()
        self.control_plane.wait_ready()
