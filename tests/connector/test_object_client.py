"""The object client with the real sidecar, beside it and over its server of remote access."""

from __future__ import annotations

import asyncio
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_gate import Gate

import kvcachepool.shared as shared_module
from kvcachepool import object_copy
from kvcachepool.client import AsyncClient, Client, Header, InvalidKey, Item, Object, Put, Stat, Unavailable
from kvcachepool.messages import Grant, GrantChunk
from kvcachepool.object_bytes import digest_of, encode
from kvcachepool.object_client import _put_batches
from kvcachepool.shared import Shared, shared
from servers.paths import ROOT
from servers.remote import RemoteServer
from servers.sidecar import Sidecar
from servers.waiting import wait_for

WAIT_S = 20.0
#: Well below the deadline of the clients here.
AT_ONCE_S = 3.0
PIECE = 4 << 20
ARENA = 64 << 20


@pytest.fixture(autouse=True)
def fresh_shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setattr(shared_module, "_shared", Shared())
    return shared_module.shared()


@pytest.fixture
def sidecar(tmp_path: Path, binary: Path) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path / "pod", memory="64Mi", config={"memory": {"evictionPolicy": "FIFO"}}).start()
    yield made
    made.stop()


Connect = Callable[..., Client]
#: For tests of what clients on both ways do.
BOTH = pytest.mark.parametrize("connect", ["local", "remote"], indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest, sidecar: Sidecar) -> Iterator[Connect]:
    """Creates clients of the sidecar, local ones unless the test has the mark `BOTH`."""
    target, given = str(sidecar.socket), dict[str, Any]()
    server: RemoteServer | None = None
    if getattr(request, "param", "local") == "remote":
        server = RemoteServer(sidecar, request.getfixturevalue("certificates")).start()
        target, given = server.target, server.options
    yield lambda **options: Client(target, **given, **options)
    if server is not None:
        server.stop()


@pytest.fixture
def client(connect: Connect) -> Iterator[Client]:
    with connect(timeout_s=WAIT_S) as made:
        yield made


def content(key: str, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


def stored(client: Client, key: str, value: Any, header: Header | None = None, **options: Any) -> None:
    """Stores an object, and waits until it can be read."""
    wait_for(lambda: client.put([Item(key, value, header)], **options)[0] != Put.NO_ROOM, WAIT_S, f"room for {key}")
    wait_for(lambda: client.exists(key), WAIT_S, f"{key} readable")


def press(client: Client, round_: int, times: float = 3) -> None:
    """Stores other objects, several times as many as fit into the arena."""
    for index in range(int(times * ARENA) >> 20):
        key = f"press-{round_}-{index}"
        wait_for(lambda key=key: client.put([Item(key, bytes(1 << 20))]) == [Put.STORED], WAIT_S, "room")


# -- one client


@BOTH
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4096, PIECE - 64, PIECE - 63, PIECE, 3 * PIECE + 7])
def test_a_value_comes_back_with_its_header(client: Client, nbytes: int) -> None:
    value = content("k", nbytes)
    header = Header((nbytes,), "uint8", "raw", {"layer": 3, "scale": 0.5, "name": b"x", "more": [1, None]})
    stored(client, "k", value, header)
    assert client.get("k") == [Object(header, value)]
    assert client.stat("k") == [Stat(client.stat("k")[0].nbytes, "memory", False)]
    assert client.stat("k")[0].nbytes >= nbytes


@BOTH
def test_buffers_of_all_kinds_are_stored_one_after_the_other(client: Client) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    buffers = [b"", b"bytes", bytearray(b"array"), memoryview(b"xviewx")[1:-1], array, np.int16(5)]
    whole = b"".join(memoryview(buffer).tobytes() for buffer in buffers)
    stored(client, "k", buffers)
    stored(client, "one", array)
    with client.lease(["k", "one"]) as lease:
        assert lease[0].header == Header()
        assert lease[0].read() == whole
        first, second = bytearray(7), np.zeros(len(whole) - 7, dtype=np.uint8)
        assert lease[0].read_into([first, second])
        assert bytes(first) + second.tobytes() == whole
        assert lease[0].read_into(memoryview(first)[:3], offset=len(whole) - 3)
        assert bytes(first[:3]) == whole[-3:]
        copy = np.zeros_like(array)
        assert lease[1].read_into(copy)
        assert (copy == array).all()
        with pytest.raises(ValueError, match="at most 3 bytes"):
            lease[0].read_into(bytearray(4), offset=len(whole) - 3)
        with pytest.raises(ValueError, match="read-only"):
            lease[0].read_into(b"1234")


