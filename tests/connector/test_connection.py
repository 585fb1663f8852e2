"""The client's session: HELLO, proof of death, shared memory, reconnects."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_sidecar import Memory, Received, StubSidecar

import kvcachepool.shared as shared_module
from kvcachepool import messages, wire
from kvcachepool.connection import Connection, Held, Reply, report_off
from kvcachepool.shared import Shared
from kvcachepool.wire import Op


def until(found: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Waits for a condition with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.002)
    return result


class Owner:
    """Hooks that record calls, and keep messages that could not be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Connection | None = None
        self.held_now = Held()
        self.waiting: list[tuple[Op, messages.Message]] = []
        self.hellos: list[messages.HelloReply] = []
        self.lost = 0
        self.unmapped = 0
        self.off = ""

    def held(self, region: int | None) -> Held:
        with self.lock:
            return self.held_now

    def after_hello(self) -> None:
        with self.lock:
            waiting, self.waiting = self.waiting, []
            for op, body in waiting:
                self.send(op, body)

    def send(self, op: Op, body: messages.Message) -> None:
        assert self.client is not None
        if not self.client.send(op, body):
            self.waiting.append((op, body))

    def on_hello(self, reply: messages.HelloReply) -> None:
        self.hellos.append(reply)

    def on_lost(self) -> None:
        self.lost += 1

    def before_unmap(self) -> None:
        self.unmapped += 1

    def on_off(self, reason: str) -> None:
        self.off = reason


@pytest.fixture(autouse=True)
def fresh_shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    """Resets the shared state, as if each test were a new process."""
    monkeypatch.setattr(shared_module, "_shared", Shared())
    return shared_module.shared()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[StubSidecar]:
    stub = StubSidecar(tmp_path)
    yield stub
    stub.close()


@pytest.fixture
def connect(sidecar: StubSidecar) -> Iterator[Callable[..., tuple[Connection, Owner]]]:
    made: list[Connection] = []

    def make(role: str = "worker", **options: Any) -> tuple[Connection, Owner]:
        owner = Owner()
        instance = options.pop("instance", "engine-1")
        client = Connection(role, instance, 0, "0.32.0", sidecar.path, owner, **options)
        owner.client = client
        made.append(client)
        client.start()
        return client, owner

    yield make
    for client in made:
        client.go_off("TestOver")


def lock_is_held(path: str, number: int) -> bool:
    """Queries F_GETLK from another process, like the sidecar."""
    code = (
        "import fcntl,sys\n"
        f"f=open({path!r},'r+b')\n"
        "try: fcntl.lockf(f, fcntl.LOCK_EX|fcntl.LOCK_NB, 1, 4096+%d)\n"
        "except OSError: sys.exit(3)\n" % number
    )
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 3


def test_a_process_locks_its_byte_and_then_gets_the_arena(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared
) -> None:
    client, owner = connect()
    first, second = sidecar.hello(1), sidecar.hello(2)
    until(lambda: client.connected)
    assert first.body.get("lock") is None
    assert first.body["fds"] == ["pidfd"]
    assert second.body["lock"] == 1
    assert second.body["number"] == first.body["number"] + 1
    assert second.body["incarnation"] == first.body["incarnation"]
    assert len(second.body["incarnation"]) == 16
    assert lock_is_held(sidecar.lock_path, 1)
    assert not lock_is_held(sidecar.lock_path, 2)
    assert [reply.memory for reply in owner.hellos] == ["sent"]
    mapping = fresh_shared.mapping
    assert mapping is not None
    assert mapping.region == 7
    poll = select.poll()
    poll.register(second.fds[0], select.POLLIN)
    assert poll.poll(0) == [], "a pidfd of a living process must not be readable"


def test_a_scheduler_in_its_own_process_maps_nothing(sidecar: StubSidecar, connect: Any, fresh_shared: Shared) -> None:
    client, _ = connect("scheduler")
    until(lambda: client.connected)
    assert fresh_shared.mapping is None
    assert "region" not in sidecar.hello(2).body


