"""Kernels that copy small pieces of KV blocks through a window, run on the host with a fake driver."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from stub_sidecar import memfd
from test_copy import group

from kvcachepool import cuda_window, page_kernels
from kvcachepool.copy_window import _memory
from kvcachepool.cuda_window import CudaMemory
from kvcachepool.forms import Plane
from kvcachepool.layout import Layout
from kvcachepool.messages import WindowReply
from kvcachepool.page_kernels import Rows, small_groups
from kvcachepool.pieces import Piece
from kvcachepool.shared import StillMappedError
from kvcachepool.window import WindowKeeper

WINDOW_BYTES = 1 << 20
BLOCKS = 12
#: Two layers, with keys and values of a block adjacent: one row each.
SMALL = [Plane(0, layer * 8192 * BLOCKS + half * 4096, 8192, 4096) for layer in range(2) for half in range(2)]
#: No two of these are adjacent, and they are only byte-aligned.
ODD = [Plane(0, 3, 1000, 333), Plane(0, 1000 * BLOCKS + 7, 700, 699), Plane(0, 500, 1000, 5)]
LARGE = [Plane(0, layer * 32768 * BLOCKS, 32768, 32768) for layer in range(2)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_cuda.built(tmp_path_factory.mktemp("driver"))


def held(driver: ctypes.CDLL) -> list[int]:
    """Modules, allocations and streams that were not released, and those that were released under a running kernel."""
    return [driver.fake_modules(), driver.fake_allocations(), driver.fake_streams(), driver.fake_under()]


@pytest.fixture(autouse=True)
def calls(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The recorded calls. At the end everything is released, and nothing under a running kernel."""
    called = fake_cuda.install(driver, monkeypatch)
    driver.fake_launches()
    before = held(driver)
    yield called
    assert held(driver) == before


def layout_of(*groups: list[Plane]) -> Layout:
    size = max(plane.offset + BLOCKS * plane.block_stride for planes in groups for plane in planes)
    storage = torch.from_numpy(np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8))
    return Layout((storage,), BLOCKS, tuple(group(planes) for planes in groups), "cuda", {})


def content(layout: Layout, number: int, block: int) -> bytes:
    """Bytes of a block in a section."""
    raw = layout.storages[0].numpy()
    places = ((p.offset + block * p.block_stride, p.nbytes) for p in layout.groups[number].planes)
    return b"".join(raw[start : start + nbytes].tobytes() for start, nbytes in places)


class Window:
    """A window's memory and its bytes as the sidecar sees them."""

    def __init__(self, layout: Layout) -> None:
        self.fd = memfd("device", WINDOW_BYTES)
        made = _memory(layout, WindowReply(kind="posix_fd", bytes=WINDOW_BYTES), self.fd)
        assert isinstance(made, CudaMemory)
        self.memory = made

    def bytes(self, at: int, nbytes: int) -> bytes:
        return os.pread(self.fd, nbytes, at)

    def close(self) -> None:
        assert self.memory.close()
        os.close(self.fd)


@pytest.fixture
def opened() -> Iterator[Any]:
    windows: list[Window] = []

    def opened(layout: Layout) -> Window:
        windows.append(Window(layout))
        return windows[-1]

    yield opened
    for window in windows:
        window.close()


def there_and_back(layout: Layout, window: Window, number: int = 0) -> None:
    """Copies blocks 7, 2 and 11, two of them adjacent, into the window, and back into 1, 3 and 4."""
    size = layout.groups[number].block_bytes
    offsets = [4096, 4096 + size, 300_000]
    wanted = [content(layout, number, block) for block in (7, 2, 11)]
    window.memory.copy("store", [Piece(number, [7, 2, 11], offsets)], "event")
    assert [window.bytes(at, size) for at in offsets] == wanted
    assert window.bytes(0, 4096) == bytes(4096), "nothing else was written"
    others = [content(layout, number, block) for block in range(BLOCKS)]
    window.memory.copy("load", [Piece(number, [1, 3, 4], offsets)], None)
    others[1], others[3], others[4] = wanted
    assert [content(layout, number, block) for block in range(BLOCKS)] == others


