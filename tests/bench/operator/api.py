"""The API server over keep-alive connections, one per thread, fast enough for ten thousand objects."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cluster.kubernetes import Object, Refused
from cluster.slot import Slot
from servers.prometheus import Samples

T = TypeVar("T")
MERGE = "application/merge-patch+json"
#: Maximum concurrent requests.
THREADS = 16
#: Seconds after which an idle connection is not reused.
_IDLE = 20


def say(text: str) -> None:
    """Prints a line of progress."""
    print(text, file=sys.stderr, flush=True)


class Api:
    """Requests as the cluster's administrator, whose requests the API server never queues."""

    def __init__(self, slot: Slot) -> None:
        pki = slot.folder / "pki"
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
        self._server = urlsplit(slot.server)
        self._thread = threading.local()

    def _connect(self, seconds: float) -> http.client.HTTPSConnection:
        host, port = self._server.hostname or "", self._server.port
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)

    def _ask(self, method: str, path: str, body: Any, kind: str) -> bytes:
        connection, used = getattr(self._thread, "connection", (None, 0.0))
        # The server is about to close a connection that was idle for long.
        if connection is None or time.monotonic() - used > _IDLE:
            connection = self._connect(60)
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            connection.request(method, path, data, {"Content-Type": kind})
            answer = connection.getresponse()
            text: bytes = answer.read()
        except BaseException:
            connection.close()
            self._thread.connection = (None, 0.0)
            raise
        self._thread.connection = (connection, time.monotonic())
        if answer.status >= 400:
            raise Refused(f"{method} {path}: {answer.status}: {text.decode(errors='replace')}")
        return text

    def request(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Object:
        """Sends one request and returns the response."""
        found: Object = json.loads(self._ask(method, path, body, kind))
        return found

    def metrics(self) -> Samples:
        """The API server's metrics."""
        return Samples.parse(self._ask("GET", "/metrics", None, "text/plain").decode())

    def each(self, what: str, call: Callable[[T], object], items: Sequence[T]) -> float:
        """Calls a function for every item, several at once, and prints progress to stderr. Returns the calls per
        second.
        """
        start = reported = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            for number, _ in enumerate(pool.map(call, items), 1):
                if time.monotonic() - reported > 5:
                    reported = time.monotonic()
                    say(f"  {what}: {number} of {len(items)}, {number / (reported - start):.0f} per second")
        rate = len(items) / (time.monotonic() - start)
        say(f"  {what}: {len(items)}, {rate:.0f} per second")
        return rate

    def watch(self, path: str, seconds: float) -> Iterator[tuple[float, Object]]:
        """Events with their times of arrival, until none arrives for this many seconds."""
        connection = self._connect(seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(f"GET {path}: {answer.status}: {answer.read().decode(errors='replace')}")
            while line := answer.readline():
                yield time.monotonic(), json.loads(line)
        finally:
            connection.close()
