"""The HTTP interface of a served class: requests of the S3 tier, bad requests, the end of a server."""

from __future__ import annotations

import hashlib
import http.client
import re
import socket
import socketserver
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import pytest
from store_client import ALICE, BOB, OBJECT, Answer, Client, raw

from kvcachepool import store_uploads
from kvcachepool.store_http import Server
from kvcachepool.store_memory import MemoryStore
from servers.waiting import wait_for


@pytest.fixture
def ask(serve: Callable[..., Server]) -> Client:
    """A client of a store in memory."""
    return Client(serve().server_address[1])


# -- objects


def test_an_object_comes_back_whole_and_in_ranges_with_one_etag(ask: Client) -> None:
    etag = ask("PUT", ALICE, OBJECT).headers["etag"]
    whole = ask("GET", ALICE)
    assert (whole.status, whole.body, whole.headers["etag"]) == (200, OBJECT, etag)
    assert "last-modified" in whole.headers
    for first, last in ((0, 99), (0, 9_999), (100, 100), (5_000, 10_000), (16_000, 99_999)):
        part = ask("GET", ALICE, Range=f"bytes={first}-{last}")
        end = min(last, len(OBJECT) - 1)
        assert (part.status, part.body) == (206, OBJECT[first : last + 1]), (first, last)
        assert part.headers["content-range"] == f"bytes {first}-{end}/{len(OBJECT)}"
        assert part.headers["etag"] == etag
    head = ask("HEAD", ALICE)
    assert (head.status, head.headers["content-length"], head.body) == (200, str(len(OBJECT)), b"")


def test_an_absent_object_is_missing_and_the_connection_goes_on(ask: Client) -> None:
    for method in ("GET", "HEAD"):
        assert ask(method, ALICE).status == 404
    assert ask("GET", ALICE).code == "NoSuchKey"
    assert ask("DELETE", ALICE).status == 204


@pytest.mark.parametrize(
    ("value", "status"),
    [("bytes=99999-100000", 416), ("bytes=5-4", 416), ("bytes=-5", 400), ("bytes=a-b", 400), ("lines=0-1", 400)],
)
def test_a_range_that_is_invalid_is_refused(ask: Client, value: str, status: int) -> None:
    ask("PUT", ALICE, OBJECT)
    assert ask("GET", ALICE, Range=value).status == status


def test_a_put_that_must_not_replace_keeps_the_first_object(ask: Client) -> None:
    assert ask("PUT", ALICE, b"first", If_None_Match="*").status == 200
    second = ask("PUT", ALICE, b"second", If_None_Match="*")
    assert (second.status, second.code) == (412, "PreconditionFailed")
    assert ask("GET", ALICE).body == b"first"
    assert ask("PUT", ALICE, b"third").status == 200
    assert ask("GET", ALICE).body == b"third"


def test_one_of_many_puts_at_once_wins(serve: Callable[..., Server]) -> None:
    class Slow(MemoryStore):
        def put(self, key: str, data: memoryview) -> None:
            threading.Event().wait(0.02)
            super().put(key, data)

    port = serve(Slow()).server_address[1]
    statuses: list[tuple[int, bytes]] = []

    def put(number: int) -> None:
        body = b"%d" % number
        statuses.append((Client(port)("PUT", ALICE, body, If_None_Match="*").status, body))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(status for status, _ in statuses) == [200] + [412] * 7
    assert (200, Client(port)("GET", ALICE).body) in statuses


def test_a_condition_on_a_version_holds_only_for_that_version(ask: Client) -> None:
    old = ask("PUT", ALICE, b"old").headers["etag"]
    new = ask("PUT", ALICE, b"new").headers["etag"]
    assert old != new
    assert ask("GET", ALICE, If_Match=old).status == 412
    assert ask("PUT", ALICE, b"newer", If_Match=old).status == 412
    assert ask("DELETE", ALICE, If_Match=old).status == 412
    assert ask("GET", ALICE, If_Match=new).body == b"new"
    assert ask("PUT", ALICE, b"newer", If_Match=new).status == 200
    assert ask("DELETE", ALICE, If_Match=new).status == 412
    assert ask("PUT", BOB, b"x", If_Match=new).status == 404