@BOTH
def test_parts_of_a_value_are_read_across_pieces(client: Client) -> None:
    value = np.frombuffer(content("k", 3 * PIECE), dtype=np.uint8)
    stored(client, "k", value)
    with client.lease("k") as lease:
        for begin, end in [
            (0, 100),
            (PIECE - 70, PIECE + 70),
            (PIECE - 100, 2 * PIECE + 9),
            (3 * PIECE - 1, 3 * PIECE),
        ]:
            part = np.zeros(end - begin, dtype=np.uint8)
            assert lease[0].read_into([part[:50], part[50:]], offset=begin)
            assert (part == value[begin:end]).all()


@BOTH
def test_objects_never_change(client: Client) -> None:
    stored(client, "k", b"first")
    assert client.put([Item("k", b"second"), Item("l", b"1"), Item("l", b"2")]) == [
        Put.EXISTS,
        Put.STORED,
        Put.EXISTS,
    ]
    assert client.get("k")[0].value == b"first"


@BOTH
def test_lookups_count_a_prefix_or_each_key(client: Client) -> None:
    for key in ("a", "b", "d"):
        stored(client, key, b"x")
    keys = ["a", b"b", "c", "d"]
    assert client.exists(keys) == 2
    assert client.contains(keys) == [True, True, False, True]
    assert [found is not None for found in client.lease(keys)] == [True, True, False, True]
    assert [found is not None for found in client.get(keys)] == [True, True, False, True]
    with client.lease(keys, prefix=True) as lease:
        assert len(lease) == 4
        assert lease[1] is not None
    assert client.exists([]) == 0
    assert client.contains([]) == client.get([]) == client.put([]) == client.stat([]) == []
    assert client.remove([]) == len(client.lease([])) == 0


@BOTH
def test_namespaces_have_their_own_objects(client: Client, connect: Connect) -> None:
    with connect(namespace="team-b") as other:
        stored(client, "k", b"a")
        assert other.get("k") == [None]
        stored(other, "k", b"b")
        assert other.get("k")[0].value == b"b"
        assert other.remove("k") == 1
        assert client.get("k")[0].value == b"a"


@BOTH
def test_objects_are_removed_touched_pinned_and_described(client: Client) -> None:
    for key in ("a", "b"):
        stored(client, key, b"x")
    keys = ["a", "b", "none"]
    assert client.touch(keys) == 2
    assert client.pin(keys) == 2
    assert [stat and stat.pinned for stat in client.stat(keys)] == [True, True, None]
    assert client.unpin(keys) == 2
    assert [stat and stat.pinned for stat in client.stat(keys)] == [False, False, None]
    assert client.remove(["a", "none"]) == 1
    assert client.contains(keys) == [False, True, False]
    stored(client, "a", b"another")
    assert client.get("a")[0].value == b"another"


@BOTH
def test_objects_expire(client: Client) -> None:
    stored(client, "k", b"x", ttl_s=2)
    stored(client, "stays", b"x")
    wait_for(lambda: not client.exists("k"), WAIT_S, "k expired")
    assert client.exists("stays") == 1


@BOTH
@pytest.mark.parametrize(
    "key", ["", b"", "x" * (65 << 10), b"x" * ((64 << 10) + 1), "\ud800", 5, None, bytearray(b"x")]
)
def test_bad_keys_are_refused_before_anything_is_sent(client: Client, key: Any) -> None:
    for call in (client.exists, client.contains, client.get, client.lease, client.remove, client.stat, client.pin):
        with pytest.raises(InvalidKey):
            call(["good", key])
    with pytest.raises(InvalidKey):
        client.put([Item("good", b""), Item(key, b"")])
    assert client.exists("good") == 0


