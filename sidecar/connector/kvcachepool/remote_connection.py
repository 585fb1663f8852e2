"""One TLS connection to a remote server: frames, deadlines, and the checks of what the server sends.

A connection is used by one thread at a time (`remote_pool`). After a failure in the middle of a frame, or with replies
missing, it is not `usable` any more. Its end gives back all that the server holds for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from . import __version__, wire
from .messages import ErrorBody, Message, RemoteHello, RemoteHelloReply, decode, encode
from .object_types import Refused, Unavailable
from .wire import HEADER_BYTES, Op

#: Longest body of a reply without data, and longest map of one with data.
_MAX_MAP_BYTES = 1 << 20
#: Smaller buffers are sent together.
_JOIN_BYTES = 32 << 10
_KEEPALIVE_IDLE_S, _KEEPALIVE_EACH_S, _KEEPALIVE_COUNT = 10, 5, 3

_M = TypeVar("_M", bound=Message)


class Server(NamedTuple):
    """A server. name: `host:port` in lower case and without leading zeros, which chooses the server of a key."""

    name: str
    host: str
    port: int


class Access(NamedTuple):
    """What a client trusts, and what it shows to servers. key: reads the key; raises `ValueError`."""

    context: Callable[[], ssl.SSLContext]
    client_name: str
    key: Callable[[], str]


class Connection:
    """A connection after HELLO.

    busy, requests_to_release: guarded by the pool's lock.
    leases: requests that hold objects.
    """

    def __init__(self, sock: socket.socket, server: str) -> None:
        self.closed = False
        self.busy = False
        self.leases: set[str] = set()
        self.requests_to_release: list[str] = []
        self.hello = RemoteHelloReply(0, "", 0, 0)
        self._sock = sock
        self._server = server
        self._tags = itertools.count(1)
        self._asked: deque[tuple[Op, int]] = deque()
        self._torn = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)

    @property
    def usable(self) -> bool:
        """Whether the next frame can follow."""
        return not (self.closed or self._torn or self._asked)

    def lost(self) -> bool:
        """Whether an idle connection has ended: the server sends nothing that nobody asked for."""
        return self.closed or bool(self._poll.poll(0))

    def close(self) -> None:
        self.closed = True
        self.interrupt()  # closing the socket ends nothing while a fork of the process has a copy of it
        self._sock.close()

    def interrupt(self) -> None:
        """Ends the connection, and what another thread does with it."""
        with contextlib.suppress(OSError):
            # `SSLSocket.shutdown` would turn the socket into one without TLS below the other thread.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    # -- requests

    def call(self, op: Op, body: Message, kind: type[_M], deadline: float) -> _M:
        """The reply to a request. Raises `Refused`, or `Unavailable`."""
        self.send(op, body, deadline)
        reply, nbytes = self.receive(kind, deadline)
        if nbytes:
            self.bad_reply(f"{nbytes} bytes behind a reply that has none")
        return reply

    def send(self, op: Op, body: Message, deadline: float, data: Sequence[memoryview] | None = None) -> None:
        """Sends a request, with `data` behind its map. Sends nothing if the deadline has passed."""
        tag, packed = next(self._tags), encode(body)
        flags, length = 0, len(packed)
        if data is not None:
            flags, length = wire.FLAG_DATA, 4 + length + sum(map(len, data))
            packed = len(packed).to_bytes(4, "little") + packed
        try:
            left_s = _left(deadline)
        except TimeoutError:
            # The server knows nothing of the request. The connection, with the leases on it, stays usable.
            raise Unavailable("Deadline", f"no time was left to send a request to {self._server}") from None
        self._asked.append((op, tag))
        with self._io():
            for part in _joined(wire.encode_header(op, flags, tag, length) + packed, data or ()):
                at = 0
                while at < len(part):
                    self._sock.settimeout(left_s or _left(deadline))
                    left_s = 0.0
                    at += self._sock.send(part[at:])

    def receive(self, kind: type[_M], deadline: float) -> tuple[_M, int]:
        """The reply to the oldest request, and the number of the bytes behind it, which `fill` must read next."""
        op, tag = self._asked[0]
        with self._io():
            try:
                header = wire.decode_header(self._read(HEADER_BYTES, deadline))
            except wire.WrongVersion as error:
                self.bad_reply(str(error), "WrongVersion")
            except wire.FrameError as error:
                self.bad_reply(str(error))
            if (header.opcode, header.tag) != (op, tag) or header.flags & ~(wire.FLAG_ERROR | wire.FLAG_DATA) != 1:
                self.bad_reply(f"a frame of op {header.opcode}, tag {header.tag}, flags {header.flags}")
            length, nbytes = header.length, 0
            if header.flags & wire.FLAG_DATA:
                if length < 4:
                    self.bad_reply("a frame with data and without a map")
                nbytes = length - 4
                length = int.from_bytes(self._read(4, deadline), "little")
                nbytes -= length
            if length > _MAX_MAP_BYTES or nbytes < 0 or (nbytes and header.flags & wire.FLAG_ERROR):
                self.bad_reply(f"a map of {length} bytes in a frame of {header.length}")
            raw = self._read(length, deadline)
        try:
            if header.flags & wire.FLAG_ERROR:
                refusal = decode(raw, ErrorBody)
                self._asked.popleft()
                raise (Unavailable if refusal.retryable else Refused)(refusal.code, refusal.message)
            reply = decode(raw, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.bad_reply(str(error))
        self._asked.popleft()
        self._torn = nbytes > 0
        return reply, nbytes

    def fill(self, targets: Sequence[memoryview], deadline: float) -> None:
        """Reads the bytes behind a reply, all of them."""
        with self._io():
            for target in targets:
                self._read_into(target, deadline)

    def bad_reply(self, message: str, reason: str = "BadReply") -> NoReturn:
        """Closes the connection, because what the server holds is uncertain. Raises `Unavailable`."""
        self.close()
        raise Unavailable(reason, f"{self._server}: {message}")

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        self._torn = True
        try:
            yield
        except TimeoutError:
            self.close()
            raise Unavailable("Deadline", f"{self._server} did not answer in time") from None
        except OSError as error:
            self.close()
            raise Unavailable("ConnectionLost", f"{self._server}: {error}") from None
        self._torn = False

    def _read(self, nbytes: int, deadline: float) -> memoryview:
        raw = memoryview(bytearray(nbytes))
        self._read_into(raw, deadline)
        return raw

    def _read_into(self, target: memoryview, deadline: float) -> None:
        at = 0
        while at < len(target):
            self._sock.settimeout(_left(deadline))
            received = self._sock.recv_into(target[at:])
            if not received:
                raise ConnectionResetError("the server has closed the connection")
            at += received


def connect(server: Server, access: Access, instance: str, deadline: float) -> Connection:
    """A connection whose HELLO was accepted. Raises `Unavailable`."""
    try:
        key = access.key()
    except ValueError as error:
        raise Unavailable("NoKey", str(error)) from None
    try:
        raw = socket.create_connection((server.host, server.port), _left(deadline))
    except (OSError, UnicodeError) as error:
        raise Unavailable("NotConnected", f"no server at {server.name}: {error}") from None
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EACH_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
        raw.settimeout(_left(deadline))
        sock = access.context().wrap_socket(raw, server_hostname=server.host)
    except (OSError, ValueError) as error:
        raw.close()
        raise Unavailable("NotConnected", f"no TLS with {server.name}: {error}") from None
    connection = Connection(sock, server.name)
    try:
        _greet(connection, access.client_name, instance, key, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: Connection, name: str, instance: str, key: str, deadline: float) -> None:
    body = RemoteHello(wire.PROTOCOL_VERSION, engine=name, engine_version=__version__, instance=instance, key=key)
    try:
        hello = connection.call(Op.HELLO, body, RemoteHelloReply, deadline)
    except Refused as error:
        raise Unavailable(error.code, f"the server refused this client: {error.message}") from None
    except Unavailable as error:
        if error.reason not in ("ConnectionLost", "Deadline"):
            raise
        raise Unavailable("NotConnected", f"no reply to HELLO: {error.message}") from None
    if "objects" not in hello.features:
        raise Unavailable("ObjectsNotServed", "the server has no opaque objects")
    if hello.arena_bytes < 0:
        connection.bad_reply("a negative size in HELLO")
    connection.hello = hello


def new_instance(name: str) -> str:
    """A name for one client of this process."""
    return f"{name}-{os.urandom(6).hex()}"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _joined(first: bytes, parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes in order, small parts together: each part would be a TLS record."""
    small = bytearray(first)
    for part in parts:
        large = len(part) >= _JOIN_BYTES
        if not large:
            small += part
        if large or len(small) >= _JOIN_BYTES:
            yield memoryview(small)
            small = bytearray()
        if large:
            yield part
    if small:
        yield memoryview(small)