def test_processes_that_serve_the_same_store_give_the_same_etags(serve: Callable[..., Server]) -> None:
    shared = MemoryStore()
    one, other = (Client(serve(shared).server_address[1]) for _ in range(2))
    etag = one("PUT", ALICE, OBJECT).headers["etag"]
    part = other("GET", ALICE, Range="bytes=8000-9000", If_Match=etag)
    assert (part.status, part.body) == (206, OBJECT[8000:9001])
    one("PUT", ALICE, OBJECT[1:] + b"x")
    assert other("GET", ALICE, Range="bytes=0-9000", If_Match=etag).status == 412
    assert other("DELETE", ALICE, If_Match=etag).status == 412


# -- listings, removals, uploads


def keys_of(answer: Answer) -> list[str]:
    return [key.decode() for key in re.findall(rb"<Key>([^<]*)</Key>", answer.body)]


def test_a_listing_has_every_key_below_its_prefix_in_pages(ask: Client) -> None:
    names = [f"a/{number:02}.kv" for number in range(25)]
    for name in [*names, "b/other.kv", "a"]:
        ask("PUT", f"/kv-bucket/{name}", b"12345")
    ask("PUT", "/another-bucket/a/00.kv", b"1")
    found: list[str] = []
    token, pages = "", 0
    while True:
        query = f"list-type=2&prefix=a%2F&max-keys=10{token}"
        page = ask("GET", f"/kv-bucket?{query}")
        found += keys_of(page)
        pages += 1
        following = re.search(rb"<NextContinuationToken>([^<]*)<", page.body)
        if not following:
            break
        token = f"&continuation-token={following[1].decode()}"
    assert (found, pages) == (names, 3)
    assert b"<Size>5</Size>" in page.body
    assert b"<IsTruncated>false</IsTruncated>" in page.body


def test_a_batch_removes_all_its_keys(ask: Client) -> None:
    for path in (ALICE, BOB):
        ask("PUT", path, b"x")
    body = b"<Delete><Object><Key>a/one.kv</Key></Object><Object><Key>a/none.kv</Key></Object></Delete>"
    assert ask("POST", "/kv-bucket?delete", body).status == 200
    assert (ask("HEAD", ALICE).status, ask("HEAD", BOB).status) == (404, 200)


@pytest.mark.parametrize(
    "body",
    [b"", b"<Delete>", b"<Delete></Delete>", b"<Delete><Object></Object></Delete>", b"\xff\xfe",
     b'<!DOCTYPE d [<!ENTITY e "x">]><Delete><Object><Key>&e;</Key></Object></Delete>'],
)  # fmt: skip
def test_a_batch_that_is_invalid_removes_nothing(ask: Client, body: bytes) -> None:
    ask("PUT", "/kv-bucket/x", b"x")
    refused = ask("POST", "/kv-bucket?delete", body)
    assert (refused.status, refused.code) == (400, "MalformedXML")
    assert ask("HEAD", "/kv-bucket/x").status == 200


def begin(ask: Client, path: str = ALICE) -> str:
    found = re.search(rb"<UploadId>(\w+)</UploadId>", ask("POST", f"{path}?uploads").body)
    assert found
    return found[1].decode()


def complete(parts: Sequence[tuple[int, str]]) -> bytes:
    listed = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in parts)
    return f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()


def test_an_upload_in_parts_appears_when_it_is_complete(ask: Client) -> None:
    upload = begin(ask)
    etags = [
        ask("PUT", f"{ALICE}?partNumber={number}&uploadId={upload}", piece).headers["etag"]
        for number, piece in ((2, OBJECT[9_000:]), (1, OBJECT[:9_000]))
    ]
    assert ask("HEAD", ALICE).status == 404
    body = complete([(1, etags[1]), (2, etags[0])])
    assert ask("POST", f"{ALICE}?uploadId={upload}", body, If_None_Match="*").status == 200
    assert ask("GET", ALICE).body == OBJECT
    again = ask("POST", f"{ALICE}?uploadId={upload}", body)
    assert (again.status, again.code) == (404, "NoSuchUpload")


