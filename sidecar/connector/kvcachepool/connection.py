"""One role's session with the sidecar: socket, reader thread, reconnection in the background, numbered HELLOs.

Only `go_off` blocks its caller. Sends do not block: a frame that does not fit into the socket closes the connection,
and the next HELLO reconciles both sides. Callbacks run on the reader thread and never hold a lock of this file.

The owner of a `Connection` has a lock of its own. It calls `send` and `request` while holding it, together with the
change of its state that the frame describes; `held` and `after_hello` take the same lock. So nothing is lost between a
HELLO's list and the frames behind it: if `send` returns False, the owner keeps the message and sends it in
`after_hello`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from . import wire
from .messages import NO_SETTINGS, ErrorBody, Hello, HelloReply, Message, decode, encode
from .shared import Shared, SharedMemoryError, shared
from .wire import Op

logger = logging.getLogger("kvcachepool")

_HELLO_TIMEOUT_S = 30.0
_BACKOFF_FIRST_S = 0.01
_BACKOFF_LAST_S = 2.0
_BACKOFF_REFUSED_S = 30.0
_SEND_BUFFER = 4 << 20
_MAX_LOCK_FAILURES = 3

_M = TypeVar("_M", bound=Message)


class Reply(NamedTuple):
    """A response to `request`. `error` is set if the sidecar refused the request. `partial`: more responses with this
    tag follow.
    """

    tag: int
    partial: bool
    error: ErrorBody | None
    body: bytes
    #: Descriptors of the frame. Those that the callback does not take are closed after it.
    fds: list[int]

    def read(self, kind: type[_M]) -> _M:
        """The body as a message. Raises `msgspec.DecodeError`."""
        return decode(self.body, kind)


class Held(NamedTuple):
    """The list in a HELLO: granted slots (packed references) of a worker or an object client, and request ids whose
    leases continue.
    """

    grants: bytes = b""
    requests: tuple[str, ...] = ()


class Hooks(Protocol):
    """Callbacks of a `Connection`'s owner. They run on the reader thread, except for `before_unmap` and `on_off`, which
    may run on any thread.
    """

    def held(self, region: int | None) -> Held:
        """Returns the list for the next HELLO, which names this region as mapped. Called under the owner's lock."""

    def after_hello(self) -> None:
        """HELLO was sent, and `send` and `request` work again. Sends what ended after the list was made, and what is
        pending.
        """

    def on_hello(self, reply: HelloReply) -> None:
        """HELLO was answered with memory `sent`, `held` or `none`. REGISTER is sent here."""

    def on_lost(self) -> None:
        """The connection was lost. No response to an earlier `request` will arrive."""

    def before_unmap(self) -> None:
        """Ends all copies and drops all views of the arena. Returns when none is in use."""

    def on_off(self, reason: str) -> None:
        """This client has turned off permanently, for this reason."""


_tags = itertools.count(1)


