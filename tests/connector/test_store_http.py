"""The HTTP interface of a served class: requests of the S3 tier, bad requests, and classes that are wrong."""

from __future__ import annotations

import hashlib
import http.client
import re
import socket
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcachepool import store, store_sign, store_uploads
from kvcachepool.store_api import Entry, Stat
from kvcachepool.store_calls import BadClass, Budget, Calls, load
from kvcachepool.store_errors import Refused, line
from kvcachepool.store_http import Server
from kvcachepool.store_memory import MemoryStore
from servers.waiting import wait_for

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


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers in this process."""
    made: list[Server] = []

    def start(
        served: Any = None, *, memory: int = 64 << 20, deadline_s: float = 5.0, connections: int = 64, keys: Any = None
    ) -> Server:
        calls = Calls(served or MemoryStore(), 4, deadline_s)
        made.append(Server(("127.0.0.1", 0), calls, Budget(memory, min(deadline_s, 0.5)), keys, connections))
        threading.Thread(target=made[-1].serve_forever, args=(0.02,), daemon=True).start()
        return made[-1]

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def ask(serve: Callable[..., Server]) -> Client:
    """A client of a store in memory."""
    return Client(serve().server_address[1])


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
    begin(ask)
    server.budget.take(10_000)


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
        ("/kv-bucket?" + "&".join(f"q{n}=1" for n in range(40)), 400),
    ],
)
def test_an_address_that_is_invalid_is_refused(ask: Client, path: str, status: int) -> None:
    assert ask("GET", path).status == status


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


# -- classes that are wrong


class Wrong(MemoryStore):
    """Results of the wrong type or size."""

    def __init__(self, **results: Any) -> None:
        super().__init__()
        self.results = results

    def __getattribute__(self, name: str) -> Any:
        results = object.__getattribute__(self, "__dict__").get("results", {})
        if name in results:
            return lambda *_: results[name]
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    ("results", "path"),
    [
        ({"stat": "text"}, ALICE),
        ({"stat": Stat(-1)}, ALICE),
        ({"stat": (1, 2, 3)}, ALICE),
        ({"stat": (True, None)}, ALICE),
        ({"stat": Stat(3, float("nan"))}, ALICE),
        ({"get": "text"}, ALICE),
        ({"get": b"ob"}, ALICE),
        ({"get": b"object and more"}, ALICE),
        ({"list": [Entry("kv-bucket/b", 1, 0.0), Entry("kv-bucket/a", 1, 0.0)]}, "/kv-bucket?list-type=2"),
        ({"list": [Entry("elsewhere/b", 1, 0.0)]}, "/kv-bucket?list-type=2"),
        ({"list": [Entry("kv-bucket/b", 1, 1e30)]}, "/kv-bucket?list-type=2"),
        ({"list": None}, "/kv-bucket?list-type=2"),
    ],
)
def test_a_result_that_is_wrong_is_an_error_with_the_name_of_the_class(
    serve: Callable[..., Server], results: dict[str, Any], path: str
) -> None:
    served = Wrong()
    served.put("kv-bucket/a/one.kv", memoryview(b"obj"))
    served.results = results
    answer = Client(serve(served).server_address[1])("GET", path)
    assert (answer.status, answer.code) == (500, "InternalError")
    assert b"Wrong" in answer.body


def test_an_exception_of_the_class_fails_one_request(serve: Callable[..., Server]) -> None:
    class Raising(MemoryStore):
        def stat(self, key: str) -> Stat | None:
            if key.endswith("bad"):
                raise TimeoutError("<the reason>")
            return super().stat(key)

    ask = Client(serve(Raising()).server_address[1])
    answer = ask("GET", "/kv-bucket/bad")
    assert (answer.status, answer.code) == (500, "InternalError")
    assert b"Raising.stat raised TimeoutError: &lt;the reason&gt;" in answer.body
    assert ask("GET", "/kv-bucket/good").status == 404


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_call_that_hangs_ends_at_its_deadline(serve: Callable[..., Server], kind: str) -> None:
    release = threading.Event()

    class Hanging(MemoryStore):
        def stat(self, key: str) -> Any:
            if not key.endswith("bad"):
                return super().stat(key)
            if kind == "async":
                import asyncio

                return asyncio.sleep(3600)
            release.wait(60)
            return None

    server = serve(Hanging(), deadline_s=0.2)
    ask = Client(server.server_address[1])
    for _ in range(4):
        answer = ask("GET", "/kv-bucket/bad")
        assert (answer.status, answer.code) == (503, "RequestTimeout")
    if kind == "async":
        # The coroutine was cancelled, so its thread is free.
        wait_for(lambda: ask("GET", "/kv-bucket/good").status == 404, 10, "a free thread")
        return
    wait_for(lambda: ask("GET", "/healthz").status == 503, 10, "health that fails")
    release.set()
    wait_for(lambda: ask("GET", "/healthz").status == 200, 10, "health again")
    assert ask("GET", "/kv-bucket/good").status == 404


@pytest.mark.parametrize(
    ("path", "config", "words"),
    [
        ("kvcachepool.store_memory", {}, "expected MODULE:CLASS"),
        ("no_such_module:X", {}, "add its folder to PYTHONPATH"),
        ("kvcachepool.store_memory:Nothing", {}, "has no class Nothing"),
        ("kvcachepool.store_api:Store", {}, "does not accept --config"),
        ("kvcachepool.store_api:Stat", {}, "lacks open, close, stat, get, put, delete"),
        ("kvcachepool.store_memory:MemoryStore", {"colour": 1}, "does not accept --config"),
        ("kvcachepool.store_mooncake:MooncakeStore", {"master": "a", "hostname": "b", "ranges": 0}, "above 0"),
        ("kvcachepool.store_infinistore:InfiniStore", {"host": "a", "connections": 0}, "above 0"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_reason(path: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadClass, match=re.escape(words)):
        load(path, config)


def test_log_fields_stay_on_one_line() -> None:
    assert line("failed", why='a "b"\nlevel=info') == 'failed why="a \\"b\\"\\nlevel=info"'
    assert line("failed", port=1, empty="") == 'failed port=1 empty=""'


# -- the command


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        store.main(["--help"])
    assert "kvcachepool.store_memory:MemoryStore --config" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "9810"],
        ["--listen", "127.0.0.1:99999"],
        ["--memory", "0"],
        ["--memory", "1T"],
        ["--deadline", "0"],
        ["--deadline", "nan"],
        ["--concurrency", "0"],
        ["--config", "[]"],
        ["--config", "{"],
        ["--config", "@/no/such/file"],
    ],
)
def test_an_argument_that_is_invalid_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        store.main(["kvcachepool.store_memory:MemoryStore", *arguments])
    assert ended.value.code == 2
    assert f"argument {arguments[0]}: expected" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "kv.example"])
def test_it_listens_elsewhere_only_with_a_key(host: str, keys: store_sign.Keys, tmp_path: Path) -> None:
    arguments = ["kvcachepool.store_memory:MemoryStore", "--listen", f"{host}:9810"]
    with pytest.raises(store_sign.BadKey, match="add --auth FOLDER"):
        store.keys_of(store.parser().parse_args(arguments))
    signed = store.keys_of(store.parser().parse_args([*arguments, "--auth", str(tmp_path)]))
    assert signed is not None
    assert signed.pair() == (KEY_ID, SECRET)


def test_a_class_that_does_not_open_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "opening.py").write_text(
        "import threading\n"
        "from kvcachepool.store_memory import MemoryStore\n"
        "class Raises(MemoryStore):\n    def open(self):\n        raise OSError('no server')\n"
        "class Hangs(MemoryStore):\n    def open(self):\n        threading.Event().wait(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert store.main(["opening:Raises"]) == 1
    assert "Raises.open raised OSError: no server" in caplog.text
    assert store.main(["opening:Hangs", "--open-deadline", "0.1"]) == 1
    assert "Hangs.open did not return within 0.1 s" in caplog.text


# -- signatures

#: The example of AWS's documentation for a GET with a header.
KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
NOW_S = 1_369_353_600.0
EMPTY = hashlib.sha256(b"").hexdigest()
SIGNED = {
    "host": "examplebucket.s3.amazonaws.com",
    "range": "bytes=0-9",
    "x-amz-content-sha256": EMPTY,
    "x-amz-date": "20130524T000000Z",
    "authorization": f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20130524/us-east-1/s3/aws4_request,"
    "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
    "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
}


@pytest.fixture
def keys(tmp_path: Path) -> store_sign.Keys:
    """The key of that example."""
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text(KEY_ID)
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text(SECRET + "\n")
    return store_sign.Keys(tmp_path)


def refused(keys: store_sign.Keys, method: str = "GET", target: str = "/test.txt", **more: Any) -> str:
    """Code of the refusal of that example with changes; empty if it is accepted."""
    now_s = more.pop("now_s", NOW_S)
    headers = {**SIGNED, **{name.replace("_", "-"): value for name, value in more.items()}}
    try:
        store_sign.check(keys, method, target, headers, now_s)
    except Refused as error:
        return error.code
    return ""


def test_a_signature_of_awss_documentation_is_accepted(keys: store_sign.Keys) -> None:
    assert refused(keys) == ""
    assert refused(keys, now_s=NOW_S + 899) == ""


def test_a_request_that_differs_from_what_was_signed_is_refused(keys: store_sign.Keys) -> None:
    signed = SIGNED["authorization"]
    assert refused(keys, method="DELETE") == "SignatureDoesNotMatch"
    assert refused(keys, target="/test.tx") == "SignatureDoesNotMatch"
    assert refused(keys, target="/test.txt?uploads") == "SignatureDoesNotMatch"
    assert refused(keys, range="bytes=0-10") == "SignatureDoesNotMatch"
    assert refused(keys, x_amz_content_sha256="UNSIGNED-PAYLOAD") == "SignatureDoesNotMatch"
    assert refused(keys, authorization=signed[:-1]) == "SignatureDoesNotMatch"
    assert refused(keys, authorization=signed.replace("us-east-1", "us-east-2")) == "SignatureDoesNotMatch"
    assert refused(keys, authorization=signed.replace(KEY_ID, "another")) == "InvalidAccessKeyId"
    assert refused(keys, authorization=signed.replace("host;", "")) == "AccessDenied"
    assert refused(keys, authorization="") == "AccessDenied"
    assert refused(keys, authorization="Basic dXNlcjpwYXNz") == "AccessDenied"
    assert refused(keys, authorization="AWS4-HMAC-SHA256 nonsense") == "AccessDenied"
    assert refused(keys, x_amz_date="yesterday") == "AccessDenied"
    for now_s in (NOW_S - 901, NOW_S + 901):
        assert refused(keys, now_s=now_s) == "RequestTimeTooSkewed"


def test_a_key_that_changed_is_used_and_one_that_cannot_be_read_is_kept(
    keys: store_sign.Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_sign, "_FRESH_S", 0.0)
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("another")
    assert refused(keys) == "SignatureDoesNotMatch"
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text(SECRET)
    assert refused(keys) == ""
    (tmp_path / "AWS_SECRET_ACCESS_KEY").unlink()
    assert refused(keys) == ""
    with pytest.raises(store_sign.BadKey, match="--auth needs the files"):
        store_sign.Keys(tmp_path)


def test_a_request_without_a_signature_is_refused_unread(serve: Callable[..., Server], keys: store_sign.Keys) -> None:
    served = MemoryStore()
    server = serve(served, keys=keys)
    answer = raw(server, b"PUT /kv-bucket/x HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
    assert answer.startswith(b"HTTP/1.1 403")
    assert served.stat("kv-bucket/x") is None
    assert Client(server.server_address[1])("GET", "/healthz").status == 200