@pytest.mark.parametrize("planes", [SMALL, ODD], ids=["small", "odd"])
def test_small_pieces_are_copied_by_one_launch_per_run_of_blocks(
    driver: ctypes.CDLL, opened: Any, planes: list[Plane]
) -> None:
    layout = layout_of(planes)
    window = opened(layout)
    assert driver.fake_launches() == 2, "each kernel once, without blocks: first launches are slow"
    there_and_back(layout, window)
    assert driver.fake_launches() == 2 * 2
    assert window.memory.no_kernels == ""


@pytest.mark.parametrize("kind", ["store", "load"])
def test_kernels_wait_for_the_models_work_and_copies_wait_for_kernels(calls: list[str], opened: Any, kind: str) -> None:
    window = opened(layout_of(SMALL))
    calls.clear()
    window.memory.copy(kind, [Piece(0, [7, 2], [0, 65536])], "event")
    exchanged = [call for call in calls if "CaptureMode" not in call]
    assert exchanged == [
        "cuMemcpyHtoDAsync_v2",
        "wait event",
        "cuLaunchKernel",
        "cuLaunchKernel",
        "synchronize",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
    ]


def test_large_pieces_are_copied_without_kernels(driver: ctypes.CDLL, opened: Any) -> None:
    layout = layout_of(LARGE)
    there_and_back(layout, opened(layout))
    assert driver.fake_launches() == 0


def test_a_job_of_groups_of_either_kind_has_both(driver: ctypes.CDLL, opened: Any) -> None:
    layout = layout_of(SMALL, LARGE)
    window = opened(layout)
    driver.fake_launches()
    pieces = [Piece(0, [5], [0]), Piece(1, [6], [65536]), Piece(0, [8], [500_000])]
    window.memory.copy("store", pieces, None)
    for piece in pieces:
        wanted = content(layout, piece.group, piece.blocks[0])
        assert window.bytes(piece.offsets[0], len(wanted)) == wanted
    assert driver.fake_launches() == 2