def test_an_upload_with_wrong_parts_stores_nothing(ask: Client) -> None:
    upload = begin(ask)
    etag = ask("PUT", f"{ALICE}?partNumber=1&uploadId={upload}", b"1").headers["etag"]
    other = ask("PUT", f"{ALICE}?partNumber=2&uploadId={upload}", b"2").headers["etag"]
    for parts, code in (
        ([(1, other)], "InvalidPart"),
        ([(1, etag), (3, other)], "InvalidPart"),
        ([(2, other), (1, etag)], "InvalidPartOrder"),
        ([], "InvalidPartOrder"),
    ):
        assert ask("POST", f"{ALICE}?uploadId={upload}", complete(parts)).code == code
    assert ask("PUT", f"{BOB}?partNumber=1&uploadId={upload}", b"1").code == "NoSuchUpload"
    assert ask("PUT", f"{ALICE}?partNumber=0&uploadId={upload}", b"1").code == "InvalidArgument"
    assert ask("PUT", f"{ALICE}?partNumber=x&uploadId={upload}", b"1").code == "InvalidArgument"
    assert ask("DELETE", f"{ALICE}?uploadId={upload}").status == 204
    assert ask("PUT", f"{ALICE}?partNumber=1&uploadId={upload}", b"1").code == "NoSuchUpload"
    assert ask("HEAD", ALICE).status == 404
    assert ask("GET", "/kv-bucket?uploads").status == 200


def test_the_memory_of_uploads_is_bounded_and_given_back(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(memory=10_000)
    ask = Client(server.server_address[1])
    upload = begin(ask)
    assert ask("PUT", f"{ALICE}?partNumber=1&uploadId={upload}", bytes(6_000)).status == 200
    refused = Client(server.server_address[1])("PUT", BOB, bytes(6_000))
    assert (refused.status, refused.code) == (503, "SlowDown")
    assert ask("PUT", f"{ALICE}?partNumber=1&uploadId={upload}", bytes(3_000)).status == 200
    assert Client(server.server_address[1])("PUT", BOB, bytes(6_000)).status == 200
    monkeypatch.setattr(store_uploads, "_IDLE_S", -1.0)
    assert Client(server.server_address[1])("PUT", BOB, bytes(10_000)).status == 200
    assert ask("PUT", f"{ALICE}?partNumber=2&uploadId={upload}", b"x").code == "NoSuchUpload"


def test_uploads_that_fill_the_memory_can_be_completed(serve: Callable[..., Server]) -> None:
    server = serve(memory=64 << 20)
    ask, pieces = Client(server.server_address[1]), [bytes([number]) * (5 << 20) for number in range(4)]
    paths = [f"/kv-bucket/a/{number}.kv" for number in range(3)]
    uploads = [(path, begin(ask, path)) for path in paths]
    parts = [
        [
            (number, ask("PUT", f"{path}?partNumber={number}&uploadId={upload}", piece).headers["etag"])
            for number, piece in enumerate(pieces, 1)
        ]
        for path, upload in uploads
    ]
    completed = [
        ask("POST", f"{path}?uploadId={upload}", complete(listed)).status
        for (path, upload), listed in zip(uploads, parts, strict=True)
    ]
    assert completed == [200] * 3
    assert all(ask("GET", path).body == b"".join(pieces) for path in paths)
    wait_for(lambda: server.budget._free == server.budget.total, 10, "the memory of the uploads")


def test_an_upload_that_the_class_refuses_gives_its_memory_back(serve: Callable[..., Server]) -> None:
    server = serve(MemoryStore(capacity_bytes=10), memory=10_000)
    ask = Client(server.server_address[1])
    upload = begin(ask)
    etag = ask("PUT", f"{ALICE}?partNumber=1&uploadId={upload}", bytes(6_000)).headers["etag"]
    unlisted = ask("PUT", f"{ALICE}?partNumber=2&uploadId={upload}", bytes(3_000))
    assert unlisted.status == 200
    body = complete([(1, etag)])
    assert ask("POST", f"{ALICE}?uploadId={upload}", body).status == 507
    assert ask("POST", f"{ALICE}?uploadId={upload}", body).code == "NoSuchUpload"
    assert ask("DELETE", f"{ALICE}?uploadId={upload}").status == 204
    wait_for(lambda: server.budget._free == server.budget.total, 10, "the memory of the upload")


# -- bad requests


def test_a_body_larger_than_the_memory_is_refused_unread(serve: Callable[..., Server]) -> None:
    server = serve(memory=1000)
    answer = raw(server, b"PUT /kv-bucket/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"EntityTooLarge" in answer
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"PUT /kv-bucket/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Encoding: aws-chunked\r\nContent-Length: 1\r\n\r\nx", b"400"),
        (b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", b"400"),
        (b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", b"400"),
        (b"PUT /kv-bucket/x HTTP/1.1\r\n\r\n", b"411"),
        (b"BREW /kv-bucket/x HTTP/1.1\r\n\r\n", b"501"),
        (b"GET /kv-bucket/x HTTP/9.9\r\n\r\n", b"505"),
        (b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /kv-bucket/x HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
    ],
)  # fmt: skip
def test_a_request_that_is_invalid_is_refused_and_its_connection_closed(
    serve: Callable[..., Server], head: bytes, status: bytes
) -> None:
    served = MemoryStore()
    answer = raw(serve(served), head)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    # Nothing of the rest was taken for a second request.
    assert answer.count(b"HTTP/1.1") == 1
    assert served.stat("kv-bucket/x") is None


def test_a_body_that_is_cut_off_is_not_stored(serve: Callable[..., Server]) -> None:
    served = MemoryStore()
    assert raw(serve(served), b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Length: 100\r\n\r\nonly this", shut=True) == b""
    assert served.stat("kv-bucket/x") is None


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 400),
        ("/B/x", 400),
        ("/kv-bucket/%ff", 400),
        ("/kv-bucket/%00", 400),
        ("/kv-bucket/%C3%A9", 400),
        ("/kv-bucket/" + "k" * 1024, 400),
        ("/kv-bucket?list-type=1", 501),
        ("/kv-bucket?list-type=2&delimiter=%2F", 501),
        ("/kv-bucket?list-type=2&max-keys=x", 501),
        ("/kv-bucket?list-type=2&max-keys=1&max-keys=2", 400),
        ("/kv-bucket?list-type=2&start-after=a", 501),
        ("/kv-bucket?list-type=2&prefix=..", 400),
        ("/kv-bucket?list-type=2&prefix=a%2F..%2F", 400),
        ("/kv-bucket?list-type=2&prefix=%2F", 400),
        ("/kv-bucket?list-type=2&prefix=%00", 400),
        ("/kv-bucket?list-type=2&prefix=" + "k" * 1024, 400),
        ("/kv-bucket?list-type=2&continuation-token=a%2F%2Fb", 400),
        ("/kv-bucket?list-type=2&continuation-token=..%2Fb", 400),
        ("/kv-bucket?list-type=2&continuation-token=a%2F", 400),
        ("/kv-bucket?" + "&".join(f"q{n}=1" for n in range(40)), 400),
    ],
)
def test_an_address_that_is_invalid_is_refused(ask: Client, path: str, status: int) -> None:
    assert ask("GET", path).status == status


