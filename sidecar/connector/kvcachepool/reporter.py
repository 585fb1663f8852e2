"""The background exchange with the sidecar: a thread sends REPORTs and renews aged PROBEs, and EVENTS returns the
pool's events for vLLM's KV events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .connection import Reply
from .kv_events import Adapter, EventFeed, EventGroup
from .messages import CHUNK_READY, Event, Events, EventsReply
from .metrics import Counters
from .nodes import Client
from .wire import Op

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from .probes import Lookup

_EVENTS_WAIT_MS = 10_000
_REPORT_EVERY_S = 0.2
_RETRY_S = 1.0
_RENEW_EVERY_S = 1.0
#: If a sidecar is disconnected for longer, its blocks are removed from the routers.
_AWAY_S = 5.0
#: An idle engine keeps stepping for this long after its start, until the first snapshot can be published.
_FIRST_SNAPSHOT_S = 3.0


class Reporter:
    """A separate thread sends REPORTs soon after something was counted. EVENTS is one long poll at a time, or the pages
    of a snapshot at the start and after lost events.
    """

    def __init__(self, client: Client, counters: Counters, group: EventGroup | None) -> None:
        """`group`: the KV group of the events. None if vLLM publishes no KV events, and then none are requested."""
        self._client = client
        self._counters = counters
        self._feed = EventFeed(group) if group is not None else None
        self._cursor = self._boot = 0
        self._stale = True  # the next EVENTS requests a snapshot
        self._page: int | None = None  # of the incoming snapshot
        self._snapshot: list[Event] = []
        self._first_until_s = time.monotonic() + _FIRST_SNAPSHOT_S
        self._connected_s = time.monotonic()
        self._local_blocks: Any = None
        self._stop = threading.Event()

    def start(self, renew: Callable[[], None]) -> None:
        """Starts the thread, which also calls `renew` about once a second."""
        threading.Thread(target=self._report, args=(renew,), name="kvcachepool-report", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._counters.dirty.set()

    # -- KV events

    def events(self, pool: Any) -> list[Any]:
        """KV events since the last call. `pool`: vLLM's block pool."""
        if self._feed is None:
            return []
        blocks = getattr(pool, "cached_block_hash_to_block", None)
        if blocks is not self._local_blocks:
            # The pool was reset, and vLLM has just published AllBlocksCleared, which routers apply to all media.
            if self._local_blocks is not None:
                self._feed.republish()
            self._local_blocks = blocks
        return self._feed.take_events()

    @property
    def pending(self) -> bool:
        """An idle engine must keep stepping, because events are published only in steps."""
        if self._feed is None:
            return False
        first = not self._boot and time.monotonic() < self._first_until_s
        return first or self._feed.pending

    def serve(self, namespace: bytes | None, lora: Any, tags: Any) -> None:
        """A request has this namespace. Chunks of tagged requests are not published, because routers do not know
        tags.
        """
        if self._feed is None or namespace is None or tags:
            return
        adapter = Adapter(lora.lora_int_id, lora.lora_name) if lora is not None else Adapter()
        if self._feed.serve(namespace, adapter):
            self._stale = True

    def note(self, request: Request, begin: int, end: int) -> None:
        """A chunk of the request is about to be stored."""
        if self._feed is not None:
            self._feed.note(request, begin, end)

    def learn(self, request: Request, lookup: Lookup, states: bytes) -> None:
        """The pool has these chunks of the request."""
        if self._feed is None:
            return
        for index, state in enumerate(states):
            if state == CHUNK_READY and not self._feed.knows(lookup.hash_of(index)):
                self._feed.note(request, lookup.end_of(index), lookup.end_of(index + 1))

    def forget(self) -> None:
        """Nothing that was stored before is found any more."""
        if self._feed is not None:
            self._feed.forget()

    def start_events(self, connection: int) -> None:
        """Starts the long poll on this connection."""
        if self._feed is not None:
            self._stale |= self._page is not None
            self._page = None
            self._request_events(self._feed, connection)

    def _request_events(self, feed: EventFeed, connection: int) -> None:
        if self._client.connection != connection:
            return
        if self._stale and self._page is None:
            self._stale, self._page, self._snapshot = False, 0, []
        page = self._page

        def on_reply(reply: Reply) -> None:
            if reply.error is not None:
                self._counters.event(f"events_refused/{reply.error.code}")
                return
            answer = reply.read(EventsReply)
            if not answer.boot:  # it does not identify the sidecar's boot or the initial content
                self._counters.event("events_of_older_sidecar")
                return
            if page is None:
                self._changes(feed, answer)
            else:
                self._on_page(feed, page, answer)
            if feed.over_limit:
                self._counters.event("events_over_limit", feed.over_limit)
                feed.over_limit = 0
            self._request_events(feed, connection)

        body = Events(cursor=self._cursor, wait_ms=_EVENTS_WAIT_MS, boot=self._boot, snapshot=page)
        self._client.request(Op.EVENTS, body, on_reply)

    def _changes(self, feed: EventFeed, answer: EventsReply) -> None:
        self._cursor = answer.cursor
        if answer.lost:
            self._counters.event("events_lost")
            self._stale = True
        else:
            feed.apply(answer.events)

    def _on_page(self, feed: EventFeed, page: int, answer: EventsReply) -> None:
        if page == 0:
            self._cursor, self._boot = answer.cursor, answer.boot
        self._snapshot += answer.events
        self._page = answer.next
        if answer.next is None:
            feed.replace(self._snapshot)
            self._snapshot = []

    def _watch(self) -> None:
        """Removes the blocks of a sidecar that has been disconnected for long."""
        now_s = time.monotonic()
        if self._client.connected:
            self._connected_s = now_s
        elif self._feed is not None and now_s - self._connected_s > _AWAY_S:
            self._feed.clear()
            self._stale = True

    # -- REPORTs

    def _report(self, renew: Callable[[], None]) -> None:
        dirty = self._counters.dirty
        while not self._stop.is_set():
            reporting = dirty.wait(_RENEW_EVERY_S)
            renew()
            self._watch()
            if not reporting:
                continue
            self._stop.wait(_REPORT_EVERY_S)
            report = self._counters.take_report()
            if not self._client.send(Op.REPORT, report):
                self._counters.put_back(report)
                self._stop.wait(_RETRY_S)
                dirty.set()