class Connection:
    """A session of one role (`scheduler`, `worker` or `opaque`) of this process.

    Attributes that any thread may read:
    role, instance: the arguments.
    connected: HELLO was answered on the current connection.
    connection: number of the connection; responses to an earlier one never arrive.
    settings: from the last HELLO response, `NO_SETTINGS` before it.
    hello: the last HELLO response, or None.
    refusal: name of the error with which the sidecar refused the last HELLO, or "".
    failure: message of the error that ended the last connection, or "".
    attempted: set once the first attempt to connect has succeeded or failed.
    on_other: set before `start`; called with responses that no `request` of this process waits for.
    """

    def __init__(
        self,
        role: str,
        instance: str,
        rank: int,
        engine_version: str,
        socket_path: str,
        hooks: Hooks,
        wants_memory: bool | None = None,
        engine: str = "vllm",
    ) -> None:
        """Nothing happens before `start`. By default, only workers and object clients have `wants_memory`."""
        self.role = role
        self.wants_memory = role in ("worker", "opaque") if wants_memory is None else wants_memory
        self.settings = NO_SETTINGS
        self.hello: HelloReply | None = None
        self.connected = False
        self.connection = 0
        self.refusal = ""
        self.failure = ""
        self.attempted = threading.Event()
        self.on_other: Callable[[Reply], None] | None = None
        self._lock_failures = 0
        self.instance = instance
        self._engine = engine
        self._rank = rank
        self._engine_version = engine_version
        self._path = socket_path
        self._hooks = hooks
        self._shared: Shared = shared()
        self._lock = threading.Lock()  # guards: _sock's writes, _open, _callbacks
        self._sock: socket.socket | None = None
        self._open = False
        self._callbacks: dict[int, Callable[[Reply], None]] = {}
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"kvcachepool-{role}", daemon=True)

    # -- for the owner

    def start(self) -> None:
        """Joins the process's shared state and connects in the background."""
        self._shared.join(self)
        if self._stop.is_set():
            self._shared.leave(self)
            return
        self._thread.start()

    def send(self, op: Op, body: Message) -> bool:
        """Sends a one-way frame. Returns False if no HELLO was sent on a connection, or if the frame did not fit."""
        return self._transmit(op, encode(body), None) is not None

    def request(self, op: Op, body: Message, on_reply: Callable[[Reply], None]) -> int | None:
        """Sends a request whose responses go to `on_reply`, on the reader thread. Returns its tag, or None if it was
        not sent.

        A response may arrive before this returns. After `on_lost` no response arrives.
        """
        return self._transmit(op, encode(body), on_reply)

    def forward(self, op: Op, tag: int, body: bytes) -> bool:
        """Sends a message of another process under that process's tag; `on_other` gets its responses. Returns whether
        it was sent.
        """
        return self._transmit(op, body, None, tag) is not None

    def drop(self, tag: int) -> None:
        """Ignores responses with this tag from now on."""
        with self._lock:
            self._callbacks.pop(tag, None)

    def go_off(self, reason: str) -> None:
        """Turns off permanently: closes the connection, ends copies, unmaps, closes the memfds, and unlocks the byte
        unless another part of the process needs them. Blocks until copies have ended.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._break()
        self._hooks.before_unmap()
        self._shared.leave(self)
        self._hooks.on_off(reason)

    # -- shared.Participant

    def before_unmap(self) -> None:
        self._hooks.before_unmap()

    def reconnect(self) -> None:
        self._break()

    # -- sending

    def _transmit(
        self, op: Op, body: bytes, on_reply: Callable[[Reply], None] | None, tag: int | None = None
    ) -> int | None:
        # A forked child may have inherited the lock from a thread that does not exist in it.
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if not self._open:
                return None
            tag = next(_tags) if tag is None else tag
            if on_reply is not None:
                self._callbacks[tag] = on_reply
            if self._write(op, tag, body):
                return tag
            self._callbacks.pop(tag, None)
            return None

    def _write(self, op: Op, tag: int, body: bytes) -> bool:
        """Writes one frame without blocking. Breaks the connection if the frame does not fit. The lock is held."""
        sock = self._sock
        if sock is None:
            return False
        if len(body) > wire.MAX_BODY:
            return False
        if wire.send_now(sock, wire.encode_header(op, 0, tag, len(body)) + body):
            return True
        self._break_locked()
        return False

    def _break(self) -> None:
        with self._lock:
            self._break_locked()

    def _break_locked(self) -> None:
        self._open = False
        self.connected = False
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    # -- the reader thread

    def _run(self) -> None:
        backoff = _BACKOFF_FIRST_S
        while not self._stop.is_set():
            accepted = False
            try:
                accepted = self._session()
            except wire.WrongVersion as error:
                accepted = self.connected
                self._refused(ErrorBody(code="WrongVersion", message=str(error), retryable=False))
            except (OSError, wire.FrameError, SharedMemoryError, msgspec.DecodeError) as error:
                logger.debug("connection to the sidecar ended: %s", error)
                self.failure = str(error)
                accepted = self.connected
            except Exception:
                logger.exception("unexpected error on the connection to the sidecar")
            finally:
                self._close()
                self.attempted.set()
            if self._stop.is_set():
                return
            backoff = _BACKOFF_FIRST_S if accepted else min(backoff * 2, _BACKOFF_LAST_S)
            wait = _BACKOFF_REFUSED_S if self.refusal and not accepted else backoff
            self._stop.wait(wait * random.uniform(0.5, 1.0))

    def _close(self) -> None:
        with self._lock:
            was = self._sock is not None
            self._open = False
            self.connected = False
            self._callbacks.clear()
            if self._sock is not None:
                # A forked child may hold the socket open, so that only a shutdown ends the connection.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._sock.close()
                self._sock = None
        if was:
            self._hooks.on_lost()

    def _session(self) -> bool:
        """Runs one connection. Returns whether a HELLO was accepted."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            if self._stop.is_set():
                sock.close()
                return False
            self._sock = sock
            self.connection += 1
        frames = wire.Frames(sock)
        try:
            return self._serve(frames)
        finally:
            frames.close()

    def _serve(self, frames: wire.Frames) -> bool:
        next_hello_at: float | None = time.monotonic()
        accepted = False
        while not self._stop.is_set():
            if next_hello_at is not None and time.monotonic() >= next_hello_at:
                next_hello_at, ok = self._exchange_hello(frames)
                accepted = accepted or ok
                if next_hello_at is None and not ok:
                    return accepted
                continue
            frame = frames.next(None if next_hello_at is None else max(0.0, next_hello_at - time.monotonic()))
            if frame is not None:
                self._dispatch(*frame)
            elif frames.ended:
                return accepted
        return accepted

    def _dispatch(self, header: wire.Header, body: bytes, fds: list[int]) -> None:
        partial = bool(header.flags & wire.FLAG_PARTIAL)
        with self._lock:
            on_reply = self._callbacks.get(header.tag) if partial else self._callbacks.pop(header.tag, None)
        on_reply = on_reply or self.on_other
        try:
            if on_reply is None:
                return
            error = decode(body, ErrorBody) if header.flags & wire.FLAG_ERROR else None
            try:
                on_reply(Reply(header.tag, partial, error, body, fds))
            except Exception:
                logger.exception("processing a response of the sidecar failed")
        finally:
            wire.close_all(fds)

    # -- HELLO

    def _exchange_hello(self, frames: wire.Frames) -> tuple[float | None, bool]:
        """Sends HELLO and processes the response. Returns the time of the next HELLO (None: no retry), and whether it
        was accepted.
        """
        while not self._shared.hello_lock.acquire(timeout=0.1):
            if self._stop.is_set():
                return None, False
        try:
            reply = self._send_hello(frames)
            if reply is None:
                return None, False
            again = self._apply_memory(*reply)
        finally:
            self._shared.hello_lock.release()
        if again is not None:
            return again, False
        hello = reply[0]
        self.settings = hello.settings
        self.hello = hello
        self.refusal = ""
        with self._lock:
            self.connected = self._open
        self._hooks.on_hello(hello)
        self.attempted.set()
        if hello.memory == "none" and self.wants_memory:
            return time.monotonic() + max(hello.retry_ms, 10) / 1000, True
        return None, True

    def _send_hello(self, frames: wire.Frames) -> tuple[HelloReply, list[int]] | None:
        names, fds, region = self._shared.hello_fds()
        held = self._hooks.held(region)
        body = encode(
            Hello(
                version=wire.PROTOCOL_VERSION,
                role=self.role,
                engine=self._engine,
                engine_version=self._engine_version,
                instance=self.instance,
                incarnation=self._shared.incarnation,
                number=self._shared.hello_number(self.role),
                rank=self._rank,
                fds=names,
                lock=self._shared.lock_number,
                region=region,
                grants=held.grants,
                requests=list(held.requests),
                watches_shrinks=True,
            )
        )
        tag = next(_tags)
        with self._lock:
            if self._sock is None or self._stop.is_set():
                return None
            header = wire.encode_header(Op.HELLO, wire.FLAG_FDS if fds else 0, tag, len(body))
            wire.send_with_fds(self._sock, header + body, fds)
            self._open = True
        self._hooks.after_hello()
        deadline = time.monotonic() + _HELLO_TIMEOUT_S
        while not self._stop.is_set():
            frame = frames.next(min(0.1, max(0.0, deadline - time.monotonic())))
            if frame is None:
                if frames.ended:
                    return None
                if time.monotonic() >= deadline:
                    raise TimeoutError("the sidecar did not answer HELLO")
                continue
            answer, payload, received = frame
            if answer.tag != tag:
                self._dispatch(answer, payload, received)
                continue
            if answer.flags & wire.FLAG_ERROR:
                wire.close_all(received)
                self._refused(decode(payload, ErrorBody))
                return None
            try:
                return decode(payload, HelloReply), received
            except BaseException:
                wire.close_all(received)
                raise
        return None

    def _refused(self, error: ErrorBody) -> None:
        if error.code == "LockNotHeld":
            self._shared.start_over(self)
            return
        if not error.retryable and error.code != "StaleHello":
            if self.refusal != error.code:
                logger.warning("the sidecar refused HELLO, retrying: %s: %s", error.code, error.message)
            self.refusal = error.code

    def _apply_memory(self, hello: HelloReply, fds: list[int]) -> float | None:
        """Applies the response's memory instructions. Returns the time of the next HELLO, or None if this one is
        complete.
        """
        named = dict(zip(hello.fds, fds, strict=False))
        rest = fds[len(hello.fds) :]
        try:
            if hello.memory == "lock_first":
                if hello.lock is None or "lock" not in named:
                    raise SharedMemoryError("HELLO response without the descriptor of the lock file")
                return self._take_lock(named.pop("lock"), hello.lock)
            if hello.memory == "unmap":
                logger.warning("the sidecar cannot adopt the arena (%s); unmapping it", hello.reason)
                self._shared.unmap(self)
                return time.monotonic() + hello.retry_ms / 1000
            if hello.memory == "sent":
                if hello.region is None or "arena" not in named or "table" not in named:
                    raise SharedMemoryError("HELLO response without the descriptors of arena and slot table")
                self._shared.adopt(
                    hello.region, named.pop("arena"), named.pop("table"), hello.arena_bytes, hello.table_bytes
                )
            return None
        finally:
            wire.close_all([*named.values(), *rest])

    def _take_lock(self, fd: int, number: int) -> float | None:
        """Locks the byte. Returns the time of the next HELLO: now, or never if the file cannot be locked."""
        try:
            self._shared.take_lock(fd, number)
        except OSError as error:
            # The descriptor stays open, so the number of attempts is limited.
            self._lock_failures += 1
            logger.warning("locking byte %d of the sidecar's lock file failed: %s", number, error)
            if self._lock_failures >= _MAX_LOCK_FAILURES:
                self.go_off("LockFileUnusable")
            raise
        return time.monotonic()


def report_off(
    socket_path: str, reason: str, engine_version: str, instance: str = "", for_s: float = 60.0
) -> threading.Thread:
    """Reports to the sidecar that the cache is off in this vLLM, with the reason. Retries in the background for `for_s`
    seconds.
    """

    def run() -> None:
        deadline = time.monotonic() + for_s
        wait = 0.1
        hello = Hello(
            version=wire.PROTOCOL_VERSION,
            role="plugin",
            engine="vllm",
            engine_version=engine_version,
            instance=instance,
            incarnation=os.urandom(16),
            number=1,
            off=reason,
        )
        body = encode(hello)
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(5)
                sock.connect(socket_path)
                sock.sendall(wire.encode_header(Op.HELLO, 0, 1, len(body)) + body)
                if sock.recv(1):
                    return
            time.sleep(wait)
            wait = min(wait * 2, 5.0)

    thread = threading.Thread(target=run, name="kvcachepool-off", daemon=True)
    thread.start()
    return thread
