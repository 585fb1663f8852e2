"""A window in device memory with a fake driver, whose device memory is memfds: which calls are made, and how."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import capture_mode, elsewhere
from stub_sidecar import memfd
from test_copy import group, layer_outermost

from kvcachepool import copy_window
from kvcachepool.copy_window import _memory
from kvcachepool.flag_page import PATTERN_BYTES
from kvcachepool.layout import Layout
from kvcachepool.messages import WindowReply
from kvcachepool.pieces import Piece
from kvcachepool.shared import SharedMemoryError
from kvcachepool.window import WindowKeeper

WINDOW_BYTES = 4 << 20
BLOCKS = 12


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_cuda.built(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def layout(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """KV blocks at addresses that a fake driver can access."""
    fake_cuda.install(driver, monkeypatch)
    planes = layer_outermost(4096)
    storage = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 3 * 4096 * BLOCKS, dtype=np.uint8))
    return Layout((storage,), BLOCKS, (group(planes),), "cuda", {})


def test_pieces_of_two_kv_groups_are_one_batch(layout: Layout, driver: ctypes.CDLL) -> None:
    fd = memfd("device", WINDOW_BYTES)
    two = layout._replace(groups=(group(layer_outermost(32768, layers=1)), group(layer_outermost(49152, layers=1))))
    memory = _memory(two, WindowReply(kind="posix_fd", bytes=WINDOW_BYTES), fd)
    raw = layout.storages[0].numpy()
    wanted = [raw[2 * 32768 :][:32768].tobytes(), raw[49152:][:49152].tobytes()]
    driver.fake_batches()
    memory.copy("store", [Piece(0, [2], [0]), Piece(1, [1], [1 << 20])], None)
    assert [os.pread(fd, len(one), at) for one, at in zip(wanted, (0, 1 << 20), strict=True)] == wanted
    assert driver.fake_batches() == 1
    layout.storages[0].zero_()
    memory.copy("load", [Piece(0, [0], [0]), Piece(1, [1], [1 << 20])], None)
    assert [raw[:32768].tobytes(), raw[49152:][:49152].tobytes()] == wanted
    assert driver.fake_batches() == 1
    memory.copy("load", [Piece(0, [], [])], None)
    assert driver.fake_batches() == 0
    assert memory.close()
    os.close(fd)


@pytest.fixture(scope="module")
def handle(driver: ctypes.CDLL) -> Iterator[bytes]:
    """The handle of another process's memory."""
    with fake_cuda.exported(driver, WINDOW_BYTES) as exporter:
        yield exporter.handle


def test_memory_imported_by_descriptor_is_the_sidecars(layout: Layout) -> None:
    fd = memfd("device", WINDOW_BYTES)
    os.pwrite(fd, b"pattern!", 0)
    memory = _memory(layout, WindowReply(kind="posix_fd", bytes=WINDOW_BYTES), fd)
    assert memory.read(8) == b"pattern!"
    memory.write(b"seen")
    assert os.pread(fd, 8, 0) == b"seenern!"
    size = layout.groups[0].block_bytes
    before = layout.storages[0].clone()
    memory._stream.calls.clear()  # type: ignore[attr-defined]
    memory.copy("store", [Piece(0, [7, 2], [size, 1 << 20])], "event")
    assert memory._stream.calls == ["wait event", "synchronize"]  # type: ignore[attr-defined]
    rows = before.numpy().reshape(3, BLOCKS, 4096)
    assert os.pread(fd, size, size) == rows[:, 7].tobytes()
    assert os.pread(fd, size, 1 << 20) == rows[:, 2].tobytes()
    layout.storages[0].zero_()
    memory.copy("load", [Piece(0, [9], [1 << 20])], None)
    loaded = layout.storages[0].numpy().reshape(3, BLOCKS, 4096)
    assert (loaded[:, 9] == rows[:, 2]).all()
    assert loaded.sum() == rows[:, 2].astype(np.int64).sum(), "nothing else was written"
    assert memory.close()
    assert memory.close()
    os.close(fd)


def test_memory_imported_by_handle_is_the_sidecars_or_an_error(
    layout: Layout, handle: bytes, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=handle)
    memory, other = _memory(layout, reply, None), _memory(layout, reply, None)
    assert memory.read(8) == b"pattern!"
    memory.write(b"seen")
    assert other.read(8) == b"seenern!"
    memory.write(b"patt")
    assert other.close()
    monkeypatch.setenv("FAKE_STAYS", "1")
    assert not memory.close(), "the driver keeps it mapped"
    monkeypatch.delenv("FAKE_STAYS")
    with pytest.raises(SharedMemoryError, match="cuIpcOpenMemHandle_v2 failed with 1"):
        _memory(layout, WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=bytes(64)), None)
    with pytest.raises(SharedMemoryError, match="without the descriptor"):
        _memory(layout, WindowReply(kind="posix_fd", bytes=WINDOW_BYTES), None)
    with pytest.raises(SharedMemoryError, match="cannot use a window"):
        _memory(layout, WindowReply(kind="host", bytes=WINDOW_BYTES), 0)


