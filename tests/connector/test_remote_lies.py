"""The object client with a remote server that lies: wrong counts, lengths, states and frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_calls import fails
from stub_remote import (
    DATA,
    ERROR,
    LONG_S,
    REPLY,
    VALUE,
    Answer,
    Change,
    StubRemote,
    lies,
    options,
    refusal,
    says,
    serves_again,
)

from kvcachepool import remote_pool, wire
from kvcachepool.client import Client, Item, Put
from kvcachepool.wire import Op

AT_ONCE_S = 5.0


@pytest.fixture
def client(remote: StubRemote, certificates: Path) -> Iterator[Client]:
    with Client(remote.target, **options(certificates)) as made:
        assert made.wait_connected(LONG_S)
        yield made


PROBE_LIES: dict[str, Change] = {
    "fewer states": says(states=b"\1"),
    "more states": says(states=b"\1\1\1"),
    "an unknown state": says(states=b"\1\3"),
    "no lengths": says(bytes=[]),
    "more lengths": says(bytes=[100, 100, 100]),
    "an empty object": says(bytes=[100, 0]),
    "a negative length": says(bytes=[100, -1]),
    "a huge length": says(bytes=[100, 1 << 40]),
    "a length that is text": says(bytes=[100, "x"]),
    "text": says(states="text"),
    "no states": lambda answer: answer._replace(body={}),
}


@pytest.mark.parametrize("lie", PROBE_LIES.values(), ids=PROBE_LIES.keys())
def test_a_lying_probe_is_an_error_and_ends_the_connection(remote: StubRemote, client: Client, lie: Change) -> None:
    assert client.put([Item("a", VALUE), Item("b", b"b" * 100)]) == [Put.STORED] * 2
    before = remote.numbers
    remote.answer = lies(Op.PROBE, lie)
    fails("BadReply", lambda: client.get(["a", "b"]))
    serves_again(remote, client, before)


@pytest.mark.parametrize("states", [b"\1", b"\1\1\1", b"\1\3", b""])
def test_a_lying_reply_to_a_lookup_is_an_error(remote: StubRemote, client: Client, states: bytes) -> None:
    before = remote.numbers
    remote.answer = lies(Op.PROBE, says(states=states))
    fails("BadReply", lambda: client.contains(["a", "b"]))
    serves_again(remote, client, before)


GRANT_LIES: dict[str, Change] = {
    "fewer results": says(results=b"\1"),
    "more results": says(results=b"\1\1\1"),
    "an unknown result": says(results=b"\1\x63"),
    "no result": says(results=b"\0\1"),
    "text": says(results="text"),
    "a list": says(results=[1, 1]),
}


@pytest.mark.parametrize("lie", GRANT_LIES.values(), ids=GRANT_LIES.keys())
def test_a_lying_grant_is_an_error_and_nothing_is_sent(remote: StubRemote, client: Client, lie: Change) -> None:
    before = remote.numbers
    remote.answer = lies(Op.GRANT, lie)
    fails("BadReply", lambda: client.put([Item("a", VALUE), Item("b", b"b" * 100)]))
    assert not remote.frames(Op.WRITE)
    serves_again(remote, client, before)


WRITE_LIES: dict[str, Change] = {
    "fewer results": says(written=b""),
    "more results": says(written=b"\1\1\1\1"),
    "complete too early": says(written=b"\2"),
    "an unknown result": says(written=b"\7"),
    "data": lambda answer: answer._replace(data=b"data"),
    "text": says(written="text"),
}


@pytest.mark.parametrize("lie", WRITE_LIES.values(), ids=WRITE_LIES.keys())
def test_a_lying_reply_to_write_is_an_error(remote: StubRemote, client: Client, lie: Change) -> None:
    before = remote.numbers
    remote.answer = lies(Op.WRITE, lie)
    fails("BadReply", lambda: client.put([Item("a", VALUE + VALUE)]))
    serves_again(remote, client, before)


def test_an_object_that_is_never_complete_is_not_stored(remote: StubRemote, client: Client) -> None:
    before = remote.numbers
    remote.answer = lies(Op.WRITE, says(written=b"\1"))
    fails("BadReply", lambda: client.put([Item("a", b"value")]))
    serves_again(remote, client, before)


READ_LIES: dict[str, Change] = {
    "fewer results": says(found=b""),
    "more results": says(found=b"\1\1\1"),
    "an unknown result": says(found=b"\2"),
    "less data": lambda answer: answer._replace(data=(answer.data or b"")[:-1]),
    "more data": lambda answer: answer._replace(data=(answer.data or b"") + b"x"),
    "no data": lambda answer: answer._replace(data=b""),
    "no frame with data": lambda answer: answer._replace(data=None),
    "data of a part that was not found": says(found=b"\0"),
    "text": says(found="text"),
}


@pytest.mark.parametrize("lie", READ_LIES.values(), ids=READ_LIES.keys())
def test_a_lying_reply_to_read_is_a_miss_and_ends_the_connection(
    remote: StubRemote, client: Client, lie: Change
) -> None:
    client.put([Item("a", VALUE)])
    lease = client.lease("a")
    before = remote.numbers
    remote.answer = lies(Op.READ, lie)
    assert lease[0].read() is None
    fails("BadReply", lambda: client.lease("a"))
    serves_again(remote, client, before)
    lease.close()


OBJECTS_LIES: dict[str, Change] = {
    "more objects": says(count=3),
    "a negative count": says(count=-1),
    "fewer states": says(states=b"\1"),
    "fewer lengths": says(bytes=[1]),
    "text": says(count="x"),
}


@pytest.mark.parametrize("lie", OBJECTS_LIES.values(), ids=OBJECTS_LIES.keys())
def test_a_lying_reply_to_objects_is_an_error(remote: StubRemote, client: Client, lie: Change) -> None:
    before = remote.numbers
    remote.answer = lies(Op.OBJECTS, lie)
    fails("BadReply", lambda: client.stat(["a", "b"]))
    serves_again(remote, client, before)


FRAME_LIES: dict[str, tuple[str, Change]] = {
    "another tag": ("BadReply", lambda answer: answer._replace(tag=999)),
    "another op": ("BadReply", lambda answer: answer._replace(op=Op.GRANT)),
    "no reply": ("BadReply", lambda answer: answer._replace(flags=0)),
    "a partial reply": ("BadReply", lambda answer: answer._replace(flags=REPLY | 4)),
    "descriptors": ("BadReply", lambda answer: answer._replace(flags=REPLY | 8)),
    "data behind a reply that has none": ("BadReply", lambda answer: answer._replace(data=b"data")),
    "an error with data": ("BadReply", lambda answer: refusal("X")._replace(data=b"data")),
    "an error without a code": ("BadReply", lambda answer: Answer({}, flags=REPLY | ERROR)),
    "a long frame": ("BadReply", lambda answer: answer._replace(raw=header(length=(8 << 20) + 1))),
    "a long map": ("BadReply", lambda answer: answer._replace(raw=header(length=8 << 20))),
    "data without a map": (
        "BadReply",
        lambda answer: answer._replace(raw=header(flags=REPLY | DATA, length=3) + b"xxx"),
    ),
    "a map beyond the frame": (
        "BadReply",
        lambda answer: answer._replace(raw=header(flags=REPLY | DATA, length=8) + b"\xff\xff\0\0" + bytes(4)),
    ),
    "no msgpack": ("BadReply", lambda answer: answer._replace(raw=header(length=1) + b"\xc1")),
    "a deep map": ("BadReply", lambda answer: answer._replace(raw=header(length=100_000) + b"\x91" * 100_000)),
    "another version": ("WrongVersion", lambda answer: answer._replace(raw=header(version=3, length=0))),
}


def header(*, length: int, flags: int = REPLY, version: int = 1) -> bytes:
    """The header of a reply to the third request of a connection, a PROBE."""
    raw = bytearray(wire.encode_header(Op.PROBE, flags, 3, length))
    raw[4] = version
    return bytes(raw)


@pytest.mark.parametrize(("reason", "lie"), FRAME_LIES.values(), ids=FRAME_LIES.keys())
def test_a_wrong_frame_is_an_error_and_ends_the_connection(
    remote: StubRemote, client: Client, reason: str, lie: Change
) -> None:
    assert client.exists("a") == 0
    before = remote.numbers
    remote.answer = lies(Op.PROBE, lie)
    fails(reason, lambda: client.exists("a"))
    serves_again(remote, client, before)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (says(features=[]), "ObjectsNotServed"),
        (says(arena_bytes=-1), "BadReply"),
        (says(arena_bytes="x"), "BadReply"),
        (lambda answer: answer._replace(raw=header(version=3, length=0)), "WrongVersion"),
        (lambda answer: refusal("NoArena", retryable=True), "NoArena"),
        (lambda answer: answer._replace(cut=0), "NotConnected"),
    ],
)
def test_a_wrong_reply_to_hello_is_named_and_the_client_connects_later(
    remote: StubRemote, certificates: Path, lie: Change, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pool, "_BACKOFF_REFUSED_S", 0.2)
    remote.answer = lies(Op.HELLO, lie)
    with Client(remote.target, **options(certificates)) as client:
        assert fails(reason, lambda: client.exists("a")) < AT_ONCE_S
        assert not client.connected
        remote.answer = lambda request, answer: answer
        assert client.wait_connected(LONG_S)
        assert client.exists("a") == 0
