"""Frames on the socket: a 16-byte little-endian header, then a msgpack map. Twin of `protocol/src/frame.rs`."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import select
import socket
import struct
import time
from enum import IntEnum
from typing import NamedTuple

PROTOCOL_VERSION = 1
HEADER_BYTES = 16
#: Largest body: 8 MiB.
MAX_BODY = 8 << 20

#: Set in every response.
FLAG_REPLY = 1
#: The body is an `ErrorBody`.
FLAG_ERROR = 2
#: More responses with this tag follow.
FLAG_PARTIAL = 4
#: Descriptors are attached to the first byte of the frame. The body's `fds` names them in order.
FLAG_FDS = 8
#: Remote access: bytes follow the map, whose length is in the first four bytes of the body.
FLAG_DATA = 16

_HEADER = struct.Struct("<IBBHQ")
#: Maximum descriptors per read.
_MAX_FDS = 8
_READ_BYTES = 256 << 10


class Op(IntEnum):
    """Opcodes. The protocol's documentation lists the roles that may use each."""

    HELLO = 1
    REGISTER = 2
    WINDOW = 3
    PROBE = 4
    PIN = 5
    RELEASE = 6
    GRANT = 7
    COMMIT = 8
    ABORT = 9
    EVENTS = 10
    ADMIN = 11
    REPORT = 12
    OBJECTS = 13
    READ = 14
    WRITE = 15


class FrameError(Exception):
    """The peer sent an invalid frame. The connection is closed."""


class WrongVersion(FrameError):
    """The peer's protocol version differs by more than one."""


class Header(NamedTuple):
    """A frame's header. `length` is that of the body in bytes, and `opcode` is not validated yet."""

    length: int
    version: int
    opcode: int
    flags: int
    tag: int


def encode_header(op: int, flags: int, tag: int, length: int) -> bytes:
    return _HEADER.pack(length, PROTOCOL_VERSION, op, flags, tag)


def decode_header(raw: bytes | bytearray | memoryview) -> Header:
    """Decodes and checks the first 16 bytes of a frame. Raises `FrameError`."""
    header = Header(*_HEADER.unpack_from(raw))
    if header.version == 0 or abs(header.version - PROTOCOL_VERSION) > 1:
        raise WrongVersion(
            f"frame version {header.version} is not supported: expected {PROTOCOL_VERSION}, or one more or less"
        )
    if header.length > MAX_BODY:
        raise FrameError(f"frame body of {header.length} bytes exceeds the limit of {MAX_BODY} bytes")
    return header


#: libc's `send`, called with the GIL held: see `send_now`.
_send = ctypes.PyDLL(None).send
_send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_send.restype = ctypes.c_ssize_t


def send_now(sock: socket.socket, frame: bytes) -> bool:
    """Sends a frame without blocking. Returns False if it did not fit, or if the connection is closed.

    Keeps the GIL. A socket's own methods release it, and a thread of vLLM that sends a few bytes would wait up to 5 ms
    to get it back from another thread. A send that does not block takes microseconds.
    """
    return bool(_send(sock.fileno(), frame, len(frame), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(frame))


def send_with_fds(sock: socket.socket, frame: bytes, fds: list[int]) -> None:
    """Sends a frame with descriptors on its first byte, without blocking. Raises `OSError` if it does not fit."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([frame], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if sent != len(frame):
        raise BlockingIOError(f"only {sent} of {len(frame)} bytes of a frame fit into the socket")


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class Frames:
    """Splits the byte stream of a connection into frames with their descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.ended = False
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def next(self, timeout_s: float | None) -> tuple[Header, bytes, list[int]] | None:
        """The next frame. None on timeout, or at the end of the stream (`ended`). Raises `FrameError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frame = self._cut()
            if frame is not None:
                return frame
            wait = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
            if not self._poll.poll(wait):
                return None
            data, ancillary, flags, _ = self._sock.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._fds += fds
            if flags & socket.MSG_CTRUNC:
                raise FrameError(f"a frame has more than {_MAX_FDS} descriptors")
            if not data:
                self.ended = True
                return None
            self._buffer += data

    def _cut(self) -> tuple[Header, bytes, list[int]] | None:
        if len(self._buffer) < HEADER_BYTES:
            return None
        header = decode_header(self._buffer)
        end = HEADER_BYTES + header.length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        fds: list[int] = []
        if header.flags & FLAG_FDS:
            fds, self._fds = self._fds, []
        return header, body, fds

    def close(self) -> None:
        """Closes descriptors that no frame named. The owner keeps the socket."""
        close_all(self._fds)
        self._fds = []
