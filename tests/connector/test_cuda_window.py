"""A window in device memory over a made-up driver, whose device memory is memfds: what is called, and how."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stub_sidecar import memfd
from test_copy import group, layer_outermost

import kvcachepool.cuda_window as cuda_window
from kvcachepool.copy_window import _memory
from kvcachepool.layout import Layout
from kvcachepool.messages import WindowReply
from kvcachepool.pieces import Piece
from kvcachepool.shared import SharedMemoryError

SOURCE = Path(__file__).parents[2] / "sidecar" / "tests" / "served" / "fake_driver.c"
WINDOW_BYTES = 4 << 20
BLOCKS = 12


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: cc")
    built = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(SOURCE)], check=True)
    return built


class Stream:
    """As much of torch's streams as is used, and what was asked of it."""

    def __init__(self, **options: Any) -> None:
        self.cuda_stream = 77
        self.asked: list[str] = []

    def wait_event(self, event: object) -> None:
        self.asked.append(f"wait {event}")

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


@pytest.fixture
def layout(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Layout]:
    """KV blocks whose addresses a made-up driver can reach."""
    os.environ["FAKE_CURRENT"] = "1"
    driver = ctypes.CDLL(str(library))
    monkeypatch.setattr(cuda_window, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_window, "_device_number", lambda device: 0)

    def submit(to: Any, source: Any, sizes: Any, stable: bool, stream: int) -> None:
        assert not stable
        assert stream == 77
        for target, origin, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, origin, size)

    monkeypatch.setattr(cuda_window, "batch_submit", lambda: submit)
    fake = SimpleNamespace(
        set_device=lambda device: None,
        current_stream=lambda device: Stream(),
        Stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(cuda_window.torch, "cuda", fake)
    planes = layer_outermost(4096)
    storage = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 3 * 4096 * BLOCKS, dtype=np.uint8))
    yield Layout((storage,), BLOCKS, (group(planes),), "cuda", {})
    del os.environ["FAKE_CURRENT"]


def test_memory_that_came_by_descriptor_is_that_of_the_sidecar(layout: Layout) -> None:
    fd = memfd("device", WINDOW_BYTES)
    os.pwrite(fd, b"pattern!", 0)
    memory = _memory(layout, WindowReply(kind="posix_fd", bytes=WINDOW_BYTES), fd)
    assert memory.read(8) == b"pattern!"
    memory.write(b"seen")
    assert os.pread(fd, 8, 0) == b"seenern!"
    size = layout.groups[0].block_bytes
    before = layout.storages[0].clone()
    memory.copy("store", [Piece(0, [7, 2], [size, 1 << 20])], "event")
    assert memory._stream.asked == ["wait event", "synchronize"]  # type: ignore[attr-defined]
    rows = before.numpy().reshape(3, BLOCKS, 4096)
    assert os.pread(fd, size, size) == rows[:, 7].tobytes()
    assert os.pread(fd, size, 1 << 20) == rows[:, 2].tobytes()
    layout.storages[0].zero_()
    memory.copy("load", [Piece(0, [9], [1 << 20])], None)
    loaded = layout.storages[0].numpy().reshape(3, BLOCKS, 4096)
    assert (loaded[:, 9] == rows[:, 2]).all()
    assert loaded.sum() == rows[:, 2].astype(np.int64).sum(), "nothing else was written"
    memory.close()
    memory.close()
    os.close(fd)


def test_memory_that_came_by_handle_is_opened_and_one_that_cannot_be_is_an_error(layout: Layout) -> None:
    reply = WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=bytes([7] * 64))
    memory = _memory(layout, reply, None)
    assert memory.read(4) == b"\0" * 4
    memory.close()
    with pytest.raises(SharedMemoryError, match="cuIpcOpenMemHandle_v2 failed with 1"):
        _memory(layout, WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=bytes(64)), None)
    with pytest.raises(SharedMemoryError, match="without its descriptor"):
        _memory(layout, WindowReply(kind="posix_fd", bytes=WINDOW_BYTES), None)
    with pytest.raises(SharedMemoryError, match="of no use"):
        _memory(layout, WindowReply(kind="host", bytes=WINDOW_BYTES), 0)
