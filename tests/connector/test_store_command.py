"""The process of a served class: classes that are wrong, arguments, and signatures of requests."""

from __future__ import annotations

import gc
import hashlib
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_client import ALICE, Client, raw

from kvcachepool import store, store_sign
from kvcachepool.store_api import Entry, Stat
from kvcachepool.store_calls import BadClass, Calls, load
from kvcachepool.store_errors import Refused, line
from kvcachepool.store_http import Server
from kvcachepool.store_memory import MemoryStore
from servers.waiting import wait_for

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


def test_a_call_that_was_cancelled_in_the_queue_keeps_no_bytes() -> None:
    release = threading.Event()

    class Hanging(MemoryStore):
        def stat(self, key: str) -> Stat | None:
            release.wait(60)
            return None

    class Data(bytearray):
        """Bytes that a weak reference can follow."""

    calls = Calls(Hanging(), 1, 0.1)
    with pytest.raises(Refused, match="did not return"):
        calls.call("stat", "k")
    data = Data(b"x")
    alive = weakref.ref(data)
    with pytest.raises(Refused, match="did not return") as refused:
        calls.call("put", "k", memoryview(data))
    del data, refused
    assert calls.stuck()
    wait_for(lambda: gc.collect() >= 0 and alive() is None, 10, "the bytes released while the thread hangs")
    release.set()
    wait_for(lambda: not calls.stuck(), 10, "a free thread")
    calls.call("put", "k", memoryview(b"y"))


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


@pytest.mark.parametrize("name", ["host", "x-amz-date", "x-amz-content-sha256"])
def test_a_header_that_is_signed_and_not_sent_is_refused(keys: store_sign.Keys, name: str) -> None:
    headers = {header: value for header, value in SIGNED.items() if header != name}
    with pytest.raises(Refused, match="expected a signature of the headers"):
        store_sign.check(keys, "GET", "/test.txt", headers, NOW_S)


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
