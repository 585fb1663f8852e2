"""The transport to several remote servers. The key alone chooses its server, so that all clients agree.

A server that is unavailable takes part of the keys away: they are absent, and are not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Generic, TypeVar

from .messages import CHUNK_ABSENT
from .object_bytes import Encoded, Located, digest_of
from .object_transport import Range
from .object_types import Error, Put, Stat, Unavailable
from .remote_transport import RemoteHolding, RemoteTransport

#: Calls of one server that run at once. A pool has as many connections.
_CALLS_AT_ONCE = 8
_POLL_S = 0.05

_T = TypeVar("_T")


def server_of(names: Sequence[str], digest: bytes) -> int:
    """The position of a key's server (rendezvous hashing). If one server goes, only its keys move."""

    def score(at: int) -> bytes:
        return hashlib.blake2b(names[at].encode() + digest, digest_size=8).digest()

    return max(range(len(names)), key=score)


def _in_parallel(threads: ThreadPoolExecutor, calls: Sequence[Callable[[], None]]) -> None:
    """Runs all calls, and returns when all have ended: then none touches a buffer. Raises `Unavailable` once closed."""
    try:
        running = [threads.submit(call) for call in calls[1:]]
    except RuntimeError:
        raise Unavailable("Closed") from None
    try:
        for call in calls[:1]:
            call()
    finally:
        wait(running)
    for one in running:
        one.result()


class _Share(Generic[_T]):
    """One server's part of a call: the positions of its keys, and what it answered."""

    def __init__(self, server: RemoteTransport, positions: list[int]) -> None:
        self.server = server
        self.positions = positions
        self.result: _T | None = None
        self.failure: Error | None = None

    def run(self, call: Callable[[RemoteTransport, list[int]], _T]) -> None:
        try:
            self.result = call(self.server, self.positions)
        except Error as error:
            self.failure = error


class ServersHolding:
    """The leases of one PROBE per server (`object_transport.Holding`)."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        located: Sequence[Located | None],
        parts: Sequence[RemoteHolding],
        places: dict[int, tuple[int, int]],
    ) -> None:
        """places: for each position that has one, its part, and the position there."""
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
        _in_parallel(self._threads, [partial(run, self._parts[number], mine) for number, mine in by_part.items()])
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
        self._threads = ThreadPoolExecutor(_CALLS_AT_ONCE * len(servers), "kvcachepool-servers")

    @property
    def ready(self) -> bool:
        """Whether a server serves."""
        return any(server.ready for server in self._servers)

    @property
    def invalid(self) -> int:
        return sum(server.invalid for server in self._servers)

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until a server serves."""
        self._servers[0].check_process()
        deadline = time.monotonic() + timeout_s
        while not self.ready:
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return False
            self._servers[0].wait_ready(min(left, _POLL_S))
        return True

    def close(self) -> None:
        self._closed = True
        for server in self._servers:
            server.close()
        self._threads.shutdown(wait=False)

    def states(self, digests: Sequence[bytes], prefix: bool, deadline: float) -> bytes:
        def ask(server: RemoteTransport, mine: list[int]) -> bytes:
            return server.states([digests[at] for at in mine], prefix, deadline)

        return bytes(self._merged(digests, ask, CHUNK_ABSENT))

    def put(self, objects: Sequence[Encoded], ttl_s: int, deadline: float) -> list[Put]:
        def ask(server: RemoteTransport, mine: list[int]) -> list[Put]:
            return server.put([objects[at] for at in mine], ttl_s, deadline)

        return self._merged([one.digest for one in objects], ask, Put.UNAVAILABLE)

    def stat(self, digests: Sequence[bytes], deadline: float) -> list[Stat | None]:
        def ask(server: RemoteTransport, mine: list[int]) -> list[Stat | None]:
            return server.stat([digests[at] for at in mine], deadline)

        return self._merged(digests, ask, None)

    def change(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> int:
        def ask(server: RemoteTransport, mine: list[int]) -> int:
            return server.change(op, [digests[at] for at in mine], ttl_s, deadline)

        return sum(share.result or 0 for share in _served(self._ask(digests, ask), self._servers))

    def hold(self, names: Sequence[bytes], prefix: bool, deadline: float) -> ServersHolding:
        def ask(server: RemoteTransport, mine: list[int]) -> RemoteHolding:
            return server.hold([names[at] for at in mine], prefix, deadline)

        shares = self._ask([digest_of(name) for name in names], ask)
        parts = [share.result for share in shares if share.result is not None]
        try:
            _served(shares, self._servers)
        except Error:
            for part in parts:
                part.release()
            raise
        located: list[Located | None] = [None] * len(names)
        places: dict[int, tuple[int, int]] = {}
        for number, share in enumerate(share for share in shares if share.result is not None):
            for place, at in enumerate(share.positions):
                located[at] = parts[number].located[place]
                places[at] = (number, place)
        if prefix and None in located:
            first = located.index(None)
            located[first:] = [None] * (len(located) - first)
        return ServersHolding(self._threads, located, parts, places)

    def _merged(
        self, digests: Sequence[bytes], ask: Callable[[RemoteTransport, list[int]], Sequence[_T]], absent: _T
    ) -> list[_T]:
        """The results for all keys, in order. `absent`: that of keys whose server is unavailable."""
        merged = [absent] * len(digests)
        for share in _served(self._ask(digests, ask), self._servers):
            if share.result is not None:
                for at, result in zip(share.positions, share.result, strict=True):
                    merged[at] = result
        return merged

    def _ask(self, digests: Sequence[bytes], call: Callable[[RemoteTransport, list[int]], _T]) -> list[_Share[_T]]:
        """Calls the servers of these keys in parallel, and waits for all."""
        self._servers[0].check_process()
        positions: dict[int, list[int]] = {}
        for at, digest in enumerate(digests):
            positions.setdefault(server_of(self._names, digest), []).append(at)
        shares = [_Share[_T](self._servers[number], mine) for number, mine in positions.items()]
        _in_parallel(self._threads, [partial(share.run, call) for share in shares])
        return shares


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