def test_two_roles_of_one_process_share_lock_and_mapping(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared
) -> None:
    worker, _ = connect("worker")
    scheduler, _ = connect("scheduler")
    until(lambda: worker.connected and scheduler.connected)
    hellos = sidecar.frames(Op.HELLO)
    assert sidecar.next_lock == 2, "one lock per process"
    assert {hello.body["incarnation"] for hello in hellos} == {fresh_shared.incarnation}
    sidecar.cut()
    until(lambda: len(sidecar.frames(Op.HELLO)) >= len(hellos) + 2)
    for hello in sidecar.frames(Op.HELLO)[-2:]:
        assert hello.body["region"] == 7
        assert hello.body["fds"] == ["pidfd", "arena", "table"]
        assert len(hello.fds) == 3


def test_reconnects_with_growing_hello_numbers_and_fresh_tags(sidecar: StubSidecar, connect: Any) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    seen = []
    for round_ in range(3):
        tag = client.request(Op.REGISTER, messages.Register(world=1), lambda reply: None)
        assert tag is not None
        seen.append(tag)
        sidecar.cut()
        until(functools.partial(lambda lost: owner.lost == lost and client.connected, round_ + 1))
    numbers = [frame.body["number"] for frame in sidecar.frames(Op.HELLO)]
    assert numbers == sorted(set(numbers))
    tags = [frame.tag for frame in sidecar.received]
    assert tags == sorted(set(tags))
    assert seen == sorted(set(seen))


def test_hello_lists_held_grants_and_later_ends_follow_it(sidecar: StubSidecar, connect: Any) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    before = len(sidecar.frames(Op.HELLO))
    gate = threading.Event()
    listed = threading.Event()
    refs = b"r" * 16

    original = owner.held

    def held(region: int | None) -> Held:
        result = Held(grants=refs)
        listed.set()
        gate.wait(5)
        return result

    owner.held = held
    sidecar.cut()
    assert listed.wait(5)
    with owner.lock:
        owner.send(Op.COMMIT, messages.Sections(region=7, refs=refs))
        assert owner.waiting, "nothing can be sent between the list and its HELLO"
    owner.held = original
    gate.set()
    sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.COMMIT])
    order = [(Op(f.op).name, f.connection) for f in sidecar.received[before:]]
    newest = max(connection for _, connection in order)
    assert [name for name, connection in order if connection == newest][:2] == ["HELLO", "COMMIT"]
    assert sidecar.frames(Op.HELLO)[before].body["grants"] == refs


def test_frames_may_follow_an_unanswered_hello(sidecar: StubSidecar, connect: Any) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    sidecar.answer = lambda frame: False if frame.op == Op.HELLO else None
    with owner.lock:
        owner.waiting.append((Op.COMMIT, messages.Sections(region=7, refs=b"")))
    sidecar.cut()
    commit = sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.COMMIT])[0]
    assert [f.op for f in sidecar.received if f.connection == commit.connection] == [Op.HELLO, Op.COMMIT]
    assert commit.connection == 2
    assert not client.connected


def test_late_answers_are_dropped_by_tag(sidecar: StubSidecar, connect: Any) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    sidecar.answer = lambda frame: False if frame.op == Op.PROBE else None
    answers: list[Reply] = []
    probe = messages.Probe(request="a", hashes=b"")
    client.request(Op.PROBE, probe, answers.append)
    first = sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.PROBE])[0]
    sidecar.cut()
    until(lambda: owner.lost == 1 and client.connected)
    client.request(Op.PROBE, probe, answers.append)
    second = sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.PROBE][1:])[0]
    late = first._replace(connection=second.connection)
    body = {"states": b"", "refs": b""}
    sidecar.reply(late, body)
    sidecar.reply(second, body, flags=wire.FLAG_PARTIAL)
    sidecar.reply(second, body)
    sidecar.reply(second, body)
    until(lambda: len(answers) == 2)
    client.request(Op.PROBE, probe, answers.append)
    third = sidecar.wait_for(lambda all_: [f for f in all_ if f.op == Op.PROBE][2:])[0]
    sidecar.refuse(third, "NotRegistered", retryable=True)
    until(lambda: len(answers) == 3)
    assert [(a.tag, a.partial) for a in answers[:2]] == [(second.tag, True), (second.tag, False)]
    assert answers[2].error is not None
    assert answers[2].error.code == "NotRegistered"
    assert answers[2].error.retryable