@pytest.mark.parametrize("name", ["..", ".", "a/../b", "a/./b", "a//b", "/b", "a/", "a/%2e%2e/b", "a%2F%2Fb"])
def test_a_key_with_a_segment_that_paths_reduce_is_refused(serve: Callable[..., Server], name: str) -> None:
    served = MemoryStore()
    served.put("kv-bucket/b", memoryview(b"x"))
    ask = Client(serve(served).server_address[1])
    for method in ("PUT", "GET", "HEAD", "DELETE", "POST"):
        query = "?uploads" if method == "POST" else ""
        assert ask(method, f"/kv-bucket/{name}{query}", b"y" if method == "PUT" else None).status == 400, method
    body = f"<Delete><Object><Key>b</Key></Object><Object><Key>{unquote(name)}</Key></Object></Delete>"
    assert ask("POST", "/kv-bucket?delete", body.encode()).status == 400
    assert [entry.key for entry in served.list("", "", 10)] == ["kv-bucket/b"]


def test_keys_and_prefixes_of_other_names_are_accepted(ask: Client) -> None:
    for name in (".kvcachepool-probe", "a/...", "a/..b", "a/b.."):
        assert ask("PUT", f"/kv-bucket/{name}", b"x").status == 200
    for prefix in ("", "a/", "a/..b", ".kv"):
        assert keys_of(ask("GET", f"/kv-bucket?list-type=2&prefix={prefix}")), prefix


