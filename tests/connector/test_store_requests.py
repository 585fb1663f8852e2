"""Requests of a served class that are slow, ambiguous or not authenticated."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from store_client import Client, raw

from kvcachepool import store_http
from kvcachepool.store_http import Server
from kvcachepool.store_memory import MemoryStore
from servers.waiting import readable, wait_for


def drip(server: Server, begin: bytes, piece: bytes) -> bytes:
    """Sends `begin`, then `piece` again and again until the server ends the connection. Returns its response."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), 10) as connection:
        connection.sendall(begin)
        deadline_s, received = time.monotonic() + 10, b""
        while time.monotonic() < deadline_s:
            if not readable(connection, 0.02):
                connection.sendall(piece)
                continue
            try:
                found = connection.recv(65_536)
            except ConnectionResetError:
                return received
            if not found:
                return received
            received += found
        raise AssertionError(f"the connection is open after 10 s, with the response {received!r}")


# -- deadlines


def test_a_body_that_arrives_too_slowly_is_refused(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_http, "_BODY_S", 0.3)
    served = MemoryStore()
    answer = drip(serve(served), b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", b"x")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"<Code>RequestTimeout</Code>" in answer
    assert served.stat("kv-bucket/x") is None


@pytest.mark.parametrize("begin", [b"", b"GET /healthz HTTP/1.1\r\nA: "])
def test_headers_that_arrive_too_slowly_end_the_connection(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(store_http, "_HEAD_S", 0.3)
    server = serve()
    assert drip(server, begin, b"x") == b""
    wait_for(lambda: not server._open, 10, "the connection gone")


def test_a_connection_may_be_idle_before_each_request(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_http, "_HEAD_S", 0.1)
    ask = Client(serve().server_address[1])
    for _ in range(2):
        assert ask("GET", "/healthz").status == 200
        assert not readable(ask._connection.sock, 0.3), "the connection was closed"


# -- health


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /healthz HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n",
        b"HEAD /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT /healthz HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\n\r\n",
        b"DELETE /healthz HTTP/1.1\r\n\r\n",
    ],
)
def test_health_does_not_wait_for_a_body(serve: Callable[..., Server], request_head: bytes) -> None:
    server = serve(memory=1000)
    answer = raw(server, request_head)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Connection: close" in answer
    assert server.budget._free == 1000


def test_health_is_for_get_and_head(serve: Callable[..., Server]) -> None:
    ask = Client(serve().server_address[1])
    for method in ("GET", "HEAD", "GET"):
        assert ask(method, "/healthz").status == 200


# -- headers


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Host: a", "Host: b"),
        ("Authorization: a", "authorization: b"),
        ("Content-Length: 1", "Content-Length: 1"),
        ("Content-Type: a/b", "Content-Type: a/c"),
        ("x-amz-content-sha256: UNSIGNED-PAYLOAD", "X-Amz-Content-Sha256: UNSIGNED-PAYLOAD"),
        ("x-amz-date: a", "x-amz-date: b"),
        ("Range: bytes=0-1", "Range: bytes=0-2"),
        ("If-Match: a", "If-Match: b"),
        ("If-None-Match: *", "If-None-Match: *"),
    ],
)
def test_a_header_that_is_repeated_is_refused(serve: Callable[..., Server], first: str, second: str) -> None:
    served = MemoryStore()
    lines = ["PUT /kv-bucket/x HTTP/1.1", first, second]
    lines += [] if first.startswith("Content-Length") else ["Content-Length: 1"]
    answer = raw(serve(served), "\r\n".join([*lines, "", "x"]).encode())
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b"repeated" in answer
    assert b"Connection: close" in answer
    assert served.stat("kv-bucket/x") is None


def test_other_headers_may_be_repeated(serve: Callable[..., Server]) -> None:
    head = b"GET /healthz HTTP/1.1\r\nForwarded: for=a\r\nForwarded: for=b\r\nConnection: close\r\n\r\n"
    assert raw(serve(), head).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length : 60"],
        ["Host: a", "no colon", "Content-Length: 5"],
        [" Host: a", "Content-Length: 5"],
        [": nameless", "Content-Length: 5"],
        ["x-amz-date: a", " folded", "Content-Length: 5"],
        ["Content-Length:", " 5"],
    ],
)
@pytest.mark.parametrize("path", ["/kv-bucket/x", "/healthz"])
def test_header_lines_that_are_malformed_are_refused(serve: Callable[..., Server], lines: list[str], path: str) -> None:
    served = MemoryStore()
    answer = raw(serve(served), "\r\n".join([f"PUT {path} HTTP/1.1", *lines, "", "hello"]).encode())
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b"header" in answer
    assert b"Connection: close" in answer
    assert served.stat("kv-bucket/x") is None


@pytest.mark.parametrize(
    "value",
    ["", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "unsigned-payload", "ab" * 31,
     "AB" * 32],
)  # fmt: skip
def test_a_digest_of_another_form_is_refused_and_stores_nothing(serve: Callable[..., Server], value: str) -> None:
    served = MemoryStore()
    ask = Client(serve(served).server_address[1])
    refused = ask("PUT", "/kv-bucket/x", b"x", x_amz_content_sha256=value)
    assert refused.status == 400
    assert b"expected x-amz-content-sha256" in refused.body
    assert served.stat("kv-bucket/x") is None


def test_a_body_without_a_digest_is_accepted_as_such(serve: Callable[..., Server]) -> None:
    ask = Client(serve().server_address[1])
    assert ask("PUT", "/kv-bucket/x", b"x", x_amz_content_sha256="UNSIGNED-PAYLOAD").status == 200