def test_a_frame_that_does_not_fit_closes_the_connection_without_blocking(sidecar: StubSidecar, connect: Any) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    stuck = threading.Event()
    sidecar.answer = lambda frame: stuck.wait(20) if frame.op == Op.COMMIT else None
    body = messages.Sections(region=7, refs=b"x" * 65536)
    slowest = 0.0
    for _ in range(200):
        start = time.monotonic()
        sent = client.send(Op.COMMIT, body)
        slowest = max(slowest, time.monotonic() - start)
        if not sent:
            break
    assert not sent, "the socket's buffer is finite"
    assert slowest < 0.5
    assert not client.send(Op.COMMIT, body)
    stuck.set()
    until(lambda: owner.lost == 1 and client.connected)


def test_a_send_keeps_the_gil(sidecar: StubSidecar, connect: Any) -> None:
    client, _ = connect()
    until(lambda: client.connected)
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()
    other = threading.Thread(target=lambda: (gate.acquire(), ran.set()))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread gets the GIL only when this one releases it
    try:
        gate.release()
        for _ in range(200):
            assert client.send(Op.RELEASE, messages.Release(requests=["r"]))
        assert not ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    other.join()


def test_unmap_ends_copies_and_sends_hello_without_memory(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared
) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    old = fresh_shared.mapping
    assert old is not None
    sidecar.memory = Memory(8, 32)
    sidecar.cut()
    until(lambda: fresh_shared.mapping is not None and fresh_shared.mapping.region == 8 and client.connected)
    assert owner.unmapped == 1
    assert old.closed
    regions = [frame.body.get("region") for frame in sidecar.frames(Op.HELLO)]
    assert regions == [None, None, 7, None]


def test_after_an_unmap_both_roles_send_hello_again(sidecar: StubSidecar, connect: Any, fresh_shared: Shared) -> None:
    (worker, owner), (scheduler, _) = connect("worker"), connect("scheduler")
    until(lambda: worker.connected and scheduler.connected)
    before = len(owner.hellos)
    sidecar.memory = Memory(8, 32)
    scheduler.reconnect()
    until(lambda: fresh_shared.mapping is not None and fresh_shared.mapping.region == 8)
    until(lambda: len(owner.hellos) > before and worker.connected and scheduler.connected)
    assert owner.hellos[-1].region == 8


def test_an_unusable_lock_file_is_not_retried_forever(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: Any) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr("fcntl.lockf", refuses)
    client, owner = connect()
    until(lambda: owner.off == "LockFileUnusable")
    assert len(fresh_shared._lock_fds) == 3
    assert not client.connected


def test_without_a_memory_tier_hello_is_sent_again(sidecar: StubSidecar, connect: Any, fresh_shared: Shared) -> None:
    memory, sidecar.memory = sidecar.memory, None
    _client, owner = connect()
    until(lambda: len(owner.hellos) >= 2)
    assert fresh_shared.mapping is None
    assert owner.hellos[0].memory == "none"
    sidecar.memory = memory
    until(lambda: fresh_shared.mapping is not None)


