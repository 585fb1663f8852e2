"""An engine over several nodes: one sidecar per node, and the answers of all of them as one.

The scheduler's process reaches its own node's sidecar by the socket. Messages to the others go to their nodes with
vLLM's steps, where the first rank passes them on (`relay`), and answers come back the same way. So nothing new listens
on a network. A node's sidecar holds the sections of its own ranks. A chunk is readable if it is readable on all nodes,
and a slot is granted on all nodes or on none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from .connection import Connection, Held, Hooks, Reply
from .messages import (
    CHUNK_ABSENT,
    CHUNK_PENDING,
    CHUNK_READY,
    GRANT_EXISTS,
    GRANT_GRANTED,
    GRANT_NO_PARENT,
    GRANT_NOT_READY,
    Abort,
    ErrorBody,
    GrantReply,
    HelloReply,
    Message,
    Pin,
    ProbeReply,
    RegisterReply,
    Settings,
    encode,
)
from .shared import NO_SLOT
from .wire import Op

logger = logging.getLogger("kvcachepool")

_NO_GRANT = GrantReply(results=b"", refs=b"")
_ABSENT = NO_SLOT.to_bytes(4, "little") + bytes(12)
#: Only the scheduler's own node gets these.
_LOCAL = (Op.REPORT, Op.EVENTS)
#: Tags of passed messages do not collide with those that the other node's process draws itself.
_PASSED = 1 << 62
#: An idle engine keeps stepping for this long after its start or a lost connection, for reports of a new one.
_RECONNECT_S = 3.0
#: A node that has not reported for this long after the start is named in the log.
_LATE_S = 60.0


class Passed(NamedTuple):
    """A message for the sidecar of another node.

    connection: number of the connection that it is meant for.
    answered: whether the sidecar answers it.
    """

    connection: int
    op: Op
    tag: int
    body: bytes
    answered: bool


class Described(NamedTuple):
    """A node's ranks have read their model's files. `model`: what identifies the KV values, "" if no other engine can
    share them.
    """

    model: str


class Up(NamedTuple):
    """A node's sidecar has answered HELLO."""

    connection: int
    chunk_tokens: int


class Lost(NamedTuple):
    """The connection to a node's sidecar has ended."""


#: What a node reports, in order.
Report = Described | Up | Lost | Reply


@dataclass(slots=True, eq=False)
class _Request:
    """A request to all nodes. replies: the newest of each node."""

    op: Op
    on_reply: Callable[[Reply], None]
    replies: list[Reply | None]


@dataclass(slots=True, eq=False)
class _Peer:
    """Another node, as it last reported itself."""

    up: Up | None = None
    messages: list[Passed] = field(default_factory=list)


