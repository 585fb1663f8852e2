"""The transport to several remote servers. The key alone chooses its server, so that all clients agree.

A server that is unavailable takes part of the keys away: they are absent, and are not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Generic, TypeVar

from .messages import CHUNK_ABSENT
from .object_bytes import Encoded, Located, digest_of
from .object_transport import Range
from .object_types import Error, Put, Stat, Unavailable
from .remote_transport import RemoteHolding, RemoteTransport

#: Threads for the calls of one server. Its pool has as many connections. Servers share no threads, so that one that
#: does not answer delays no call of another.
_CALLS_AT_ONCE = 8
_POLL_S = 0.05

_T = TypeVar("_T")


def server_of(names: Sequence[str], digest: bytes) -> int:
    """The position of a key's server (rendezvous hashing). If one server goes, only its keys move."""

    def score(at: int) -> bytes:
        return hashlib.blake2b(names[at].encode() + digest, digest_size=8).digest()

    return max(range(len(names)), key=score)


def _in_parallel(calls: Sequence[tuple[ThreadPoolExecutor, Callable[[], None]]], deadline: float) -> None:
    """Makes calls, and returns when none is running: then none touches a buffer. Raises `Unavailable` once closed.

    The first call runs in this thread. One that no thread has begun at the deadline is not made.
    """
    running: list[Future[None]] = []
    try:
        for threads, call in calls[1:]:
            running.append(_submit(threads, call))
        for _, call in calls[:1]:
            call()
        wait(running, max(0.0, deadline - time.monotonic()))
    finally:
        begun = [one for one in running if not one.cancel()]
        _wait_for_all(begun)
    for one in begun:
        one.result()


def _submit(threads: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None]:
    try:
        return threads.submit(call)
    except RuntimeError:
        raise Unavailable("Closed") from None


def _wait_for_all(running: Sequence[Future[None]]) -> None:
    """Waits for calls, which end at their deadline. An interrupt is raised after that."""
    interrupt: BaseException | None = None
    while not all(one.done() for one in running):
        try:
            wait(running)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class _Share(Generic[_T]):
    """One server's part of a call: the positions of its keys, and what it answered."""

    def __init__(self, server: RemoteTransport, threads: ThreadPoolExecutor, positions: list[int]) -> None:
        self.server = server
        self.threads = threads
        self.positions = positions
        self.result: _T | None = None
        #: Stays if the call is not made.
        self.failure: Error | None = Unavailable("Deadline", f"{server.name} was busy with earlier calls")

    def run(self, call: Callable[[RemoteTransport, list[int]], _T]) -> None:
        try:
            self.result = call(self.server, self.positions)
            self.failure = None
        except Error as error:
            self.failure = error


class ServersHolding:
    """The leases of one PROBE per server (`object_transport.Holding`)."""

    def __init__(
        self,
        located: Sequence[Located | None],
        parts: Sequence[RemoteHolding],
        threads: Sequence[ThreadPoolExecutor],
        places: dict[int, tuple[int, int]],
    ) -> None:
        """threads: those of each part's server.

        places: for each position that has one, its part, and the position there.
        """
        self.located = located
        self._threads = threads
        self._parts = parts
        self._places = places

    def read(self, ranges: Sequence[Range], deadline: float) -> list[bool]:
        done = [False] * len(ranges)
        by_part: dict[int, list[int]] = {}
        for at, one in enumerate(ranges):
            by_part.setdefault(self._places[one.position][0], []).append(at)

        def run(part: RemoteHolding, mine: list[int]) -> None:
            wanted = [ranges[at]._replace(position=self._places[ranges[at].position][1]) for at in mine]
            with contextlib.suppress(Error):  # what the server held is a miss
                for at, read in zip(mine, part.read(wanted, deadline), strict=True):
                    done[at] = read

        for part in self._parts[:1]:
            part.check_process()
        calls = [(self._threads[number], partial(run, self._parts[number], mine)) for number, mine in by_part.items()]
        _in_parallel(calls, deadline)
        return done

    def release(self) -> None:
        for part in self._parts:
            part.release()

    def drop(self) -> None:
        for part in self._parts:
            part.drop()