def test_a_handle_of_a_dead_sidecar_is_named_and_the_worker_copies_by_itself(
    layout: Layout, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copy_window, "FlagPage", lambda *arguments: SimpleNamespace(close=lambda: None))
    stage, page = 2 << 20, memfd("page", 1 << 16)
    client: Any = SimpleNamespace(hello=SimpleNamespace(boot=1), request=lambda *arguments: 1)
    streams = driver.fake_streams()
    with fake_cuda.exported(driver, WINDOW_BYTES) as exporter:
        body = WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=exporter.handle, stages=2, stage_bytes=stage)
        body.fds, body.pattern = ["page", "bell"], b"pattern!" + bytes(PATTERN_BYTES - 8)
        for alive in (True, False):
            counted: list[str] = []
            keeper = WindowKeeper(layout, "", counted.append)
            near, bell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds = [os.dup(page), bell.detach()]
            keeper._on_window(client, SimpleNamespace(error=None, fds=fds, read=lambda kind: body))  # type: ignore[arg-type]
            assert (keeper._pending is not None) == alive
            if alive:
                assert counted == []
                keeper.retire()
                for retired in keeper.take_retired():
                    retired.close()
                exporter.kill()
            assert near.recv(1) == b"\x02", "it is not mapped"
            near.close()
    assert (keeper.reason, counted, keeper.live) == ("NotMapped", ["window_unavailable/NotMapped"], None)
    line = "the sidecar's window is not available, so this worker copies without it: "
    line += "NotMapped: cuIpcOpenMemHandle_v2 failed with 205"
    assert [record.message for record in caplog.records] == [line]
    assert driver.fake_streams() == streams
    os.close(page)


@pytest.mark.parametrize(("kind", "unmaps"), [("posix_fd", "cuMemUnmap"), ("ipc_handle", "cuIpcCloseMemHandle")])
def test_memory_of_another_device_is_refused_and_unmapped(
    layout: Layout, handle: bytes, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: str, unmaps: str
) -> None:
    calls = fake_cuda.install(driver, monkeypatch)
    monkeypatch.setenv("FAKE_FOREIGN", "2")
    fd = memfd("device", WINDOW_BYTES)
    with pytest.raises(SharedMemoryError, match=r"^the window is on device 2, the KV blocks are on device 0$"):
        _memory(layout, WindowReply(kind=kind, bytes=WINDOW_BYTES, handle=handle), fd)
    os.close(fd)
    assert calls.count(unmaps) == 1


def test_a_window_copies_on_its_own_stream_and_releases_it(layout: Layout, handle: bytes, driver: ctypes.CDLL) -> None:
    assert not hasattr(torch.cuda, "Stream"), "torch's streams are everybody's"
    before = driver.fake_streams()
    memory = _memory(layout, WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=handle), None)
    assert driver.fake_streams() == before + 1
    assert memory.close()
    assert memory.close()
    for kind in ("ipc_handle", "posix_fd"):
        with pytest.raises(SharedMemoryError):
            _memory(layout, WindowReply(kind=kind, bytes=WINDOW_BYTES, handle=bytes(64)), None)
    assert driver.fake_streams() == before


def test_memory_is_unmapped_in_the_devices_context_whatever_thread_does_it(
    layout: Layout, handle: bytes, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _memory(layout, WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=handle), None)
    current: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert memory.close()
    assert current == [layout.storages[0].device]

    def lost(device: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    memory = _memory(layout, WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=handle), None)
    monkeypatch.setattr(torch.cuda, "set_device", lost)
    assert not memory.close(), "it may still be mapped"


def test_the_devices_context_becomes_current_on_threads_without_one(
    layout: Layout, handle: bytes, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FAKE_CURRENT")
    log = tmp_path / "contexts"
    monkeypatch.setenv("FAKE_CONTEXTS", str(log))
    reply = WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=handle)
    memory = elsewhere(lambda: _memory(layout, reply, None))
    assert log.read_text() == "+-", "once, and the count of those who use it is as before"

    def copied() -> bytes:
        memory.begin_thread()
        memory.copy("store", [Piece(0, [7], [0])], None)
        return memory.read(4096)

    assert elsewhere(copied) == layout.storages[0][7 * 4096 :][:4096].numpy().tobytes()
    assert elsewhere(memory.close)
    assert log.read_text() == "+-+-+-"
    monkeypatch.setenv("FAKE_NO_CONTEXT", "1")
    with pytest.raises(RuntimeError, match="no CUDA context: the driver failed with 999"):
        elsewhere(lambda: _memory(layout, reply, None))


@pytest.mark.parametrize("kind", ["posix_fd", "ipc_handle"])
def test_no_use_of_a_window_ends_a_capture(
    layout: Layout, handle: bytes, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("FAKE_CAPTURE", "1")
    before = driver.fake_captures_ended()
    fd = memfd("device", WINDOW_BYTES)
    memory = _memory(layout, WindowReply(kind=kind, bytes=WINDOW_BYTES, handle=handle), fd)
    memory.write(b"seen")
    assert memory.read(4) == b"seen"
    memory.begin_thread()
    memory.copy("store", [Piece(0, [7], [0])], None)
    memory.copy("load", [Piece(0, [7], [0])], None)
    memory.close()
    with pytest.raises(SharedMemoryError, match="cuMemAddressReserve failed"):
        _memory(layout, WindowReply(kind="posix_fd", bytes=0), fd)
    os.close(fd)
    assert driver.fake_captures_ended() == before
    assert capture_mode(driver) == 0, "a thread that is vLLM's counts as before"
    driver.cuMemHostUnregister(ctypes.c_void_p(1))
    assert driver.fake_captures_ended() == before + 1, "the fake driver counts captures that a call ends"
