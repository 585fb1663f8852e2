"""The process that a cluster lives and dies with: parent of the nodes' first processes, holder of the slot's lock.

It ends the cluster at SIGTERM, or when the pipe to its owner closes, by whatever death of the owner. When the guard
itself is killed, the kernel ends the nodes, and the next cluster of the slot sweeps up.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from functools import partial

from cluster import cgroups
from cluster.slot import Slot
from servers.process import children
from servers.waiting import wait_for

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_UNSHARE = ["unshare", "-f", "-p", "-m", "-n", "-i", "-u", "--mount-proc", "--kill-child", "--propagation", "private"]


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def sweep(slot: Slot) -> None:
    """Removes leftovers of an ended cluster. Called by the holder of the slot's lock."""
    for pid in cgroups.processes(slot.cgroup):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cgroups.remove(slot.cgroup)
    # The kernel removes it with its node's namespace, which closing sockets can keep alive for a minute.
    subprocess.run(["ip", "link", "delete", slot.interface], stderr=subprocess.DEVNULL)
    shutil.rmtree(slot.folder, ignore_errors=True)


def main(number: int, nodes: int, lock: int, *, owned: bool) -> None:
    """Starts the nodes' first processes, prints their ids, waits for the end and sweeps."""
    slot = Slot(number)
    os.set_inheritable(lock, False)
    end, ended = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(ended, b"x"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = [*_UNSHARE, str(slot.folder / "pause")]
    outer = [subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent) for _ in range(nodes)]
    first: list[int] = []
    try:
        for process in outer:
            first += wait_for(partial(children, process.pid), 5, "a node's first process")
        print(json.dumps(first), flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        select.select([end, sys.stdin] if owned else [end], [], [])
    finally:
        # A namespace's first process is gone only when all others of it are.
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        for process in outer:
            if not first:
                process.kill()
            process.wait()
        sweep(slot)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), owned=sys.argv[4] == "owned")
