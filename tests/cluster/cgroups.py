"""The cgroup that holds a cluster's pods. Cgroups are not namespaced here, so they are made and removed by hand.

Tried on version 1 only; the steps for version 2 follow the kernel's documentation.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from servers.waiting import wait_for

ROOT = Path("/sys/fs/cgroup")


def _unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _roots() -> list[Path]:
    """Mount points of hierarchies: one of version 2, or one per controller of version 1."""
    if _unified():
        return [ROOT]
    return [entry for entry in ROOT.iterdir() if entry.is_dir() and not entry.is_symlink()]


def _inherit(group: Path) -> None:
    """Settings that a new group needs before it can hold processes."""
    if _unified():
        controllers = (group.parent / "cgroup.controllers").read_text().split()
        for controller in controllers:
            # kubelet names a controller that the parent does not delegate.
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        return
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():
            (group / name).write_text((group.parent / name).read_text())


def create(name: str) -> None:
    """Creates the group in every hierarchy. `name` may contain a parent."""
    for root in _roots():
        group = root
        for part in Path(name).parts:
            group = group / part
            group.mkdir(exist_ok=True)
            _inherit(group)


def _groups(name: str) -> list[Path]:
    """All groups under the name, the deepest first."""
    found = []
    for root in _roots():
        for folder, _, _ in os.walk(root / name, topdown=False):
            found.append(Path(folder))
    return found


def processes(name: str) -> list[int]:
    """Processes in the groups."""
    found: set[int] = set()
    for group in _groups(name):
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
    return sorted(found)


def find(last: str, below: str) -> list[Path]:
    """The groups of this last name somewhere below another one: with version 1, one for each controller."""
    return [group for group in _groups(below) if group.name == last]


def exists(name: str) -> bool:
    """Whether any hierarchy has the group."""
    return any((root / name).exists() for root in _roots())


def remove(name: str) -> None:
    """Removes the groups. Their last processes may still be exiting."""

    def gone() -> bool:
        for group in _groups(name):
            with contextlib.suppress(OSError):
                group.rmdir()
        return not exists(name)

    wait_for(gone, 20, f"removal of the cgroups {name}, which hold the processes {processes(name)}")
