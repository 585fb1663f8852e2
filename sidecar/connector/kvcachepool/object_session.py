"""The connection that all object clients of a process share, and what it holds: calls, granted slots, running copies.

One lock guards all state. It is never held while waiting for the sidecar or while copying. Frames that change what the
sidecar believes this process holds are sent under it, and HELLO's list is made under it (`connection.Hooks`).

Invariants: a granted slot is in `_held` from the moment its reply is read until COMMIT or ABORT was sent for it. A copy
runs only within `copying`, and `before_unmap` waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from . import __version__
from .connection import Connection, Held, Reply
from .messages import (
    CHUNK_READY,
    GRANT_GRANTED,
    Grant,
    GrantReply,
    HelloReply,
    Message,
    Pin,
    Probe,
    ProbeReply,
    Release,
    Sections,
)
from .object_bytes import HASH_BYTES, Bytes
from .object_slots import REF_BYTES, BadReplyError, Slots, by_slot, objects_of, overlap
from .object_transport import budget_ms
from .object_types import Error, Refused, Unavailable
from .shared import Mapping, shared
from .wire import Op

#: Bytes of requests that the sidecar has not answered yet. More might not fit into the socket, which ends a connection.
_BACKLOG_BYTES = 128 << 10

_M = TypeVar("_M", bound=Message)


class _Call:
    """A request and the newest reply to it. `waiting`: bytes of a request without a reply. `lost`: why none follows."""

    def __init__(self, nbytes: int) -> None:
        self.waiting = nbytes
        self.reply: Reply | None = None
        self.lost = ""
        self.done = threading.Event()


class _GrantCall(_Call):
    """A GRANT. `granted` is set on the reader thread, so that HELLO names the slots from then on.

    abandoned: nobody waits, so slots are given back when the reply arrives.
    """

    def __init__(self, nbytes: int, sizes: Sequence[int]) -> None:
        super().__init__(nbytes)
        self.sizes = sizes
        self.results = b""
        self.granted: list[Slots] = []
        self.abandoned = False


class Session:
    """A session of role `opaque` (`connection.Hooks`). Its methods raise `Unavailable` or `Refused`."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.users = 0
        #: Objects that were damaged or of another key.
        self.invalid = 0
        #: Leases that were dropped without `close`, as arguments of `release`. Any thread may append to it.
        self.dropped: deque[tuple[str, int]] = deque()
        self.off = ""
        self._leases: set[tuple[str, int]] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._requests = itertools.count(1)
        self._ready = False
        self._reason = "NotConnected"
        self._mapping: Mapping | None = None
        self._arena: Bytes = np.empty(0, dtype=np.uint8)
        self._calls: set[_Call] = set()
        self._waiting = 0
        self._held: dict[int, bytes] = {}  # slot -> reference
        self._outbox: list[tuple[Op, Sections]] = []  # to be sent after the next HELLO, which names their slots
        self._copies = 0
        instance = f"{name}-{os.urandom(6).hex()}"
        self._connection = Connection("opaque", instance, 0, __version__, path, self, engine=name)

    def start(self) -> None:
        self._connection.start()

    def close(self) -> None:
        """Ends the session and what it holds. Blocks until copies have ended; calls that wait raise `Unavailable`."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._turn_off("Closed")  # no copy begins from now on
            while self._copies:
                self._changed.wait(1.0)  # a HELLO meanwhile still names their slots
            mapping, self._mapping = self._mapping, None
            if self._leases:
                self._connection.send(Op.RELEASE, Release(requests=[request for request, _ in self._leases]))
            if self._held and mapping is not None:
                refs = b"".join(self._held.values())
                self._connection.send(Op.ABORT, Sections(region=mapping.region, refs=refs))
            self._held = {}
        self._connection.go_off("Shutdown")

    # -- state

    def count_invalid(self) -> None:
        """Counts an object that was damaged or of another key."""
        with self._lock:
            self.invalid += 1

    @property
    def ready(self) -> bool:
        return self._ready and os.getpid() == self._pid

    def wait_ready(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self.check_process()
        with self._changed:
            while not self._ready and not self.off and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._ready

    def arena_bytes(self, deadline: float) -> int:
        """Size of the sidecar's memory."""
        self._wait_attempt(deadline)
        with self._lock:
            if not self._ready:
                raise self._unavailable()
            return self._mapping.capacity_bytes if self._mapping is not None else 0

    def check_process(self) -> None:
        """Raises `Unavailable` in a fork of the client's process."""
        if os.getpid() != self._pid:
            raise Unavailable("Forked", "this process is a fork of the client's process and must create its own client")

    def _wait_attempt(self, deadline: float) -> None:
        """Waits for the end of the first attempt to connect."""
        self.check_process()
        if not self._connection.attempted.is_set():
            self._connection.attempted.wait(max(0.0, deadline - time.monotonic()))

    def _unavailable(self) -> Unavailable:
        """Why calls fail now. The lock is held."""
        connection = self._connection
        if self.off:
            return Unavailable(self.off)
        if connection.refusal:
            return Unavailable(connection.refusal, "the sidecar refused this client")
        return Unavailable(self._reason, f"no sidecar at {self.path}: {connection.failure}".removesuffix(": "))

    # -- requests

    def call(self, op: Op, body: Message, nbytes: int, deadline: float, kind: type[_M]) -> _M:
        """The reply to a request. nbytes: its approximate size."""
        call = _Call(nbytes)
        self._send(op, body, call, deadline)
        reply = self._wait(call, deadline)
        return self._read(reply, kind)

    def probe(self, body: Probe, deadline: float) -> tuple[ProbeReply, int, int]:
        """The final reply to a PROBE, or the last partial one at the deadline; its tag, and its connection."""
        body.budget_ms = budget_ms(deadline)
        call = _Call(len(body.hashes))
        tag, connection = self._send(Op.PROBE, body, call, deadline)
        try:
            reply = self._read(self._wait(call, deadline, partial=True), ProbeReply)
            keys = len(body.hashes) // HASH_BYTES
            if reply.reason and not reply.states:
                reply = ProbeReply(states=bytes(keys), refs=b"", reason=reply.reason)
            if len(reply.states) != keys:
                raise Unavailable("BadReply", f"{len(reply.states)} states for {keys} keys")
            return reply, tag, connection
        except BaseException:
            self.release(body.request, connection)
            raise

    def lease(self, body: Probe, deadline: float) -> tuple[list[Slots | None], int]:
        """Leases what a PROBE finds, under its request. Returns the slots of each key (None: not in memory), and the
        connection for `release`.
        """
        reply, tag, connection = self.probe(body, deadline)
        try:
            objects = self._located(reply)
            pin = Pin(request=body.request, probe=tag, from_=0, to=len(reply.states))
            with self._lock:
                if self.off:
                    raise self._unavailable()
                if self._connection.connection == connection:
                    self._leases.add((body.request, connection))
                    self._connection.send(Op.PIN, pin)
            return objects, connection
        except BaseException:
            self.release(body.request, connection)
            raise

    def release(self, request: str, connection: int) -> None:
        """Ends what a request holds. The end of its connection has ended it, too."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._leases.discard((request, connection))
            if self._connection.connection == connection:
                self._connection.send(Op.RELEASE, Release(requests=[request]))

    def new_request(self) -> str:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self.dropped:
                self.release(*self.dropped.popleft())
        return str(next(self._requests))

    def grant(self, body: Grant, deadline: float) -> tuple[bytes, list[Slots]]:
        """Asks for slots. Returns a result per object, and the slots of those that were granted, in order. The caller
        must end each by `commit` or `abort`.
        """
        call = _GrantCall(96 * len(body.chunks), [chunk.bytes for chunk in body.chunks])
        self._send(Op.GRANT, body, call, deadline)
        try:
            reply = self._wait(call, deadline)
            if reply.error is not None:
                raise _error_of(reply)
            return call.results, call.granted
        except BaseException:
            with self._lock:
                call.abandoned = True
                self._settle(Op.ABORT, call.granted)
            raise

    def commit(self, slots: Sequence[Slots]) -> None:
        """Reports slots as written. Raises `Unavailable` if the message was not sent; the next HELLO then precedes
        it.
        """
        with self._lock:
            if self.off:
                self._settle(Op.ABORT, slots)
                raise self._unavailable()
            if not self._settle(Op.COMMIT, slots):
                raise self._unavailable()

    def abort(self, slots: Sequence[Slots]) -> None:
        """Gives back slots that are not written any more."""
        if os.getpid() == self._pid:
            with self._lock:
                self._settle(Op.ABORT, slots)

    def _send(self, op: Op, body: Message, call: _Call, deadline: float) -> tuple[int, int]:
        """Sends a request. Returns its tag and the number of its connection."""
        self._wait_attempt(deadline)
        on_reply = functools.partial(self._replied, call)
        with self._changed:
            while self._ready and self._waiting and self._waiting + call.waiting > _BACKLOG_BYTES:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unavailable("Deadline", "the sidecar does not answer earlier requests")
                self._changed.wait(left)
            if not self._ready:
                raise self._unavailable()
            self._calls.add(call)
            self._waiting += call.waiting
            tag = self._connection.request(op, body, on_reply)
            if tag is None:
                self._end(call, "ConnectionLost")
                raise Unavailable("ConnectionLost")
            return tag, self._connection.connection

    def _wait(self, call: _Call, deadline: float, partial: bool = False) -> Reply:
        """The final reply; with `partial`, the newest one at the deadline."""
        try:
            done = call.done.wait(max(0.0, deadline - time.monotonic()))
            with self._lock:
                if call.lost:
                    raise Unavailable(call.lost)
                if call.reply is not None and (done or partial):
                    return call.reply
            raise Unavailable("Deadline", "the sidecar did not answer in time")
        finally:
            with self._changed:
                self._calls.discard(call)

    def _replied(self, call: _Call, reply: Reply) -> None:
        """Takes a reply, on the reader thread."""
        with self._changed:
            if call.lost:
                return
            self._answered(call)
            call.reply = reply
            if isinstance(call, _GrantCall) and reply.error is None:
                try:
                    self._take_granted(call, reply)
                except (BadReplyError, msgspec.DecodeError) as error:
                    # What this process may write is uncertain: the next HELLO says what it holds.
                    self._end(call, "BadReply")
                    self._connection.failure = str(error)
                    self._connection.reconnect()
                    return
            if not reply.partial:
                self._end(call, call.lost)

    def _answered(self, call: _Call) -> None:
        if call.waiting:
            self._waiting -= call.waiting
            call.waiting = 0
            self._changed.notify_all()

    def _end(self, call: _Call, lost: str) -> None:
        """No reply follows. The lock is held."""
        self._answered(call)
        self._calls.discard(call)
        call.lost = lost
        call.done.set()

    def _read(self, reply: Reply, kind: type[_M]) -> _M:
        if reply.error is not None:
            raise _error_of(reply)
        try:
            return reply.read(kind)
        except msgspec.DecodeError as error:
            raise Unavailable("BadReply", str(error)) from None

    # -- references

    def _located(self, reply: ProbeReply) -> list[Slots | None]:
        """The slots of each key of a reply; None for keys that are not ready."""
        with self._lock:
            mapping = self._mapping
        ready = reply.states.count(CHUNK_READY)
        if mapping is None or (ready and mapping.region != reply.region):
            raise Unavailable("ConnectionLost", "the sidecar took its memory back")
        try:
            found = iter(objects_of(mapping, reply.refs, ready))
        except BadReplyError as error:
            raise Unavailable("BadReply", str(error)) from None
        return [next(found) if state == CHUNK_READY else None for state in reply.states]

    def _take_granted(self, call: _GrantCall, reply: Reply) -> None:
        """Registers the slots of a GRANT's reply. Raises `BadReplyError`. The lock is held."""
        body, mapping = reply.read(GrantReply), self._mapping
        if mapping is None:
            # Another HELLO follows, and does not name them.
            call.lost = "ConnectionLost"
            return
        sizes = [size for size, result in zip(call.sizes, body.results, strict=False) if result == GRANT_GRANTED]
        if len(body.results) != len(call.sizes) or (sizes and body.region != mapping.region):
            raise BadReplyError(f"{len(body.results)} results in region {body.region} for {len(call.sizes)} objects")
        granted = objects_of(mapping, body.refs, len(sizes))
        if [slots.nbytes for slots in granted] != sizes:
            raise BadReplyError(f"slots of {[slots.nbytes for slots in granted]} bytes for objects of {sizes}")
        held = self._held | {slot: ref for slots in granted for slot, ref in by_slot(slots)}
        if len(held) != len(self._held) + len(body.refs) // REF_BYTES or overlap(held):
            raise BadReplyError("the same memory is granted twice")
        self._held = held
        if call.abandoned:
            self._settle(Op.ABORT, granted)
        else:
            call.results, call.granted = body.results, granted

    def _settle(self, op: Op, slots: Sequence[Slots]) -> bool:
        """Sends COMMIT or ABORT for slots, or keeps it for the next HELLO. Returns whether it was sent. The lock is
        held.
        """
        mapping = self._mapping
        packed = b"".join(one.packed for one in slots if one.mapping is mapping)
        if mapping is None or not packed:
            return not slots
        for at in range(0, len(packed), REF_BYTES):
            self._held.pop(int.from_bytes(packed[at : at + 4], "little"), None)
        body = Sections(region=mapping.region, refs=packed)
        if self._connection.send(op, body):
            return True
        self._outbox.append((op, body))
        return False

    # -- copies

    @contextlib.contextmanager
    def copying(self, mapping: Mapping) -> Iterator[Bytes | None]:
        """The arena's bytes, which stay mapped meanwhile. None if this memory is not mapped any more."""
        self.check_process()
        with self._lock:
            arena = None if self._mapping is not mapping or self.off else self._arena
            self._copies += arena is not None
        try:
            yield arena
        finally:
            with self._changed:
                self._copies -= arena is not None
                if not self._copies:
                    self._changed.notify_all()

    # -- connection.Hooks

    def held(self, region: int | None) -> Held:
        with self._lock:
            if self._mapping is None or region != self._mapping.region:
                return Held()
            return Held(grants=b"".join([*self._held.values(), *(body.refs for _, body in self._outbox)]))

    def after_hello(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, []
            for op, body in outbox:
                if not self._connection.send(op, body):
                    self._outbox.append((op, body))

    def on_hello(self, reply: HelloReply) -> None:
        mapping = shared().mapping
        with self._changed:
            self._ready = False
            if self.off:
                return
            if "objects" not in reply.features:
                self._reason = "ObjectsNotServed"
            elif reply.memory not in ("sent", "held") or mapping is None or mapping.retired:
                self._reason = reply.reason or "NoMemory"
            else:
                if self._mapping is not mapping:
                    self._mapping = mapping
                    self._arena = np.frombuffer(mapping.arena_buffer(), dtype=np.uint8)
                self._ready = True
                self._changed.notify_all()

    def on_lost(self) -> None:
        """Calls end at once. Copies continue, and what they wrote is reported after the next HELLO."""
        with self._changed:
            self._ready = False
            self._reason = "NotConnected"
            self._leases.clear()
            self._end_calls(self.off or "ConnectionLost")

    def before_unmap(self) -> None:
        with self._changed:
            self._ready = False
            self._mapping = None
            self._held = {}
            self._outbox = []
            self._changed.notify_all()
            while self._copies:
                self._changed.wait(1.0)
            self._arena = np.empty(0, dtype=np.uint8)

    def on_off(self, reason: str) -> None:
        with self._changed:
            self._turn_off(reason)

    def _turn_off(self, reason: str) -> None:
        self.off = self.off or reason
        self._ready = False
        self._end_calls(self.off)

    def _end_calls(self, lost: str) -> None:
        for call in list(self._calls):
            self._end(call, lost)
        self._waiting = 0  # of calls that nobody waits for any more
        self._changed.notify_all()


def _error_of(reply: Reply) -> Error:
    error = reply.error
    assert error is not None
    return (Unavailable if error.retryable else Refused)(error.code, error.message)
