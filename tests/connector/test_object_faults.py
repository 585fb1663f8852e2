"""The object client against a stub sidecar: lying and late replies, lost connections, forks, ends of parts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_gate import Gate
from object_calls import fails, in_thread
from stub_objects import StubObjects
from stub_sidecar import Memory, Received

import kvcachepool.shared as shared_module
from kvcachepool.client import AsyncClient, Client, Error, Header, Item, Put, Refused, Unavailable
from kvcachepool.connection import Connection, Held
from kvcachepool.messages import HelloReply
from kvcachepool.object_bytes import encode
from kvcachepool.shared import ROW_BYTES, Shared, shared
from kvcachepool.wire import Op
from servers.waiting import wait_for

LONG_S = 30.0
#: Well below any deadline of a test's call.
AT_ONCE_S = 5.0
PIECE = 4 << 20
ROWS = 2048


@pytest.fixture(autouse=True)
def fresh_shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setattr(shared_module, "_shared", Shared())
    return shared_module.shared()


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubObjects]:
    made = StubObjects(tmp_path, ROWS)
    yield made
    made.close()


@pytest.fixture
def client(stub: StubObjects) -> Iterator[Client]:
    with Client(stub.path, timeout_s=LONG_S) as made:
        assert made.wait_connected(10)
        yield made


def processed(stub: StubObjects, op: Op) -> list[Received]:
    """The frames with this opcode, once all that were sent have been processed."""
    wait_for(stub.processed_all, 10, "all frames processed")
    return stub.frames(op)


def stored(stub: StubObjects, client: Client) -> bytes:
    """References of the only object."""
    assert client.exists("none") == 0, "the reply follows the COMMIT"
    (refs,) = stub.objects.values()
    return refs


def untouched(stub: StubObjects) -> bool:
    assert stub.memory is not None
    try:
        return os.lseek(stub.memory.arena_fd, 0, os.SEEK_DATA) < 0
    except OSError as error:
        return error.errno == errno.ENXIO


def changed(refs: bytes, ref: int, word: int, value: int) -> bytes:
    """References with one word replaced."""
    words = np.frombuffer(refs, dtype="<u4").copy()
    words[ref * 4 + word] = value
    return words.tobytes()


# -- lies

GRANT_LIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "fewer results": lambda reply: reply | {"results": reply["results"][:-1]},
    "more results": lambda reply: reply | {"results": reply["results"] + b"\1"},
    "no references": lambda reply: reply | {"refs": b""},
    "one object's references": lambda reply: reply | {"refs": reply["refs"][:32]},
    "more references": lambda reply: reply | {"refs": reply["refs"] + reply["refs"][-16:]},
    "torn references": lambda reply: reply | {"refs": reply["refs"][:-1]},
    "slot outside": lambda reply: reply | {"refs": changed(reply["refs"], 0, 0, 1 << 20)},
    "slot at the end": lambda reply: reply | {"refs": changed(reply["refs"], 0, 0, ROWS - 3)},
    "absent slot": lambda reply: reply | {"refs": changed(reply["refs"], 2, 0, 0xFFFFFFFF)},
    "slot twice": lambda reply: reply | {"refs": changed(reply["refs"], 1, 0, 0)},
    "slots that overlap": lambda reply: reply | {"refs": changed(reply["refs"], 1, 0, 5)},
    "longer piece": lambda reply: reply | {"refs": changed(reply["refs"], 0, 2, PIECE + 1)},
    "shorter piece": lambda reply: reply | {"refs": changed(reply["refs"], 1, 2, 1)},
    "empty piece": lambda reply: reply | {"refs": changed(reply["refs"], 1, 2, 0)},
    "section 7": lambda reply: reply | {"refs": changed(reply["refs"], 1, 3, 7)},
    "no section 0": lambda reply: reply | {"refs": changed(reply["refs"], 0, 3, 1)},
    "another region": lambda reply: reply | {"region": 8},
    "text": lambda reply: reply | {"results": "text"},
}


@pytest.mark.parametrize("lie", GRANT_LIES.values(), ids=GRANT_LIES.keys())
def test_a_lying_grant_is_an_error_and_writes_nothing(
    stub: StubObjects, client: Client, lie: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    stub.lie = lambda frame, reply: lie(reply) if frame.op == Op.GRANT else reply
    items = [Item("a", b"a" * (PIECE + 1)), Item("b", b"b" * 100)]
    fails("BadReply", lambda: client.put(items))
    assert untouched(stub)
    assert stub.hello(3).body.get("grants", b"") == b"", "the next HELLO gives the slots back"
    assert processed(stub, Op.ABORT) == [], "what a lying reply names may belong to another put"


def test_each_result_of_a_grant_has_its_name(stub: StubObjects, client: Client) -> None:
    results = {2: Put.EXISTS, 3: Put.NO_ROOM, 4: Put.NO_ROOM, 7: Put.QUOTA, 8: Put.TOO_LARGE}
    stub.lie = lambda frame, reply: reply | {"results": bytes(results), "refs": b""}
    assert client.put([Item(str(code), b"") for code in results]) == list(results.values())
    for unknown in (0, 5, 6, 9):
        stub.lie = lambda frame, reply, unknown=unknown: reply | {"results": bytes([unknown]), "refs": b""}
        fails("BadReply", lambda: client.put([Item("a", b"")]))


def test_slots_that_the_table_does_not_grant_are_not_written(stub: StubObjects, client: Client) -> None:
    def lie(frame: Received, reply: dict[str, Any]) -> dict[str, Any]:
        return reply | {"refs": changed(reply["refs"], 0, 1, 77)} if frame.op == Op.GRANT else reply

    stub.lie = lie
    fails("ConnectionLost", lambda: client.put([Item("a", b"value")]))
    assert untouched(stub)


def test_a_grant_of_slots_that_another_put_writes_is_refused(stub: StubObjects, client: Client, gate: Gate) -> None:
    first = in_thread(lambda: client.put([Item("a", b"a" * 1000)]))
    assert gate.entered.wait(10)
    refs = stub.granted[encode("a", b"", None).digest]
    stub.lie = lambda frame, reply: reply | {"refs": refs} if frame.op == Op.GRANT else reply
    fails("BadReply", lambda: client.put([Item("b", b"b" * 1000)]))
    assert stub.hello(3).body["grants"] == refs, "the first put still writes its slot"
    gate.opened.set()
    first()
    stub.wait_for(lambda frames: [f for f in frames if f.op == Op.COMMIT and f.body["refs"] == refs])


PROBE_LIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "fewer states": lambda reply: reply | {"states": b"\1"},
    "more states": lambda reply: reply | {"states": reply["states"] + b"\1"},
    "no references": lambda reply: reply | {"refs": b""},
    "one object's references": lambda reply: reply | {"refs": reply["refs"][:32]},
    "torn references": lambda reply: reply | {"refs": reply["refs"][:-1]},
    "slot outside": lambda reply: reply | {"refs": changed(reply["refs"], 0, 0, 1 << 20)},
    "absent slot": lambda reply: reply | {"refs": changed(reply["refs"], 2, 0, 0xFFFFFFFF)},
    "shorter piece": lambda reply: reply | {"refs": changed(reply["refs"], 0, 2, 64)},
    "section 7": lambda reply: reply | {"refs": changed(reply["refs"], 1, 3, 7)},
    "no section 0": lambda reply: reply | {"refs": changed(reply["refs"], 0, 3, 1)},
    "text": lambda reply: reply | {"states": "text"},
}


@pytest.mark.parametrize("lie", PROBE_LIES.values(), ids=PROBE_LIES.keys())
def test_a_lying_probe_is_an_error_and_ends_the_lease(
    stub: StubObjects, client: Client, lie: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    assert client.put([Item("a", b"a" * (PIECE + 1)), Item("b", b"b" * 100)]) == [Put.STORED] * 2
    stub.lie = lambda frame, reply: lie(reply)
    fails("BadReply", lambda: client.lease(["a", "b"]))
    request = processed(stub, Op.PROBE)[-1].body["request"]
    stub.wait_for(lambda frames: [f for f in frames if f.op == Op.RELEASE and f.body["requests"] == [request]])


@pytest.mark.parametrize("reply", [{"count": 3}, {"count": -1}, {"count": "x"}, {"count": 2, "states": b"\1"}])
def test_a_lying_reply_to_objects_is_an_error(stub: StubObjects, client: Client, reply: dict[str, Any]) -> None:
    stub.lie = lambda frame, _: reply
    fails("BadReply", lambda: client.stat(["a", "b"]))


LIES_OF_OBJECTS: dict[str, tuple[int, bytes]] = {
    "magic": (0, b"X"),
    "shorter key": (8, struct.pack("<I", 2)),
    "longer key": (8, struct.pack("<I", 1 << 31)),
    "longer header": (12, struct.pack("<I", 1 << 16)),
    "more value": (16, struct.pack("<Q", 101)),
    "less value": (16, struct.pack("<Q", 99)),
    "huge value": (16, struct.pack("<Q", (1 << 64) - 64)),
    "value in the header": (24, struct.pack("<Q", 0)),
    "value not aligned": (24, struct.pack("<Q", 65)),
    "value behind the end": (24, struct.pack("<Q", 1 << 40)),
    "another key": (32, b"KEY"),
    "header that is no map": (35, b"\xc1"),
}


@pytest.mark.parametrize(("at", "lie"), LIES_OF_OBJECTS.values(), ids=LIES_OF_OBJECTS.keys())
def test_an_object_whose_front_lies_is_absent_and_counted(
    stub: StubObjects, client: Client, at: int, lie: bytes
) -> None:
    assert client.put([Item("key", b"v" * 100, Header((100,), "uint8"))]) == [Put.STORED]
    assert client.get("key") == [(Header((100,), "uint8"), b"v" * 100)]
    refs = stored(stub, client)
    assert stub.memory is not None
    start = int.from_bytes(refs[:4], "little") * ROW_BYTES + at
    stub.memory.arena[start : start + len(lie)] = lie
    assert client.get("key") == [None]
    assert client.invalid_objects == 1


# -- late and missing replies


def test_slots_of_a_grant_that_is_answered_after_the_deadline_are_given_back(stub: StubObjects, client: Client) -> None:
    late: list[tuple[Received, dict[str, Any]]] = []

    def keep(frame: Received, reply: dict[str, Any]) -> bool:
        late.append((frame, reply))
        return False

    stub.lie = keep
    assert fails("Deadline", lambda: client.put([Item("a", b"value")], timeout_s=0.1)) < AT_ONCE_S
    stub.reply(*late[0])
    abort = stub.wait_for(lambda frames: [f for f in frames if f.op == Op.ABORT])[0]
    assert abort.body["refs"] == late[0][1]["refs"]
    assert processed(stub, Op.COMMIT) == []
    stub.cut()
    assert stub.hello(3).body.get("grants", b"") == b""


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.exists(["a"], timeout_s=0.1),
        lambda client: client.contains(["a"], timeout_s=0.1),
        lambda client: client.get(["a"], timeout_s=0.1),
        lambda client: client.lease(["a"], timeout_s=0.1),
        lambda client: client.put([Item("a", b"")], timeout_s=0.1),
        lambda client: client.remove(["a"], timeout_s=0.1),
        lambda client: client.stat(["a"], timeout_s=0.1),
    ],
)
def test_no_call_waits_longer_than_its_deadline(
    stub: StubObjects, client: Client, call: Callable[[Client], Any]
) -> None:
    stub.lie = lambda frame, reply: False
    assert 0.1 <= fails("Deadline", lambda: call(client)) < AT_ONCE_S


def test_the_newest_partial_reply_counts_at_the_deadline(stub: StubObjects, client: Client) -> None:
    assert client.put([Item("a", b"value"), Item("b", b"value")]) == [Put.STORED] * 2

    def partly(frame: Received, reply: dict[str, Any]) -> bool:
        stub.reply(frame, reply | {"states": b"\1\2", "refs": reply["refs"][:16]}, flags=4)
        return False

    stub.lie = partly
    with client.lease(["a", "b"], timeout_s=0.2) as lease:
        assert [leased is not None for leased in lease] == [True, False]
        assert lease[0].read() == b"value"


def test_a_lease_tells_the_sidecar_how_long_to_wait_for_lower_tiers(stub: StubObjects, client: Client) -> None:
    assert client.put([Item("a", b"value")]) == [Put.STORED]
    client._transport.session._connection.settings.load_timeout_ms = 50
    with client.lease("a", timeout_s=4) as lease:
        assert lease[0] is not None
    (probe,) = processed(stub, Op.PROBE)
    assert 3_000 < probe.body["budget_ms"] < 4_000


def test_requests_that_might_not_fit_into_the_socket_wait_for_earlier_ones(stub: StubObjects, client: Client) -> None:
    stub.lie = lambda frame, reply: False
    keys = [str(index) for index in range(1024)]
    calls = [in_thread(lambda: client.exists(keys, timeout_s=0.3)) for _ in range(12)]
    assert {call().reason for call in calls} == {"Deadline"}
    assert len(processed(stub, Op.PROBE)) == 4, "32 KiB each, of 128 KiB"
    assert client.connected
    stub.cut()
    stub.lie = lambda frame, reply: reply
    assert stub.hello(3)
    assert client.wait_connected(10)
    assert client.exists(keys) == 0, "lost requests do not count any more"


# -- lost connections


def test_calls_that_wait_end_at_once_when_the_connection_is_lost(stub: StubObjects, client: Client) -> None:
    stub.lie = lambda frame, reply: False
    calls = [
        in_thread(lambda: client.exists("a")),
        in_thread(lambda: client.put([Item("a", b"value")])),
        in_thread(lambda: client.stat("a")),
    ]
    stub.wait_for(lambda frames: {Op.PROBE, Op.GRANT, Op.OBJECTS} <= {f.op for f in frames})
    start = time.monotonic()
    stub.cut()
    assert {call().reason for call in calls} == {"ConnectionLost"}
    assert time.monotonic() - start < AT_ONCE_S
    assert stub.hello(3).body.get("grants", b"") == b""


def test_without_a_sidecar_calls_fail_at_once(tmp_path: Path) -> None:
    with Client(str(tmp_path / "none.sock"), timeout_s=LONG_S) as client:
        for _ in range(2):
            assert fails("NotConnected", lambda: client.get("a")) < AT_ONCE_S
        assert not client.connected
        assert not client.wait_connected(0.05)


def test_a_put_that_copies_survives_a_reconnection(stub: StubObjects, client: Client, gate: Gate) -> None:
    put = in_thread(lambda: client.put([Item("a", b"value")]))
    assert gate.entered.wait(10)
    (refs,) = stub.granted.values()
    stub.cut()
    assert stub.hello(3).body["grants"] == refs
    assert client.wait_connected(10)
    gate.opened.set()
    assert put() == [Put.STORED]
    stub.wait_for(lambda _: stub.objects)
    assert client.get("a")[0].value == b"value"


def test_a_commit_that_could_not_be_sent_follows_the_next_hello(stub: StubObjects, client: Client, gate: Gate) -> None:
    put = in_thread(lambda: client.put([Item("a", b"value")]))
    assert gate.entered.wait(10)
    (refs,) = stub.granted.values()
    with shared().hello_lock:
        stub.cut()
        wait_for(lambda: not client.connected, 10, "the end of the connection")
        gate.opened.set()
        assert put().reason == "NotConnected"
    assert stub.hello(3).body["grants"] == refs
    stub.wait_for(lambda _: stub.objects)
    stub.cut()
    assert stub.hello(4).body.get("grants", b"") == b""


def test_a_lease_ends_with_its_connection_but_can_be_read(stub: StubObjects, client: Client) -> None:
    client.put([Item("a", b"value")])
    lease = client.lease("a")
    stub.cut()
    assert stub.hello(3).body.get("requests", []) == []
    assert client.wait_connected(10)
    assert lease[0].read() == b"value"
    refs = stored(stub, client)
    assert stub.memory is not None
    stub.memory.bump(int.from_bytes(refs[:4], "little"))
    assert lease[0].read() is None, "the slot is another object's"
    lease.close()
    request = processed(stub, Op.PROBE)[0].body["request"]
    assert client.exists("a") == 1
    assert [request] not in [frame.body["requests"] for frame in processed(stub, Op.RELEASE)]


def test_a_slot_that_is_reused_before_its_front_is_read_is_a_miss(stub: StubObjects, client: Client) -> None:
    client.put([Item("a", b"value")])
    slot = int.from_bytes(stored(stub, client)[:4], "little")

    def reuse(frame: Received, reply: dict[str, Any]) -> dict[str, Any]:
        assert stub.memory is not None
        stub.memory.bump(slot)
        stub.memory.arena[slot * ROW_BYTES : slot * ROW_BYTES + 8] = b"anothers"
        return reply

    stub.lie = reuse
    with client.lease("a") as lease:
        assert lease[0] is None
    assert client.invalid_objects == 0, "the bytes are of another object, and not damaged"


def test_a_copy_that_an_eviction_overtakes_is_a_miss(stub: StubObjects, client: Client, gate: Gate) -> None:
    gate.opened.set()
    client.put([Item("a", b"value")])
    refs = stored(stub, client)
    lease = client.lease("a")
    gate.entered.clear()
    gate.opened.clear()
    read = in_thread(lease[0].read)
    assert gate.entered.wait(10)
    assert stub.memory is not None
    stub.memory.bump(int.from_bytes(refs[:4], "little"))
    gate.opened.set()
    assert read() is None


def test_memory_is_unmapped_only_after_copies_and_later_copies_notice(
    stub: StubObjects, client: Client, gate: Gate
) -> None:
    gate.opened.set()
    client.put([Item("a", b"value")])
    lease = client.lease("a")
    gate.entered.clear()
    gate.opened.clear()
    old = shared().mapping
    assert old is not None
    put = in_thread(lambda: client.put([Item("b", b"value"), Item("c", b"value")]))
    assert gate.entered.wait(10)
    stub.memory = Memory(8, 64)
    stub.cut()
    wait_for(lambda: old.retired, 10, "the end of the mapping")
    assert not old.closed, "a copy under way is waited for"
    gate.opened.set()
    assert put().reason in ("NotConnected", "ConnectionLost")
    wait_for(lambda: old.closed, 10, "the end of the mapping")
    assert lease[0].read() is None
    assert client.wait_connected(10)
    stub.objects.clear()
    assert client.get("a") == [None]


def test_memory_that_is_about_to_be_unmapped_is_not_used_again(stub: StubObjects, client: Client) -> None:
    session, mapping, hello = client._transport.session, shared().mapping, client._transport.session._connection.hello
    assert mapping is not None
    assert hello is not None
    mapping.retired = True  # as `Shared.unmap` does before it ends the copies of all parts
    session.before_unmap()
    session.on_hello(hello)
    assert not client.connected
    fails("NoMemory", lambda: client.get("a"))


# -- several parts, processes, ends


class Part:
    """Another part of this process: a role of vLLM."""

    def __init__(self, role: str, path: str) -> None:
        self.off = ""
        self.connection = Connection(role, "engine-1", 0, "0.32.0", path, self)
        self.connection.start()

    def held(self, region: int | None) -> Held:
        return Held()

    def after_hello(self) -> None:
        pass

    def on_hello(self, reply: HelloReply) -> None:
        pass

    def on_lost(self) -> None:
        pass

    def before_unmap(self) -> None:
        pass

    def on_off(self, reason: str) -> None:
        self.off = reason


def test_the_client_and_the_parts_of_vllm_end_apart(stub: StubObjects) -> None:
    scheduler, worker = Part("scheduler", stub.path), Part("worker", stub.path)
    client = Client(stub.path)
    try:
        assert client.put([Item("a", b"value")]) == [Put.STORED]
        parts = (scheduler.connection, worker.connection)
        wait_for(lambda: all(part.connected for part in parts), 10, "the parts of vLLM connected")
        client.close()
        assert scheduler.connection.connected
        assert worker.connection.connected
        assert shared().mapping is not None
        client = Client(stub.path)
        assert client.get("a")[0].value == b"value"
        worker.connection.go_off("TestOver")
        assert scheduler.off == "WorkerOff"
        assert client.get("a")[0].value == b"value"
    finally:
        worker.connection.go_off("TestOver")
        scheduler.connection.go_off("TestOver")
        client.close()
    assert shared().mapping is None


def test_clients_of_a_process_share_a_connection_until_the_last_is_closed(stub: StubObjects, client: Client) -> None:
    other = Client(stub.path, namespace="other", name="other")
    assert other.put([Item("a", b"value")]) == [Put.STORED]
    other.close()
    other.close()
    fails("Closed", lambda: other.get("a"))
    assert client.get("b") == [None]
    assert {frame.connection for frame in stub.received} == {1}


def test_a_process_uses_one_sidecar(stub: StubObjects, client: Client, tmp_path: Path) -> None:
    with pytest.raises(Error, match="already uses"):
        Client(str(tmp_path / "other.sock"))
    assert client.exists("a") == 0


def test_calls_that_wait_end_at_once_when_the_client_is_closed(stub: StubObjects) -> None:
    client = Client(stub.path, timeout_s=LONG_S)
    stub.lie = lambda frame, reply: False
    calls = [in_thread(lambda: client.exists("a")), in_thread(lambda: client.put([Item("a", b"value")]))]
    stub.wait_for(lambda frames: {Op.PROBE, Op.GRANT} <= {f.op for f in frames})
    client.close()
    assert {call().reason for call in calls} == {"Closed"}


def test_close_waits_for_copies(stub: StubObjects, gate: Gate) -> None:
    client = Client(stub.path)
    put = in_thread(lambda: client.put([Item("a", b"value")]))
    assert gate.entered.wait(10)
    mapping = shared().mapping
    assert mapping is not None
    closed = in_thread(client.close)
    wait_for(lambda: not client.connected, 10, "the end of the connection")
    assert not mapping.closed
    gate.opened.set()
    closed()
    assert mapping.closed
    assert put().reason == "Closed"


def test_a_forked_child_makes_its_own_client(stub: StubObjects, client: Client) -> None:
    client.put([Item("a", b"value")])
    lease = client.lease("a")
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            fails("Forked", lambda: client.exists("a"))
            fails("Forked", lambda: client.wait_connected(1))
            fails("Forked", lambda: lease[0].read())
            assert not client.connected
            lease.close()
            client.close()
            with Client(stub.path) as own:
                assert own.get("a")[0].value == b"value"
                assert own.put([Item("b", b"value")]) == [Put.STORED]
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.connected
    assert lease[0].read() == b"value"
    wait_for(lambda: client.exists("b"), 10, "the child's object")


def test_a_lease_pins_what_its_probe_found(stub: StubObjects, client: Client) -> None:
    client.put([Item("a", b"value"), Item("b", b"value")])
    with client.lease(["a", "b"]):
        probe, pin = processed(stub, Op.PROBE)[-1], processed(stub, Op.PIN)[-1]
        assert pin.body == {"request": probe.body["request"], "probe": probe.tag, "from": 0, "to": 2}
        assert not processed(stub, Op.RELEASE)
    assert processed(stub, Op.RELEASE)[-1].body == {"requests": [probe.body["request"]]}


def test_a_dropped_lease_is_released_with_the_next_call(stub: StubObjects, client: Client) -> None:
    client.put([Item("a", b"value")])
    client.lease("a")
    request = processed(stub, Op.PROBE)[-1].body["request"]
    client.exists("a")
    stub.wait_for(lambda frames: [f for f in frames if f.op == Op.RELEASE and f.body["requests"] == [request]])


def test_a_sidecar_without_objects_is_named(stub: StubObjects) -> None:
    stub.features = []
    with Client(stub.path) as client:
        assert fails("ObjectsNotServed", lambda: client.get("a")) < AT_ONCE_S


def test_a_sidecar_that_refuses_the_role_is_named(stub: StubObjects) -> None:
    def refuse(frame: Received) -> bool:
        stub.refuse(frame, "NotServed")
        return False

    stub.answer = refuse
    with Client(stub.path) as client:
        assert fails("NotServed", lambda: client.get("a")) < AT_ONCE_S


@pytest.mark.parametrize(("retryable", "kind"), [(True, Unavailable), (False, Refused)])
def test_a_refused_request_has_the_sidecars_code(
    stub: StubObjects, client: Client, retryable: bool, kind: type[Error]
) -> None:
    def refuse(frame: Received, reply: dict[str, Any]) -> bool:
        stub.refuse(frame, "ByTheTest", retryable)
        return False

    stub.lie = refuse
    for call in (lambda: client.exists("a"), lambda: client.put([Item("a", b"")]), lambda: client.pin("a")):
        with pytest.raises(kind, match="ByTheTest"):
            call()


def test_many_keys_are_asked_for_in_several_requests(stub: StubObjects, client: Client) -> None:
    client.put([Item(str(index), b"") for index in range(1500)])
    keys = [str(index) for index in range(3000)]
    assert client.exists(keys) == 1500
    assert client.contains(keys) == [True] * 1500 + [False] * 1500
    sizes = [len(frame.body["hashes"]) // 32 for frame in processed(stub, Op.PROBE)]
    assert sizes == [1024, 1024, 1024, 1024, 952]


# -- asyncio


def test_a_cancelled_call_ends_after_its_copy(stub: StubObjects, gate: Gate) -> None:
    async def run() -> None:
        async with AsyncClient(stub.path) as client:
            task = asyncio.create_task(client.put([Item("a", b"value")]))
            await asyncio.to_thread(gate.entered.wait, 10)
            task.cancel()
            await asyncio.wait([task], timeout=0.05)
            assert not task.done(), "the copy reads the caller's buffer"
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_a_call_that_no_thread_takes_keeps_its_deadline(stub: StubObjects) -> None:
    stub.lie = lambda frame, reply: False

    async def run() -> None:
        async with AsyncClient(stub.path, timeout_s=2) as client:
            busy = [asyncio.create_task(client.exists("a")) for _ in range(16)]
            await asyncio.to_thread(stub.wait_for, lambda frames: len([f for f in frames if f.op == Op.PROBE]) == 16)
            with pytest.raises(Unavailable, match="busy"):
                await client.exists("a", timeout_s=0.05)
            stub.cut()
            results = await asyncio.gather(*busy, return_exceptions=True)
            assert {getattr(result, "reason", "") for result in results} == {"ConnectionLost"}

    asyncio.run(run())