class ServersTransport:
    """`object_transport.Transport` over several servers. A call asks them in parallel."""

    def __init__(self, servers: Sequence[RemoteTransport]) -> None:
        self._servers = servers
        self._names = [server.name for server in servers]
        self._closed = False
        self._threads = [ThreadPoolExecutor(_CALLS_AT_ONCE, "kvcachepool-servers") for _ in servers]

    @property
    def ready(self) -> bool:
        """Whether a server serves."""
        return any(server.ready for server in self._servers)

    @property
    def invalid(self) -> int:
        return sum(server.invalid for server in self._servers)

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until a server serves."""
        self.check_process()
        deadline = time.monotonic() + timeout_s
        while not self.ready:
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return False
            self._servers[0].wait_ready(min(left, _POLL_S))
        return True

    def check_process(self) -> None:
        self._servers[0].check_process()

    def close(self) -> None:
        self._closed = True
        for server in self._servers:
            server.close()
        for threads in self._threads:
            threads.shutdown(wait=False)

    def states(self, digests: Sequence[bytes], prefix: bool, deadline: float) -> bytes:
        def ask(server: RemoteTransport, mine: list[int]) -> bytes:
            return server.states([digests[at] for at in mine], prefix, deadline)

        return bytes(self._merged(digests, ask, CHUNK_ABSENT, deadline))

    def put(self, objects: Sequence[Encoded], ttl_s: int, deadline: float) -> list[Put]:
        def ask(server: RemoteTransport, mine: list[int]) -> list[Put]:
            return server.put([objects[at] for at in mine], ttl_s, deadline)

        return self._merged([one.digest for one in objects], ask, Put.UNAVAILABLE, deadline)

    def stat(self, digests: Sequence[bytes], deadline: float) -> list[Stat | None]:
        def ask(server: RemoteTransport, mine: list[int]) -> list[Stat | None]:
            return server.stat([digests[at] for at in mine], deadline)

        return self._merged(digests, ask, None, deadline)

    def change(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> int:
        def ask(server: RemoteTransport, mine: list[int]) -> int:
            return server.change(op, [digests[at] for at in mine], ttl_s, deadline)

        return sum(share.result or 0 for share in _served(self._ask(digests, ask, deadline), self._servers))

    def hold(self, names: Sequence[bytes], prefix: bool, deadline: float) -> ServersHolding:
        def ask(server: RemoteTransport, mine: list[int]) -> RemoteHolding:
            return server.hold([names[at] for at in mine], prefix, deadline)

        shares: list[_Share[RemoteHolding]] = self._shares([digest_of(name) for name in names])
        try:
            _run(shares, ask, deadline)
            return _merged_holding(_served(shares, self._servers), len(names), prefix)
        except BaseException:
            for share in shares:
                if share.result is not None:
                    share.result.release()
            raise

    def _merged(
        self,
        digests: Sequence[bytes],
        ask: Callable[[RemoteTransport, list[int]], Sequence[_T]],
        absent: _T,
        deadline: float,
    ) -> list[_T]:
        """The results for all keys, in order. `absent`: that of keys whose server is unavailable."""
        merged = [absent] * len(digests)
        for share in _served(self._ask(digests, ask, deadline), self._servers):
            if share.result is not None:
                for at, result in zip(share.positions, share.result, strict=True):
                    merged[at] = result
        return merged

    def _ask(
        self, digests: Sequence[bytes], call: Callable[[RemoteTransport, list[int]], _T], deadline: float
    ) -> list[_Share[_T]]:
        """Calls the servers of these keys in parallel, and waits for all."""
        shares: list[_Share[_T]] = self._shares(digests)
        _run(shares, call, deadline)
        return shares

    def _shares(self, digests: Sequence[bytes]) -> list[_Share[_T]]:
        positions: dict[int, list[int]] = {}
        for at, digest in enumerate(digests):
            positions.setdefault(server_of(self._names, digest), []).append(at)
        return [_Share(self._servers[number], self._threads[number], mine) for number, mine in positions.items()]


def _run(shares: Sequence[_Share[_T]], call: Callable[[RemoteTransport, list[int]], _T], deadline: float) -> None:
    _in_parallel([(share.threads, partial(share.run, call)) for share in shares], deadline)


def _merged_holding(shares: Sequence[_Share[RemoteHolding]], keys: int, prefix: bool) -> ServersHolding:
    """The leases of all servers that answered. The lease of one whose keys are all behind the prefix ends."""
    located: list[Located | None] = [None] * keys
    for share in shares:
        if share.result is not None:
            for at, one in zip(share.positions, share.result.located, strict=True):
                located[at] = one
    end = located.index(None) if prefix and None in located else keys
    located[end:] = [None] * (keys - end)
    parts: list[RemoteHolding] = []
    threads: list[ThreadPoolExecutor] = []
    places: dict[int, tuple[int, int]] = {}
    for share in shares:
        if share.result is None:
            continue
        if share.positions[0] >= end:
            # Nobody waits for it.
            share.threads.submit(share.result.release)
            continue
        places |= {at: (len(parts), place) for place, at in enumerate(share.positions)}
        parts.append(share.result)
        threads.append(share.threads)
    return ServersHolding(located, parts, threads, places)


def _served(shares: list[_Share[_T]], servers: Sequence[RemoteTransport]) -> list[_Share[_T]]:
    """The shares. Raises what a server refused, and `Unavailable` if no server serves."""
    failures = [share.failure for share in shares if share.failure is not None]
    for failure in failures:
        if not isinstance(failure, Unavailable):
            raise failure
    if failures and len(failures) == len(shares):
        asked = [share.server for share in shares]
        if not any(server.ready for server in servers if server not in asked):
            raise failures[0]
    return shares
