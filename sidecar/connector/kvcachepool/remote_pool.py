"""The connections to one remote server. A thread opens them, so that a call never waits longer than its deadline.

While the server is known to be down, calls fail at once, and the thread tries again with a growing pause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from .messages import Nothing, Release
from .object_types import Error, Unavailable
from .remote_connection import Connection
from .wire import Op

logger = logging.getLogger("kvcachepool")

_MAX_CONNECTIONS = 8
_CONNECT_S = 5.0
_RELEASE_S = 1.0
#: Requests of one RELEASE, so that its map has less than 256 KiB.
_RELEASE_REQUESTS = 8192
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 2.0
_BACKOFF_REFUSED_S = 30.0
#: Refusals that a retry after a short pause does not change.
_LASTING = ("Unauthorized", "NoKey", "ObjectsNotServed", "WrongVersion")


class Pool:
    """For any thread. `connect` opens a connection by a deadline, or raises `Unavailable`."""

    def __init__(self, server: str, connect: Callable[[float], Connection]) -> None:
        #: Leases that were dropped without `release`. Any thread may append to it.
        self.dropped: deque[tuple[Connection, str]] = deque()
        self._server = server
        self._connect = connect
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._connections: list[Connection] = []
        self._waiting = 0
        self._closed = False
        #: Why no connection could be opened. None once a call is served, even if another connection cannot be opened.
        self._failure: Unavailable | None = None
        self._retry_at = 0.0
        self._backoff_s = _BACKOFF_FIRST_S
        threading.Thread(target=self._run, name="kvcachepool-remote", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether a connection is open."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._forget_lost()
            return bool(self._connections) and not self._closed

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until a connection is open."""
        self.check_process()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed and (left := deadline - time.monotonic()) > 0:
                self._forget_lost()
                if self._connections:
                    return True
                self._changed.wait(left)
        return False

    def close(self) -> None:
        """Ends all calls, and returns when none uses a connection any more."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for connection in self._connections:
                if connection.busy:
                    connection.interrupt()
            while any(connection.busy for connection in self._connections):
                self._changed.wait(1.0)
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Unavailable("Forked", "this process is a fork of the client's process and must create its own client")

    @contextlib.contextmanager
    def using(self, deadline: float, connection: Connection | None = None) -> Iterator[Connection]:
        """A connection for one call: any, or the given one. A connection with unfinished frames is closed after it."""
        self.check_process()
        if connection is None:
            self._release_waiting(deadline)
        with self._changed:
            taken = self._take_any(deadline) if connection is None else self._take(connection, deadline)
        try:
            yield taken
            self._failure = None
        except Unavailable as error:
            if self._closed and error.reason == "ConnectionLost":
                raise Unavailable("Closed") from None
            raise
        finally:
            self._give_back(taken, deadline)

    def release(self, connection: Connection, request: str) -> None:
        """Ends the lease of a request, now or when the call that uses its connection ends. Raises no `Error`."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._queue_release(connection, request)
            if connection.busy or not connection.requests_to_release:
                return
            connection.busy = True
        self._give_back(connection, time.monotonic() + _RELEASE_S)

    def _queue_release(self, connection: Connection, request: str) -> None:
        connection.leases.discard(request)
        if not connection.closed and not self._closed:
            connection.requests_to_release.append(request)

    def _release_waiting(self, deadline: float) -> None:
        """Ends leases that were dropped, and those that an earlier call had no time to end."""
        while time.monotonic() < deadline:
            with self._changed:
                while self.dropped:
                    self._queue_release(*self.dropped.popleft())
                waiting = [one for one in self._connections if one.requests_to_release and not one.busy]
                if not waiting:
                    return
                waiting[0].busy = True
            self._give_back(waiting[0], deadline)

    def _take(self, connection: Connection, deadline: float) -> Connection:
        while connection.busy and not connection.closed:
            self._wait(deadline)
        if self._closed or connection.closed or connection not in self._connections:
            raise Unavailable("ConnectionLost", f"the connection to {self._server} that holds the lease has ended")
        connection.busy = True
        return connection

    def _take_any(self, deadline: float) -> Connection:
        """An idle connection, preferably one without leases: a call that fails ends those of its connection. Otherwise
        the one with the fewest, because servers limit them.
        """
        self._waiting += 1
        try:
            while True:
                self._check_open()
                self._forget_lost()
                idle = [one for one in self._connections if not one.busy]
                taken = min(idle, key=lambda one: len(one.leases), default=None)
                no_more = len(self._connections) == _MAX_CONNECTIONS or self._attempt_failed
                if taken is not None and (no_more or not taken.leases):
                    taken.busy = True
                    return taken
                if self._failure is not None and not self._connections:
                    raise Unavailable(self._failure.reason, self._failure.message)
                self._changed.notify_all()
                self._wait(deadline)
        finally:
            self._waiting -= 1

    @property
    def _attempt_failed(self) -> bool:
        """Whether the last attempt to open a connection failed."""
        return self._backoff_s > _BACKOFF_FIRST_S

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Unavailable("Deadline", f"no connection to {self._server} was free in time")
        self._changed.wait(left)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("Closed")

    def _give_back(self, connection: Connection, deadline: float) -> None:
        """Ends the use of a connection. Sends RELEASEs that wait for it, if the deadline has not passed."""
        while True:
            with self._changed:
                requests = connection.requests_to_release[:_RELEASE_REQUESTS]
                late = time.monotonic() >= deadline
                if not requests or late or not connection.usable or self._closed:
                    connection.busy = False
                    if not connection.usable:
                        connection.close()
                        self._forget_lost()
                    self._changed.notify_all()
                    return
                del connection.requests_to_release[: len(requests)]
            try:
                until = min(deadline, time.monotonic() + _RELEASE_S)
                connection.call(Op.RELEASE, Release(requests=requests), Nothing, until)
            except Error:
                connection.close()
            except BaseException:
                connection.close()
                self._give_back(connection, deadline)  # sends nothing more
                raise

    def _forget_lost(self) -> None:
        """Drops connections that have ended. The lock is held."""
        lost = [one for one in self._connections if not one.busy and one.lost()]
        for connection in lost:
            connection.close()
            self._connections.remove(connection)
        if lost:
            self._changed.notify_all()

    # -- the thread

    def _run(self) -> None:
        while self._wait_wanted():
            try:
                connection = self._connect(time.monotonic() + _CONNECT_S)
            except Unavailable as error:
                self._failed(error)
            except Exception as error:
                logger.exception("unexpected error while connecting to the remote server %s", self._server)
                self._failed(Unavailable("NotConnected", repr(error)))
            else:
                self._connected(connection)

    def _wait_wanted(self) -> bool:
        """Waits until another connection is wanted. False once the pool is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                free = sum(not one.busy and not one.leases for one in self._connections)
                wanted = self._waiting > free and len(self._connections) < _MAX_CONNECTIONS
                if not wanted and self._connections:
                    self._changed.wait()
                elif now < self._retry_at and (self._connections or self._failure is not None):
                    self._changed.wait(self._retry_at - now)
                else:
                    return True
            return False

    def _failed(self, error: Unavailable) -> None:
        with self._changed:
            if not self._attempt_failed:
                logger.warning("remote server is unavailable: server=%s error=%s", self._server, error)
            self._failure = error
            pause_s = _BACKOFF_REFUSED_S if error.reason in _LASTING else self._backoff_s
            self._retry_at = time.monotonic() + pause_s * random.uniform(0.75, 1.25)
            self._backoff_s = min(self._backoff_s * 2, _BACKOFF_LAST_S)
            self._changed.notify_all()

    def _connected(self, connection: Connection) -> None:
        with self._changed:
            if self._attempt_failed:
                logger.info("remote server is available: server=%s", self._server)
            self._failure, self._retry_at, self._backoff_s = None, 0.0, _BACKOFF_FIRST_S
            if self._closed:
                connection.close()
            else:
                self._connections.append(connection)
            self._changed.notify_all()
