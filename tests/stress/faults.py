"""Faults of the sidecar while requests run, and their ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from servers import web
from servers.sidecar import Sidecar
from stress.counts import Counts

#: Place of the number of starts without a minute of health in the lock file beside the socket, and the number from
#: which on the sidecar takes no memory back from connectors.
_BOOTS_AT, _BOOTS_DISTRUSTED = 24, 6


class Faults:
    """One sidecar under attack."""

    def __init__(self, sidecar: Sidecar, chance: random.Random, counts: Counts, note: Callable[[str], None]) -> None:
        self.sidecar = sidecar
        self._chance = chance
        self._counts = counts
        self._note = note
        self._thaw_at: float | None = None
        self._start_at: float | None = None

    def pass_time(self) -> None:
        """Ends expired faults."""
        now = time.monotonic()
        if self._thaw_at is not None and now >= self._thaw_at:
            self._thaw()
        if self._start_at is not None and now >= self._start_at:
            self._start()

    def end(self) -> None:
        """Ends all faults and waits until the sidecar serves."""
        if self._thaw_at is not None:
            self._thaw()
        if self._start_at is not None:
            self._start()
        self.sidecar.wait_ready(60)

    def collect(self) -> None:
        """Collects the sidecar's counters if it answers."""
        if self._thaw_at is None and self.sidecar.running() and web.get(f"{self.sidecar.url}/readyz", 1)[0] == 200:
            self._counts.collect(self.sidecar)

    def freeze(self) -> None:
        """SIGSTOP, and SIGCONT later."""
        if self._start_at is not None:
            self._start()
        seconds = self._chance.choice((0.05, 0.3, 0.7, 1.5))
        self._note(f"the sidecar is frozen for {seconds} s")
        self.sidecar.freeze()
        self._thaw_at = time.monotonic() + seconds
        self._counts.add("frozen")

    def kill_container(self) -> None:
        """SIGKILL to all processes, and a start later."""
        if self._start_at is not None:
            self._start()
        self.collect()
        seconds = self._chance.choice((0.0, 0.2, 1.0))
        self._note(f"the sidecar's container is killed and starts after {seconds} s")
        self.sidecar.kill_tree()
        self._set_boots(0)
        self._counts.died()
        self._thaw_at = None
        self._start_at = time.monotonic() + seconds
        self._counts.add("containers_killed")

    def kill_engine(self) -> None:
        """SIGKILL to the engine process below the supervisor, which starts another one."""
        if self._thaw_at is not None:
            self._thaw()
        if self._start_at is not None:
            self._start()
        self.collect()
        self._note("the sidecar's engine process is killed")
        self._set_boots(0)
        self.sidecar.kill_engine()
        self._counts.died()
        self._counts.add("engines_killed")

    def restart_cold(self) -> None:
        """Restarts with new memory: all chunks are lost."""
        self.kill_container()
        self._note("it takes no memory back")
        self._set_boots(_BOOTS_DISTRUSTED)
        self._start()
        self._counts.add("restarted_cold")

    def _set_boots(self, number: int) -> None:
        """Sets the number of recent starts for the next one. 0 is like after a minute of health."""
        with self.sidecar.socket.with_name("sidecar.lock").open("r+b") as file:
            file.seek(_BOOTS_AT)
            file.write(number.to_bytes(4, "little"))

    def _thaw(self) -> None:
        self._note("the sidecar runs again")
        self._thaw_at = None
        self.sidecar.thaw()

    def _start(self) -> None:
        self._note("the sidecar starts")
        self._start_at = None
        self.sidecar.start(ready_seconds=None)
        self._counts.add("restarted")
