"""The object client with a remote server that the test controls: what it sends, and what it moves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_calls import fails
from stub_remote import LONG_S, Answer, Received, StubRemote, options

from kvcachepool.client import AsyncClient, AsyncLease, Client, Header, Item, Object, Put, Stat, Unavailable
from kvcachepool.object_bytes import digest_of
from kvcachepool.object_transport import budget_ms
from kvcachepool.wire import Op
from servers.waiting import wait_for

MIB = 1 << 20
AT_ONCE_S = 5.0


@pytest.fixture
def client(remote: StubRemote, certificates: Path) -> Iterator[Client]:
    with Client(remote.target, **options(certificates)) as made:
        yield made


def content(seed: str, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


# -- values


@pytest.mark.parametrize("nbytes", [0, 1, 63 << 10, 64 << 10, 65 << 10, 4 * MIB - 128, 4 * MIB, 9 * MIB + 7])
def test_a_value_comes_back_with_its_header(client: Client, nbytes: int) -> None:
    header, value = Header((nbytes,), "uint8", "raw", {"layer": 3}), content("k", nbytes)
    assert client.put([Item("k", value, header)]) == [Put.STORED]
    assert client.put([Item("k", b"another")]) == [Put.EXISTS]
    assert client.get("k") == [Object(header, value)]
    assert client.stat("k") == [Stat(client.stat("k")[0].nbytes, "memory", False)]


def test_no_frame_is_longer_than_the_limit(remote: StubRemote, client: Client) -> None:
    values = {f"k{at}": content(str(at), 3 * MIB + at) for at in range(7)} | {"large": content("l", 11 * MIB)}
    values |= {f"s{at}": content(str(at), at) for at in range(300)}
    assert set(client.put([Item(key, value) for key, value in values.items()])) == {Put.STORED}
    assert all(len(frame.data) <= 4 * MIB for frame in remote.frames(Op.WRITE))
    assert len(remote.frames(Op.WRITE)) < 20, "small objects share frames"
    assert [one.value for one in client.get(list(values))] == list(values.values())
    for frame in remote.frames(Op.READ):
        assert 0 < sum(length for _, _, length in frame.body["parts"]) <= 4 * MIB


def test_parts_of_a_value_are_read_into_several_buffers(client: Client) -> None:
    value = np.frombuffer(content("k", 9 * MIB), dtype=np.uint8)
    client.put([Item("k", [value[:100], value[100 : 5 * MIB], b"", value[5 * MIB :]])])
    with client.lease("k") as lease:
        for begin, end in [(0, 10), (0, 200 << 10), ((64 << 10) - 200, 66 << 10), (4 * MIB - 70, 8 * MIB + 9)]:
            part = np.zeros(end - begin, dtype=np.uint8)
            assert lease[0].read_into([part[:7], part[7:7], part[7:8], part[8:]], offset=begin)
            assert (part == value[begin:end]).all(), (begin, end)
        with pytest.raises(ValueError, match="at most 3 bytes"):
            lease[0].read_into(bytearray(4), offset=9 * MIB - 3)


def test_a_small_value_needs_no_read_of_its_own(remote: StubRemote, client: Client) -> None:
    client.put([Item(f"k{at}", content(str(at), 500)) for at in range(20)])
    with client.lease([f"k{at}" for at in range(20)]) as lease:
        reads = len(remote.frames(Op.READ))
        assert reads == 1
        assert [one.read() for one in lease] == [content(str(at), 500) for at in range(20)]
        assert len(remote.frames(Op.READ)) == reads


def test_the_longest_key_and_header_are_read(client: Client) -> None:
    key, header = "k" * (64 << 10), Header(metadata={"m": b"x" * (60 << 10)})
    client.put([Item(key, b"value", header), Item("l", b"x")])
    assert client.get([key, "l"]) == [Object(header, b"value"), Object(Header(), b"x")]


def test_many_leased_objects_have_bounded_fronts(remote: StubRemote, client: Client) -> None:
    keys = [f"k{at}" for at in range(1024)]
    client.put([Item(key, bytes(40 << 10)) for key in keys])
    with client.lease(keys) as lease:
        front = sum(length for frame in remote.frames(Op.READ) for _, _, length in frame.body["parts"])
        assert front <= 16 * MIB
        assert lease[1023].read() == bytes(40 << 10)


def test_lookups_and_changes_answer_for_each_key(remote: StubRemote, client: Client, certificates: Path) -> None:
    client.put([Item(key, b"x") for key in ("a", "b", "d")])
    keys = ["a", "b", "c", "d"]
    assert client.exists(keys) == 2
    assert client.contains(keys) == [True, True, False, True]
    with client.lease(keys) as lease, client.lease(keys, prefix=True) as prefix:
        assert [one is not None for one in lease] == [True, True, False, True]
        assert [one is not None for one in prefix] == [True, True, False, False]
    assert client.touch(keys) == client.pin(keys) == client.unpin(keys) == 3
    assert client.remove(["a", "c"]) == 1
    assert client.contains(keys) == [False, True, False, True]
    assert client.exists([]) == client.remove([]) == 0
    assert client.put([]) == client.get([]) == client.contains([]) == client.stat([]) == []
    with Client(remote.target, namespace="other", **options(certificates)) as other:
        assert other.contains(keys) == [False] * 4


def test_an_object_beyond_the_servers_memory_is_too_large_and_not_sent(remote: StubRemote, client: Client) -> None:
    remote.arena_bytes = 1000
    assert client.put([Item("k", bytes(1001)), Item("l", b"x")]) == [Put.TOO_LARGE, Put.STORED]
    assert client.put([Item("k", bytes(1001))]) == [Put.TOO_LARGE]
    assert [len(frame.body["chunks"]) for frame in remote.frames(Op.GRANT)] == [1]


@pytest.mark.parametrize(("left_s", "expected"), [(-1.0, 1), (0.0, 1), (0.0009, 1), (0.1, 89), (10.0, 9979)])
def test_the_time_for_lower_tiers_is_never_0_which_would_be_the_sidecars_own_limit(
    left_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert abs(budget_ms(1000.0 + left_s) - expected) <= (left_s > 0.001)


def test_a_time_to_live_is_sent(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", b"")], ttl_s=7)
    assert remote.frames(Op.GRANT)[0].body["ttl_s"] == 7


def test_an_object_of_another_key_is_absent_and_counted(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", b"value"), Item("l", b"value")])
    (namespace, _), *_ = remote.objects
    remote.objects[namespace, digest_of(b"k")] = remote.objects[namespace, digest_of(b"l")]
    remote.objects[namespace, digest_of(b"m")] = b"short"
    assert client.get(["k", "l", "m"]) == [None, Object(Header(), b"value"), None]
    assert client.invalid_objects == 2


# -- connections and leases


def test_connections_are_made_on_demand_and_at_most_eight(remote: StubRemote, client: Client) -> None:
    assert client.exists("k") == 0
    assert client.exists("k") == 0
    assert remote.connections == 1
    opened = threading.Event()

    def slow(request: Received, answer: Answer) -> Answer:
        if request.op == Op.PROBE:
            assert opened.wait(LONG_S)
        return answer

    remote.answer = slow
    calls = [threading.Thread(target=client.exists, args=("k",)) for _ in range(12)]
    for call in calls:
        call.start()
    remote.wait_for(lambda: sum(one.op == Op.PROBE for one in remote.received) == 10)
    fails("Deadline", lambda: client.exists("k", timeout_s=0.3))
    assert remote.connections == 8
    opened.set()
    for call in calls:
        call.join()
    assert len(remote.frames(Op.PROBE)) == 14


def test_a_lease_is_released_on_its_connection(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", content("k", MIB))])
    lease = client.lease("k")
    assert client.exists("k") == 1
    assert client.exists("k") == 1
    assert remote.held == 1
    probe = next(frame for frame in remote.frames(Op.PROBE) if frame.body.get("local_tokens") == 0)
    assert lease[0].read() == content("k", MIB)
    assert {frame.connection for frame in remote.frames(Op.READ)} == {probe.connection}
    lease.close()
    release = remote.frames(Op.RELEASE)[-1]
    assert (release.connection, release.body["requests"]) == (probe.connection, [probe.body["request"]])
    assert remote.held == 0
    assert lease[0].read() is None


def test_a_dropped_lease_is_released_with_the_next_call(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", b"value")])
    client.lease("k")
    gc.collect()
    assert client.exists("k") == 1
    assert remote.held == 0


def test_a_lease_that_is_closed_during_a_read_is_released_after_it(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", content("k", MIB))])
    lease = client.lease("k")
    leased = lease[0]
    entered, opened = threading.Event(), threading.Event()

    def slow(request: Received, answer: Answer) -> Answer:
        if request.op == Op.READ:
            entered.set()
            assert opened.wait(LONG_S)
        return answer

    remote.answer = slow
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.append(leased.read()))
    reader.start()
    assert entered.wait(LONG_S)
    lease.close()
    assert remote.held == 1
    opened.set()
    reader.join()
    assert read == [content("k", MIB)]
    remote.wait_for(lambda: remote.received[-1].op == Op.RELEASE)
    assert remote.held == 0


def test_a_lease_ends_with_its_connection(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", content("k", MIB))])
    with client.lease("k") as lease:
        remote.cut()
        wait_for(lambda: remote.held == 0, 10, "the end of the lease")
        assert lease[0].read() is None
        assert client.wait_connected(LONG_S)
        assert client.get("k")[0].value == content("k", MIB)


def test_a_call_that_fails_does_not_end_the_lease_of_another(remote: StubRemote, client: Client) -> None:
    client.put([Item("k", content("k", MIB))])
    with client.lease("k") as lease:
        remote.answer = lambda request, answer: None if request.op == Op.OBJECTS else answer
        fails("Deadline", lambda: client.stat("k", timeout_s=0.1))
        assert lease[0].read() == content("k", MIB)


def test_a_forked_child_makes_its_own_client(remote: StubRemote, client: Client, certificates: Path) -> None:
    client.put([Item("a", content("a", MIB))])
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
            with Client(remote.target, **options(certificates)) as own:
                assert own.get("a")[0].value == content("a", MIB)
                assert own.put([Item("b", b"value")]) == [Put.STORED]
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.connected
    assert lease[0].read() == content("a", MIB)
    assert client.exists("b") == 1


def test_a_forked_child_makes_its_own_asynchronous_client(remote: StubRemote, certificates: Path) -> None:
    async def leave(client: AsyncClient, lease: AsyncLease, end: Callable[..., Awaitable[object]]) -> None:
        for call in (client.exists("a"), client.wait_connected(1), lease[0].read()):
            with pytest.raises(Unavailable, match="Forked"):
                await call
        await end(None, None, None)
        await client.close()
        async with AsyncClient(remote.target, **options(certificates)) as own:
            assert (await own.get("a"))[0].value == content("a", MIB)

    async def run() -> None:
        async with AsyncClient(remote.target, **options(certificates)) as client:
            await client.put([Item("a", content("a", MIB))])
            leasing = client.lease("a")
            async with leasing as lease:
                child = os.fork()
                if child == 0:
                    code = 1
                    with contextlib.suppress(BaseException):
                        asyncio.run(asyncio.wait_for(leave(client, lease, leasing.__aexit__), AT_ONCE_S))
                        code = 0
                    os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert await lease[0].read() == content("a", MIB)

    asyncio.run(run())


def test_the_methods_are_coroutines_too(remote: StubRemote, certificates: Path) -> None:
    async def run() -> None:
        async with AsyncClient(remote.target, **options(certificates)) as client:
            assert await client.put([Item("k", b"value")]) == [Put.STORED]
            async with client.lease(["k", "none"]) as lease:
                assert await lease[0].read() == b"value"
                assert lease[1] is None
            assert remote.held == 0
            results = await asyncio.gather(*(client.get("k") for _ in range(40)))
            assert all(found[0].value == b"value" for found in results)

    asyncio.run(run())
