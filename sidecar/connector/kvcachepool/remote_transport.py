"""The transport to one remote server. No memory is shared: bytes of objects travel in frames."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from .messages import (
    CHUNK_PENDING,
    CHUNK_READY,
    GRANT_GRANTED,
    Objects,
    ObjectsReply,
    Probe,
    RemoteGrantReply,
    RemoteProbeReply,
)
from .object_bytes import MAX_OBJECT_BYTES, Bytes, Encoded, Located, digest_of, front_bytes, parse
from .object_transport import PUT_RESULTS, Range, budget_ms, changed_of, grant_of, probe_of, stats_of
from .object_types import Put, Stat, Unavailable
from .remote_connection import Access, Connection, Server, connect, new_instance
from .remote_pool import Pool
from .remote_transfers import cut, read, write
from .wire import Op

#: Bytes of an object that are read with its lease, and those of all objects of one lease together.
_FRONT_BYTES = 64 << 10
_FRONTS_BYTES = 16 << 20


class RemoteHolding:
    """The leases of one PROBE (`object_transport.Holding`). They end with their connection.

    located: as of the protocol. fronts: the first bytes of each object that was located.
    """

    def __init__(
        self,
        pool: Pool,
        connection: Connection,
        request: str,
        located: Sequence[Located | None],
        fronts: dict[int, bytearray],
    ) -> None:
        self.located = located
        self._pool = pool
        self._connection = connection
        self._request = request
        self._fronts = fronts

    def check_process(self) -> None:
        """Raises `Unavailable` in a fork of the client's process."""
        self._pool.check_process()

    def read(self, ranges: Sequence[Range], deadline: float) -> list[bool]:
        self.check_process()
        fronts = self._fronts
        parts = []
        for number, one in enumerate(ranges):
            begin, buffers = _copy_front(fronts.get(one.position, b""), one)
            parts.append((number, one.position, begin, buffers))
        missed = {number for number, index, _, _ in parts if index not in fronts}
        wanted = [part for part in parts if part[0] not in missed and any(map(len, part[3]))]
        if wanted:
            missed |= self._fetch(wanted, deadline)
        return [number not in missed for number in range(len(ranges))]

    def _fetch(self, wanted: Sequence[tuple[int, int, int, list[Bytes]]], deadline: float) -> set[int]:
        """Reads buffers from the server. Returns the numbers of those that it could not."""
        parts = (part for _, index, begin, buffers in wanted for part in cut(index, begin, buffers))
        with self._pool.using(deadline, self._connection) as connection:
            lost = read(connection, self._request, parts, deadline)
        return {number for number, index, _, _ in wanted if index in lost}

    def release(self) -> None:
        self._fronts = {}
        self._pool.release(self._connection, self._request)

    def drop(self) -> None:
        self._pool.dropped.append((self._connection, self._request))