def test_a_forked_child_keeps_neither_mapping_nor_descriptors(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared
) -> None:
    client, _ = connect()
    until(lambda: client.connected)
    mapping = fresh_shared.mapping
    assert mapping is not None
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            closed = 0
            for fd in (mapping.arena_fd, mapping.table_fd):
                try:
                    os.fstat(fd)
                except OSError:
                    closed += 1
            maps = Path("/proc/self/maps").read_text()
            mapped = f"{mapping.arena_address:x}-" in maps
            dead = not client.send(Op.COMMIT, messages.Sections(region=7, refs=b""))
            os.write(write_end, f"{closed} {int(mapped)} {int(dead)}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 64) == b"2 0 1"
    os.close(read_end)
    os.close(write_end)
    assert lock_is_held(sidecar.lock_path, 1), "the parent's lock outlives its children"


def test_turning_off_unmaps_before_it_unlocks(sidecar: StubSidecar, connect: Any, fresh_shared: Shared) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    mapping = fresh_shared.mapping
    assert mapping is not None
    lock_fd = fresh_shared._lock_fds[-1]
    held_at_unmap: list[bool] = []
    owner.before_unmap = lambda: held_at_unmap.append(lock_is_held(sidecar.lock_path, 1))
    client.go_off("Test")
    assert held_at_unmap == [True]
    assert mapping.closed
    assert owner.off == "Test"
    assert not lock_is_held(sidecar.lock_path, 1)
    os.fstat(lock_fd)
    assert not client.send(Op.COMMIT, messages.Sections(region=7, refs=b""))


def test_a_client_that_was_turned_off_before_its_start_never_joins(sidecar: StubSidecar, fresh_shared: Shared) -> None:
    owner = Owner()
    client = Connection("worker", "engine-1", 0, "0.32.0", sidecar.path, owner)
    client.go_off("Early")
    client.start()
    assert owner.off == "Early"
    assert not fresh_shared._participants
    assert not sidecar.received


@pytest.mark.parametrize("first", [0, 1], ids=["worker", "scheduler"])
def test_both_parts_of_an_engine_turn_off_together_and_unlock_the_byte(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared, first: int
) -> None:
    parts = [connect("worker"), connect("scheduler")]
    until(lambda: all(client.connected for client, _ in parts))
    parts[first][0].go_off("Test")
    assert parts[first][1].off == "Test"
    assert parts[1 - first][1].off == ("WorkerOff" if first == 0 else "SchedulerOff")
    assert fresh_shared.mapping is None
    assert not lock_is_held(sidecar.lock_path, 1)


def test_a_newer_engine_in_one_process_takes_over(sidecar: StubSidecar, connect: Any) -> None:
    older, owner = connect()
    until(lambda: older.connected)
    scheduler, scheduler_owner = connect("scheduler", instance="engine-2")
    newer, _ = connect(instance="engine-2")
    until(lambda: newer.connected and scheduler.connected)
    assert owner.off == "Superseded"
    assert not older.connected
    assert not scheduler_owner.off, "a part of the newer engine stays"


def test_a_lock_that_the_sidecar_does_not_see_starts_another_incarnation(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared
) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    before = fresh_shared.incarnation
    refused: list[int] = []

    def answer(frame: Received) -> Any:
        if frame.op == Op.HELLO and frame.body.get("lock") == 1:
            refused.append(1)
            sidecar.refuse(frame, "LockNotHeld")
            return False
        return None

    sidecar.answer = answer
    sidecar.cut()
    until(lambda: client.connected and refused)
    assert fresh_shared.incarnation != before
    assert fresh_shared.lock_number == 2
    assert owner.unmapped == 1


def test_a_permanent_refusal_is_named_and_retried_rarely(sidecar: StubSidecar, connect: Any) -> None:
    def answer(frame: Received) -> Any:
        sidecar.refuse(frame, "NoProofOfDeath")
        return False

    sidecar.answer = answer
    client, _ = connect()
    until(lambda: client.refusal == "NoProofOfDeath")
    until(sidecar.processed_all)
    assert len(sidecar.frames(Op.HELLO)) == 1
    assert not client.connected


def test_a_sidecar_with_an_incompatible_version_is_named(sidecar: StubSidecar, connect: Any) -> None:
    def answer(frame: Received) -> Any:
        header = bytearray(wire.encode_header(Op.HELLO, wire.FLAG_REPLY, frame.tag, 0))
        header[4] = wire.PROTOCOL_VERSION + 2
        sidecar.raw(bytes(header))
        return False

    sidecar.answer = answer
    client, _ = connect()
    until(lambda: client.refusal == "WrongVersion")
    assert not client.connected


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        wire.encode_header(Op.PROBE, 0, 1, 0)[:4] + b"\x09" + wire.encode_header(Op.PROBE, 0, 1, 0)[5:],
        (wire.MAX_BODY + 1).to_bytes(4, "little") + wire.encode_header(Op.PROBE, 0, 1, 0)[4:],
    ],
    ids=["noise", "foreign version", "oversized"],
)
def test_foreign_bytes_only_close_the_connection(sidecar: StubSidecar, connect: Any, garbage: bytes) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    sidecar.raw(garbage)
    until(lambda: owner.lost == 1 and client.connected)


def test_an_unreadable_answer_is_not_fatal(sidecar: StubSidecar, connect: Any) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    sidecar.answer = lambda frame: {"nonsense": 1} if frame.op == Op.HELLO else None
    sidecar.cut()
    until(lambda: owner.lost >= 2)
    sidecar.answer = lambda frame: None
    until(lambda: client.connected)


