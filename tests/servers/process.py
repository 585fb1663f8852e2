"""Processes in their own groups that end with their test, even if the test is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Protocol

from servers.waiting import wait_for

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

# Runs in a separate session. When this process's end of its pipe closes, for any reason, it kills the remaining groups.
_UNDERTAKER = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
_undertaker: subprocess.Popen[bytes] | None = None
_undertaker_lock = threading.Lock()


def _notify_undertaker(sign: str, group: int) -> None:
    global _undertaker
    with _undertaker_lock:
        if _undertaker is None or _undertaker.poll() is not None:
            _undertaker = subprocess.Popen(
                [sys.executable, "-S", "-c", _UNDERTAKER], stdin=subprocess.PIPE, start_new_session=True, cwd="/"
            )
        assert _undertaker.stdin is not None
        _undertaker.stdin.write(f"{sign}{group}\n".encode())
        _undertaker.stdin.flush()


def die_with_parent() -> None:
    """Kills the calling process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Direct children of a process. Empty if it is gone, even during the call."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """All processes below a process, nearest first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not, unless some of its threads are still ending, because they hold its
    files.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def cpu_seconds(pids: list[int]) -> float:
    """User and system CPU time of the processes so far."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_anon_mib(pids: list[int]) -> float:
    """Anonymous resident memory of the processes, without shared memory."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1])
    return total / 1024


def shared_memory(pids: list[int]) -> list[Path]:
    """Files in /dev/shm that the processes have mapped. vLLM's survive a SIGKILL."""
    mapped: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                # A semaphore is created under another name, so only the inode is stable.
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    mapped.add(int(fields[4]))
    with contextlib.suppress(OSError):
        return [Path(entry.path) for entry in os.scandir("/dev/shm") if entry.inode() in mapped]
    return []


class _Child(Protocol):
    """The interface of a started process."""

    pid: int

    def poll(self) -> int | None:
        """None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; raises `subprocess.TimeoutExpired`."""


class Fork:
    """A process that another one forked and reaps. Its end is visible, but not its exit status."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = select.poll()
        self._pidfd = os.pidfd_open(pid)
        self._ended.register(self._pidfd, select.POLLIN)
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """None while it runs, then 0."""
        return 0 if self._ended.poll(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        if not self._ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return 0


class Process:
    """A program with all its children, and its output in a file."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        *,
        env: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        with log.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._watch(name, child, log)

    @classmethod
    def forked(cls, name: str, pid: int, log: Path) -> Process:
        """A process that already leads its own group and writes to this file."""
        process = cls.__new__(cls)
        process._watch(name, Fork(pid), log)
        return process

    def _watch(self, name: str, child: _Child, log: Path) -> None:
        self.name = name
        self.log = log
        self._child = child
        self.pid = child.pid
        _notify_undertaker("+", self.pid)

    def running(self) -> bool:
        """Whether the first process still runs."""
        return self._child.poll() is None

    def tree(self) -> list[int]:
        """The process and all below it."""
        return [self.pid, *descendants(self.pid)]

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to the group, and to descendants in other groups."""
        below = self.tree()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills all processes at once, like the end of a container, and waits for their end."""
        left = self.tree()
        shared = shared_memory(left)
        self.signal_all(signal.SIGKILL)
        self._child.wait()
        wait_for(lambda: not any(alive(pid) for pid in left), 20, f"end of {self.name} after SIGKILL")
        for file in shared:
            file.unlink(missing_ok=True)
        _notify_undertaker("-", self.pid)

    def stop(self, seconds: float = 20) -> None:
        """SIGTERM, and SIGKILL for the rest after the timeout."""
        shared: list[Path] = []
        if self.running():
            shared = shared_memory(self.tree())
            self.signal_all(signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
        self.kill()
        for file in shared:
            file.unlink(missing_ok=True)

    def tail(self, lines: int = 40) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
