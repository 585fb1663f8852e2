"""The connections of the object client to a remote server: what ends them, what keeps them, and who releases leases."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_calls import fails
from stub_remote import KEY, LONG_S, VALUE, StubRemote, options

from kvcachepool import remote_pool
from kvcachepool.client import Client, Item, Unavailable
from kvcachepool.remote_connection import Connection
from kvcachepool.remote_pool import Pool
from kvcachepool.wire import Op
from servers.waiting import wait_for

AT_ONCE_S = 5.0


@pytest.fixture
def client(remote: StubRemote, certificates: Path) -> Iterator[Client]:
    with Client(remote.target, **options(certificates)) as made:
        assert made.wait_connected(LONG_S)
        yield made


def pool_of(client: Client) -> Pool:
    return client._transport._pool


def connection_of(client: Client) -> Connection:
    """The only connection."""
    (connection,) = pool_of(client)._connections
    return connection


# -- the end of a connection


@pytest.mark.parametrize(
    "call",
    [
        lambda transport, deadline: transport.states([bytes(32)], False, deadline),
        lambda transport, deadline: transport.hold([b"a"], False, deadline),
        lambda transport, deadline: transport.change("touch", [bytes(32)], 0, deadline),
        lambda transport, deadline: transport.stat([bytes(32)], deadline),
    ],
)
def test_a_call_whose_deadline_has_passed_leaves_the_connection(
    remote: StubRemote, client: Client, call: Callable[..., object]
) -> None:
    connection, frames = connection_of(client), len(remote.received)
    fails("Deadline", lambda: call(client._transport, time.monotonic()))
    assert len(remote.received) == frames, "nothing is sent after the deadline"
    assert connection.usable
    assert client.exists("a") == 0
    assert len(remote.frames(Op.HELLO)) == 1


def test_a_read_whose_deadline_has_passed_leaves_the_leases_of_its_connection(
    remote: StubRemote, client: Client
) -> None:
    client.put([Item("a", VALUE)])
    with client.lease("a") as lease:
        connection = connection_of(client)
        lease[0]._patience._left_s = 0.0
        assert lease[0].read() is None
        assert connection.usable
        lease[0]._patience._left_s = LONG_S
        assert lease[0].read() == VALUE
    assert len(remote.frames(Op.HELLO)) == 1


def test_close_ends_connections_that_a_forked_child_has_too(remote: StubRemote, client: Client) -> None:
    client.put([Item("a", b"value")])
    lease = client.lease("a")
    assert remote.held == 1
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    try:
        client.close()
        wait_for(lambda: not remote.numbers and not remote.held, 10, "the end of the connection and its lease")
    finally:
        os.close(end)
        os.close(ended)
        os.waitpid(child, 0)
    lease.close()


# -- leases that wait for their RELEASE


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_release_frees_its_connection_and_ends_the_lease(
    remote: StubRemote, client: Client, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put([Item("a", b"value")])
    lease, connection = client.lease("a"), connection_of(client)

    def interrupt(*arguments: object) -> None:
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(connection, "call", interrupt)
        with pytest.raises(kind):
            lease.close()
    assert not connection.busy
    wait_for(lambda: remote.held == 0, 10, "the end of the lease with its connection")
    assert client.exists("a") == 1
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(AT_ONCE_S)
    assert not closing.is_alive(), "close waits for connections that are busy"


def test_leases_that_were_dropped_end_with_one_release_per_connection(remote: StubRemote, client: Client) -> None:
    client.put([Item("a", b"value")])
    leases = [client.lease("a") for _ in range(20)]
    assert remote.held == 20
    leases.clear()
    gc.collect()
    assert client.exists("a") == 1
    assert remote.held == 0
    releases = remote.frames(Op.RELEASE)
    assert len(releases) == len({frame.connection for frame in releases})
    assert sum(len(frame.body["requests"]) for frame in releases) == 20


def test_leases_are_spread_over_all_connections(remote: StubRemote, client: Client) -> None:
    """A server limits the leases of one connection."""
    client.put([Item("a", b"value")])
    leases = [client.lease("a") for _ in range(2000)]
    probes = Counter(frame.connection for frame in remote.frames(Op.PROBE))
    assert len(probes) == 8
    assert max(probes.values()) <= 2000 / 8 + 1
    assert leases[0][0].read() == leases[-1][0].read() == b"value"


def test_many_leases_end_with_frames_of_bounded_size(
    remote: StubRemote, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pool, "_RELEASE_REQUESTS", 2)
    pool_of(client).dropped.extend((connection_of(client), str(at)) for at in range(5))
    client.exists("a")
    assert [frame.body["requests"] for frame in remote.frames(Op.RELEASE)] == [["0", "1"], ["2", "3"], ["4"]]


def test_a_release_that_is_not_answered_costs_a_call_no_more_than_its_deadline(
    remote: StubRemote, client: Client
) -> None:
    client.put([Item("a", b"value")])
    leases = [client.lease("a") for _ in range(8)]
    remote.answer = lambda request, answer: None if request.op == Op.RELEASE else answer
    leases.clear()
    gc.collect()
    start = time.monotonic()
    with contextlib.suppress(Unavailable):
        client.exists("a", timeout_s=0.2)
    assert time.monotonic() - start < 0.7
    remote.answer = lambda request, answer: answer
    assert client.exists("a") == 1
    wait_for(lambda: remote.held == 0, 10, "the end of all leases")


def test_a_lease_that_ends_during_a_call_without_time_left_ends_with_the_next_call(
    remote: StubRemote, client: Client
) -> None:
    client.put([Item("a", b"value")])
    lease, connection = client.lease("a"), connection_of(client)
    deadline = time.monotonic() + 0.01
    with pool_of(client).using(deadline, connection):
        lease.close()
        wait_for(lambda: time.monotonic() >= deadline, 10, "the deadline")
    assert remote.held == 1
    assert connection.usable
    assert client.exists("a") == 1
    assert remote.held == 0
    assert len(remote.frames(Op.HELLO)) == 1


# -- failures to connect


def test_a_failed_attempt_to_connect_is_forgotten_when_another_connection_serves(
    remote: StubRemote, client: Client
) -> None:
    client.put([Item("a", b"value")])
    with client.lease("a"):
        remote.key = "another"
        assert client.exists("a") == 1, "the call shares the connection of the lease"
        assert len(remote.frames(Op.HELLO)) == 2
        assert client.exists("a") == 1
        assert len(remote.frames(Op.HELLO)) == 2, "a refused key is not tried again at once"
    remote.key = KEY
    remote.cut()
    wait_for(lambda: not client.connected, 10, "the end of the connection")
    start = time.monotonic()
    assert client.exists("a") == 1
    assert time.monotonic() - start < AT_ONCE_S


def test_a_failed_attempt_to_connect_is_kept_while_no_connection_serves(remote: StubRemote, client: Client) -> None:
    remote.key = "another"
    remote.cut()
    wait_for(lambda: not client.connected, 10, "the end of the connection")
    for _ in range(3):
        assert fails("Unauthorized", lambda: client.exists("a")) < AT_ONCE_S
    assert len(remote.frames(Op.HELLO)) == 2, "a refused key is not tried again at once"
