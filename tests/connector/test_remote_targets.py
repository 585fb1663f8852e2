"""Targets and credentials of the object client: what it accepts, and whom it trusts."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from object_calls import fails
from stub_remote import KEY, LONG_S, StubRemote, options

from kvcachepool import object_targets
from kvcachepool.client import Client, Item, Put, Unavailable
from kvcachepool.object_targets import servers_of
from kvcachepool.wire import Op
from servers.certificates import for_server
from servers.paths import ROOT
from servers.waiting import wait_for

AT_ONCE_S = 5.0


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("/run/sidecar.sock", []),
        ("relative.sock", []),
        ("tls://cache:7411", ["cache:7411"]),
        ("tls://Cache.ns.svc:7411, tls://10.0.0.1:1", ["cache.ns.svc:7411", "10.0.0.1:1"]),
        ("tls://[::1]:65535", ["[::1]:65535"]),
        ("tls://[FE80::1]:07411,tls://a:00001", ["[fe80::1]:7411", "a:1"]),
    ],
)
def test_a_target_is_a_path_or_servers(target: str, names: list[str]) -> None:
    assert [server.name for server in servers_of(target)] == names


def test_the_host_of_a_server_has_no_brackets() -> None:
    assert [(one.host, one.port) for one in servers_of("tls://[::1]:7,tls://a:8")] == [("::1", 7), ("a", 8)]


@pytest.mark.parametrize(
    "target",
    [
        "cache:7411",
        "tcp://cache:7411",
        "lm://cache:7411",
        "TLS://cache:7411",
        "tls://cache",
        "tls://cache:",
        "tls://:7411",
        "tls://cache:0",
        "tls://cache:65536",
        "tls://cache:x",
        "tls://user@cache:7411",
        "tls://cache:7411/path",
        "tls://cache:7411?x=1",
        "tls://::1:7411",
        "tls://a:1,b:1",
        "tls://a:1,/run/sidecar.sock",
        "tls://a:1,",
        "tls://a:1,tls://a:1",
        "tls://a:1,tls://A:1",
        "tls://a:1,tls://b:1,tls://a:01",
        "tls://[::a]:1,tls://[::A]:1",
    ],
)
def test_a_wrong_target_is_named_with_what_is_expected(target: str) -> None:
    with pytest.raises(ValueError, match=r"tls://host:port|once"):
        Client(target, key=KEY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "need a key: set key_file, key or KVCACHEPOOL_KEY_FILE"),
        ({"key": ""}, "1 to 1024 bytes"),
        ({"key": "x" * 1025}, "1 to 1024 bytes"),
        ({"key": b"bytes"}, "expected a text"),
        ({"key": "x", "key_file": "/x"}, "either key or key_file"),
        ({"key_file": "/none/key"}, "key_file /none/key: .*No such file"),
        ({"key": "x", "ca_file": "/none/ca"}, "ca_file /none/ca: expected certificates in PEM"),
    ],
)
def test_wrong_credentials_are_an_error_at_once(options: dict[str, Any], message: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("KVCACHEPOOL_KEY_FILE", raising=False)
    with pytest.raises(ValueError, match=message):
        Client("tls://127.0.0.1:1", **options)


@pytest.mark.parametrize("text", ["", "\n \n", "x" * 2000, b"\xff\xfe"])
def test_a_file_without_a_key_is_an_error_at_once(text: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="key_file"):
        Client("tls://127.0.0.1:1", key_file=str(file))


def test_the_environment_names_servers_and_credentials(
    remote: StubRemote, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(f"\n{KEY}\nan older key\n")
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", remote.target)
    monkeypatch.setenv("KVCACHEPOOL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("KVCACHEPOOL_CA_FILE", str(certificates / "ca.crt"))
    with Client(timeout_s=LONG_S) as client:
        assert client.put([Item("k", b"value")]) == [Put.STORED]
        assert client.get("k")[0].value == b"value"


def test_a_key_file_is_read_for_each_connection(remote: StubRemote, certificates: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    with Client(remote.target, key_file=str(file), ca_file=str(certificates / "ca.crt"), timeout_s=LONG_S) as client:
        assert client.exists("k") == 0
        remote.key = "another key"
        file.write_text("another key\n")
        remote.cut()
        wait_for(lambda: not client.connected or remote.connections == 0, 10, "the end of the connections")
        assert client.wait_connected(LONG_S)
        assert client.exists("k") == 0


def test_a_changed_ca_file_is_read_for_the_next_connection(
    remote: StubRemote, certificates: Path, tmp_path: Path
) -> None:
    file, renewed = tmp_path / "ca.crt", tmp_path / "renewed"
    file.write_bytes((certificates / "ca.crt").read_bytes())
    with Client(remote.target, key=KEY, ca_file=str(file), timeout_s=LONG_S) as client:
        assert client.exists("k") == 0

        def reconnects() -> None:
            remote.cut()
            wait_for(lambda: not client.connected or remote.connections == 0, 10, "the end of the connections")
            assert client.wait_connected(LONG_S)
            assert client.exists("k") == 0

        file.write_text("half of")
        reconnects()
        file.unlink()
        reconnects()
        for_server(renewed, "127.0.0.1")
        remote.context.load_cert_chain(renewed / "server.crt", renewed / "server.key")
        file.write_bytes((renewed / "ca.crt").read_bytes())
        reconnects()


def test_the_guides_example_runs(remote: StubRemote, certificates: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "remote.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "key").write_text(KEY)
    example = example.replace("tls://cache.example:9800", remote.target)
    example = example.replace("/etc/kvcachepool/key", str(tmp_path / "key"))
    example = example.replace("/etc/kvcachepool/ca.crt", str(certificates / "ca.crt"))
    names: dict[str, Any] = {}
    exec(example, names)
    with names["client"] as client:
        assert client.get("key")[0].value == b"value"


def test_a_wrong_key_is_unauthorized(remote: StubRemote, certificates: Path) -> None:
    with Client(remote.target, **options(certificates) | {"key": "wrong"}) as client:
        for call in (lambda: client.exists("k"), lambda: client.put([Item("k", b"")]), lambda: client.lease("k")):
            assert fails("Unauthorized", call) < AT_ONCE_S
        assert not client.connected
        assert client._transport._pool._retry_at - time.monotonic() > 15, "a refused key is not tried again and again"
    assert [frame.op for frame in remote.received] == [Op.HELLO]


def test_a_server_whose_certificate_nobody_trusts_gets_no_key(remote: StubRemote) -> None:
    with Client(remote.target, key=KEY, timeout_s=LONG_S) as client:
        with pytest.raises(Unavailable, match="certificate"):
            client.exists("k")
    assert not remote.received


def test_a_certificate_of_another_host_is_refused(
    remote: StubRemote, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"tls://localhost:{remote.port}"
    with Client(target, **options(certificates)) as client:
        with pytest.raises(Unavailable, match=r"[Hh]ostname"):
            client.exists("k")
    assert not remote.received


def test_tls_is_1_2_or_newer(certificates: Path) -> None:
    access = object_targets._access(object_targets.Credentials(KEY, None, str(certificates / "ca.crt")), "test")
    context = access.context()
    assert context.minimum_version.name == "TLSv1_2"
    assert context.check_hostname
    assert context.verify_mode.name == "CERT_REQUIRED"
