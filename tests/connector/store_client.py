"""A client of a served class, and servers in this process."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from typing import Any

from kvcachepool.store_calls import Budget, Calls
from kvcachepool.store_http import Server
from kvcachepool.store_memory import MemoryStore

OBJECT = bytes(range(256)) * 64
ALICE, BOB = "/kv-bucket/a/one.kv", "/kv-bucket/a/two.kv"


class Answer:
    """A response with its body."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.body = answer.status, answer.read()
        self.headers = {name.lower(): value for name, value in answer.getheaders()}

    @property
    def code(self) -> str:
        """The code of an error."""
        found = re.search(rb"<Code>(\w+)</Code>", self.body)
        return found[1].decode() if found else ""


class Client:
    """One connection to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, sent)
        return Answer(self._connection.getresponse())


def raw(server: Server, request: bytes, shut: bool = False) -> bytes:
    """Everything that a server answers before it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), 10) as connection:
        connection.sendall(request)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65_536):
            received += piece
        return received


class Servers:
    """Starts servers, which all end with the test."""

    def __init__(self) -> None:
        self._made: list[Server] = []

    def __call__(
        self,
        served: Any = None,
        *,
        memory: int = 64 << 20,
        deadline_s: float = 5.0,
        connections: int = 64,
        keys: Any = None,
    ) -> Server:
        calls = Calls(served or MemoryStore(), 4, deadline_s)
        server = Server(("127.0.0.1", 0), calls, Budget(memory, min(deadline_s, 0.5)), keys, connections)
        self._made.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def close(self) -> None:
        """Ends them."""
        for one in self._made:
            one.shutdown()
            one.server_close()
