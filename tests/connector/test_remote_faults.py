"""The object client with a remote server that is slow, refuses, dies, or is none. `test_remote_lies` has more."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from object_calls import fails, in_thread
from stub_remote import (
    LONG_S,
    VALUE,
    Answer,
    Received,
    StubRemote,
    lies,
    options,
    refusal,
    serves_again,
)

from kvcachepool import remote_transport
from kvcachepool.client import Client, Error, Item, Put, Refused, Unavailable
from kvcachepool.messages import Nothing, Release
from kvcachepool.wire import Op
from servers.waiting import wait_for

AT_ONCE_S = 5.0
MIB = 1 << 20


@pytest.fixture
def client(remote: StubRemote, certificates: Path) -> Iterator[Client]:
    with Client(remote.target, **options(certificates)) as made:
        assert made.wait_connected(LONG_S)
        yield made


# -- refusals and lost memory


@pytest.mark.parametrize(("retryable", "kind"), [(True, Unavailable), (False, Refused)])
def test_a_refused_request_has_the_servers_code_and_keeps_the_connection(
    remote: StubRemote, client: Client, retryable: bool, kind: type[Error]
) -> None:
    remote.answer = lambda request, answer: refusal("ByTheTest", retryable)
    for call in (
        lambda: client.exists("a"),
        lambda: client.lease("a"),
        lambda: client.put([Item("a", b"")]),
        lambda: client.pin("a"),
    ):
        with pytest.raises(kind, match="ByTheTest"):
            call()
    remote.answer = lambda request, answer: answer
    assert client.exists("a") == 0
    assert len(remote.frames(Op.HELLO)) == 1


def test_memory_that_was_taken_back_is_a_miss(remote: StubRemote, client: Client) -> None:
    client.put([Item("a", VALUE), Item("b", b"b")])
    remote.answer = lies(
        Op.READ, lambda answer: answer._replace(body={"found": b"\0\1"}, data=(answer.data or b"")[-65:])
    )
    assert [one is not None for one in client.lease(["a", "b"])] == [False, True]
    assert client.invalid_objects == 0
    remote.answer = lambda request, answer: answer
    with client.lease("a") as lease:
        remote.answer = lies(Op.READ, lambda answer: answer._replace(body={"found": b"\0"}, data=b""))
        assert lease[0].read() is None
    assert len(remote.frames(Op.HELLO)) <= 2, "a miss does not end the connection"


def test_an_object_whose_memory_is_lost_during_a_put_is_an_error_and_the_others_are_stored(
    remote: StubRemote, client: Client
) -> None:
    def lose(request: Received, answer: Answer) -> Answer:
        if request.op != Op.WRITE:
            return answer
        parts = zip(request.body["parts"], answer.body["written"], strict=True)
        return answer._replace(body={"written": bytes(0 if index == 0 else state for (index, _, _), state in parts)})

    remote.answer = lose
    fails("ConnectionLost", lambda: client.put([Item("a", VALUE * 4), Item("b", VALUE)]))
    remote.answer = lambda request, answer: answer
    assert client.get("b")[0].value == VALUE
    assert len(remote.frames(Op.HELLO)) == 1
    sent = [offset for frame in remote.frames(Op.WRITE) for index, offset, _ in frame.body["parts"] if index == 0]
    assert len(sent) <= 4, "an object that is lost is not sent to its end"


# -- slow and dying servers

CALLS: list[Callable[[Client, float], Any]] = [
    lambda client, timeout_s: client.exists(["a"], timeout_s=timeout_s),
    lambda client, timeout_s: client.contains(["a"], timeout_s=timeout_s),
    lambda client, timeout_s: client.get(["a"], timeout_s=timeout_s),
    lambda client, timeout_s: client.lease(["a"], timeout_s=timeout_s),
    lambda client, timeout_s: client.put([Item("a", b"")], timeout_s=timeout_s),
    lambda client, timeout_s: client.remove(["a"], timeout_s=timeout_s),
    lambda client, timeout_s: client.stat(["a"], timeout_s=timeout_s),
]


@pytest.mark.parametrize("call", CALLS)
def test_no_call_waits_longer_than_its_deadline(
    remote: StubRemote, client: Client, call: Callable[[Client, float], Any]
) -> None:
    before = remote.numbers
    remote.answer = lambda request, answer: answer if request.op == Op.HELLO else None
    assert 0.1 <= fails("Deadline", lambda: call(client, 0.1)) < AT_ONCE_S
    serves_again(remote, client, before)


@pytest.mark.parametrize("nbytes", [1, 15, 16, 20, 50_000])
def test_a_frame_that_stops_in_the_middle_costs_the_deadline(remote: StubRemote, client: Client, nbytes: int) -> None:
    client.put([Item("a", VALUE)])
    lease = client.lease("a")
    before = remote.numbers

    def stop(request: Received, answer: Answer) -> Answer:
        return answer._replace(raw=answer.frame(request)[:nbytes]) if request.op == Op.READ else answer

    remote.answer = stop
    assert 0.1 <= fails("Deadline", lambda: client.lease("a", timeout_s=0.1)) < AT_ONCE_S
    lease[0]._patience._left_s = 0.1
    start = time.monotonic()
    assert lease[0].read() is None
    assert time.monotonic() - start < AT_ONCE_S
    serves_again(remote, client, before)


def test_all_reads_of_a_lease_share_its_time(remote: StubRemote, client: Client) -> None:
    names = [str(number) for number in range(20)]
    client.put([Item(name, VALUE) for name in names])

    def slow(request: Received, answer: Answer) -> Answer:
        if request.op == Op.READ:
            remote.ended.wait(0.2)
        return answer

    remote.answer = slow
    with client.lease(names, timeout_s=0.5) as lease:
        start = time.monotonic()
        read = [leased is not None and leased.read() is not None for leased in lease]
        assert time.monotonic() - start < AT_ONCE_S
    assert read[0]
    assert not read[-1]


def test_a_reply_that_trickles_in_costs_the_deadline(remote: StubRemote, client: Client) -> None:
    before = remote.numbers
    remote.answer = lies(Op.PROBE, lambda answer: answer._replace(pause_s=0.25))
    assert 0.5 <= fails("Deadline", lambda: client.exists("a", timeout_s=0.5)) < 3
    remote.answer = lambda request, answer: answer
    wait_for(lambda: not before.intersection(remote.numbers), 20, "the end of the connection")


@pytest.mark.parametrize("nbytes", [0, 1, 16, 20, 50_000])
def test_a_server_that_dies_in_a_frame_ends_the_call_at_once(remote: StubRemote, client: Client, nbytes: int) -> None:
    client.put([Item("a", VALUE)])
    lease = client.lease("a")
    before = remote.numbers
    remote.answer = lies(Op.READ, lambda answer: answer._replace(cut=nbytes))
    assert fails("ConnectionLost", lambda: client.get("a")) < AT_ONCE_S
    assert lease[0].read() is None
    serves_again(remote, client, before)


def test_a_server_that_dies_while_a_value_is_read_is_an_error_of_get(remote: StubRemote, client: Client) -> None:
    client.put([Item("a", VALUE)])
    reads: list[Received] = []

    def die(request: Received, answer: Answer) -> Answer:
        if request.op == Op.READ:
            reads.append(request)
        return answer._replace(cut=MIB) if len(reads) == 2 else answer

    remote.answer = die
    assert fails("ConnectionLost", lambda: client.get("a")) < AT_ONCE_S


def test_a_put_to_a_server_that_does_not_read_ends_at_its_deadline(remote: StubRemote, client: Client) -> None:
    opened = threading.Event()

    def stop(request: Received, answer: Answer) -> Answer:
        if request.op == Op.GRANT:
            return answer
        assert opened.wait(LONG_S)
        return answer

    before = remote.numbers
    remote.answer = stop
    assert 0.3 <= fails("Deadline", lambda: client.put([Item("a", VALUE * 20)], timeout_s=0.3)) < AT_ONCE_S
    opened.set()
    serves_again(remote, client, before)
    assert client.put([Item("a", b"again")]) == [Put.STORED], "what was half written is given back"


@pytest.mark.parametrize("op", [Op.GRANT, Op.WRITE])
def test_a_server_that_dies_during_a_put_leaves_nothing(remote: StubRemote, client: Client, op: Op) -> None:
    before = remote.numbers
    remote.answer = lies(op, lambda answer: answer._replace(cut=0))
    assert fails("ConnectionLost", lambda: client.put([Item("a", VALUE * 2)])) < AT_ONCE_S
    serves_again(remote, client, before)
    assert client.exists("a") == 0


def test_an_unexpected_error_in_a_put_gives_back_what_was_granted(
    remote: StubRemote, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = remote.numbers

    def fail(*arguments: Any) -> set[int]:
        raise RuntimeError("by the test")

    with monkeypatch.context() as patch:
        patch.setattr(remote_transport, "write", fail)
        with pytest.raises(RuntimeError):
            client.put([Item("a", VALUE)])
    serves_again(remote, client, before)
    assert client.put([Item("a", VALUE)]) == [Put.STORED]


def test_an_unexpected_error_in_a_lease_ends_it(
    remote: StubRemote, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put([Item("a", VALUE)])
    before = remote.numbers

    def fail(*arguments: Any) -> dict[int, Any]:
        raise RuntimeError("by the test")

    with monkeypatch.context() as patch:
        patch.setattr(remote_transport, "_fronts", fail)
        with pytest.raises(RuntimeError):
            client.lease("a")
    serves_again(remote, client, before)


def test_a_lease_tells_the_server_how_long_to_wait_for_lower_tiers(remote: StubRemote, client: Client) -> None:
    client.put([Item("a", b"value")])
    probes: list[Received] = []

    def seen(request: Received, answer: Answer) -> Answer:
        probes.extend([request] if request.op == Op.PROBE else [])
        return answer

    remote.answer = seen
    assert client.get("a", timeout_s=4)[0].value == b"value"
    assert [3_000 < request.body["budget_ms"] < 4_000 for request in probes] == [True]


def test_what_has_not_arrived_at_the_deadline_is_absent(remote: StubRemote, client: Client) -> None:
    client.put([Item("a", b"value"), Item("b", b"value")])
    remote.answer = lies(Op.PROBE, lambda answer: Answer({"states": b"\1\2", "bytes": answer.body["bytes"][:1]}))
    assert [one and bytes(one.value) for one in client.get(["a", "b"])] == [b"value", None]


# -- no server


def test_a_server_that_is_gone_fails_calls_at_once_until_it_is_back(remote: StubRemote, certificates: Path) -> None:
    with Client(remote.target, **options(certificates)) as client:
        client.put([Item("a", VALUE)])
        lease = client.lease("a")
        remote.close()
        wait_for(lambda: not client.connected, 10, "the end of the connection")
        for call in CALLS:
            start = time.monotonic()
            with pytest.raises(Unavailable):
                call(client, LONG_S)
            assert time.monotonic() - start < AT_ONCE_S
        assert fails("NotConnected", lambda: client.exists("a")) < AT_ONCE_S
        assert lease[0].read() is None
        back = StubRemote(certificates, remote.port)
        try:
            assert client.wait_connected(LONG_S)
            assert client.put([Item("a", b"new")]) == [Put.STORED]
            lease.close()
            assert client.get("a")[0].value == b"new"
        finally:
            back.close()


def test_connections_that_died_while_idle_are_not_used(remote: StubRemote, client: Client) -> None:
    assert client.exists("a") == 0
    remote.cut()
    wait_for(lambda: not remote.numbers, 10, "the end of all connections")
    assert client.exists("a") == 0, "another connection serves the call"


def test_calls_that_wait_end_at_once_when_the_server_dies(remote: StubRemote, client: Client) -> None:
    remote.answer = lambda request, answer: answer if request.op == Op.HELLO else None
    calls = [
        in_thread(lambda: client.exists("a")),
        in_thread(lambda: client.put([Item("a", b"value")])),
        in_thread(lambda: client.stat("a")),
    ]
    remote.wait_for(lambda: {Op.PROBE, Op.GRANT, Op.OBJECTS} <= {frame.op for frame in remote.received})
    start = time.monotonic()
    remote.close()
    assert {call().reason for call in calls} == {"ConnectionLost"}
    assert time.monotonic() - start < AT_ONCE_S


def test_calls_that_wait_end_at_once_when_the_client_is_closed(remote: StubRemote, certificates: Path) -> None:
    client = Client(remote.target, **options(certificates))
    remote.answer = lambda request, answer: answer if request.op == Op.HELLO else None
    calls = [in_thread(lambda: client.exists("a")) for _ in range(10)]
    remote.wait_for(lambda: sum(frame.op == Op.PROBE for frame in remote.received) == 8)
    start = time.monotonic()
    client.close()
    assert {call().reason for call in calls} == {"Closed"}
    assert time.monotonic() - start < AT_ONCE_S
    fails("Closed", lambda: client.exists("a"))
    wait_for(lambda: not remote.numbers, 10, "the end of all connections")


def test_no_read_touches_its_buffer_after_close(remote: StubRemote, certificates: Path) -> None:
    client = Client(remote.target, **options(certificates))
    client.put([Item("a", VALUE)])
    lease = client.lease("a")
    buffer = bytearray(len(VALUE))

    def stop(request: Received, answer: Answer) -> Answer:
        return answer._replace(raw=answer.frame(request)[: 2 * MIB]) if request.op == Op.READ else answer

    remote.answer = stop
    read = in_thread(lambda: lease[0].read_into(buffer))
    wait_for(lambda: any(buffer[1 * MIB :]), 10, "a part of the value")
    (busy,) = [one for one in client._transport._pool._connections if one.busy]
    client.close()
    assert not busy.busy, "close waits for the read"
    assert read() is False


def test_a_server_that_never_answers_hello_costs_the_deadline(certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"tls://127.0.0.1:{silent.getsockname()[1]}"
        with Client(target, **options(certificates)) as client:
            assert 0.2 <= fails("Deadline", lambda: client.exists("a", timeout_s=0.2)) < AT_ONCE_S
            assert not client.wait_connected(0.05)


def test_a_server_without_tls_is_no_server(certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = plain.accept()
                    connection.sendall(b"220 plain text\r\n")
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with Client(f"tls://127.0.0.1:{plain.getsockname()[1]}", **options(certificates)) as client:
            with pytest.raises(Unavailable, match="NotConnected: no TLS"):
                client.exists("a")
        plain.shutdown(socket.SHUT_RDWR)


def test_an_old_version_of_tls_is_refused(remote: StubRemote, certificates: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        remote.context.minimum_version = ssl.TLSVersion.TLSv1
        remote.context.maximum_version = ssl.TLSVersion.TLSv1_1
    with Client(remote.target, **options(certificates)) as client:
        with pytest.raises(Unavailable, match="NotConnected: no TLS"):
            client.exists("a")


def test_a_closed_connection_never_falls_back_to_plain_text(remote: StubRemote, client: Client) -> None:
    (connection,) = client._transport._pool._connections
    connection.interrupt()
    assert connection._sock._sslobj is not None, "the thread that uses it still reads and writes TLS"
    fails("ConnectionLost", lambda: connection.call(Op.RELEASE, Release(requests=[]), Nothing, time.monotonic() + 5))
    assert not connection.usable


def test_a_key_file_that_went_away_is_named(remote: StubRemote, certificates: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(remote.key)
    given = options(certificates) | {"key": None, "key_file": str(file)}
    with Client(remote.target, **given) as client:
        assert client.wait_connected(LONG_S)
        file.unlink()
        remote.cut()
        wait_for(lambda: not client.connected, 10, "the end of the connection")
        with pytest.raises(Unavailable, match="NoKey: key_file"):
            client.exists("a")
