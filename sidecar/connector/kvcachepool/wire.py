"""Frames on the socket: a 16-byte little-endian header, then a msgpack map. Twin of `protocol/src/frame.rs`."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

PROTOCOL_VERSION = 1
HEADER_BYTES = 16
#: Largest body: 8 MiB.
MAX_BODY = 8 << 20

#: Set in every answer.
FLAG_REPLY = 1
#: The body is an `ErrorBody`.
FLAG_ERROR = 2
#: More answers with this tag follow.
FLAG_PARTIAL = 4
#: Descriptors ride on the first byte of the frame; the body's `fds` names them in order.
FLAG_FDS = 8

_HEADER = struct.Struct("<IBBHQ")


class Op(IntEnum):
    """Opcodes; who may use which: docs/protocol.md."""

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


class FrameError(Exception):
    """The peer's bytes are no frame of a version that is spoken here; the connection ends."""


class Header(NamedTuple):
    """A frame's header; `length` counts the body's bytes, `opcode` is not interpreted yet."""

    length: int
    version: int
    opcode: int
    flags: int
    tag: int


def encode_header(op: int, flags: int, tag: int, length: int) -> bytes:
    """Header bytes for the wire."""
    return _HEADER.pack(length, PROTOCOL_VERSION, op, flags, tag)


def decode_header(raw: bytes | bytearray | memoryview) -> Header:
    """Reads and checks the first 16 bytes of a frame. Raises `FrameError`."""
    header = Header(*_HEADER.unpack_from(raw))
    if header.version == 0 or abs(header.version - PROTOCOL_VERSION) > 1:
        raise FrameError(f"frame version {header.version} is not spoken here (this side speaks {PROTOCOL_VERSION})")
    if header.length > MAX_BODY:
        raise FrameError(f"frame body of {header.length} bytes is over the limit of {MAX_BODY}")
    return header
