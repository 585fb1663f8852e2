"""The transport to the sidecar of the same pod: objects are written and read in shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

from . import object_copy, object_registry
from .messages import GRANT_GRANTED, Objects, ObjectsReply
from .object_bytes import Encoded, Located, digest_of
from .object_session import Session
from .object_slots import Slots
from .object_transport import Range, changed_of, grant_of, probe_of, put_result, stats_of
from .object_types import Put, Stat, Unavailable
from .wire import Op


class LocalHolding:
    """The leases of one PROBE (`object_transport.Holding`)."""

    def __init__(
        self,
        session: Session,
        lease: tuple[str, int],
        slots: Sequence[Slots | None],
        located: Sequence[Located | None],
    ) -> None:
        self.located = located
        self._session = session
        self._lease = lease
        self._slots = slots

    def read(self, ranges: Sequence[Range], deadline: float) -> list[bool]:
        """Copies do not wait, so the deadline does not matter."""
        done = []
        for one in ranges:
            slots = self._slots[one.position]
            done.append(slots is not None and object_copy.read(self._session, slots, one.begin, one.buffers))
        return done

    def release(self) -> None:
        self._session.release(*self._lease)

    def drop(self) -> None:
        self._session.dropped.append(self._lease)


class LocalTransport:
    """`object_transport.Transport` over the session that all clients of this process share."""

    def __init__(self, path: str, name: str, namespace: bytes) -> None:
        """Raises `Error` if the process uses the sidecar at another path."""
        self._namespace = namespace
        self.session = object_registry.join(path, name)

    @property
    def ready(self) -> bool:
        return self.session.ready

    @property
    def invalid(self) -> int:
        return self.session.invalid

    def wait_ready(self, timeout_s: float) -> bool:
        return self.session.wait_ready(timeout_s)

    def check_process(self) -> None:
        self.session.check_process()

    def close(self) -> None:
        object_registry.leave(self.session)

    def states(self, digests: Sequence[bytes], prefix: bool, deadline: float) -> bytes:
        body = probe_of(self.session.new_request(), self._namespace, digests, prefix)
        reply, _, connection = self.session.probe(body, deadline)
        self.session.release(body.request, connection)
        return reply.states

    def hold(self, names: Sequence[bytes], prefix: bool, deadline: float) -> LocalHolding:
        digests = [digest_of(name) for name in names]
        body = probe_of(self.session.new_request(), self._namespace, digests, prefix, local_tokens=0)
        found, connection = self.session.lease(body, deadline)
        try:
            located = object_copy.locate(self.session, names, found)
        except BaseException:
            self.session.release(body.request, connection)
            raise
        return LocalHolding(self.session, (body.request, connection), found, located)

    def put(self, objects: Sequence[Encoded], ttl_s: int, deadline: float) -> list[Put]:
        """Asks for the slots of objects, and writes those that were granted."""
        session = self.session
        most = session.arena_bytes(deadline)
        fitting = [index for index, one in enumerate(objects) if one.nbytes <= most]
        results = [Put.TOO_LARGE] * len(objects)
        if not fitting:
            return results
        body = grant_of(session.new_request(), self._namespace, [objects[index] for index in fitting], ttl_s)
        states, granted = session.grant(body, deadline)
        written: list[Slots] = []
        rest = list(granted)
        try:
            for index, state in zip(fitting, states, strict=True):
                results[index] = put_result(state)
                if state != GRANT_GRANTED:
                    continue
                if time.monotonic() > deadline:
                    raise Unavailable("Deadline", "the copies took too long")
                if not object_copy.write(session, rest[0], objects[index].parts):
                    raise Unavailable("ConnectionLost", "the sidecar took granted memory back")
                written.append(rest.pop(0))
        finally:
            session.abort(rest)
            session.commit(written)
        return results

    def change(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> int:
        return changed_of(self._objects(op, digests, ttl_s, deadline), len(digests))

    def stat(self, digests: Sequence[bytes], deadline: float) -> list[Stat | None]:
        return stats_of(self._objects("stat", digests, 0, deadline), len(digests))

    def _objects(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> ObjectsReply:
        body = Objects(op=op, namespace=self._namespace, hashes=b"".join(digests), ttl_s=ttl_s)
        return self.session.call(Op.OBJECTS, body, len(body.hashes), deadline, ObjectsReply)
