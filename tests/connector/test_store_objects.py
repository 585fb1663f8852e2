"""Objects of a served class: requests about one object at once, and listings."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_client import ALICE, BOB, Client

from kvcachepool.store_api import Entry
from kvcachepool.store_http import Server
from kvcachepool.store_memory import MemoryStore
from servers.waiting import wait_for

KEY = ALICE.removeprefix("/")
BATCH = b"<Delete><Object><Key>a/two.kv</Key></Object><Object><Key>a/one.kv</Key></Object></Delete>"


class Held(MemoryStore):
    """Writes of `KEY` wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = threading.Event(), threading.Event()

    def put(self, key: str, data: memoryview) -> None:
        if key == KEY and not self.begun.is_set():
            self.begun.set()
            self.release.wait(30)
        super().put(key, data)


@pytest.fixture
def held() -> Iterator[Held]:
    """The store; its calls end with the test."""
    store = Held()
    yield store
    store.release.set()


def test_a_call_beyond_its_deadline_keeps_others_from_its_object(serve: Callable[..., Server], held: Held) -> None:
    ask = Client(serve(held, deadline_s=0.2).server_address[1])
    late = ask("PUT", ALICE, b"late")
    assert (late.status, late.code) == (503, "RequestTimeout")
    for answer in (
        ask("PUT", ALICE, b"new"),
        ask("DELETE", ALICE),
        ask("DELETE", ALICE, If_Match='"any"'),
        ask("POST", "/kv-bucket?delete", BATCH),
    ):
        assert (answer.status, answer.code) == (409, "OperationAborted")
    assert ask("PUT", BOB, b"other").status == 200
    held.release.set()
    wait_for(lambda: ask("PUT", ALICE, b"new").status == 200, 10, "the object free again")
    assert ask("GET", ALICE).body == b"new"
    assert ask("POST", "/kv-bucket?delete", BATCH).status == 200
    assert (ask("HEAD", ALICE).status, ask("HEAD", BOB).status) == (404, 404)


def test_a_removal_waits_for_a_write_of_its_object(serve: Callable[..., Server], held: Held) -> None:
    port = serve(held).server_address[1]
    statuses: list[int] = []
    put = threading.Thread(target=lambda: statuses.append(Client(port)("PUT", ALICE, b"x").status))
    delete = threading.Thread(target=lambda: statuses.append(Client(port)("DELETE", ALICE).status))
    put.start()
    assert held.begun.wait(10)
    delete.start()
    delete.join(0.2)
    assert delete.is_alive()
    held.release.set()
    for thread in (put, delete):
        thread.join(10)
    assert sorted(statuses) == [200, 204]
    assert held.stat(KEY) is None


def test_a_coroutine_that_takes_time_to_be_cancelled_keeps_its_object(serve: Callable[..., Server]) -> None:
    release = threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, data: memoryview) -> Any:
            return self.written(key, bytes(data)) if data == b"late" else super().put(key, data)

        async def written(self, key: str, data: bytes) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                while not release.is_set():
                    await asyncio.sleep(0.01)
                super().put(key, memoryview(data))

    ask = Client(serve(Slow(), deadline_s=0.2).server_address[1])
    assert ask("PUT", ALICE, b"late").code == "RequestTimeout"
    assert ask("PUT", ALICE, b"new").code == "OperationAborted"
    release.set()
    wait_for(lambda: ask("PUT", ALICE, b"new").status == 200, 10, "the object free again")
    assert ask("GET", ALICE).body == b"new"


# -- listings


def test_a_listing_goes_on_after_a_short_page(serve: Callable[..., Server]) -> None:
    class Short(MemoryStore):
        def list(self, prefix: str, after: str, limit: int) -> list[Entry]:
            return super().list(prefix, after, min(limit, 2))

    ask = Client(serve(Short()).server_address[1])
    names = [f"a/{number}.kv" for number in range(7)]
    for name in names:
        ask("PUT", f"/kv-bucket/{name}", b"x")
    whole = ask("GET", "/kv-bucket?list-type=2&prefix=a%2F")
    assert re.findall(r"<Key>([^<]*)</Key>", whole.body.decode()) == names
    assert b"<IsTruncated>false</IsTruncated>" in whole.body
    page = ask("GET", "/kv-bucket?list-type=2&prefix=a%2F&max-keys=5")
    assert re.findall(r"<Key>([^<]*)</Key>", page.body.decode()) == names[:5]
    assert b"<NextContinuationToken>a/4.kv</NextContinuationToken>" in page.body


def test_a_class_that_repeats_a_page_fails_the_listing(serve: Callable[..., Server]) -> None:
    class Repeating(MemoryStore):
        def list(self, prefix: str, after: str, limit: int) -> list[Entry]:
            return super().list(prefix, "", min(limit, 2))

    ask = Client(serve(Repeating()).server_address[1])
    for name in "abc":
        ask("PUT", f"/kv-bucket/{name}", b"x")
    answer = ask("GET", "/kv-bucket?list-type=2")
    assert (answer.status, answer.code) == (500, "InternalError")
    assert b"Repeating.list" in answer.body