def test_adjacent_planes_are_one_row() -> None:
    rows = Rows.of(group(SMALL), [1 << 20])
    assert rows.table.tolist() == [
        [1 << 20, 8192, 8192, 0],
        [(1 << 20) + 8192 * BLOCKS, 8192, 8192, 8192],
    ]
    assert (rows.block_bytes, rows.longest, rows.small) == (16384, 8192, True)
    apart = [Plane(0, 0, 64, 32), Plane(0, 32, 128, 32)]
    assert len(Rows.of(group(apart), [0]).table) == 2, "side by side in block 0 alone"
    assert small_groups(layout_of(LARGE, SMALL), [0]).keys() == {1}


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FAKE_PTX", "7.8", "PtxTooNew"),
        ("FAKE_CAPABILITY", "7.5", "DeviceTooOld"),
        ("FAKE_FULL", "1", "OutOfMemory"),
        ("FAKE_LAUNCHES", "1", "DriverFailed"),
    ],
)
def test_copy_engines_copy_everything_if_the_driver_refuses_kernels(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, opened: Any, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    layout = layout_of(SMALL)
    window = opened(layout)
    assert window.memory.no_kernels == reason
    driver.fake_launches()
    there_and_back(layout, window)
    assert driver.fake_launches() == 0


def test_the_minimum_device_is_that_of_the_ptx() -> None:
    ptx = resources.files("kvcachepool").joinpath("pages.ptx").read_text()
    assert "\n.target sm_{}{}\n".format(*page_kernels._CAPABILITY) in ptx


def test_a_window_without_kernels_is_counted_by_name() -> None:
    counted: list[str] = []
    for reason in ("", "PtxTooNew"):
        keeper = WindowKeeper(layout_of(SMALL), "", counted.append)
        pending: Any = SimpleNamespace(memory=SimpleNamespace(where="device memory", no_kernels=reason))
        keeper._pending = pending
        answer: Any = SimpleNamespace(error=None, read=lambda kind: WindowReply(working=True))
        keeper._on_confirmed(pending, answer)
        assert keeper.live is pending
    assert counted == ["window_without_kernels/PtxTooNew"]


def test_kernels_that_fail_later_are_counted_once(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    counted: list[str] = []
    layout = layout_of(SMALL)
    keeper = WindowKeeper(layout, "", counted.append)
    window = opened(layout)
    keeper._pending = pending = SimpleNamespace(memory=window.memory)  # type: ignore[assignment]
    answer: Any = SimpleNamespace(error=None, read=lambda kind: WindowReply(working=True))
    keeper._on_confirmed(pending, answer)  # type: ignore[arg-type]
    keeper.take_retired()
    assert counted == []
    driver.fake_launches()
    monkeypatch.setenv("FAKE_LAUNCHES", "0")
    there_and_back(layout, window)
    keeper.take_retired()
    keeper.take_retired()
    assert counted == ["window_without_kernels/DriverFailed"]


def test_a_driver_without_the_calls_is_named(monkeypatch: pytest.MonkeyPatch, opened: Any) -> None:
    monkeypatch.setattr(page_kernels, "cuda_driver", type("Nothing", (), {"library": staticmethod(lambda: None)}))
    layout = layout_of(SMALL)
    window = opened(layout)
    assert window.memory.no_kernels == "DriverFailed"
    there_and_back(layout, window)


@pytest.mark.parametrize("launches", [0, 1])
def test_after_a_failed_launch_copy_engines_copy_everything(
    driver: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    opened: Any,
    caplog: pytest.LogCaptureFixture,
    launches: int,
) -> None:
    layout = layout_of(SMALL)
    window = opened(layout)
    driver.fake_launches()
    monkeypatch.setenv("FAKE_LAUNCHES", str(launches))
    there_and_back(layout, window)
    monkeypatch.delenv("FAKE_LAUNCHES")
    assert driver.fake_launches() == launches
    there_and_back(layout, window)
    assert driver.fake_launches() == 0
    assert window.memory.no_kernels == "DriverFailed"
    assert [record.message for record in caplog.records].count(
        "copy kernels are not available, so copy engines copy small pieces of KV blocks: "
        "DriverFailed: cuLaunchKernel failed with 701"
    ) == 1


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_block_outside_the_cache_is_skipped_and_the_job_fails(opened: Any, kind: str) -> None:
    layout = layout_of(SMALL)
    window = opened(layout)
    before = layout.storages[0].clone()
    with pytest.raises(RuntimeError, match="block ids that are not in the KV cache"):
        window.memory.copy(kind, [Piece(0, [BLOCKS], [0])], None)
    assert window.bytes(0, WINDOW_BYTES) == bytes(WINDOW_BYTES)
    assert torch.equal(layout.storages[0], before)
    there_and_back(layout, window)


def test_too_many_blocks_are_copied_without_kernels(driver: ctypes.CDLL, opened: Any) -> None:
    layout = layout_of(SMALL)
    window = opened(layout)
    driver.fake_launches()
    wanted = content(layout, 0, 5)
    window.memory.copy("store", [Piece(0, [5] * 65, [0] * 65)], None)
    assert window.bytes(0, len(wanted)) == wanted
    assert driver.fake_launches() == 0
    assert window.memory.no_kernels == "TooManyBlocks"


@pytest.mark.parametrize(
    "wrong",
    [Plane(0, 0, 1 << 20, 64), Plane(0, -64, 8192, 64), Plane(0, 1 << 16, -4096, 64)],
    ids=["too far", "before the storage", "backwards"],
)
@pytest.mark.parametrize("first", [True, False])
def test_planes_beyond_their_storage_use_no_kernels(
    driver: ctypes.CDLL, opened: Any, wrong: Plane, first: bool
) -> None:
    planes = [wrong, *SMALL] if first else [*SMALL, wrong]
    layout = layout_of(SMALL, LARGE)._replace(groups=(group(LARGE), group(planes)))
    assert opened(layout).memory.no_kernels == "BadLayout"
    assert driver.fake_launches() == 0


@pytest.mark.parametrize(("at", "blocks"), [(-1, 1), (WINDOW_BYTES - 16384 + 1, 1), (WINDOW_BYTES - 3 * 16384, 4)])
def test_blocks_outside_of_the_window_are_not_copied_and_the_job_fails(
    driver: ctypes.CDLL, opened: Any, at: int, blocks: int
) -> None:
    window = opened(layout_of(SMALL))
    driver.fake_launches()
    with pytest.raises(ValueError, match="exceed the window"):
        window.memory.copy("store", [Piece(0, [5] * blocks, [at + i * 16384 for i in range(blocks)])], None)
    assert driver.fake_launches() == 0


def test_a_package_with_mismatched_files_loads_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    package = resources.files("kvcachepool")
    manifest = json.loads(package.joinpath("kernels.json").read_text())
    ptx = package.joinpath("pages.ptx").read_bytes()
    monkeypatch.setattr(page_kernels.resources, "files", lambda name: tmp_path)
    layout = layout_of(SMALL)

    def refusal(manifest: Any, ptx: bytes) -> str:
        (tmp_path / "kernels.json").write_text(json.dumps(manifest))
        (tmp_path / "pages.ptx").write_bytes(ptx)
        return str(opened(layout).memory.no_kernels)

    assert refusal(manifest, ptx) == ""
    assert refusal(manifest, ptx + b"\n") == "BadPackage"
    assert refusal({"modules": []}, ptx) == "BadPackage"
    pages = next(module for module in manifest["modules"] if module["name"] == "pages")
    newer = ptx + b"// of a newer version\n"
    pages["ptx_sha256"] = hashlib.sha256(newer).hexdigest()
    assert refusal(manifest, newer) == "BadPackage"
    pages["ptx_sha256"] = hashlib.sha256(ptx).hexdigest()
    pages["entries"][1]["arguments"][1]["type"] = "u128"
    assert refusal(manifest, ptx) == "BadPackage"
    pages["entries"][1]["arguments"].reverse()
    assert refusal(manifest, ptx) == "BadPackage"
    (tmp_path / "pages.ptx").unlink()
    window = opened(layout)
    assert window.memory.no_kernels == "BadPackage"
    there_and_back(layout, window)


def test_a_failed_window_that_stays_mapped_is_reported_as_mapped(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("of some kind")

    monkeypatch.setattr(cuda_window, "PageKernels", broken)
    with fake_cuda.exported(driver, WINDOW_BYTES) as exporter:
        reply = WindowReply(kind="ipc_handle", bytes=WINDOW_BYTES, handle=exporter.handle)
        with pytest.raises(RuntimeError, match="of some kind"):
            _memory(layout_of(SMALL), reply, None)
        monkeypatch.setenv("FAKE_STAYS", "1")
        with pytest.raises(StillMappedError, match="of some kind"):
            _memory(layout_of(SMALL), reply, None)


@pytest.mark.parametrize("seed", range(60))
def test_any_planes_and_runs_of_blocks_are_copied(opened: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gap = int(rng.integers(0, 40))
    planes: list[Plane] = []
    start = gap
    for nbytes in rng.integers(1, 400, int(rng.integers(1, 6))).tolist():
        planes.append(Plane(0, start, nbytes + gap, nbytes))
        start += BLOCKS * (nbytes + gap)
    layout = layout_of(planes)
    size = layout.groups[0].block_bytes
    blocks = rng.permutation(BLOCKS)[: rng.integers(1, BLOCKS + 1)].tolist()
    offsets = (np.arange(len(blocks)) * size + 17 * np.cumsum(rng.integers(0, 2, len(blocks)))).tolist()
    wanted = [content(layout, 0, block) for block in blocks]
    window = opened(layout)
    window.memory.copy("store", [Piece(0, blocks, offsets)], None)
    assert [window.bytes(at, size) for at in offsets] == wanted
    layout.storages[0].zero_()
    window.memory.copy("load", [Piece(0, blocks, offsets)], None)
    assert [content(layout, 0, block) for block in blocks] == wanted
    assert int(layout.storages[0].sum()) == sum(sum(each) for each in wanted), "nothing else was written"
