"""Remote access with the real sidecar and the real server: what restarts, deaths and lower tiers do to clients."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcachepool.shared as shared_module
from kvcachepool.client import Client, Header, Item, Object, Put, Unavailable
from kvcachepool.object_bytes import digest_of
from kvcachepool.remote_servers import server_of
from kvcachepool.shared import Shared
from servers.remote import RemoteServer
from servers.sidecar import Sidecar
from servers.waiting import wait_for

WAIT_S = 20.0
AT_ONCE_S = 5.0
MIB = 1 << 20
ARENA = 64 * MIB


@pytest.fixture(autouse=True)
def fresh_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_shared", Shared())


@pytest.fixture
def sidecar(tmp_path: Path, binary: Path) -> Iterator[Sidecar]:
    (tmp_path / "disk").mkdir()
    disk = {"path": str(tmp_path / "disk"), "size": "1Gi"}
    config = {"memory": {"evictionPolicy": "FIFO"}, "disk": disk}
    made = Sidecar(tmp_path / "pod", memory="64Mi", config=config).start()
    yield made
    made.stop()


@pytest.fixture
def server(sidecar: Sidecar, certificates: Path) -> Iterator[RemoteServer]:
    made = RemoteServer(sidecar, certificates).start()
    yield made
    made.stop()


@pytest.fixture
def client(server: RemoteServer) -> Iterator[Client]:
    with Client(server.target, timeout_s=WAIT_S, **server.options) as made:
        yield made


def content(key: str, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


def stored(client: Client, key: str, value: Any, header: Header | None = None) -> None:
    """Stores an object, and waits until it can be read."""
    wait_for(lambda: client.put([Item(key, value, header)])[0] != Put.NO_ROOM, WAIT_S, f"room for {key}")
    wait_for(lambda: client.exists(key), WAIT_S, f"{key} readable")


def press(client: Client) -> None:
    """Stores other objects, three times as many as fit into the arena."""
    for index in range(3 * ARENA // MIB):
        item = Item(f"press-{index}-{time.monotonic_ns()}", bytes(MIB))
        wait_for(lambda item=item: client.put([item]) == [Put.STORED], WAIT_S, "room")


def served_again(client: Client) -> None:
    def works() -> bool:
        try:
            return client.exists("none") == 0
        except Unavailable:
            return False

    wait_for(works, WAIT_S, "a call that is served")


def test_local_and_remote_clients_share_objects(client: Client, sidecar: Sidecar) -> None:
    value, header = content("k", 9 * MIB), Header((9,), "uint8")
    with Client(str(sidecar.socket), timeout_s=WAIT_S) as local:
        stored(local, "local", value, header)
        assert client.get("local") == [Object(header, value)]
        stored(client, "remote", value, header)
        assert local.get("remote") == [Object(header, value)]
        assert client.remove("local") == 1
        assert local.contains(["local", "remote"]) == [False, True]


def test_an_evicted_object_is_fetched_from_disk(client: Client, sidecar: Sidecar) -> None:
    value = content("k", 8 * MIB + 5)
    stored(client, "k", value)
    wait_for(lambda: sidecar.written_to("disk"), WAIT_S, "k on disk")
    press(client)
    wait_for(lambda: client.stat("k") == [None], WAIT_S, "k evicted from memory")
    assert client.contains(["none", "k"]) == [False, True]
    assert client.get(["k", "none"]) == [Object(Header(), value), None]


def test_a_wrong_key_is_unauthorized(server: RemoteServer) -> None:
    with Client(server.target, timeout_s=WAIT_S, **server.options | {"key": "wrong"}) as client:
        with pytest.raises(Unavailable) as caught:
            client.exists("k")
        assert caught.value.reason == "Unauthorized"


def test_objects_survive_the_death_of_the_server_and_the_client_reconnects(
    client: Client, server: RemoteServer
) -> None:
    value = content("k", 5 * MIB)
    stored(client, "k", value)
    with client.lease("k") as lease:
        server.kill()
        wait_for(lambda: not client.connected, WAIT_S, "the end of the connection")
        calls: list[Callable[[], Any]] = [lambda: client.exists("k"), lambda: client.put([Item("l", b"")])]
        for call in calls:
            start = time.monotonic()
            with pytest.raises(Unavailable):
                call()
            assert time.monotonic() - start < AT_ONCE_S
        assert lease[0].read() is None
        server.start()
        assert client.wait_connected(WAIT_S)
    served_again(client)
    assert client.get("k")[0].value == value


def test_objects_survive_the_death_of_the_engine_process(client: Client, sidecar: Sidecar) -> None:
    value = content("k", 5 * MIB)
    stored(client, "k", value)
    sidecar.kill_engine()
    wait_for(lambda: not client.connected, WAIT_S, "the end of the connections")
    served_again(client)
    wait_for(lambda: client.get("k")[0] is not None, WAIT_S, "k readable")
    assert client.get("k")[0].value == value


def test_a_client_that_dies_in_a_put_leaves_the_key_free(
    client: Client, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcachepool import remote_transport

    def die(connection: Any, *arguments: Any) -> set[int]:
        connection.interrupt()
        raise Unavailable("ConnectionLost")

    with monkeypatch.context() as patch:
        patch.setattr(remote_transport, "write", die)
        with pytest.raises(Unavailable):
            client.put([Item("k", content("k", 5 * MIB))])
    wait_for(lambda: client.put([Item("k", b"value")]) == [Put.STORED], WAIT_S, "the end of the dead client's grant")
    wait_for(lambda: client.exists("k"), WAIT_S, "k readable")
    assert client.get("k")[0].value == b"value"


def test_a_frozen_server_costs_a_call_its_deadline(client: Client, server: RemoteServer) -> None:
    stored(client, "k", b"value")
    server.freeze()
    try:
        start = time.monotonic()
        for call in (client.get, client.exists, client.stat, client.remove):
            with pytest.raises(Unavailable, match="Deadline"):
                call(["l"], timeout_s=0.2)
        with pytest.raises(Unavailable, match="Deadline"):
            client.put([Item("l", bytes(9 * MIB))], timeout_s=0.2)
        assert time.monotonic() - start < AT_ONCE_S
    finally:
        server.thaw()
    assert client.get("k")[0].value == b"value"
    wait_for(lambda: client.put([Item("l", b"new")]) == [Put.STORED], WAIT_S, "what was half written given back")


def test_without_its_sidecar_the_server_is_unavailable_until_it_is_back(client: Client, sidecar: Sidecar) -> None:
    stored(client, "k", b"value")
    sidecar.kill_tree()
    wait_for(lambda: not client.connected, WAIT_S, "the end of the connections")
    start = time.monotonic()
    with pytest.raises(Unavailable):
        client.exists("k")
    assert time.monotonic() - start < AT_ONCE_S
    sidecar.start()
    served_again(client)
    stored(client, "l", b"new")
    assert client.get("l")[0].value == b"new"


def test_calls_during_restarts_end_with_a_result_or_unavailable(
    client: Client, server: RemoteServer, sidecar: Sidecar
) -> None:
    keys = [f"k{index}" for index in range(20)]
    expected = {key: content(key, 500 << 10) for key in keys}
    stop, wrong, results = threading.Event(), list[Any](), set[str]()

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        while not stop.is_set():
            key = chosen.choice(keys)
            try:
                results.add(client.put([Item(key, expected[key])], timeout_s=5)[0].name)
                found = client.get(key, timeout_s=5)[0]
                if found is not None and found.value != expected[key]:
                    wrong.append(key)
                if chosen.random() < 0.3:
                    client.remove(key, timeout_s=5)
            except Unavailable as error:
                results.add(error.reason)
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(3):
        wait_for(lambda: {"STORED", "EXISTS"} <= results, WAIT_S, "served calls")
        if turn == 0:
            sidecar.kill_engine()
        elif turn == 1:
            server.kill()
            server.start()
        results.clear()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    served_again(client)
    wait_for(lambda: sidecar.status()["memory"]["slots"]["granted"] == 0, WAIT_S, "no slot still granted")


def test_two_servers_serve_their_own_keys(sidecar: Sidecar, certificates: Path) -> None:
    servers = [RemoteServer(sidecar, certificates, name).start() for name in ("one", "two")]
    names = [server.target.removeprefix("tls://") for server in servers]
    keys = [f"k{index}" for index in range(20)]
    first = [server_of(names, digest_of(key.encode())) == 0 for key in keys]
    try:
        target = ",".join(server.target for server in servers)
        with Client(target, timeout_s=WAIT_S, **servers[0].options) as client:
            assert client.put([Item(key, content(key, 100_000)) for key in keys]) == [Put.STORED] * 20
            wait_for(lambda: client.exists(keys) == 20, WAIT_S, "all readable")
            servers[0].kill()
            wait_for(lambda: client.contains(keys) == [not one for one in first], WAIT_S, "only keys of the other one")
            assert [one is None for one in client.get(keys)] == first
            servers[0].start()
            wait_for(lambda: client.exists(keys) == 20, WAIT_S, "all readable again")
    finally:
        for server in servers:
            server.stop()