class RemoteTransport:
    """`object_transport.Transport` over one server."""

    def __init__(self, server: Server, access: Access, namespace: bytes) -> None:
        self.name = server.name
        self.invalid = 0
        self._namespace = namespace
        self._lock = threading.Lock()
        self._requests = itertools.count(1)
        instance = new_instance(access.client_name)
        self._pool = Pool(server.name, lambda deadline: connect(server, access, instance, deadline))

    @property
    def ready(self) -> bool:
        return self._pool.ready

    def wait_ready(self, timeout_s: float) -> bool:
        return self._pool.wait_ready(timeout_s)

    def close(self) -> None:
        self._pool.close()

    def check_process(self) -> None:
        """Raises `Unavailable` in a fork of the client's process."""
        self._pool.check_process()

    # -- lookups and leases

    def states(self, digests: Sequence[bytes], prefix: bool, deadline: float) -> bytes:
        body = probe_of(str(next(self._requests)), self._namespace, digests, prefix)
        with self._pool.using(deadline) as connection:
            return _ask(connection, body, deadline).states

    def hold(self, names: Sequence[bytes], prefix: bool, deadline: float) -> RemoteHolding:
        digests = [digest_of(name) for name in names]
        body = probe_of(str(next(self._requests)), self._namespace, digests, prefix, local_tokens=0)
        with self._pool.using(deadline) as connection:
            reply = _ask(connection, body, deadline)
            try:
                fronts = _fronts(connection, body.request, names, _sizes(connection, reply), deadline)
            except BaseException:
                connection.close()  # which ends the lease
                raise
            connection.leases.add(body.request)
        located = [None if at not in fronts else _parse(name, *fronts[at]) for at, name in enumerate(names)]
        damaged = [at for at in fronts if located[at] is None]
        with self._lock:
            self.invalid += len(damaged)
        kept = {at: front for at, (_, front) in fronts.items() if located[at] is not None}
        return RemoteHolding(self._pool, connection, body.request, located, kept)

    # -- the other calls

    def put(self, objects: Sequence[Encoded], ttl_s: int, deadline: float) -> list[Put]:
        with self._pool.using(deadline) as connection:
            fitting = [at for at, one in enumerate(objects) if one.nbytes <= connection.hello.arena_bytes]
            results = [Put.TOO_LARGE] * len(objects)
            if not fitting:
                return results
            request = str(next(self._requests))
            body = grant_of(request, self._namespace, [objects[at] for at in fitting], ttl_s)
            reply = connection.call(Op.GRANT, body, RemoteGrantReply, deadline)
            try:
                if len(reply.results) != len(fitting) or not set(reply.results) <= PUT_RESULTS.keys():
                    connection.bad_reply(f"results {list(reply.results)} of a GRANT for {len(fitting)} objects")
                granted = {
                    number: objects[at].parts
                    for number, (at, state) in enumerate(zip(fitting, reply.results, strict=True))
                    if state == GRANT_GRANTED
                }
                lost = write(connection, request, granted, deadline)
            except BaseException:
                connection.close()  # which gives back what is not written
                raise
        if lost:
            raise Unavailable("ConnectionLost", f"{self.name} took granted memory back")
        for at, state in zip(fitting, reply.results, strict=True):
            results[at] = PUT_RESULTS[state]
        return results

    def change(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> int:
        with self._objects(op, digests, ttl_s, deadline) as reply:
            return changed_of(reply, len(digests))

    def stat(self, digests: Sequence[bytes], deadline: float) -> list[Stat | None]:
        with self._objects("stat", digests, 0, deadline) as reply:
            return stats_of(reply, len(digests))

    @contextlib.contextmanager
    def _objects(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> Iterator[ObjectsReply]:
        """The reply to OBJECTS. If it turns out to be a bad one, the connection is closed."""
        body = Objects(op=op, namespace=self._namespace, hashes=b"".join(digests), ttl_s=ttl_s)
        with self._pool.using(deadline) as connection:
            reply = connection.call(Op.OBJECTS, body, ObjectsReply, deadline)
            try:
                yield reply
            except Unavailable:
                connection.close()
                raise


def _ask(connection: Connection, body: Probe, deadline: float) -> RemoteProbeReply:
    """The reply to a PROBE, with a state per key."""
    body.budget_ms = budget_ms(deadline)
    reply = connection.call(Op.PROBE, body, RemoteProbeReply, deadline)
    keys = len(body.hashes) // len(digest_of(b""))
    if reply.reason and not reply.states:
        reply = RemoteProbeReply(states=bytes(keys), reason=reply.reason)
    if len(reply.states) != keys or max(reply.states, default=0) > CHUNK_PENDING:
        connection.bad_reply(f"states {list(reply.states[:8])} ({len(reply.states)}) for {keys} keys")
    return reply


def _sizes(connection: Connection, reply: RemoteProbeReply) -> dict[int, int]:
    """The length of each object that is ready, by its position."""
    ready = [at for at, state in enumerate(reply.states) if state == CHUNK_READY]
    if len(reply.bytes) != len(ready) or not all(0 < nbytes <= MAX_OBJECT_BYTES for nbytes in reply.bytes):
        connection.bad_reply(f"lengths {reply.bytes[:8]} ({len(reply.bytes)}) of {len(ready)} objects")
    return dict(zip(ready, reply.bytes, strict=True))


def _fronts(
    connection: Connection, request: str, names: Sequence[bytes], sizes: dict[int, int], deadline: float
) -> dict[int, tuple[int, bytearray]]:
    """The length and the first bytes of each object that could be read: at least its key and its header."""
    most = min(_FRONT_BYTES, _FRONTS_BYTES // max(1, len(sizes)))
    fronts = {at: bytearray(min(nbytes, most)) for at, nbytes in sizes.items()}
    missed = _read_fronts(connection, request, fronts, {}, deadline)
    begun = {at: len(front) for at, front in fronts.items()}
    longer = {}
    for at in fronts.keys() - missed:
        nbytes = min(front_bytes(fronts[at], names[at]), sizes[at])
        if nbytes > begun[at]:
            longer[at] = fronts[at] + bytes(nbytes - begun[at])
    missed |= _read_fronts(connection, request, longer, begun, deadline)
    fronts |= longer
    return {at: (sizes[at], front) for at, front in fronts.items() if at not in missed}


def _read_fronts(
    connection: Connection, request: str, fronts: dict[int, bytearray], begun: dict[int, int], deadline: float
) -> set[int]:
    """Reads the bytes of fronts behind those that were read already. Returns the objects that could not be read."""
    parts = (
        part
        for at, front in fronts.items()
        for part in cut(at, begun.get(at, 0), [np.frombuffer(front, dtype=np.uint8)[begun.get(at, 0) :]])
    )
    return read(connection, request, parts, deadline)


def _parse(name: bytes, nbytes: int, front: bytearray) -> Located | None:
    return parse(name, nbytes, len(front), lambda begin, end: bytes(front[begin:end]))


def _copy_front(front: bytes | bytearray, wanted: Range) -> tuple[int, list[Bytes]]:
    """Copies what the front has of a range. Returns where the rest begins, and the buffers that need it."""
    begin, rest = wanted.begin, []
    for buffer in wanted.buffers:
        nbytes = max(0, min(len(front) - begin, len(buffer)))
        if nbytes:
            buffer[:nbytes] = np.frombuffer(front, dtype=np.uint8, count=nbytes, offset=begin)
        begin += nbytes
        rest.append(buffer[nbytes:])
    return begin, rest
