"""A stub sidecar for what the real one cannot do: refusals, lost answers, prepared tables."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcachepool import wire
from kvcachepool.shared import FREE, GRANTED, PUBLISHED, ROW_BYTES
from kvcachepool.wire import Op

SETTINGS = {
    "chunk_tokens": 256,
    "save": "Prompt",
    "min_load_tokens": 512,
    "load_timeout_ms": 2000,
    "first_poll_wait_us": 1000,
    "step_wait_us": 2000,
    "grant_timeout_ms": 1000,
    "store_bytes_in_flight": 256 << 20,
}


class Received(NamedTuple):
    """A frame as it was received. `fds` are owned by the stub."""

    op: int
    tag: int
    body: dict[str, Any]
    fds: list[int]
    connection: int


def memfd(name: str, size: int) -> int:
    """A sealed memfd, like those of the sidecar."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class Memory:
    """An arena and its slot table, as the engine creates them."""

    def __init__(self, region: int, rows: int, segments: int = 1) -> None:
        self.region = region
        self.rows = rows
        self.arena_bytes = rows * ROW_BYTES
        self.table_bytes = 4096 + rows * 64
        self.arena_fd = memfd("arena", self.arena_bytes)
        self.table_fd = memfd("table", self.table_bytes)
        self.arena = mmap.mmap(self.arena_fd, self.arena_bytes)
        self.table = mmap.mmap(self.table_fd, self.table_bytes)
        struct.pack_into(
            "<8sIIQQIIQQQI",
            self.table,
            0,
            *(b"KVCPSLOT", 1, ROW_BYTES, region, self.arena_bytes, rows, 0),
            *(self.arena_bytes // segments, 4096, 4096, rows),
        )
        self._view = np.frombuffer(self.table, dtype=np.uint32, offset=4096).reshape(rows, 16)

    def grant(self, slot: int, generation: int, owner: int, length: int) -> bytes:
        """Makes a row GRANTED. Returns its reference for section 0."""
        self._view[slot, 1], self._view[slot, 2] = generation, owner
        self._view[slot, 0] = GRANTED
        return struct.pack("<IIII", slot, generation, length, 0)

    def publish(self, slot: int, generation: int, content: bytes) -> bytes:
        """Makes a row PUBLISHED with these bytes. Returns its reference for section 0."""
        self.arena[slot * ROW_BYTES : slot * ROW_BYTES + len(content)] = content
        self._view[slot, 1] = generation
        self._view[slot, 0] = PUBLISHED
        return struct.pack("<IIII", slot, generation, len(content), 0)

    def free(self, slot: int) -> None:
        self._view[slot, 0] = FREE

    def bump(self, slot: int) -> None:
        """Raises the generation, like before a reuse."""
        self._view[slot, 1] += 1

    def read(self, slot: int, length: int) -> bytes:
        return self.arena[slot * ROW_BYTES : slot * ROW_BYTES + length]


class StubSidecar:
    """Answers HELLO and REGISTER as a healthy sidecar does; `answer` may say otherwise.

    answer(frame) -> None (default answer), False (no answer), or a body dict (answer with it).
    """

    def __init__(self, folder: Path, rows: int = 64) -> None:
        self.path = str(folder / "sidecar.sock")
        self.lock_path = str(folder / "sidecar.lock")
        Path(self.lock_path).write_bytes(b"\0" * 64)
        self.memory: Memory | None = Memory(7, rows)
        self.answer: Callable[[Received], dict[str, Any] | bool | None] = lambda frame: None
        self.received: list[Received] = []
        self.next_lock = 1
        self.boot = 1
        self._changed = threading.Condition()
        self._connections: dict[int, socket.socket] = {}
        self._busy: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._count = 0
        threading.Thread(target=self._accept, daemon=True).start()

    # -- for tests

    def wait_for(self, found: Callable[[list[Received]], Any], timeout_s: float = 10.0) -> Any:
        """The first truthy `found(frames so far)`; fails the test after the deadline."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                result = found(self.received)
                if result:
                    return result
                left = deadline - time.monotonic()
                assert left > 0, f"not received in time; so far {[(Op(f.op).name, f.body) for f in self.received]}"
                self._changed.wait(left)

    def frames(self, op: Op) -> list[Received]:
        with self._changed:
            return [frame for frame in self.received if frame.op == op]

    def hello(self, nth: int) -> Received:
        """The nth HELLO, counted from 1."""
        return self.wait_for(lambda all_: [f for f in all_ if f.op == Op.HELLO][nth - 1 : nth])[0]

    def processed_all(self) -> bool:
        """Waits until all sent frames were processed: frames of several connections have no other order."""
        with self._changed:
            unread = (fcntl.ioctl(one, termios.FIONREAD, b"\0" * 4) for one in self._connections.values())
            return not self._busy and not any(map(any, unread))

    def cut(self) -> None:
        """Closes all connections."""
        with self._changed:
            connections = list(self._connections.values())
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def raw(self, data: bytes) -> None:
        """Sends bytes on the newest connection."""
        with self._changed:
            connection = self._connections[max(self._connections)]
        connection.sendall(data)

    def reply(self, frame: Received, body: dict[str, Any], flags: int = 0, fds: list[int] | None = None) -> None:
        with self._changed:
            connection = self._connections[frame.connection]
        payload = msgspec.msgpack.encode(body)
        flags |= wire.FLAG_REPLY | (wire.FLAG_FDS if fds else 0)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        header = wire.encode_header(frame.op, flags, frame.tag, len(payload))
        with contextlib.suppress(OSError):
            connection.sendmsg([header + payload], ancillary)

    def refuse(self, frame: Received, code: str, retryable: bool = False) -> None:
        self.reply(frame, {"code": code, "message": "by the test", "retryable": retryable}, wire.FLAG_ERROR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    # -- serving

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self._count += 1
                number = self._count
                self._connections[number] = connection
            threading.Thread(target=self._serve, args=(number, connection), daemon=True).start()

    def _serve(self, number: int, connection: socket.socket) -> None:
        buffer, fds = b"", []
        with contextlib.suppress(OSError):
            while True:
                connection.recv(1, socket.MSG_PEEK)  # bytes here mean unread frames or a busy connection
                with self._changed:
                    self._busy.add(number)
                data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(64))
                for _, _, payload in ancillary:
                    fds += list(array.array("i", payload))
                if not data:
                    break
                buffer += data
                while len(buffer) >= wire.HEADER_BYTES:
                    header = wire.decode_header(buffer)
                    end = wire.HEADER_BYTES + header.length
                    if len(buffer) < end:
                        break
                    body = msgspec.msgpack.decode(buffer[wire.HEADER_BYTES : end])
                    buffer = buffer[end:]
                    passed: list[int] = []
                    if header.flags & wire.FLAG_FDS:
                        passed, fds = fds, []
                    frame = Received(header.opcode, header.tag, body, passed, number)
                    answer = self.answer(frame)
                    with self._changed:  # whoever has seen the answer also sees the frame, and the other way round
                        self._respond(frame, answer)
                        self.received.append(frame)
                        self._changed.notify_all()
                with self._changed:
                    self._busy.discard(number)
        with self._changed:
            self._busy.discard(number)
            self._connections.pop(number, None)
        connection.close()

    def _respond(self, frame: Received, answer: dict[str, Any] | bool | None) -> None:
        if answer is False:
            return
        if isinstance(answer, dict):
            self.reply(frame, answer)
        elif frame.op == Op.HELLO:
            self.greet(frame)
        elif frame.op == Op.REGISTER:
            self.reply(frame, {"ready": True, "layout_id": b"l" * 32, "model_id": b"m" * 32})

    def greet(self, frame: Received, **changes: Any) -> None:
        """The HELLO response of a healthy sidecar."""
        body: dict[str, Any] = {
            "version": 1,
            "sidecar_version": "0",
            "session": 1,
            "boot": self.boot,
            "settings": SETTINGS,
            "memory": "none",
            "fds": [],
        }
        fds: list[int] = []
        hello = frame.body
        if hello.get("lock") is None:
            body |= {"memory": "lock_first", "lock": self.next_lock, "fds": ["lock"]}
            self.next_lock += 1
            fds = [os.open(self.lock_path, os.O_RDWR | os.O_CLOEXEC)]
        elif self.memory is None:
            body |= {"memory": "none", "reason": "NoArena", "retry_ms": 20}
        elif hello.get("region") is None:
            body |= {"memory": "sent", "region": self.memory.region, "fds": ["arena", "table"]}
            body |= {"arena_bytes": self.memory.arena_bytes, "table_bytes": self.memory.table_bytes}
            fds = [self.memory.arena_fd, self.memory.table_fd]
        elif hello["region"] == self.memory.region:
            body |= {"memory": "held", "region": self.memory.region}
        else:
            body |= {"memory": "unmap", "reason": "another region"}
        # The lock file's descriptor stays open: stub and client are one process, and closing any of them would drop the
        # client's lock.
        self.reply(frame, body | changes, fds=fds)
