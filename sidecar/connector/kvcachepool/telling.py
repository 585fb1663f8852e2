"""What goes between the scheduler side and the sidecar beside the work: REPORTs and PROBEs without hurry out, events of
the pool in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .client import Client, Reply
from .messages import Events, EventsReply
from .metrics import Counters, EventFeed
from .wire import Op

_EVENTS_WAIT_MS = 10_000
_REPORT_EVERY_S = 0.2
_RETRY_S = 1.0
_ASK_ANEW_EVERY_S = 1.0


class Telling:
    """REPORTs leave by a thread of their own, soon after something was counted; EVENTS is one long poll at a time."""

    def __init__(self, client: Client, counters: Counters, hash_block: int, ask_anew: Callable[[], None]) -> None:
        """`hash_block`: tokens of a hash block; 0 = vLLM publishes no KV events, so none are asked for. `ask_anew` is
        called about once a second.
        """
        self._client = client
        self._counters = counters
        self._hash_block = hash_block
        self._ask_anew = ask_anew
        self._feed = EventFeed()
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._report, name="kvcachepool-report", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._counters.dirty.set()

    def events(self) -> list[Any]:
        """KV events since the last call."""
        return self._feed.take() if self._hash_block else []

    def ask_events(self, connection: int) -> None:
        """Begins the long poll on this connection, and goes on with it."""
        if not self._hash_block or self._client.connection != connection:
            return

        def on_reply(reply: Reply) -> None:
            if reply.error is not None:
                self._counters.event(f"eventsRefused/{reply.error.code}")
                return
            self._feed.add(reply.read(EventsReply), self._hash_block)
            self.ask_events(connection)

        self._client.ask(Op.EVENTS, Events(cursor=self._feed.cursor, wait_ms=_EVENTS_WAIT_MS), on_reply)

    def _report(self) -> None:
        dirty = self._counters.dirty
        while not self._stop.is_set():
            reporting = dirty.wait(_ASK_ANEW_EVERY_S)
            self._ask_anew()
            if not reporting:
                continue
            self._stop.wait(_REPORT_EVERY_S)
            report = self._counters.take_report()
            if not self._client.send(Op.REPORT, report):
                self._counters.put_back(report)
                self._stop.wait(_RETRY_S)
                dirty.set()
