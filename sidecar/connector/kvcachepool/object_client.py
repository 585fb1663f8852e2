"""The object client: lookups, puts, leases. `client` is its public name."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from . import object_copy, object_registry, place
from .messages import (
    CHUNK_ABSENT,
    GRANT_EXISTS,
    GRANT_GRANTED,
    GRANT_NO_ROOM,
    GRANT_NOT_READY,
    GRANT_QUOTA,
    GRANT_TOO_LARGE,
    MEMORY,
    TIERS,
    Grant,
    GrantChunk,
    Objects,
    ObjectsReply,
    Probe,
)
from .object_bytes import (
    MAX_OBJECT_BYTES,
    Encoded,
    Located,
    buffers_of,
    digest_of,
    encode,
    key_bytes,
    namespace_id,
)
from .object_session import Session
from .object_slots import Slots
from .object_types import Buffer, Header, Item, Key, Put, Stat, Unavailable
from .wire import Op

#: Keys of one request. Its frame must fit into the socket's buffer beside those of other threads.
_KEYS_AT_ONCE = 1024
#: Objects and bytes of one GRANT. The slots of a batch cannot be evicted before it is written.
_PUTS_AT_ONCE = 256
_PUT_BYTES_AT_ONCE = 128 << 20
#: Objects that `get` leases at once.
_GETS_AT_ONCE = 64

_RESULTS = {
    GRANT_EXISTS: Put.EXISTS,
    GRANT_NO_ROOM: Put.NO_ROOM,
    GRANT_NOT_READY: Put.NO_ROOM,
    GRANT_QUOTA: Put.QUOTA,
    GRANT_TOO_LARGE: Put.TOO_LARGE,
}

_T = TypeVar("_T")


class Object(NamedTuple):
    """A copy of an object."""

    header: Header
    value: bytearray


class Leased:
    """An object that is in memory while its lease is open. `nbytes`: size of its value."""

    def __init__(self, session: Session, slots: Slots, located: Located) -> None:
        self.header = located.header
        self.nbytes = located.nbytes
        self._session = session
        self._slots = slots
        self._begin = located.begin

    def read_into(self, buffers: Buffer | Sequence[Buffer], offset: int = 0) -> bool:
        """Fills writable buffers, one after the other, with the value's bytes from `offset` on.

        Returns False if the sidecar took the memory back, which is a miss; the buffers' content is then undefined.
        Raises `ValueError` if the buffers need more bytes than the value has.
        """
        targets = buffers_of(buffers)
        wanted = sum(map(len, targets))
        if offset < 0 or offset + wanted > self.nbytes:
            raise ValueError(f"expected at most {self.nbytes - offset} bytes of buffers, got {wanted}")
        if not all(target.flags.writeable for target in targets):
            raise ValueError("a buffer is read-only")
        return object_copy.read(self._session, self._slots, self._begin + offset, targets)

    def read(self) -> bytearray | None:
        """A copy of the value. None is a miss, as in `read_into`."""
        value = _new_bytearray(self.nbytes)
        return value if self.read_into(value) else None


class Lease:
    """Objects in the order of their keys; None for an absent one. Close it, so that the sidecar can evict them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._objects: list[Leased | None] = []
        self._held: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> Leased | None:
        return self._objects[index]

    def __iter__(self) -> Iterator[Leased | None]:
        return iter(self._objects)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lease. Later reads are misses once the sidecar has evicted the object."""
        held, self._held = self._held, []
        for request, connection in held:
            self._session.release(request, connection)

    def __del__(self) -> None:
        # Any thread may run this at any point, also one that holds the session's lock.
        self._session.dropped.extend(self._held)


class Client:
    """A client of the sidecar beside this process. Its methods may be called from all threads.

    They raise `Unavailable`, `InvalidKey` and `Refused`; see the module. `timeout_s` of a call replaces the client's.
    Arguments `keys` may also be one key.
    """

    def __init__(
        self, target: str | None = None, *, namespace: str = "", timeout_s: float = 5.0, name: str = "client"
    ) -> None:
        """Connects in the background. The first call waits for the first attempt.

        Args:
            target: path of `sidecar.sock`. The default is the one beside this package, or `KVCACHEPOOL_SOCKET`.
            namespace: clients of different namespaces see different objects.
            timeout_s: longest wait of a call.
            name: what uses the client. The sidecar's status shows it.

        Raises:
            Error: the process has a client of another sidecar.
        """
        self._namespace = namespace_id(namespace)
        self._timeout_s = timeout_s
        self._closed = False
        self._session = object_registry.join(target or place.socket_path(), name)

    @property
    def connected(self) -> bool:
        """Whether calls are served now."""
        return not self._closed and self._session.ready

    @property
    def invalid_objects(self) -> int:
        """Objects that were damaged or of another key, and were treated as absent by this process."""
        return self._session.invalid

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits until calls are served."""
        return not self._closed and self._session.wait_ready(timeout_s)

    def close(self) -> None:
        """Ends this client, and with the process's last one the connection: calls that wait raise `Unavailable`."""
        if not self._closed:
            self._closed = True
            object_registry.leave(self._session)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- lookups

    def exists(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """How many keys exist in any tier, counted from the front up to the first absent one."""
        count = 0
        for states in self._states(keys, False, timeout_s):
            absent = states.find(CHUNK_ABSENT)
            if absent >= 0:
                return count + absent
            count += len(states)
        return count

    def contains(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[bool]:
        """Whether each key exists in any tier."""
        return [state != CHUNK_ABSENT for states in self._states(keys, True, timeout_s) for state in states]

    def stat(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[Stat | None]:
        """What the sidecar's memory has of each key; None if it is not in memory."""
        stats: list[Stat | None] = []
        for count, reply in self._objects("stat", keys, 0, timeout_s):
            tiers = reply.tiers or MEMORY * count
            if not len(reply.states) == len(reply.bytes) == len(tiers) == len(reply.pinned) == count:
                raise Unavailable("BadReply", f"a reply for {len(reply.states)} of {count} keys")
            columns = zip(reply.states, reply.bytes, tiers, reply.pinned, strict=True)
            stats += [
                Stat(nbytes, TIERS.get(tier, "unknown"), bool(pinned)) if state else None
                for state, nbytes, tier, pinned in columns
            ]
        return stats

    def _states(self, keys: Key | Sequence[Key], independent: bool, timeout_s: float | None) -> Iterator[bytes]:
        session, deadline = self._begin(timeout_s)
        for digests in _batches([digest_of(name) for name in _names(keys)], _KEYS_AT_ONCE):
            request = session.new_request()
            body = self._probe(request, digests, independent, None)
            reply, _, connection = session.probe(body, deadline)
            session.release(request, connection)
            yield reply.states

    def _probe(self, request: str, digests: Sequence[bytes], independent: bool, local_tokens: int | None) -> Probe:
        return Probe(
            request=request,
            namespace=self._namespace,
            hashes=b"".join(digests),
            independent=independent,
            local_tokens=local_tokens,
        )

    # -- writing

    def put(self, items: Sequence[Item], *, ttl_s: int = 0, timeout_s: float | None = None) -> list[Put]:
        """Stores objects. Returns a result per item.

        Returns when the bytes are in the sidecar's memory. Readers see an object some milliseconds later, once the
        sidecar has taken its digest. The buffers must not change before that: not before `put` returns.

        Args:
            ttl_s: age at which the objects expire. 0: the sidecar's default.

        Raises:
            Unavailable: earlier items may be stored. Repeating the call is safe.
            TypeError, ValueError: an item cannot be stored; nothing was.
        """
        session, deadline = self._begin(timeout_s)
        objects = [encode(item.key, item.value, item.header) for item in items]
        results = [Put.TOO_LARGE] * len(objects)
        most = min(MAX_OBJECT_BYTES, session.arena_bytes(deadline))
        batch: list[int] = []
        nbytes = 0
        for index, one in enumerate(objects):
            if one.nbytes > most:
                continue
            if batch and (len(batch) == _PUTS_AT_ONCE or nbytes + one.nbytes > _PUT_BYTES_AT_ONCE):
                self._put(session, objects, batch, results, ttl_s, deadline)
                batch, nbytes = [], 0
            batch.append(index)
            nbytes += one.nbytes
        if batch:
            self._put(session, objects, batch, results, ttl_s, deadline)
        return results

    def _put(
        self,
        session: Session,
        objects: Sequence[Encoded],
        batch: Sequence[int],
        results: list[Put],
        ttl_s: int,
        deadline: float,
    ) -> None:
        """Asks for the slots of a batch, and writes those that were granted."""
        chunks = [
            GrantChunk(hash=objects[i].digest, first_token=0, tokens=1, groups=1, bytes=objects[i].nbytes)
            for i in batch
        ]
        body = Grant(request=session.new_request(), namespace=self._namespace, ttl_s=ttl_s, chunks=chunks)
        states, granted = session.grant(body, deadline)
        written: list[Slots] = []
        rest = list(granted)
        try:
            for index, state in zip(batch, states, strict=True):
                if state != GRANT_GRANTED:
                    results[index] = _result(state)
                    continue
                if time.monotonic() > deadline:
                    raise Unavailable("Deadline", "the copies took too long")
                if not object_copy.write(session, rest[0], objects[index].parts):
                    raise Unavailable("ConnectionLost", "the sidecar took granted memory back")
                written.append(rest.pop(0))
                results[index] = Put.STORED
        finally:
            session.abort(rest)
            session.commit(written)

    # -- reading

    def lease(self, keys: Key | Sequence[Key], *, prefix: bool = False, timeout_s: float | None = None) -> Lease:
        """Brings objects into memory, from lower tiers too, and keeps them there until the lease is closed.

        Waits for lower tiers until the deadline; what has not arrived then is absent.

        Args:
            prefix: the keys are a prefix; nothing is fetched behind the first absent one.
        """
        session, deadline = self._begin(timeout_s)
        lease = Lease(session)
        try:
            for names in _batches(_names(keys), _KEYS_AT_ONCE):
                if prefix and None in lease._objects[-1:]:
                    lease._objects += [None] * len(names)
                    continue
                body = self._probe(session.new_request(), [digest_of(n) for n in names], not prefix, 0)
                found, connection = session.lease(body, deadline)
                lease._held.append((body.request, connection))
                located = object_copy.locate(session, names, found)
                lease._objects += [
                    None if slots is None or place is None else Leased(session, slots, place)
                    for slots, place in zip(found, located, strict=True)
                ]
        except BaseException:
            lease.close()
            raise
        return lease

    def get(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[Object | None]:
        """Copies of objects; None for an absent one."""
        deadline = time.monotonic() + self._timeout(timeout_s)
        objects: list[Object | None] = []
        for names in _batches(_names(keys), _GETS_AT_ONCE):
            with self.lease(names, timeout_s=max(0.0, deadline - time.monotonic())) as lease:
                for leased in lease:
                    value = None if leased is None else leased.read()
                    objects.append(None if leased is None or value is None else Object(leased.header, value))
        return objects

    # -- keeping and removing

    def remove(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Removes objects from memory and from the tiers that this sidecar writes. Returns how many were in memory."""
        return self._change("remove", keys, 0, timeout_s)

    def touch(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Counts as a read of each object, so that it is evicted later. Returns how many are in memory."""
        return self._change("touch", keys, 0, timeout_s)

    def pin(self, keys: Key | Sequence[Key], ttl_s: int = 300, *, timeout_s: float | None = None) -> int:
        """Keeps objects in memory for this long (0: until `unpin`), also after the end of this process. Returns how
        many are pinned: pins of all clients together have a limited share of the memory.
        """
        return self._change("pin", keys, ttl_s, timeout_s)

    def unpin(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Ends pins. Returns how many objects were pinned."""
        return self._change("unpin", keys, 0, timeout_s)

    def _change(self, op: str, keys: Key | Sequence[Key], ttl_s: int, timeout_s: float | None) -> int:
        return sum(reply.count for _, reply in self._objects(op, keys, ttl_s, timeout_s))

    def _objects(
        self, op: str, keys: Key | Sequence[Key], ttl_s: int, timeout_s: float | None
    ) -> Iterator[tuple[int, ObjectsReply]]:
        """(number of keys, reply) per request."""
        session, deadline = self._begin(timeout_s)
        for digests in _batches([digest_of(name) for name in _names(keys)], _KEYS_AT_ONCE):
            body = Objects(op=op, namespace=self._namespace, hashes=b"".join(digests), ttl_s=ttl_s)
            reply = session.call(Op.OBJECTS, body, len(body.hashes), deadline, ObjectsReply)
            if not 0 <= reply.count <= len(digests):
                raise Unavailable("BadReply", f"{reply.count} of {len(digests)} objects")
            yield len(digests), reply

    def _begin(self, timeout_s: float | None) -> tuple[Session, float]:
        """The session, and the deadline of a call that begins now."""
        if self._closed:
            raise Unavailable("Closed")
        return self._session, time.monotonic() + self._timeout(timeout_s)

    def _timeout(self, timeout_s: float | None) -> float:
        return min(self._timeout_s if timeout_s is None else timeout_s, threading.TIMEOUT_MAX)


def _result(state: int) -> Put:
    result = _RESULTS.get(state)
    if result is None:
        raise Unavailable("BadReply", f"unexpected result {state} of a GRANT")
    return result


def _names(keys: Key | Sequence[Key]) -> list[bytes]:
    """The bytes of one key or of several. Raises `InvalidKey`."""
    return [key_bytes(key) for key in ([keys] if isinstance(keys, (str, bytes)) else keys)]


def _batches(items: Sequence[_T], count: int) -> Iterator[Sequence[_T]]:
    return (items[at : at + count] for at in range(0, len(items), count))


_allocate = ctypes.pythonapi.PyByteArray_FromStringAndSize
_allocate.restype = ctypes.py_object
_allocate.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


def _new_bytearray(nbytes: int) -> bytearray:
    """A bytearray of undefined content: `bytearray(nbytes)` would write all its bytes first."""
    return cast("bytearray", _allocate(None, nbytes))
