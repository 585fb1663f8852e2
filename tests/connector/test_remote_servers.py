"""The object client with several remote servers: which one has a key, and what one that is gone takes away."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from object_calls import fails
from stub_remote import LONG_S, Answer, Received, StubRemote, options, refusal

from kvcachepool import remote_servers
from kvcachepool.client import Client, Header, Item, Object, Put, Refused
from kvcachepool.object_bytes import digest_of
from kvcachepool.remote_servers import server_of
from kvcachepool.wire import Op
from servers.waiting import wait_for

AT_ONCE_S = 5.0
NAMES = ["cache-0.cache:7411", "cache-1.cache:7411", "cache-2.cache:7411"]
#: Keys, and the position of their server in NAMES.
VECTORS = [("a", 0), ("d", 1), ("e", 2), ("f", 2), ("k0", 1), ("k1", 0), ("k2", 2)]
KEYS = [f"k{at}" for at in range(40)]


class Servers:
    """Two stand-ins and a client of both."""

    def __init__(self, certificates: Path) -> None:
        self.certificates = certificates
        self.stubs = [StubRemote(certificates), StubRemote(certificates)]
        self.names = [stub.name for stub in self.stubs]
        self.target = ",".join(stub.target for stub in self.stubs)
        self.client = Client(self.target, **options(certificates))

    def of(self, key: str) -> int:
        return server_of(self.names, digest_of(key.encode()))

    def keys_of(self, number: int) -> list[str]:
        return [key for key in KEYS if self.of(key) == number]

    def close(self) -> None:
        self.client.close()
        for stub in self.stubs:
            stub.close()


@pytest.fixture
def servers(certificates: Path) -> Iterator[Servers]:
    made = Servers(certificates)
    yield made
    made.close()


def content(key: str) -> bytes:
    return random.Random(key).randbytes(200_000)


# -- the server of a key


@pytest.mark.parametrize(("key", "server"), VECTORS)
def test_the_server_of_a_key_is_the_same_in_all_clients(key: str, server: int) -> None:
    assert server_of(NAMES, digest_of(key.encode())) == server


def test_the_server_of_a_key_has_the_greatest_digest() -> None:
    for key in KEYS:
        digest = hashlib.sha256(key.encode()).digest()
        scores = [hashlib.blake2b(name.encode() + digest, digest_size=8).digest() for name in NAMES]
        numbers = [int.from_bytes(score, "big") for score in scores]
        assert server_of(NAMES, digest) == numbers.index(max(numbers))


def test_the_order_of_servers_does_not_matter() -> None:
    for key in KEYS:
        digest = digest_of(key.encode())
        assert NAMES[server_of(NAMES, digest)] == NAMES[::-1][server_of(NAMES[::-1], digest)]


def test_only_the_keys_of_a_server_that_is_removed_move() -> None:
    digests = [digest_of(str(at).encode()) for at in range(3000)]
    counts = Counter(server_of(NAMES, digest) for digest in digests)
    assert all(800 < counts[number] < 1200 for number in range(3)), counts
    for gone in range(3):
        left = [name for name in NAMES if name != NAMES[gone]]
        for digest in digests:
            before = NAMES[server_of(NAMES, digest)]
            assert before == NAMES[gone] or left[server_of(left, digest)] == before


# -- calls of several servers


def test_objects_are_spread_and_found_in_order(servers: Servers) -> None:
    client = servers.client
    assert client.put([Item(key, content(key), Header(dtype=key)) for key in KEYS]) == [Put.STORED] * len(KEYS)
    assert [len(stub.objects) for stub in servers.stubs] == [len(servers.keys_of(0)), len(servers.keys_of(1))]
    assert min(len(stub.objects) for stub in servers.stubs) > 0
    asked = [*KEYS[:10], "none", *KEYS[10:]]
    assert client.exists(asked) == 10
    assert client.contains(asked) == [key != "none" for key in asked]
    expected = [None if key == "none" else Object(Header(dtype=key), content(key)) for key in asked]
    assert client.get(asked) == expected
    assert [stat is not None for stat in client.stat(asked)] == [key != "none" for key in asked]
    with client.lease(asked) as lease:
        assert [leased and leased.header.dtype for leased in lease] == [None if k == "none" else k for k in asked]
        assert [leased and leased.read() for leased in lease] == [one and one.value for one in expected]
    with client.lease(asked, prefix=True) as prefix:
        assert [leased is not None for leased in prefix] == [True] * 10 + [False] * 31
    assert sum(stub.held for stub in servers.stubs) == 0
    assert client.put([Item(key, b"") for key in asked]) == [
        Put.STORED if key == "none" else Put.EXISTS for key in asked
    ]
    assert client.touch(KEYS) == client.pin(KEYS) == client.unpin(KEYS) == client.remove(KEYS) == len(KEYS)
    assert client.exists([]) == 0
    assert client.put([]) == client.get([]) == client.contains([]) == client.stat([]) == []
    assert len(client.lease([])) == 0


def test_a_prefix_keeps_no_lease_of_a_server_whose_keys_are_all_behind_it(servers: Servers) -> None:
    client, (absent, *front), behind = servers.client, servers.keys_of(0), servers.keys_of(1)
    client.put([Item(key, b"x") for key in front + behind])
    with client.lease([*front, absent, *behind], prefix=True) as lease:
        assert [one is not None for one in lease] == [True] * len(front) + [False] * (1 + len(behind))
        wait_for(lambda: [stub.held for stub in servers.stubs] == [1, 0], LONG_S, "the release")
        assert lease[0].read() == b"x"
    assert [stub.held for stub in servers.stubs] == [0, 0]


def test_servers_are_asked_at_the_same_time(servers: Servers) -> None:
    both = threading.Barrier(2)

    def meet(request: Received, answer: Answer) -> Answer:
        if request.op in (Op.PROBE, Op.GRANT, Op.WRITE):
            both.wait(10)
        return answer

    for stub in servers.stubs:
        stub.answer = meet
    keys = [servers.keys_of(0)[0], servers.keys_of(1)[0]]
    assert servers.client.put([Item(key, b"x") for key in keys]) == [Put.STORED] * 2
    assert servers.client.exists(keys) == 2
    assert [one is not None for one in servers.client.get(keys)] == [True] * 2


def test_a_server_that_is_gone_takes_only_its_keys_away(servers: Servers) -> None:
    client = servers.client
    client.put([Item(key, content(key)) for key in KEYS])
    servers.stubs[0].close()
    alive = [servers.of(key) == 1 for key in KEYS]
    start = time.monotonic()
    assert client.contains(KEYS) == alive
    assert client.exists(KEYS) == alive.index(False)
    assert [one is not None for one in client.get(KEYS)] == alive
    assert [one is not None for one in client.stat(KEYS)] == alive
    assert client.touch(KEYS) == sum(alive)
    results = client.put([Item(f"new-{key}", content(key)) for key in KEYS])
    expected = [Put.STORED if servers.of(f"new-{key}") == 1 else Put.UNAVAILABLE for key in KEYS]
    assert results == expected
    with client.lease(KEYS) as lease:
        assert [one is not None for one in lease] == alive
    key = servers.keys_of(0)[0]
    assert client.exists(key) == 0
    assert client.put([Item(key, b"")]) == [Put.UNAVAILABLE]
    assert client.get(key) == [None]
    assert client.remove(key) == 0
    assert time.monotonic() - start < 2 * AT_ONCE_S
    assert client.connected
    back = StubRemote(servers.certificates, servers.stubs[0].port)
    try:
        wait_for(lambda: client.put([Item(key, b"new")]) == [Put.STORED], LONG_S, "the server that is back")
        assert client.get(key)[0].value == b"new"
    finally:
        back.close()


def test_without_any_server_calls_fail_at_once(servers: Servers) -> None:
    client = servers.client
    assert client.wait_connected(LONG_S)
    for stub in servers.stubs:
        stub.close()
    wait_for(lambda: not client.connected, 10, "the end of all connections")
    calls: list[Callable[[], Any]] = [
        lambda: client.exists(KEYS),
        lambda: client.put([Item(key, b"") for key in KEYS]),
        lambda: client.get(KEYS),
        lambda: client.remove(KEYS),
        lambda: client.stat(KEYS[0]),
    ]
    for call in calls:
        assert fails("NotConnected", call) < AT_ONCE_S
    assert not client.wait_connected(0.1)


def test_a_server_that_dies_during_a_call_leaves_the_result_of_the_others(servers: Servers) -> None:
    client = servers.client
    client.put([Item(key, content(key)) for key in KEYS])
    alive = [servers.of(key) == 1 for key in KEYS]
    with client.lease(KEYS) as lease:
        servers.stubs[0].answer = lambda request, answer: answer._replace(cut=0)
        assert [one is not None and one.read() == content(key) for key, one in zip(KEYS, lease, strict=True)] == alive
    servers.stubs[0].answer = lambda request, answer: answer._replace(cut=0) if request.op == Op.READ else answer
    assert [one is not None for one in client.get(KEYS)] == alive
    servers.stubs[0].answer = lambda request, answer: answer._replace(cut=0) if request.op == Op.WRITE else answer
    results = client.put([Item(f"new-{key}", content(key)) for key in KEYS])
    assert results == [Put.STORED if servers.of(f"new-{key}") == 1 else Put.UNAVAILABLE for key in KEYS]


def test_a_slow_server_costs_the_deadline_and_its_keys(servers: Servers) -> None:
    client = servers.client
    client.put([Item(key, b"x") for key in KEYS])
    servers.stubs[0].answer = lambda request, answer: answer if request.op == Op.HELLO else None
    start = time.monotonic()
    assert client.contains(KEYS, timeout_s=0.3) == [servers.of(key) == 1 for key in KEYS]
    assert 0.3 <= time.monotonic() - start < AT_ONCE_S


def test_a_server_that_does_not_answer_delays_no_call_of_another(servers: Servers) -> None:
    client, (hung, healthy) = servers.client, (servers.keys_of(0)[0], servers.keys_of(1)[0])
    client.put([Item(key, b"x") for key in KEYS])
    servers.stubs[0].answer = lambda request, answer: answer if request.op == Op.HELLO else None
    threads = [threading.Thread(target=client.contains, args=([healthy, hung],), daemon=True) for _ in range(24)]
    for thread in threads:
        thread.start()
    servers.stubs[1].wait_for(lambda: len(servers.stubs[1].frames(Op.PROBE)) >= 24)
    servers.stubs[0].wait_for(lambda: len(servers.stubs[0].frames(Op.PROBE)) >= 8)
    start = time.monotonic()
    assert client.contains([hung, healthy], timeout_s=0.5) == [False, True]
    assert client.contains([healthy, hung], timeout_s=0.5) == [True, False]
    with client.lease([healthy, hung], timeout_s=0.5) as lease:
        assert [one is not None for one in lease] == [True, False]
    assert time.monotonic() - start < AT_ONCE_S
    client.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_call_that_no_thread_has_begun_at_its_deadline_is_not_made() -> None:
    made, gate = [], threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(gate.wait, 10)
        calls = [(threads, lambda: made.append("here")), (threads, lambda: made.append("there"))]
        remote_servers._in_parallel(calls, time.monotonic() + 0.05)
        gate.set()
    assert made == ["here"]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_unexpected_error_of_one_server_leaves_no_lease_on_the_others(
    servers: Servers, number: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = servers.client
    client.put([Item(key, b"x") for key in KEYS])
    failing, other = servers.client._transport._servers[number], servers.stubs[1 - number]

    def fail(*arguments: Any) -> None:
        other.wait_for(lambda: other.held)
        raise kind("by the test")

    with monkeypatch.context() as patch:
        patch.setattr(failing, "hold", fail)
        with pytest.raises(kind):
            client.lease(KEYS)
    assert [stub.held for stub in servers.stubs] == [0, 0]
    assert client.contains(KEYS) == [True] * len(KEYS)


def test_an_interrupted_call_waits_for_the_other_servers(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    client = servers.client
    client.put([Item(key, b"x") for key in KEYS])
    interrupts, asked, opened = [KeyboardInterrupt(), KeyboardInterrupt()], threading.Event(), threading.Event()

    def slow(request: Received, answer: Answer) -> Answer:
        asked.set()
        assert opened.wait(10)
        return answer

    def interrupted(*arguments: Any) -> Any:
        if interrupts:
            # A call that no thread has begun is not made.
            assert asked.wait(10)
            raise interrupts.pop()
        opened.set()
        return wait(*arguments)

    for number, stub in enumerate(servers.stubs):
        stub.answer = slow if number != servers.of(KEYS[0]) else stub.answer
    with monkeypatch.context() as patch:
        patch.setattr(remote_servers, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lease(KEYS)
    assert opened.is_set()
    assert [stub.held for stub in servers.stubs] == [0, 0]


def test_a_server_with_another_key_counts_as_unavailable(certificates: Path) -> None:
    servers = Servers(certificates)
    try:
        servers.stubs[0].key = "another"
        servers.stubs[0].cut()
        with Client(servers.target, **options(certificates)) as client:
            results = client.put([Item(key, b"") for key in KEYS])
            assert results == [Put.STORED if servers.of(key) == 1 else Put.UNAVAILABLE for key in KEYS]
        servers.stubs[1].key = "another"
        with Client(servers.target, **options(certificates)) as client:
            fails("Unauthorized", lambda: client.exists(KEYS))
    finally:
        servers.close()


def test_what_one_server_refuses_is_refused_and_leaves_no_lease(servers: Servers) -> None:
    client = servers.client
    client.put([Item(key, b"x") for key in KEYS])
    servers.stubs[0].answer = lambda request, answer: refusal("ByTheTest") if request.op == Op.PROBE else answer
    with pytest.raises(Refused, match="ByTheTest"):
        client.lease(KEYS)
    wait_for(lambda: servers.stubs[1].held == 0, 10, "the end of the other server's lease")


def test_a_server_that_damages_objects_is_counted(servers: Servers) -> None:
    servers.client.put([Item(key, b"value") for key in KEYS])
    for stub in servers.stubs:
        stub.objects = {name: bytes(100) for name in stub.objects}
    assert servers.client.get(KEYS) == [None] * len(KEYS)
    assert servers.client.invalid_objects == len(KEYS)


def test_a_forked_child_makes_its_own_client(servers: Servers) -> None:
    servers.client.put([Item(key, content(key)) for key in KEYS])
    lease = servers.client.lease(KEYS)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            fails("Forked", lambda: servers.client.exists(KEYS))
            fails("Forked", lambda: servers.client.wait_connected(1))
            fails("Forked", lambda: lease[0].read())
            lease.close()
            servers.client.close()
            with Client(servers.target, **options(servers.certificates)) as own:
                assert own.exists(KEYS) == len(KEYS)
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.read() == content(key) for key, one in zip(KEYS, lease, strict=True)] == [True] * len(KEYS)


def test_a_closed_client_ends_calls_of_all_servers(servers: Servers) -> None:
    for stub in servers.stubs:
        stub.answer = lambda request, answer: answer if request.op == Op.HELLO else None
    failed: list[Exception] = []

    def call() -> None:
        try:
            servers.client.exists(KEYS)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    for stub in servers.stubs:
        stub.wait_for(lambda stub=stub: stub.frames(Op.PROBE))
    servers.client.close()
    thread.join(10)
    assert [getattr(error, "reason", error) for error in failed] == ["Closed"]
    fails("Closed", lambda: servers.client.exists(KEYS))