class Nodes:
    """The sidecars of an engine's nodes, with what the scheduler side uses of a `Connection`.

    `connected`: all nodes are, and they have the same model. `connection` counts the times that this began. `agreed`:
    all sidecars have registered the engine since then, under the same identity.

    Threads: those of the scheduler side, and the reader of its own node's connection. Answers are delivered on the
    engine's thread, in the order in which they became complete. `_lock` is never held during a callback.
    """

    #: Nodes may differ in which chunks they grant, and only whole GRANTs can be aborted.
    CHUNKS_PER_GRANT = 1
    #: Answers come with steps, of which several may be on their way.
    GRANT_TIMEOUT_S = 5.0

    def __init__(self, count: int, instance: str, engine_version: str, socket_path: str, hooks: Hooks) -> None:
        self.connected = False
        self.connection = 0
        self.agreed = False
        self._hooks = hooks
        self._own = Connection("scheduler", instance, 0, engine_version, socket_path, self)
        self._lock = threading.Lock()
        self._models: list[str | None] = [None] * count
        self._peers = [_Peer() for _ in range(count - 1)]
        self._open: dict[int, _Request] = {}
        self._complete: deque[tuple[Callable[[Reply], None], Reply]] = deque()
        self._refused = ""
        self._warn_at_s = time.monotonic() + _LATE_S
        self._idle_until_s: float | None = None  # set when the engine is idle

    @property
    def settings(self) -> Settings:
        return self._own.settings

    @property
    def pending(self) -> bool:
        """Whether messages wait for a step, or a connection may be reported with one: an idle engine must keep
        stepping. Nothing that waits for a sidecar's answer counts, because it may not come.
        """
        if not self.agreed:
            if self._idle_until_s is None:
                self._idle_until_s = time.monotonic() + _RECONNECT_S
            if time.monotonic() < self._idle_until_s:
                return True
        return any(peer.messages for peer in self._peers)

    @property
    def all_reported(self) -> bool:
        """Whether every node has this connector."""
        return None not in self._models

    def start(self) -> None:
        self._own.start()

    def go_off(self, reason: str) -> None:
        self._own.go_off(reason)

    # -- messages to all nodes

    def send(self, op: Op, body: Message) -> bool:
        """Sends a one-way message to every node with a connection. Returns whether its own node's was sent.

        It needs no agreement: what ends on one node only (a lease) ends on the others at their next HELLO.
        """
        with self._lock:
            sent = self._own.send(op, body)
            if op not in _LOCAL:
                self._pass(op, 0, body, answered=False)
            return sent

    def request(self, op: Op, body: Message, on_reply: Callable[[Reply], None]) -> int | None:
        """Sends a request to all nodes. `on_reply` gets their answers as one. Returns None if it was not sent.

        An ABORT needs no agreement: with its own node's connection it goes to the nodes that have one, too.
        """
        if op in _LOCAL:
            return self._own.request(op, body, on_reply)
        with self._lock:
            if not self.connected and op != Op.ABORT:
                return None
            tag = self._own.request(op, body, lambda reply: self._answered(0, reply))
            if tag is None:
                return None
            self._open[tag] = _Request(op, on_reply, [None] * (len(self._peers) + 1))
            self._pass(op, tag, body, answered=True)
            return tag

    def drop(self, tag: int) -> None:
        """Ignores responses with this tag from now on."""
        self._own.drop(tag)
        with self._lock:
            self._open.pop(tag, None)

    def _pass(self, op: Op, tag: int, body: Message, answered: bool) -> None:
        if isinstance(body, Pin):
            body = Pin(request=body.request, probe=body.probe | _PASSED, from_=body.from_, to=body.to)
        elif isinstance(body, Abort):
            body = Abort(grant=body.grant | _PASSED, hashes=body.hashes)
        packed = encode(body)
        for peer in self._peers:
            if peer.up is not None:
                peer.messages.append(Passed(peer.up.connection, op, tag | _PASSED, packed, answered))

    def _answered(self, node: int, reply: Reply) -> None:
        tag = reply.tag & ~_PASSED
        with self._lock:
            request = self._open.get(tag)
            if request is None:
                return
            request.replies[node] = reply
            replies = [one for one in request.replies if one is not None]
            if len(replies) < len(request.replies):
                return
            partial = any(one.partial for one in replies)
            if partial and request.op != Op.PROBE:
                return
            try:
                merged = _merged(request.op, tag, partial, replies, shared=bool(self._models[0]))
            except Exception:
                logger.exception("an answer of several nodes cannot be read")
                merged = _unreadable(request.op, tag)
            if not merged.partial:
                del self._open[tag]
            if request.op == Op.REGISTER:
                self.agreed = merged.error is None and bool(merged.read(RegisterReply).model_id)
            self._complete.append((request.on_reply, merged))

    def deliver(self) -> None:
        """Delivers complete answers, on the engine's thread."""
        while True:
            with self._lock:
                if not self._complete:
                    return
                on_reply, reply = self._complete.popleft()
            on_reply(reply)

    # -- vLLM's steps, on the engine's thread

    def take(self) -> dict[int, list[Passed]]:
        """Messages for the other nodes, by node, to be sent with this step."""
        taken = {}
        with self._lock:
            for node, peer in enumerate(self._peers, 1):
                if peer.messages:
                    taken[node], peer.messages = peer.messages, []
            late = [str(node) for node, model in enumerate(self._models) if model is None]
            if late and time.monotonic() > self._warn_at_s:
                self._warn_at_s = float("inf")
                logger.warning(
                    "the KV cache pool waits for the sidecars of all nodes: nodes=%s have not reported; see whether"
                    " their pods have the pool's label and their logs a reason",
                    ",".join(late),
                )
        return taken

    def reported(self, node: int, reports: list[Report]) -> None:
        """Takes what a node reports, one by one, so that none is taken twice."""
        while reports:
            report = reports.pop(0)
            if isinstance(report, Reply):
                self._answered(node, report)
            elif isinstance(report, Described):
                self._models[node] = report.model
                self._connect()
            elif isinstance(report, Up):
                self._disconnect(node)
                with self._lock:
                    self._peers[node - 1].up = report
                self._connect()
            else:
                self._disconnect(node)
        self.deliver()

    # -- the common connection

    def _connect(self) -> None:
        """All nodes are connected, from now on, if this was the last of them."""
        with self._lock:
            if self.connected or not self._own.connected or self._own.hello is None or self._differ():
                return
            self.connected = True
            self.connection += 1
            self._idle_until_s = None
        self._hooks.after_hello()
        self._hooks.on_hello(self._own.hello)

    def _differ(self) -> bool:
        """Whether a node has not reported, or has other KV or other chunks than the others."""
        if None in self._models or any(peer.up is None for peer in self._peers):
            return True
        why = ""
        if len(set(self._models)) > 1:
            why = "the nodes have different model files or settings"
        chunks = {peer.up.chunk_tokens for peer in self._peers if peer.up} | {self._own.settings.chunk_tokens}
        if len(chunks) > 1:
            why = f"the sidecars of the nodes have different chunks: {sorted(chunks)} tokens"
        if why and why != self._refused:
            logger.warning("the KV cache pool is not used: %s", why)
        self._refused = why
        return bool(why)

    def _disconnect(self, node: int) -> None:
        with self._lock:
            if node:
                self._peers[node - 1].up = None
                self._peers[node - 1].messages.clear()
            was, self.connected = self.connected, False
            self.agreed = False
            self._open.clear()
            self._complete.clear()
            for peer in self._peers:
                peer.messages = [message for message in peer.messages if not message.answered]
            if was:
                self._idle_until_s = None
        if was:
            self._hooks.on_lost()

    # -- hooks of its own node's connection

    def held(self, region: int | None) -> Held:
        return self._hooks.held(region)

    def after_hello(self) -> None:
        """Does nothing: `_connect` continues once all nodes are connected."""

    def on_hello(self, reply: HelloReply) -> None:
        self._connect()

    def on_lost(self) -> None:
        self._disconnect(0)

    def before_unmap(self) -> None:
        self._hooks.before_unmap()

    def on_off(self, reason: str) -> None:
        self._hooks.on_off(reason)


