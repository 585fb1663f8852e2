"""A stand-in for a remote server: TLS over a dict, for replies and failures that the real one never gives.

`answer` changes each reply. Objects can be read as soon as they are complete, and are never evicted.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcachepool import wire
from kvcachepool.client import Client, Item, Put
from kvcachepool.messages import CHUNK_READY, GRANT_EXISTS, GRANT_GRANTED
from kvcachepool.wire import Op
from servers.waiting import wait_for

HASH_BYTES = 32
#: A value of 5 MiB.
VALUE = bytes(range(256)) * 4096 * 5
#: Deadline of calls that are expected to end much earlier.
LONG_S = 30.0
KEY = "the key of the tests"
REPLY, ERROR, DATA = wire.FLAG_REPLY, wire.FLAG_ERROR, wire.FLAG_DATA


def options(certificates: Path) -> dict[str, Any]:
    """Arguments of a client that the stand-in accepts."""
    return {"key": KEY, "ca_file": str(certificates / "ca.crt"), "timeout_s": LONG_S}


class Received(NamedTuple):
    """A request. connection: counted from 1."""

    connection: int
    op: int
    tag: int
    body: dict[str, Any]
    data: bytes


class Answer(NamedTuple):
    """A reply. data: None for a frame without data. raw: sent instead of the frame. cut: the connection ends after this
    many bytes. pause_s: the bytes are sent one by one, with this pause.
    """

    body: dict[str, Any]
    data: bytes | None = None
    flags: int = REPLY
    op: int | None = None
    tag: int | None = None
    raw: bytes | None = None
    cut: int | None = None
    pause_s: float = 0.0

    def frame(self, request: Received) -> bytes:
        if self.raw is not None:
            return self.raw
        packed, flags = msgspec.msgpack.encode(self.body), self.flags
        if self.data is not None:
            packed, flags = struct.pack("<I", len(packed)) + packed + self.data, flags | DATA
        op = request.op if self.op is None else self.op
        tag = request.tag if self.tag is None else self.tag
        return wire.encode_header(op, flags, tag, len(packed)) + packed


Change = Callable[[Answer], Answer]


def refusal(code: str, retryable: bool = False) -> Answer:
    """An error."""
    return Answer({"code": code, "message": "by the test", "retryable": retryable}, flags=REPLY | ERROR)


def lies(op: Op, change: Change) -> Callable[[Received, Answer], Answer]:
    """An `answer` that changes the replies to one op."""
    return lambda request, answer: change(answer) if request.op == op else answer


def says(**fields: Any) -> Change:
    """A change of fields."""
    return lambda answer: answer._replace(body=answer.body | fields)


class _Connection:
    """What the server holds for one connection."""

    def __init__(self, number: int, sock: ssl.SSLSocket) -> None:
        self.number = number
        self.sock = sock
        self.leases: dict[str, list[bytes | None]] = {}
        self.granted: dict[str, list[_Granted | None]] = {}


class _Granted:
    def __init__(self, name: tuple[bytes, bytes], nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.written = bytearray()


class StubRemote:
    """objects: bytes by namespace and digest.

    answer(request, answer): called with each answer. Returns the one to send, or None for none.
    """

    def __init__(self, certificates: Path, port: int = 0) -> None:
        self.answer: Callable[[Received, Answer], Answer | None] = lambda request, answer: answer
        self.key = KEY
        self.features = ["objects"]
        self.arena_bytes = 1 << 30
        self.objects: dict[tuple[bytes, bytes], bytes] = {}
        self.pinned: set[tuple[bytes, bytes]] = set()
        self.received: list[Received] = []
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self._open: dict[int, _Connection] = {}
        self._writing: set[tuple[bytes, bytes]] = set()
        self._accepted = 0
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def target(self) -> str:
        return f"tls://{self.name}"

    def close(self) -> None:
        """The end of the server."""
        self.ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Ends all connections."""
        with self.changed:
            for connection in self._open.values():
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def frames(self, op: Op) -> list[Received]:
        with self.changed:
            return [one for one in self.received if one.op == op]

    def wait_for(self, condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        """Waits until a condition on this object's state is true."""
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "the stand-in did not get there in time"
            return condition()

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the open connections."""
        with self.changed:
            return set(self._open)

    @property
    def held(self) -> int:
        """Leases and unwritten grants of all connections."""
        with self.changed:
            granted = sum(one is not None for c in self._open.values() for g in c.granted.values() for one in g)
            return granted + sum(len(c.leases) for c in self._open.values())

    # -- the server

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted += 1
            threading.Thread(target=self._serve, args=(self._accepted, sock), daemon=True).start()

    def _serve(self, number: int, raw: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            sock = self.context.wrap_socket(raw, server_side=True)
            connection = _Connection(number, sock)
            with self.changed:
                self._open[number] = connection
            if self.ended.is_set():  # `close` did not know of it
                self.cut()
            try:
                while self._next(connection):
                    pass
            finally:
                with self.changed:
                    for one in (one for granted in connection.granted.values() for one in granted if one):
                        self._writing.discard(one.name)
                    del self._open[number]
                    self.changed.notify_all()
                sock.close()

    def _next(self, connection: _Connection) -> bool:
        header = wire.decode_header(_exactly(connection.sock, wire.HEADER_BYTES))
        body, data = _exactly(connection.sock, header.length), b""
        if header.flags & DATA:
            (length,) = struct.unpack_from("<I", body)
            body, data = body[4 : 4 + length], body[4 + length :]
        request = Received(connection.number, header.opcode, header.tag, msgspec.msgpack.decode(body), data)
        with self.changed:
            self.received.append(request)
            answer = self._answer(connection, request)
            self.changed.notify_all()
        changed = self.answer(request, answer)
        if changed is not None:
            frame = changed.frame(request)
            step = 1 if changed.pause_s else len(frame)
            for at in range(0, len(frame) if changed.cut is None else changed.cut, step):
                connection.sock.sendall(frame[at : at + step] if changed.cut is None else frame[: changed.cut])
                self.ended.wait(changed.pause_s)
        return changed is None or (changed.cut is None and not (request.op == Op.HELLO and changed.flags & ERROR))

    def _answer(self, connection: _Connection, request: Received) -> Answer:
        answers: dict[int, Callable[[_Connection, Received], Answer]] = {
            Op.HELLO: self._hello,
            Op.PROBE: self._probe,
            Op.RELEASE: self._release,
            Op.GRANT: self._grant,
            Op.OBJECTS: self._change,
            Op.READ: self._read,
            Op.WRITE: self._write,
        }
        return answers[request.op](connection, request)

    def _hello(self, connection: _Connection, request: Received) -> Answer:
        if request.body["key"] != self.key:
            return refusal("Unauthorized")
        reply = {"version": 1, "sidecar_version": "0.1.0", "boot": 1, "features": self.features}
        return Answer(reply | {"arena_bytes": self.arena_bytes})

    def _probe(self, connection: _Connection, request: Received) -> Answer:
        found = [self.objects.get(name) for name in _names(request)]
        if not request.body.get("independent", False) and None in found:
            first = found.index(None)
            found[first:] = [None] * (len(found) - first)
        if request.body.get("local_tokens") is not None:
            if request.body["request"] in connection.leases:
                return refusal("BadBody")
            connection.leases[request.body["request"]] = found
        states = bytes(0 if one is None else CHUNK_READY for one in found)
        return Answer({"states": states, "bytes": [len(one) for one in found if one is not None], "reason": ""})

    def _release(self, connection: _Connection, request: Received) -> Answer:
        for one in request.body["requests"]:
            connection.leases.pop(one, None)
        return Answer({})

    def _grant(self, connection: _Connection, request: Received) -> Answer:
        granted: list[_Granted | None] = []
        for chunk in request.body["chunks"]:
            name = (request.body.get("namespace", b""), chunk["hash"])
            taken = name in self.objects or name in self._writing
            granted.append(None if taken else _Granted(name, chunk["bytes"]))
            self._writing.add(name)
        connection.granted[request.body["request"]] = granted
        return Answer({"results": bytes(GRANT_EXISTS if one is None else GRANT_GRANTED for one in granted)})

    def _write(self, connection: _Connection, request: Received) -> Answer:
        granted = connection.granted[request.body["request"]]
        written, at = bytearray(), 0
        for index, offset, length in request.body["parts"]:
            one = granted[index]
            assert one is not None
            assert len(one.written) == offset, "bytes are sent in order"
            one.written += request.data[at : at + length]
            at += length
            complete = len(one.written) == one.nbytes
            if complete:
                self.objects[one.name] = bytes(one.written)
                self._writing.discard(one.name)
                granted[index] = None
            written.append(1 + complete)
        assert at == len(request.data)
        return Answer({"written": bytes(written)})

    def _read(self, connection: _Connection, request: Received) -> Answer:
        leased = connection.leases.get(request.body["request"])
        found, data = bytearray(), b""
        for index, offset, length in request.body["parts"]:
            one = None if leased is None else leased[index]
            found.append(one is not None)
            if one is not None:
                assert offset + length <= len(one)
                data += one[offset : offset + length]
        return Answer({"found": bytes(found)}, data)

    def _change(self, connection: _Connection, request: Received) -> Answer:
        names = _names(request)
        states = bytes(name in self.objects for name in names)
        sizes = [len(self.objects.get(name, b"")) for name in names]
        op = request.body["op"]
        count = sum(states)
        if op == "unpin":
            count = len(self.pinned.intersection(names))
            self.pinned.difference_update(names)
        for name in names:
            if op == "remove":
                self.objects.pop(name, None)
            elif op == "pin" and name in self.objects:
                self.pinned.add(name)
        pinned = bytes(name in self.pinned for name in names)
        return Answer({"count": count, "states": states, "bytes": sizes, "tiers": states, "pinned": pinned})


def _names(request: Received) -> list[tuple[bytes, bytes]]:
    packed, namespace = request.body["hashes"], request.body.get("namespace", b"")
    return [(namespace, packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]


def _exactly(sock: ssl.SSLSocket, nbytes: int) -> bytes:
    raw = bytearray()
    while len(raw) < nbytes:
        received = sock.recv(min(nbytes - len(raw), 1 << 20))
        if not received:
            raise EOFError
        raw += received
    return bytes(raw)


def serves_again(remote: StubRemote, client: Client, connections: set[int]) -> None:
    """The connections of before are gone with what they held, and the next call works."""
    remote.answer = lambda request, answer: answer
    wait_for(lambda: remote.held == 0 and not connections.intersection(remote.numbers), 10, "their end")
    assert client.put([Item("again", VALUE)]) == [Put.STORED]
    assert client.get("again")[0].value == VALUE
    assert client.remove("again") == 1
