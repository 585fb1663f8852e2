"""A long-running program in a node's namespaces: started, killed and started again with the same command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from servers.process import alive, children
from servers.waiting import wait_for


class Daemon:
    """One program. It ends with its node at the latest. Its process id is in a file for later callers."""

    def __init__(self, name: str, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.name = name
        self.log = folder / "logs" / f"{name}.log"
        self._command = command
        self._env = env
        self._pid_file = folder / f"{name}.pid"

    def start(self) -> None:
        """Starts it; its output is appended to the log."""
        with self.log.open("ab") as output:
            wrapper = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._pid_file.write_text(str(wrapper.pid))

        def forked() -> bool:
            if wrapper.poll() is not None:
                raise AssertionError(f"{self.name} ended at once:\n{self.tail()}")
            return bool(children(wrapper.pid))

        # nsenter's child is the program. The id of the first is known, and that of the second is found below it.
        wait_for(forked, 5, f"{self.name} has started")

    def pid(self) -> int | None:
        """The program's process id outside of the namespaces, or None if it does not run."""
        with contextlib.suppress(OSError, ValueError):
            wrapper = int(self._pid_file.read_text())
            if alive(wrapper):
                return next(iter(children(wrapper)), None)
        return None

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        pid = self.pid()
        if pid is None:
            return
        wrapper = int(self._pid_file.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # Its parent sees the end when all threads have ended and all ports are closed.
        wait_for(lambda: not alive(wrapper), 20, f"end of {self.name} after SIGKILL")

    def restart(self) -> None:
        """SIGKILL and a new start, like a crash."""
        self.kill()
        self.start()

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