def _unreadable(op: Op, tag: int) -> Reply:
    """In place of answers that cannot be read. Slots may have been granted: a GRANT without results is aborted."""
    if op == Op.GRANT:
        return Reply(tag, False, None, encode(_NO_GRANT), [])
    return Reply(tag, False, ErrorBody(code="BadAnswer"), b"", [])


#: The scheduler's connection to one sidecar, or to those of all nodes.
Client = Connection | Nodes


def _merged(op: Op, tag: int, partial: bool, replies: Sequence[Reply], *, shared: bool) -> Reply:
    """The answers of all nodes, in their order, as one. `shared`: other engines can load this engine's KV."""
    errors = [reply.error for reply in replies if reply.error is not None]
    if op == Op.GRANT and len(errors) < len(replies):
        grants = [reply.read(GrantReply) if reply.error is None else _NO_GRANT for reply in replies]
        return Reply(tag, False, None, encode(merged_grants(grants)), [])
    if errors:
        return Reply(tag, False, errors[0], b"", [])
    if op == Op.PROBE:
        return Reply(tag, partial, None, encode(merged_probes([reply.read(ProbeReply) for reply in replies])), [])
    if op == Op.REGISTER:
        identities = {reply.read(RegisterReply).model_id for reply in replies}
        if b"" in identities:
            return Reply(tag, False, None, encode(RegisterReply(ready=False)), [])
        if shared and len(identities) > 1:
            message = "the sidecars of the nodes have different settings: compare their codecs (write.codec)"
            return Reply(tag, False, ErrorBody(code="NodesDiffer", message=message), b"", [])
    return Reply(tag, False, None, replies[0].body, [])