@pytest.mark.parametrize("query", ["acl", "tagging", "retention", "versionId=1", "partNumber=1", "append", "restore"])
def test_a_query_that_means_another_request_changes_nothing(ask: Client, query: str) -> None:
    ask("PUT", ALICE, OBJECT)
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        refused = ask(method, f"{ALICE}?{query}", b"<xml/>" if method == "PUT" else None)
        assert refused.status == 501, method
        assert method == "HEAD" or query.partition("=")[0].encode() in refused.body
    assert (
        ask("POST", f"/kv-bucket?delete&{query}", b"<Delete><Object><Key>a/one.kv</Key></Object></Delete>").status
        == 501
    )
    assert ask("GET", f"{ALICE}?x-id=GetObject").body == OBJECT
    assert ask("PUT", f"{BOB}?x-id=PutObject", OBJECT).status == 200


def test_the_operations_of_uploads_are_for_their_methods(ask: Client) -> None:
    ask("PUT", ALICE, OBJECT)
    for method, query in (("GET", "uploadId=1"), ("HEAD", "uploadId=1"), ("DELETE", "uploads"), ("PUT", "uploads")):
        assert ask(method, f"{ALICE}?{query}").status == 501, (method, query)
    assert ask("GET", ALICE).body == OBJECT


def test_a_copy_is_refused_and_stores_nothing(ask: Client) -> None:
    ask("PUT", ALICE, OBJECT)
    refused = ask("PUT", BOB, b"", x_amz_copy_source=ALICE)
    assert (refused.status, refused.code) == (501, "NotImplemented")
    assert ask("HEAD", BOB).status == 404


def test_buckets_are_neither_created_nor_removed(ask: Client) -> None:
    for method in ("PUT", "DELETE"):
        assert ask(method, "/kv-bucket").status == 501
    assert ask("POST", ALICE).status == 501


def test_bytes_that_differ_from_their_digest_are_not_stored(ask: Client) -> None:
    sha256 = hashlib.sha256(b"right").hexdigest()
    crc32 = b64encode(zlib.crc32(b"right").to_bytes(4, "big")).decode()
    assert ask("PUT", ALICE, b"wrong", x_amz_content_sha256=sha256).code == "XAmzContentSHA256Mismatch"
    assert ask("PUT", ALICE, b"wrong", x_amz_checksum_crc32=crc32).code == "BadDigest"
    assert ask("HEAD", ALICE).status == 404
    assert ask("PUT", ALICE, b"right", x_amz_content_sha256=sha256, x_amz_checksum_crc32=crc32).status == 200


def test_connections_are_bounded(serve: Callable[..., Server]) -> None:
    server = serve(connections=2)
    held = [Client(server.server_address[1]) for _ in range(2)]
    assert [one("GET", "/healthz").status for one in held] == [200, 200]
    refused = Client(server.server_address[1])("GET", "/healthz")
    assert (refused.status, refused.code) == (503, "SlowDown")
    held.pop()._connection.close()
    wait_for(lambda: Client(server.server_address[1])("GET", "/healthz").status == 200, 10, "a place again")


def test_a_connection_without_a_thread_gives_its_place_back(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(connections=1)
    with monkeypatch.context() as patched:

        def fails(*_: Any) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(socketserver.ThreadingMixIn, "process_request", fails)
        for _ in range(3):
            assert raw(server, b"") == b""
    assert not server._open
    assert Client(server.server_address[1])("GET", "/healthz").status == 200


# -- the end of a server


def test_a_request_that_is_being_served_is_answered_before_the_end(serve: Callable[..., Server]) -> None:
    begun, release = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, data: memoryview) -> None:
            begun.set()
            release.wait(20)
            super().put(key, data)

    server = serve(Slow())
    idle, busy = (Client(server.server_address[1]) for _ in range(2))
    assert idle("GET", "/healthz").status == 200
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(busy("PUT", ALICE, OBJECT)))
    thread.start()
    assert begun.wait(10)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), 10) as half:
        half.sendall(b"PUT /kv-bucket/half HTTP/1.1\r\nContent-Length: 4\r\n\r\nha")
        wait_for(lambda: len(server._busy) == 2, 10, "both requests in the server")
        assert not server.drain(0.05)
        release.set()
        half.sendall(b"lf")
        assert half.recv(100).startswith(b"HTTP/1.1 200")
    assert server.drain(10)
    thread.join(10)
    assert (answers[0].status, answers[0].headers["connection"]) == (200, "close")
    with pytest.raises((http.client.HTTPException, OSError)):
        idle("GET", "/healthz")
