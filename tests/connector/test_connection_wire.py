"""The bytes of the protocol match the Rust side: frames, messages, references, lock file, slot table."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import stub_sidecar

import kvcachepool.messages as messages
from kvcachepool import shared, wire
from kvcachepool.messages import decode, encode
from kvcachepool.shared import Mapping, Refs, SharedMemoryError

VECTORS = Path(__file__).resolve().parents[2] / "sidecar" / "protocol" / "vectors"


def vectors(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


FRAMES = vectors("frames.json")
#: Not used by the connector.
FOREIGN = {"Admin"}
#: Only read by the connector, which may define fewer fields than the sidecar sends.
READ = {"ErrorBody", "HelloReply", "RegisterReply", "ProbeReply", "GrantReply", "AbortReply", "EventsReply", "Event"}
READ |= {"Settings", "WindowReply"}


def plain(value: Any) -> Any:
    """Fields of the vectors as Python values. Bytes are written in hex."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"]) if set(value) == {"hex"} else {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def sent(fields: Any, written: Any) -> Any:
    """The fields that were written: those with their default are absent."""
    if isinstance(written, dict):
        return {name: sent(fields[name], value) for name, value in written.items()}
    if isinstance(written, list):
        return [sent(field, value) for field, value in zip(fields, written, strict=True)]
    return fields


@pytest.mark.parametrize("vector", FRAMES["frames"], ids=lambda v: f"{v['message']}-{v['tag']}")
def test_frames_match_those_of_the_sidecar(vector: dict[str, Any]) -> None:
    if vector["message"] in FOREIGN:
        return
    raw = bytes.fromhex(vector["frame"])
    header = wire.decode_header(raw)
    assert (header.opcode, header.flags, header.tag) == (vector["op"], vector["flags"], vector["tag"])
    assert header.length == len(raw) - wire.HEADER_BYTES
    assert wire.encode_header(header.opcode, header.flags, header.tag, header.length) == raw[:16]
    kind = getattr(messages, vector["message"])
    body = decode(raw[16:], kind)
    fields = plain(vector["fields"])
    assert msgspec.to_builtins(decode(encode(body), kind), builtin_types=(bytes,)) == msgspec.to_builtins(
        msgspec.convert(fields, kind, builtin_types=(bytes,)), builtin_types=(bytes,)
    )
    if vector["message"] in READ:
        return
    written = msgspec.msgpack.decode(encode(body))
    assert sent(fields, written) == written


def test_required_fields_are_always_sent() -> None:
    for name, required in FRAMES["required"].items():
        if name in FOREIGN:
            continue
        kind = getattr(messages, name)
        own = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
        assert own <= set(required) if name in READ else own == set(required), name


@pytest.mark.parametrize("vector", FRAMES["bad_headers"], ids=lambda v: v["error"])
def test_bad_headers_are_refused(vector: dict[str, str]) -> None:
    with pytest.raises(wire.FrameError):
        wire.decode_header(bytes.fromhex(vector["header"]))


def test_numbers_have_the_same_names() -> None:
    assert {op.name.title(): int(op) for op in wire.Op} == FRAMES["ops"]
    names = ("reply", "error", "partial", "fds", "data")
    assert {name: getattr(wire, f"FLAG_{name.upper()}") for name in names} == FRAMES["flags"]
    assert (FRAMES["header_bytes"], FRAMES["max_body"]) == (wire.HEADER_BYTES, wire.MAX_BODY)
    assert FRAMES["version"] == wire.PROTOCOL_VERSION
    for name, number in FRAMES["chunk_states"].items():
        assert getattr(messages, f"CHUNK_{name.upper()}") == number
    for name, number in FRAMES["grant_results"].items():
        assert getattr(messages, f"GRANT_{name.upper()}") == number


def test_references_match_those_of_the_sidecar() -> None:
    vector = vectors("refs.json")
    refs = Refs.read(bytes.fromhex(vector["packed"]))
    columns = ("slot", "generation", "length", "section")
    for column, values in zip(columns, refs, strict=True):
        assert values.tolist() == [ref[column] for ref in vector["refs"]]
    assert vector["no_slot"] == shared.NO_SLOT
    with pytest.raises(ValueError):
        Refs.read(b"x" * 15)


def test_lock_bytes_are_the_same() -> None:
    for lock in vectors("lockfile.json")["locks"]:
        assert shared.lock_offset(lock["number"]) == lock["offset"]


def memfd(content: bytes, size: int) -> int:
    fd = stub_sidecar.memfd("vector", size)
    os.pwrite(fd, content, 0)
    return fd


def test_the_slot_table_matches_that_of_the_sidecar() -> None:
    vector = vectors("table.json")
    header = bytes.fromhex(vector["header"])
    offsets = vector["header_offsets"]
    region, arena_bytes = (struct.unpack_from("<Q", header, offsets[name])[0] for name in ("region", "arena_bytes"))
    rows_offset = struct.unpack_from("<Q", header, offsets["rows_offset"])[0]
    size = struct.unpack_from("<Q", header, offsets["chunks_offset"])[0]
    row = bytes.fromhex(vector["row"])
    state, generation, owner = (
        struct.unpack_from("<I", row, vector["row_offsets"][name])[0] for name in ("state", "generation", "owner")
    )
    table = memfd(header, size)
    os.pwrite(table, row, rows_offset + 3 * vector["row_bytes"])
    mapping = Mapping(region, memfd(b"", arena_bytes), table, arena_bytes, size)
    slot = np.array([3], dtype=np.uint32)
    assert vector["states"]["published"] == state == shared.PUBLISHED
    assert mapping.same_generation(slot, np.array([generation], dtype=np.uint32))
    assert not mapping.same_generation(slot, np.array([generation + 1], dtype=np.uint32))
    assert not mapping.granted_to(owner, slot, np.array([generation], dtype=np.uint32))
    granted = bytearray(row)
    struct.pack_into("<I", granted, vector["row_offsets"]["state"], vector["states"]["granted"])
    os.pwrite(table, granted, rows_offset + 3 * vector["row_bytes"])
    assert mapping.granted_to(owner, slot, np.array([generation], dtype=np.uint32))
    assert not mapping.granted_to(owner + 1, slot, np.array([generation], dtype=np.uint32))
    assert vector["states"] == {
        "free": shared.FREE,
        "granted": shared.GRANTED,
        "committed": shared.COMMITTED,
        "published": shared.PUBLISHED,
    }
    mapping.close()


@pytest.mark.parametrize("field", ["magic", "version", "row_bytes", "region", "arena_bytes", "rows"])
def test_a_table_that_does_not_fit_is_not_mapped(field: str) -> None:
    vector = vectors("table.json")
    header = bytearray.fromhex(vector["header"])
    region, arena_bytes = (
        struct.unpack_from("<Q", header, vector["header_offsets"][name])[0] for name in ("region", "arena_bytes")
    )
    size = struct.unpack_from("<Q", header, vector["header_offsets"]["chunks_offset"])[0]
    header[vector["header_offsets"][field] + (2 if field == "rows" else 0)] ^= 0x7F
    arena, table = memfd(b"", arena_bytes), memfd(bytes(header), size)
    with pytest.raises(SharedMemoryError):
        Mapping(region, arena, table, arena_bytes, size)
    os.close(arena)
    os.close(table)


@pytest.mark.parametrize("wrong", ["file", "socket", "unsealed", "short", "empty"])
@pytest.mark.parametrize("which", ["arena", "table"])
def test_unsealed_descriptors_are_not_mapped(tmp_path: Path, wrong: str, which: str) -> None:
    good = stub_sidecar.Memory(7, 4)
    fds = {"arena": good.arena_fd, "table": good.table_fd}
    sizes = {"arena": good.arena_bytes, "table": good.table_bytes}
    content = os.pread(fds[which], sizes[which], 0)
    ends: tuple[socket.socket, ...] = ()
    if wrong == "file":
        (tmp_path / "file").write_bytes(content)
        fds[which] = os.open(tmp_path / "file", os.O_RDWR)
    elif wrong == "socket":
        ends = socket.socketpair()
        fds[which] = ends[0].fileno()
    elif wrong == "unsealed":
        fds[which] = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.write(fds[which], content)
    elif wrong == "short":
        fds[which] = memfd(content[:-4096], sizes[which] - 4096)
    else:
        sizes[which] = 0
    with pytest.raises(SharedMemoryError):
        Mapping(7, fds["arena"], fds["table"], sizes["arena"], sizes["table"])
    Mapping(7, good.arena_fd, good.table_fd, good.arena_bytes, good.table_bytes).close()


def test_a_frame_is_read_whole_from_any_segments() -> None:
    own, peer = socket.socketpair()
    frames = wire.Frames(own)
    body = encode(messages.AbortReply(freed=1)) * 50
    raw = wire.encode_header(wire.Op.ABORT, wire.FLAG_REPLY, 9, len(body)) + body
    for at in range(0, len(raw), 7):
        assert frames.next(0) is None
        peer.sendall(raw[at : at + 7])
    frame = frames.next(0)
    assert frame is not None
    assert (frame[0].tag, frame[1]) == (9, body)
    peer.sendall(raw[:-1])
    peer.close()
    assert frames.next(1) is None
    assert frames.next(1) is None
    assert frames.ended
    own.close()


def test_truncated_descriptors_end_the_connection() -> None:
    own, peer = socket.socketpair()
    frames = wire.Frames(own)
    raw = wire.encode_header(wire.Op.HELLO, wire.FLAG_FDS, 1, 0)
    socket.send_fds(peer, [raw], [0] * 32)
    with pytest.raises(wire.FrameError):
        frames.next(1)
    frames.close()
    own.close()
    peer.close()
