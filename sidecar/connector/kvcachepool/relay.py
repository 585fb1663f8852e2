"""Passes the scheduler's messages to the sidecar of this node, see `nodes`. The first rank of each node has one.

vLLM's steps bring the messages and take the answers. The session is one of a scheduler, and has its own connection.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable

from .connection import Connection, Held, Reply
from .messages import HelloReply
from .nodes import Described, Lost, Passed, Report, Up


class Relay:
    """One per node. `node`: 0 is that of the scheduler, which needs no connection and only learns the model there.

    Threads: vLLM's (`take`, `wait`, `reports`), the connection's reader, the one that describes the rank (`start`).
    """

    def __init__(self, node: int, instance: str, engine_version: str, socket_path: str) -> None:
        self._connection = Connection("scheduler", instance, 0, engine_version, socket_path, self) if node else None
        if self._connection is not None:
            self._connection.on_other = self._on_reply
        self._awaits = False  # a report may follow soon
        self._off = False
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque()

    def start(self, model: str) -> None:
        """The node's ranks have read their model's files. `model`: canonical JSON of its descriptor."""
        shared = '"kind":"unshared"' not in model
        self._report(Described(hashlib.sha256(model.encode()).hexdigest() if shared else ""))
        if self._connection is not None:
            self._awaits = True
            self._connection.start()

    def go_off(self, reason: str) -> None:
        if self._connection is not None:
            self._off = True
            self._connection.go_off(reason)

    # -- vLLM's thread

    def take(self, messages: Iterable[Passed]) -> None:
        """Sends the messages of a step. Those for an earlier connection are dropped, and the scheduler learns of it."""
        connection = self._connection
        if connection is None:
            return
        for message in messages:
            if message.connection != connection.connection:
                continue
            self._awaits |= message.answered
            connection.forward(message.op, message.tag, message.body)

    def wait(self, timeout_s: float) -> None:
        """Waits for an answer to this step's messages, or for the connection. For steps without tokens and results,
        which would otherwise follow each other at once.
        """
        with self._changed:
            if self._awaits and not self._reports:
                self._changed.wait(max(0.0, timeout_s))
            self._awaits &= self._connection is not None and not (self._off or self._connection.connected)

    def reports(self) -> list[Report]:
        """What happened since the last call."""
        with self._changed:
            taken = list(self._reports)
            self._reports.clear()
        return taken

    def _report(self, report: Report) -> None:
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    def _on_reply(self, reply: Reply) -> None:
        self._report(reply._replace(fds=[]))

    # -- the connection's hooks (reader thread)

    def held(self, region: int | None) -> Held:
        """No leases: the scheduler begins again after a lost connection."""
        return Held()

    def after_hello(self) -> None:
        """Does nothing: the scheduler continues once it has learned of the connection."""

    def on_hello(self, reply: HelloReply) -> None:
        assert self._connection is not None
        self._report(Up(self._connection.connection, reply.settings.chunk_tokens))

    def on_lost(self) -> None:
        self._awaits = not self._off
        self._report(Lost())

    def before_unmap(self) -> None:
        """Does nothing: this session uses no memory."""

    def on_off(self, reason: str) -> None:
        """The scheduler learns of the lost connection."""