def test_memory_of_another_format_is_not_mapped(sidecar: StubSidecar, connect: Any, fresh_shared: Shared) -> None:
    assert sidecar.memory is not None
    sidecar.memory.table[:8] = b"NOTATABL"
    client, owner = connect()
    until(lambda: owner.lost >= 1)
    assert fresh_shared.mapping is None
    assert not client.connected
    sidecar.memory.table[:8] = b"KVCPSLOT"
    until(lambda: client.connected)
    assert fresh_shared.mapping is not None


def descriptors() -> set[tuple[str, str]]:
    """Open descriptors of this process with their targets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.parametrize("op", [Op.HELLO, Op.REGISTER])
def test_unused_descriptors_are_closed(sidecar: StubSidecar, connect: Any, op: Op) -> None:
    client, _ = connect()
    until(lambda: client.connected)
    path = sidecar.lock_path + ".foreign"
    passed: list[Received] = []
    with open(path, "wb") as foreign:

        def answer(frame: Received) -> Any:
            if frame.op != op:
                return None
            body: dict[str, Any] = {"ready": True}
            if op == Op.HELLO:
                body = {"version": 1, "sidecar_version": "0", "session": 1, "boot": 1, "settings": {}}
                body |= {"memory": "none", "retry_ms": 60_000, "fds": ["unknown"]}
            passed.append(frame)
            sidecar.reply(frame, body, fds=[foreign.fileno()] * 2)
            return False

        sidecar.answer = answer
        if op == Op.HELLO:
            sidecar.cut()
        else:
            client.request(Op.REGISTER, messages.Register(world=1), lambda reply: None)
        until(lambda: passed)
        until(lambda: [target for _, target in descriptors()].count(path) == 1)


@pytest.mark.parametrize(
    "promise",
    [
        {"memory": "lock_first", "lock": 5, "fds": []},
        {"memory": "lock_first", "lock": None, "fds": []},
        {"memory": "sent", "region": 7, "fds": []},
        {"memory": "sent", "region": 7, "fds": ["arena"]},
        {"memory": "sent", "region": None, "fds": []},
    ],
    ids=["lock", "number", "memory", "table", "region"],
)
def test_a_response_without_descriptors_ends_the_connection(
    sidecar: StubSidecar,
    connect: Any,
    fresh_shared: Shared,
    caplog: pytest.LogCaptureFixture,
    promise: dict[str, Any],
) -> None:
    broken: list[Received] = []

    def answer(frame: Received) -> Any:
        if frame.op != Op.HELLO or broken or (promise["memory"] == "sent" and frame.body.get("lock") is None):
            return None
        broken.append(frame)
        body = {"version": 1, "sidecar_version": "0", "session": 1, "boot": 1, "settings": {}} | promise
        sidecar.reply(frame, body | {"arena_bytes": 65536, "table_bytes": 8192})
        return False

    sidecar.answer = answer
    client, owner = connect()
    until(lambda: broken and client.connected)
    assert owner.lost == 1
    assert client.connection == 2
    assert fresh_shared.mapping is not None
    assert "unexpected error" not in caplog.text


def test_another_region_than_the_mapped_one_is_refused(
    sidecar: StubSidecar, connect: Any, fresh_shared: Shared
) -> None:
    client, owner = connect()
    until(lambda: client.connected)
    mapped, other = sidecar.memory, Memory(8, 64)
    assert mapped is not None
    sent: list[Received] = []

    def answer(frame: Received) -> Any:
        if frame.op != Op.HELLO or sent:
            return None
        sent.append(frame)
        sidecar.memory = other
        frame.body["region"] = None
        sidecar.greet(frame)
        sidecar.memory = mapped
        return False

    sidecar.answer = answer
    sidecar.cut()
    until(lambda: sent and client.connected)
    assert owner.lost == 2, "the connection that sent it was closed"
    assert fresh_shared.mapping is not None
    assert fresh_shared.mapping.region == 7


def test_the_plugin_reports_off_once_the_sidecar_exists(tmp_path: Path) -> None:
    path = str(tmp_path / "sidecar.sock")
    thread = report_off(path, "VllmTooOld", "0.20.0", for_s=10)
    stub = StubSidecar(tmp_path)
    try:
        hello = stub.hello(1)
        assert hello.body["role"] == "plugin"
        assert hello.body["off"] == "VllmTooOld"
        thread.join(5)
        assert not thread.is_alive()
    finally:
        stub.close()
