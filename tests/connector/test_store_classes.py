"""The classes for Mooncake and InfiniStore over stand-ins: ranges, errors, lost connections."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcachepool.store_api import Full
from kvcachepool.store_infinistore import InfiniStore
from kvcachepool.store_mooncake import MooncakeError, MooncakeStore

VALUE = bytes(range(256)) * 4


@pytest.fixture
def infinistore(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, with no values."""
    path = Path(__file__).parent / "stand_ins/infinistore.py"
    spec = importlib.util.spec_from_file_location("infinistore", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "infinistore", module)
    return module


@pytest.fixture
def segments(infinistore: Any) -> Iterator[InfiniStore]:
    """A store with small segments."""
    store = InfiniStore("127.0.0.1", connections=2, segment_bytes=100)
    store.open()
    yield store
    store.close()


def test_a_range_reads_the_segments_that_have_it(segments: InfiniStore) -> None:
    segments.put("k", memoryview(VALUE))
    stat = segments.stat("k")
    assert stat is not None
    assert stat.size == len(VALUE)
    for offset, length in ((0, 1), (0, 1024), (99, 2), (100, 100), (250, 700), (1023, 1)):
        assert segments.get("k", offset, length) == VALUE[offset : offset + length], (offset, length)


def test_an_object_is_absent_once_a_read_misses_a_segment(segments: InfiniStore, infinistore: Any) -> None:
    segments.put("k", memoryview(VALUE))
    del infinistore._values["k#3"]
    assert segments.get("k", 0, 100) == VALUE[:100]
    assert segments.get("k", 250, 100) is None
    # Otherwise each lookup finds the object, and no read gets it.
    assert segments.stat("k") is None
    segments.put("k", memoryview(VALUE))
    assert segments.get("k", 0, 1024) == VALUE


def test_an_object_is_absent_until_its_last_segment_is_written(
    segments: InfiniStore, infinistore: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments.put("k", memoryview(b"old"))
    write = infinistore.InfinityConnection.tcp_write_cache

    def fails(self: Any, key: str, ptr: int, size: int, **kwargs: Any) -> None:
        if key == "k#2":
            raise Exception("Failed to write to infinistore, ret = -1")
        write(self, key, ptr, size)

    monkeypatch.setattr(infinistore.InfinityConnection, "tcp_write_cache", fails)
    with pytest.raises(Exception, match="Failed to write"):
        segments.put("k", memoryview(VALUE))
    assert segments.stat("k") is None


def test_a_removal_removes_every_value(segments: InfiniStore, infinistore: Any) -> None:
    segments.put("a", memoryview(VALUE))
    segments.put("b", memoryview(b"x"))
    segments.delete(["a", "absent", "b"])
    assert infinistore._values == {}


def test_a_connection_that_failed_is_replaced(segments: InfiniStore, infinistore: Any) -> None:
    segments.put("k", memoryview(VALUE))
    for _ in range(2):
        connection = segments._connections.get()
        if connection is not None:
            connection.close()
        segments._connections.put(connection)
    for _ in range(2):
        # The first call finds the closed connection.
        try:
            segments.stat("k")
        except AssertionError:
            continue
    assert segments.get("k", 0, 1024) == VALUE
    assert segments._connections.qsize() == 2


def test_a_server_that_is_absent_fails_the_start(infinistore: Any) -> None:
    with pytest.raises(Exception, match="Failed to initialize"):
        InfiniStore("127.0.0.1", 1).open()


class FakeMooncake:
    """One client with results of its own."""

    setup_code = 0

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.code: int | None = None

    def setup(self, *arguments: Any) -> int:
        assert len(arguments) == 7
        return self.setup_code

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def get_size(self, key: str) -> int:
        return self.code or len(self.values.get(key, b"")) or -704

    def get_into_ranges(self, buffers: Any, keys: Any, to: Any, at: Any, sizes: Any) -> list[list[list[int]]]:
        value = self.values.get(keys[0][0])
        if self.code or value is None:
            return [[[self.code or -704]]]
        piece = value[at[0][0][0] :][: sizes[0][0][0]]
        ctypes.memmove(buffers[0] + to[0][0][0], piece, len(piece))
        return [[[len(piece)]]]

    def upsert(self, key: str, value: Any) -> int:
        if not self.code:
            self.values[key] = bytes(value)
        return self.code or 0

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        return [self.code or (0 if self.values.pop(key, None) else -704) for key in keys]

    def close(self) -> int:
        return 0


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> MooncakeStore:
    """A store with small buffers."""
    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = FakeMooncake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(FakeMooncake, "setup_code", 0)
    return MooncakeStore("127.0.0.1:50051", "127.0.0.1", range_bytes=100, ranges=2)


def test_mooncake_reads_long_ranges_through_short_buffers(mooncake: MooncakeStore) -> None:
    mooncake.open()
    mooncake.put("k", memoryview(VALUE))
    for offset, length in ((0, 1), (0, 1024), (50, 100), (7, 950)):
        assert mooncake.get("k", offset, length) == VALUE[offset : offset + length]
    assert mooncake.get("absent", 0, 10) is None
    assert mooncake.stat("absent") is None
    mooncake.delete(["k", "absent"])
    assert mooncake.stat("k") is None


def test_errors_of_mooncake_are_named_and_never_a_miss(mooncake: MooncakeStore) -> None:
    mooncake.open()
    mooncake.put("k", memoryview(VALUE))
    mooncake._client.code = -900
    for operation in (
        lambda: mooncake.stat("k"),
        lambda: mooncake.get("k", 0, 10),
        lambda: mooncake.put("k", memoryview(b"x")),
        lambda: mooncake.delete(["k"]),
    ):
        with pytest.raises(MooncakeError, match="error -900"):
            operation()
    mooncake._client.code = -200
    with pytest.raises(Full):
        mooncake.put("k", memoryview(b"x"))
    assert mooncake._buffers.qsize() == 2


def test_an_object_that_mooncake_is_still_writing_is_absent(mooncake: MooncakeStore) -> None:
    mooncake.open()
    mooncake.put("k", memoryview(VALUE))
    mooncake._client.code = -703
    assert mooncake.stat("k") is None
    assert mooncake.get("k", 0, 10) is None
    mooncake.delete(["k"])
    with pytest.raises(MooncakeError, match="error -703"):
        mooncake.put("k", memoryview(b"x"))
    assert mooncake._buffers.qsize() == 2


def test_a_range_that_ends_early_is_an_error(mooncake: MooncakeStore) -> None:
    mooncake.open()
    mooncake.put("k", memoryview(VALUE))
    with pytest.raises(MooncakeError):
        mooncake.get("k", 1000, 100)


def test_mooncake_without_a_master_does_not_open(mooncake: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMooncake, "setup_code", -1)
    with pytest.raises(MooncakeError, match="setup failed"):
        mooncake.open()