@BOTH
def test_the_longest_key_and_a_large_header_are_stored(client: Client) -> None:
    key, header = "k" * (64 << 10), Header(metadata={"m": b"x" * (60 << 10)})
    stored(client, key, b"value", header)
    assert client.get(key) == [Object(header, b"value")]
    assert client.get(key[:-1]) == [None]


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (Item("k", "text"), TypeError),
        (Item("k", 5), TypeError),
        (Item("k", [b"", None]), TypeError),
        (Item("k", np.zeros((4, 4))[:, ::2]), ValueError),
        (Item("k", b"", Header(metadata={"m": b"x" * (64 << 10)})), ValueError),
        (Item("k", b"", Header(metadata={"m": object()})), TypeError),
    ],
)
@BOTH
def test_items_that_cannot_be_stored_are_refused_before_anything_is_sent(
    client: Client, item: Item, error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.put([Item("good", b""), item])
    assert client.exists("good") == 0


@BOTH
def test_an_object_that_exceeds_the_arena_is_too_large(client: Client) -> None:
    assert client.put([Item("k", bytes(ARENA + 1)), Item("l", b"x")]) == [Put.TOO_LARGE, Put.STORED]


def write_raw(client: Client, key: str, raw: bytes) -> None:
    """Stores these bytes as the whole object of a key."""
    session = client._transport.session
    chunk = GrantChunk(hash=digest_of(key.encode()), first_token=0, tokens=1, groups=1, bytes=len(raw))
    _, granted = session.grant(Grant(request="raw", chunks=[chunk]), time.monotonic() + WAIT_S)
    assert object_copy.write(session, granted[0], [np.frombuffer(raw, dtype=np.uint8)])
    session.commit(granted)
    wait_for(lambda: client.exists(key), WAIT_S, f"{key} readable")


def test_an_object_whose_bytes_are_of_another_key_or_no_object_is_absent(client: Client) -> None:
    foreign = b"".join(part.tobytes() for part in encode("other", b"value", None).parts)
    deep = b"\x91" * 60_000
    nested = struct.pack("<8sIIQQ", b"KVCPVAL1", 2, len(deep), 0, 60_096) + b"k4" + deep + bytes(62)
    for number, raw in enumerate([foreign, b"x", bytes(100), foreign[:-1], nested]):
        write_raw(client, f"k{number}", raw)
        assert client.get(f"k{number}") == [None]
        assert client.invalid_objects == number + 1
    own = b"".join(part.tobytes() for part in encode("own", b"value", None).parts)
    write_raw(client, "own", own)
    assert client.get("own")[0].value == b"value"


# -- eviction


@BOTH
def test_leased_objects_are_not_evicted(client: Client) -> None:
    stored(client, "k", content("k", 1 << 20))
    with client.lease("k") as lease:
        press(client, 1)
        assert lease[0].read() == content("k", 1 << 20)
        assert client.exists("k") == 1
    press(client, 2)
    assert client.exists("k") == 0
    assert lease[0].read() is None


def test_closed_clients_hold_nothing(client: Client, sidecar: Sidecar) -> None:
    stored(client, "k", content("k", 1 << 20))
    open_lease = client.lease("k")
    client.close()
    for _ in range(300):  # more than `limits.sessions`
        Client(str(sidecar.socket)).close()
    with Client(str(sidecar.socket), timeout_s=WAIT_S) as later:
        assert [one["role"] for one in sidecar.status()["sessions"]] == ["opaque"]
        press(later, 1)
        assert later.exists("k") == 0
        assert open_lease[0].read() is None


def test_128_mib_of_values_are_one_grant() -> None:
    """Keys and headers come on top. A second GRANT for the last object would wait behind the digests of the others."""
    value, header = bytes(1 << 20), Header(metadata={"m": b"x" * 1000})
    objects = [encode(f"k{index}", value, header) for index in range(129)]
    assert [len(batch) for batch in _put_batches(objects[:128])] == [128]
    assert [len(batch) for batch in _put_batches(objects)] == [128, 1]


@BOTH
def test_pinned_objects_are_not_evicted(client: Client) -> None:
    stored(client, "k", content("k", 1 << 20))
    assert client.pin("k") == 1
    press(client, 1)
    assert client.get("k")[0].value == content("k", 1 << 20)


def test_a_namespace_holds_no_more_than_its_share(tmp_path: Path, binary: Path) -> None:
    sidecar = Sidecar(tmp_path / "pod", memory="64Mi", config={"limits": {"namespaceShare": "10%"}}).start()
    try:
        with Client(str(sidecar.socket)) as client, Client(str(sidecar.socket), namespace="b") as other:
            keys = [f"k{index}" for index in range(5)]
            for key in keys:
                stored(client, key, bytes(1 << 20))
            with client.lease(keys):
                assert client.put([Item("more", bytes(2 << 20))]) == [Put.QUOTA]
                assert other.put([Item("more", bytes(2 << 20))]) == [Put.STORED]
            wait_for(lambda: client.put([Item("more", bytes(2 << 20))]) == [Put.STORED], WAIT_S, "room in the share")
            assert client.exists(keys[0]) == 0, "the oldest object made room"
            assert client.exists(keys[-1]) == 1
    finally:
        sidecar.stop()


@BOTH
def test_reads_under_eviction_return_the_bytes_of_their_key_or_nothing(client: Client) -> None:
    nbytes, keys = 700 << 10, [f"k{index}" for index in range(200)]
    expected = {key: content(key, nbytes) for key in keys}
    stop, wrong, hits = threading.Event(), [], [0]
    stale: list[Any] = []

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        while not stop.is_set():
            key = chosen.choice(keys)
            for found in client.get(key):
                if found is not None:
                    hits[0] += 1
                    if found.value != expected[key]:
                        wrong.append(key)
            # A lease that has ended: only the generations tell that the slot is another object's.
            with client.lease(key) as lease:
                leased = lease[0]
            if leased is not None:
                stale.append((key, leased))
            if len(stale) > 20:
                key, leased = stale.pop(0)
                value = leased.read()
                if value is not None and value != expected[key]:
                    wrong.append(key)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(3):
        for key in keys:
            wait_for(lambda key=key: client.put([Item(key, expected[key])])[0] != Put.NO_ROOM, WAIT_S, "room")
            if turn == 1:
                client.remove(key)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert hits[0]
    assert client.invalid_objects == 0


# -- lower tiers


def test_an_evicted_object_is_fetched_from_disk(sidecar: Sidecar, client: Client, tmp_path: Path) -> None:
    client.close()
    sidecar.stop()
    (tmp_path / "disk").mkdir()
    sidecar.configure({"disk": {"path": str(tmp_path / "disk"), "size": "1Gi"}})
    sidecar.start()
    with Client(str(sidecar.socket), timeout_s=WAIT_S) as client:
        header, value = Header((3,), "float16", "kv", {"layer": 1}), content("k", 2 * PIECE + 5)
        stored(client, "k", value, header)
        wait_for(lambda: sidecar.written_to("disk"), WAIT_S, "k on disk")
        press(client, 1)
        wait_for(lambda: client.stat("k") == [None], WAIT_S, "k evicted from memory")
        assert client.exists(["k", "none"]) == 1
        assert client.contains(["none", "k"]) == [False, True]
        assert client.get(["k", "none"]) == [Object(header, value), None]
        press(client, 2)
        assert client.lease(["none", "k"], prefix=True)[1] is None
        client.remove("k")
        wait_for(lambda: not client.exists("k"), WAIT_S, "k removed from disk")


# -- several processes

OTHER_PROCESS = """
import sys
from kvcachepool.client import *
client = Client(sys.argv[1], timeout_s=20)
"""


def in_process(sidecar: Sidecar, code: str, **options: Any) -> subprocess.Popen[str]:
    """Another process with a client."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "sidecar" / "connector")}
    command = [sys.executable, "-c", OTHER_PROCESS + code, str(sidecar.socket)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE)


def test_two_processes_share_objects(client: Client, sidecar: Sidecar) -> None:
    code = (
        "print(client.put([Item('theirs', b'them', Header(dtype='u1'))]), flush=True)\n"
        "input()\n"
        "print(client.get(['ours', 'theirs']), client.put([Item('ours', b'x')]))\n"
    )
    with in_process(sidecar, code) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "[<Put.STORED: 1>]\n"
        wait_for(lambda: client.exists("theirs"), WAIT_S, "their object")
        assert client.get("theirs") == [Object(Header(dtype="u1"), bytearray(b"them"))]
        stored(client, "ours", b"us")
        printed, _ = other.communicate("\n")
    assert "bytearray(b'us')" in printed
    assert "bytearray(b'them')" in printed
    assert "Put.EXISTS" in printed
    assert client.get("theirs")[0].value == b"them", "objects outlive the process that stored them"


def test_a_key_can_be_stored_after_its_writer_was_killed(client: Client, sidecar: Sidecar) -> None:
    code = (
        "from kvcachepool import object_copy\n"
        "import time\n"
        "def hang(*arguments):\n"
        "    print('granted', flush=True)\n"
        "    time.sleep(1000)\n"
        "object_copy.write = hang\n"
        "client.put([Item('k', bytes(5 << 20))])\n"
    )
    with in_process(sidecar, code) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "granted\n"
        assert client.put([Item("k", b"value")]) == [Put.EXISTS], "another client is writing it"
        assert client.get("k") == [None]
        writer.kill()
    wait_for(lambda: client.put([Item("k", b"value")]) == [Put.STORED], WAIT_S, "the end of the dead writer's grant")
    wait_for(lambda: client.exists("k"), WAIT_S, "k readable")
    assert client.get("k")[0].value == b"value"


def test_the_client_lives_beside_vllms_parts(
    client: Client, sidecar: Sidecar, tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    import test_worker_sidecar as beside

    monkeypatch.setattr(beside.worker_module, "current_ranks", lambda config: beside.Ranks())
    stored(client, "k", b"value")
    engine = beside.Engine(sidecar, tmp_path)
    try:
        kv = beside.stored(engine)
        assert beside.loaded(engine, "a") == kv
        assert client.get("k")[0].value == b"value"
        restart_engine(client, sidecar)
        assert client.get("k")[0].value == b"value"
        assert beside.loaded(engine, "b") == kv
    finally:
        engine.close()
    assert client.get("k")[0].value == b"value"
    assert shared().mapping is not None


# -- restarts


def restart_engine(client: Client, sidecar: Sidecar) -> None:
    """Kills the engine process, and waits until the client is served by the next one."""
    connection = client._transport.session._connection
    before = connection.connection
    sidecar.kill_engine()
    wait_for(lambda: client.connected and connection.connection > before, WAIT_S, "another connection")


def fails_at_once(call: Callable[[], Any]) -> None:
    start = time.monotonic()
    with pytest.raises(Unavailable):
        call()
    assert time.monotonic() - start < AT_ONCE_S


def test_objects_survive_the_death_of_the_engine_process(client: Client, sidecar: Sidecar) -> None:
    value = content("k", 2 * PIECE)
    stored(client, "k", value)
    lease = client.lease("k")
    restart_engine(client, sidecar)
    assert lease[0].read() == value
    assert client.get("k")[0].value == value
    stored(client, "l", b"new")


def test_a_put_that_copies_survives_the_death_of_the_engine_process(
    client: Client, sidecar: Sidecar, gate: Gate
) -> None:
    value = content("k", 2 * PIECE)
    results: list[Any] = []
    put = threading.Thread(target=lambda: results.extend(client.put([Item("k", value)])))
    put.start()
    assert gate.entered.wait(WAIT_S)
    restart_engine(client, sidecar)
    with Client(str(sidecar.socket)) as other:
        assert other.put([Item("k", b"another")]) == [Put.EXISTS], "its slots are still granted"
    gate.opened.set()
    put.join()
    assert results == [Put.STORED]
    wait_for(lambda: client.exists("k"), WAIT_S, "k readable")
    assert client.get("k")[0].value == value


def test_a_client_that_closes_names_the_slots_of_a_running_copy(client: Client, gate: Gate) -> None:
    session = client._transport.session

    def store() -> None:
        with pytest.raises(Unavailable, match="Closed"):
            client.put([Item("k", content("k", PIECE))])

    put = threading.Thread(target=store)
    put.start()
    assert gate.entered.wait(WAIT_S)
    close = threading.Thread(target=client.close)
    close.start()
    wait_for(lambda: session.off, WAIT_S, "the client closes")
    # A HELLO of a connection that was lost at this moment.
    assert session.held(shared().mapping.region).grants
    gate.opened.set()
    put.join()
    close.join()
    assert not session.held(None).grants


def test_without_the_sidecar_calls_fail_at_once_until_it_is_back(client: Client, sidecar: Sidecar) -> None:
    value = content("k", PIECE)
    stored(client, "k", value)
    lease = client.lease("k")
    sidecar.kill_tree()
    wait_for(lambda: not client.connected, WAIT_S, "the end of the connection")
    for call in (
        lambda: client.exists("k"),
        lambda: client.get("k"),
        lambda: client.put([Item("l", b"")]),
        lambda: client.pin("k"),
    ):
        fails_at_once(call)
    assert lease[0].read() == value, "nobody takes the memory back"
    lease.close()
    sidecar.start(ready_seconds=None)
    assert client.wait_connected(WAIT_S)
    wait_for(lambda: client.get("k")[0], WAIT_S, "k, in the memory that the client handed back")
    assert client.get("k")[0].value == value
    stored(client, "l", b"new")


def test_calls_during_restarts_end_with_a_result_or_unavailable(client: Client, sidecar: Sidecar) -> None:
    keys = [f"k{index}" for index in range(40)]
    expected = {key: content(key, 500 << 10) for key in keys}
    stop, wrong, results = threading.Event(), [], set[str]()

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
    for turn in range(4):
        wait_for(lambda: client.connected and {"STORED", "EXISTS"} <= results, WAIT_S, "served calls")
        if turn < 3:
            restart_engine(client, sidecar)
        results.clear()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    session = client._transport.session
    assert client.wait_connected(WAIT_S)
    assert client.exists("none") == 0
    assert (session._calls, session._held, session._outbox, session._copies, session._waiting) == (set(), {}, [], 0, 0)
    wait_for(lambda: sidecar.status()["memory"]["slots"]["granted"] == 0, WAIT_S, "no slot still granted")


def test_a_call_that_waits_ends_at_once_when_the_sidecar_dies(client: Client, sidecar: Sidecar) -> None:
    stored(client, "k", b"value")
    sidecar.freeze()
    failed: list[Unavailable] = []

    def call() -> None:
        try:
            client.get("k")
        except Unavailable as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(client._transport.session._calls) == 4, WAIT_S, "four calls")
    start = time.monotonic()
    sidecar.kill_tree()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < AT_ONCE_S
    assert {error.reason for error in failed} == {"ConnectionLost"}


def test_a_frozen_sidecar_costs_a_call_its_deadline(client: Client, sidecar: Sidecar) -> None:
    stored(client, "k", b"value")
    sidecar.freeze()
    try:
        start = time.monotonic()
        for call in (client.get, client.exists, client.stat, client.remove):
            with pytest.raises(Unavailable, match="Deadline"):
                call(["l"], timeout_s=0.2)
        with pytest.raises(Unavailable, match="Deadline"):
            client.put([Item("l", b"late")], timeout_s=0.2)
        assert time.monotonic() - start < AT_ONCE_S
    finally:
        sidecar.thaw()
    assert client.get("k")[0].value == b"value"
    wait_for(lambda: client.put([Item("l", b"new")]) == [Put.STORED], WAIT_S, "the late grant given back")


# -- asyncio, documentation


def test_the_methods_are_coroutines_too(sidecar: Sidecar) -> None:
    async def run() -> None:
        async with AsyncClient(str(sidecar.socket), timeout_s=WAIT_S) as client:
            assert await client.wait_connected(WAIT_S)
            assert client.connected
            value = content("k", PIECE)
            assert await client.put([Item("k", value), Item("l", b"x")]) == [Put.STORED] * 2
            deadline = time.monotonic() + WAIT_S
            while await client.exists(["k", "l"]) < 2:
                assert time.monotonic() < deadline
            assert await client.contains(["none", "k"]) == [False, True]
            assert (await client.get("k"))[0].value == value
            async with client.lease(["k", "none"]) as lease:
                assert len(lease) == 2
                buffer = bytearray(len(value))
                assert [found is not None for found in lease] == [True, False]
                assert await lease[0].read_into(buffer)
                assert buffer == value == await lease[0].read()
            results = await asyncio.gather(*(client.get("k") for _ in range(40)))
            assert all(found[0].value == value for found in results)
            assert await client.touch("k") == await client.pin("k") == await client.unpin("k") == 1
            assert (await client.stat("k"))[0].tier == "memory"
            assert await client.remove("k") == 1
            with pytest.raises(InvalidKey):
                await client.get("")
            sidecar.kill_tree()
            with pytest.raises(Unavailable):
                await client.get("k")
        with pytest.raises(Unavailable, match="Closed"):
            await client.get("k")

    asyncio.run(run())


def test_the_guides_example_runs(sidecar: Sidecar, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "guides" / "objects.md").read_text()
    example, output = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    os.environ["KVCACHEPOOL_SOCKET"] = str(sidecar.socket)
    try:
        exec(example, {})
    finally:
        del os.environ["KVCACHEPOOL_SOCKET"]
    assert capsys.readouterr().out == output
