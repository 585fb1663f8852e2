"""The connections of the object client to a remote server: what ends them, what keeps them, and who releases leases."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stub_remote import LONG_S, VALUE, StubRemote, fails, options

from kvcachepool.client import Client, Item
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
        lease[0]._timeout_s = 0.0
        assert lease[0].read() is None
        assert connection.usable
        lease[0]._timeout_s = LONG_S
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
