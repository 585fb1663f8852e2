"""Moves the bytes of objects over a connection, in parts of at most 4 MiB. Several share a frame or are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .messages import WRITE_COMPLETE, WRITE_LOST, WRITE_MORE, RemoteParts, RemoteReadReply, RemoteWriteReply
from .object_bytes import Bytes, bounded
from .remote_connection import Connection
from .wire import Op

#: Bytes of the parts of one frame. A frame has at most 8 MiB.
FRAME_BYTES = 4 << 20
#: Parts of one frame. A server takes 4,096.
_FRAME_PARTS = 1024
#: Frames that are sent before the reply to the first one is read.
_FRAMES_IN_FLIGHT = 3


class Part(NamedTuple):
    """Bytes of an object from `offset` on, and the buffers that have them or get them. `last`: the object ends here."""

    position: int
    offset: int
    nbytes: int
    buffers: list[memoryview]
    last: bool


def cut(position: int, offset: int, buffers: Sequence[Bytes]) -> Iterator[Part]:
    """The parts of an object's bytes from `offset` on, which buffers hold one after the other."""
    views = deque(memoryview(buffer) for buffer in buffers if len(buffer))
    left = sum(map(len, views))
    while left:
        room = nbytes = min(left, FRAME_BYTES)
        taken = []
        while room:
            view = views.popleft()
            if len(view) > room:
                views.appendleft(view[room:])
                view = view[:room]
            taken.append(view)
            room -= len(view)
        left -= nbytes
        yield Part(position, offset, nbytes, taken, not left)
        offset += nbytes


def _frames(parts: Iterator[Part]) -> Iterator[list[Part]]:
    return bounded(parts, lambda part: part.nbytes, FRAME_BYTES, _FRAME_PARTS)


def _message(request: str, frame: Sequence[Part]) -> RemoteParts:
    return RemoteParts(request, [(part.position, part.offset, part.nbytes) for part in frame])


def read(connection: Connection, request: str, parts: Iterator[Part], deadline: float) -> set[int]:
    """Fills the buffers of all parts. Returns the objects of which a part could not be read."""
    frames = _frames(parts)
    asked: deque[list[Part]] = deque()
    missed: set[int] = set()
    while True:
        while len(asked) < _FRAMES_IN_FLIGHT and (frame := next(frames, None)):
            connection.send(Op.READ, _message(request, frame), deadline)
            asked.append(frame)
        if not asked:
            return missed
        frame = asked.popleft()
        reply, nbytes = connection.receive(RemoteReadReply, deadline)
        if len(reply.found) != len(frame) or not set(reply.found) <= {0, 1}:
            connection.bad_reply(f"{len(reply.found)} results for {len(frame)} parts of a READ")
        found = [part for part, there in zip(frame, reply.found, strict=True) if there]
        if sum(part.nbytes for part in found) != nbytes:
            connection.bad_reply(f"{nbytes} bytes for parts of {[part.nbytes for part in found]}")
        connection.fill([buffer for part in found for buffer in part.buffers], deadline)
        missed.update(part.position for part, there in zip(frame, reply.found, strict=True) if not there)


def write(connection: Connection, request: str, objects: Mapping[int, Sequence[Bytes]], deadline: float) -> set[int]:
    """Sends objects, by their position in GRANT. Returns those whose memory the server took back."""
    lost: set[int] = set()
    parts = (part for at, buffers in objects.items() for part in cut(at, 0, buffers) if at not in lost)
    frames = _frames(parts)
    sent: deque[list[Part]] = deque()
    while True:
        while len(sent) < _FRAMES_IN_FLIGHT and (frame := next(frames, None)):
            data = [buffer for part in frame for buffer in part.buffers]
            connection.send(Op.WRITE, _message(request, frame), deadline, data)
            sent.append(frame)
        if not sent:
            return lost
        frame = sent.popleft()
        reply, nbytes = connection.receive(RemoteWriteReply, deadline)
        if len(reply.written) != len(frame) or nbytes:
            connection.bad_reply(f"{len(reply.written)} results for {len(frame)} parts of a WRITE, {nbytes} bytes")
        for part, state in zip(frame, reply.written, strict=True):
            if state == WRITE_LOST:
                lost.add(part.position)
            elif state != (WRITE_COMPLETE if part.last else WRITE_MORE) or part.position in lost:
                connection.bad_reply(f"state {state} of a part of a WRITE")