def merged_probes(answers: Sequence[ProbeReply]) -> ProbeReply:
    """A chunk is ready if it is on all nodes, and absent if it is absent on one. Its references are those of all nodes,
    in their order.
    """
    count = max(len(answer.states) for answer in answers)
    columns = [answer.states or bytes(count) for answer in answers]
    states = bytearray()
    refs: list[bytes] = []
    found = [0] * len(answers)
    sizes = [len(answer.refs) // max(1, answer.states.count(CHUNK_READY)) for answer in answers]
    for chunk in zip(*columns, strict=True):
        ready = all(state == CHUNK_READY for state in chunk)
        states.append(CHUNK_READY if ready else CHUNK_ABSENT if CHUNK_ABSENT in chunk else CHUNK_PENDING)
        for node, state in enumerate(chunk):
            if state == CHUNK_READY:
                begin = found[node] * sizes[node]
                found[node] += 1
                if ready:
                    if sizes[node] != sizes[0]:
                        raise ValueError("the nodes have different numbers of sections")
                    refs.append(answers[node].refs[begin : begin + sizes[node]])
    return ProbeReply(
        states=bytes(states),
        refs=b"".join(refs),
        region=answers[0].region,
        pending_ms=max(answer.pending_ms for answer in answers),
        tiers=bytes(max(tiers) for tiers in zip_longest(*(answer.tiers for answer in answers), fillvalue=0)),
        reason=next((answer.reason for answer in answers if answer.reason), ""),
        declined=next((answer.declined for answer in answers if answer.declined), ""),
        regions=[answer.region for answer in answers],
    )


def merged_grants(answers: Sequence[GrantReply]) -> GrantReply:
    """The answers to a GRANT of one chunk. A node that has the chunk already gets nothing to write. `partly` if some
    nodes granted slots and others did not: then the scheduler aborts the GRANT on all of them.
    """
    results = [answer.results[0] if len(answer.results) == 1 else GRANT_NOT_READY for answer in answers]
    granted = [answer.refs for answer, result in zip(answers, results, strict=True) if result == GRANT_GRANTED]
    refused = [result for result in results if result not in (GRANT_GRANTED, GRANT_EXISTS)]
    if refused:
        why = GRANT_NO_PARENT if GRANT_NO_PARENT in refused else refused[0]
        return GrantReply(results=bytes([why]), refs=b"", partly=bool(granted))
    if not granted:
        return GrantReply(results=bytes([GRANT_EXISTS]), refs=b"")
    size = len(granted[0])
    if any(len(refs) != size for refs in granted):
        raise ValueError("the nodes have different numbers of sections")
    nothing = _ABSENT * (size // len(_ABSENT))
    refs = [
        answer.refs if result == GRANT_GRANTED else nothing for answer, result in zip(answers, results, strict=True)
    ]
    regions = [answer.region for answer in answers]
    return GrantReply(results=bytes([GRANT_GRANTED]), refs=b"".join(refs), region=regions[0], regions=regions)
