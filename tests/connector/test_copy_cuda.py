"""Copies between KV blocks and the arena with a fake driver: which calls are made, and how."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from stub_sidecar import Memory
from test_copy import BLOCKS, arena, block_outermost, group, layer_outermost

import kvcachepool.copy_cuda as copy_cuda
from gpu import place
from kvcachepool.copy_cuda import CudaCopier
from kvcachepool.layout import Layout, Unserved
from kvcachepool.pieces import Piece
from kvcachepool.shared import ROW_BYTES, Mapping
from servers.waiting import wait_for


def ignored(event: str) -> None:
    """An event that a test does not check."""


def lost(device: object) -> None:
    """A device that is lost."""
    raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_cuda.built(tmp_path_factory.mktemp("driver"))


def test_neither_copies_nor_page_locks_end_a_capture(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 0.0)
    storage = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 3 * 4096 * BLOCKS, dtype=np.uint8))
    copier = CudaCopier(Layout((storage,), BLOCKS, (group(layer_outermost(4096)),), "cuda", {}), ignored)
    copier.attach(mapping)
    monkeypatch.setenv("FAKE_CAPTURE", "1")
    before = driver.fake_captures_ended()
    copier.begin_thread()
    wanted = b"".join(storage.numpy().tobytes()[(layer * BLOCKS + 5) * 4096 :][:4096] for layer in range(3))
    locks = copier._locks
    assert locks is not None
    for locked in (False, True):
        wait_for(lambda locked=locked: locks._done.any() == locked, 20, "the page lock")  # type: ignore[misc]
        arena(mapping)[:] = 0
        copier.copy("store", [Piece(0, [5], [65536])], "event")
        assert arena(mapping)[65536:][: len(wanted)].tobytes() == wanted
        copier.copy("load", [Piece(0, [6], [65536])], None)
        assert storage.numpy()[6 * 4096 :][:4096].tobytes() == wanted[:4096]
    copier.synchronize()
    copier.detach()
    assert driver.fake_captures_ended() == before
    assert fake_cuda.capture_mode(driver) == 0


def page_locked(mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> CudaCopier:
    """A copier that has page-locked the only segment of this arena."""
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 0.0)
    storage = torch.from_numpy(np.zeros(3 * 4096 * BLOCKS, dtype=np.uint8))
    copier = CudaCopier(Layout((storage,), BLOCKS, (group(layer_outermost(4096)),), "cuda", {}), ignored)
    copier.attach(mapping)
    copier.begin_thread()
    copier.copy("store", [Piece(0, [5], [65536])], None)
    locks = copier._locks
    assert locks is not None
    wait_for(lambda: locks._done.all(), 20, "the page lock")
    return copier


def test_page_locks_are_released_in_the_devices_context_whatever_thread_does_it(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier = page_locked(mapping, monkeypatch)
    steps: list[object] = []
    runtime = torch.cuda.cudart()

    def unregister(address: int) -> int:
        steps.append(address)
        return int(runtime.cudaHostUnregister(address))

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=unregister))
    monkeypatch.setattr(torch.cuda, "set_device", steps.append)
    copier.detach()
    assert steps == [copier._device, mapping.arena_address]
    assert caplog.records == []


def test_unreleased_page_locks_are_logged(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier = page_locked(mapping, monkeypatch)
    released = torch.cuda.cudart()
    with monkeypatch.context() as refusing:
        refusing.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda address: 713))
        copier.detach()
    assert [record.message for record in caplog.records] == ["1 of 1 page locks of the arena were not released: 713"]
    assert released.cudaHostUnregister(mapping.arena_address) == 0

    caplog.clear()
    copier = page_locked(mapping, monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lost)
    copier.detach()
    assert len(caplog.records) == 1
    assert "unspecified launch failure" in caplog.records[0].message
    assert released.cudaHostUnregister(mapping.arena_address) == 0


def test_page_locks_are_released_after_the_arena_shrank_and_taken_again_where_it_has_pages(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier = page_locked(mapping, monkeypatch)
    locks = copier._locks
    assert locks is not None
    runtime = torch.cuda.cudart()
    released: list[int] = []

    def unregister(address: int) -> int:
        released.append(address)
        return int(runtime.cudaHostUnregister(address))

    both = SimpleNamespace(cudaHostRegister=runtime.cudaHostRegister, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: both)
    header = np.memmap(f"/proc/self/fd/{mapping.table_fd}", dtype=np.uint32, mode="r+", shape=32)
    populated, capacity, shrinks, lowest = range(16, 20)
    rows = header[populated]
    # An idle worker lets go as well.
    header[[populated, capacity, lowest]] = 1
    header[shrinks] = 1
    assert (mapping.populated_bytes, mapping.capacity_bytes, mapping.lowest_bytes) == (ROW_BYTES,) * 3
    wait_for(lambda: released == [mapping.arena_address], 20, "the release")
    # The segment reaches behind the arena's end.
    copier.copy("load", [Piece(0, [6], [0])], None)
    wait_for(lambda: not locks._wanted, 20, "the refused page lock")
    copier.copy("load", [Piece(0, [6], [0])], None)
    assert not locks._done.any()
    header[[populated, capacity]] = rows
    copier.copy("load", [Piece(0, [6], [0])], None)
    wait_for(lambda: locks._done.all(), 20, "the page lock")
    # At the next job the release is due, too: its copy does not use the lock.
    with locks._wake:
        header[shrinks] = 2
        locks._copying = True
        locks._wake.notify_all()
    assert locks._done.all(), "a copy may use it"
    copier.copy("load", [Piece(0, [6], [0])], None)
    wait_for(lambda: released == [mapping.arena_address] * 2, 20, "the release")
    # What never lost its pages stays locked.
    copier.copy("load", [Piece(0, [6], [0])], None)
    wait_for(lambda: locks._done.all(), 20, "the page lock")
    header[lowest] = rows
    header[shrinks] = 3
    copier.copy("load", [Piece(0, [6], [0])], None)
    assert locks._done.all()
    copier.detach()
    assert released == [mapping.arena_address] * 3


def test_a_segment_is_locked_once_however_many_jobs_end_meanwhile(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 0.0)
    runtime = torch.cuda.cudart()
    locked: list[int] = []
    locking, others_ended = threading.Event(), threading.Event()

    def register(address: int, nbytes: int, flags: int) -> int:
        locked.append(address)
        locking.set()
        assert others_ended.wait(20)
        return int(runtime.cudaHostRegister(address, nbytes, flags))

    both = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=runtime.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: both)
    copier, _, counted = three_rows(mapping)
    locks = copier._locks
    assert locks is not None
    copier.copy("store", [Piece(0, [5], [65536])], None)
    assert locking.wait(20)
    copier.copy("load", [Piece(0, [6], [65536])], None)
    others_ended.set()
    wait_for(lambda: not locks._wanted, 20, "the page lock")
    assert locks._done.all()
    assert locked == [mapping.arena_address]
    assert not any(event.startswith("copies_without_page_locks") for event in counted), counted
    copier.detach()


def three_rows(mapping: Mapping) -> tuple[CudaCopier, torch.Tensor, list[str]]:
    """A copier of blocks in three runs, its cache, and the events that it counts."""
    storage = torch.from_numpy(np.random.default_rng(5).integers(0, 256, 3 * 4096 * BLOCKS, dtype=np.uint8))
    counted: list[str] = []
    layout = Layout((storage,), BLOCKS, (group(layer_outermost(4096)),), "cuda", {})
    copier = CudaCopier(layout, counted.append)
    copier.attach(mapping)
    copier.begin_thread()
    return copier, storage, counted


def content(storage: torch.Tensor, block: int) -> bytes:
    return storage.numpy().reshape(3, BLOCKS, 4096)[:, block].tobytes()


def test_a_job_is_one_batch_of_the_driver(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier, storage, counted = three_rows(mapping)
    driver.fake_batches()
    copier.copy("store", [Piece(0, [5, 7], [0, 65536])], None)
    assert arena(mapping)[: 3 * 4096].tobytes() == content(storage, 5)
    assert arena(mapping)[65536:][: 3 * 4096].tobytes() == content(storage, 7)
    assert driver.fake_batches() == 1
    copier.copy("load", [Piece(0, [2], [65536])], None)
    assert content(storage, 2) == content(storage, 7)
    assert driver.fake_batches() == 1
    copier.detach()
    assert counted == []


def test_a_job_of_two_kv_groups_is_one_batch_to_locked_pages_and_one_through_the_ring(
    segmented: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    # The first segment is locked, and no other in time.
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 600.0)
    storage = torch.from_numpy(np.random.default_rng(6).integers(0, 256, 3 * 4096 * BLOCKS, dtype=np.uint8))
    groups = (group(layer_outermost(4096)), group(layer_outermost(4096, layers=2)))
    copier = CudaCopier(Layout((storage,), BLOCKS, groups, "cuda", {}), ignored)
    copier.attach(segmented)
    copier.begin_thread()
    locks, last = copier._locks, 2 * segmented.segment_bytes
    assert locks is not None
    in_first = [Piece(0, [5], [0]), Piece(1, [7], [65536])]
    in_both = [Piece(0, [5, 1], [0, last]), Piece(1, [7, 3], [65536, last + 65536])]
    driver.fake_batches()
    for pieces, batches in [(in_first, 1), (in_first, 1), (in_both, 2)]:
        arena(segmented)[:] = 0
        copier.copy("store", pieces, None)
        assert driver.fake_batches() == batches
        for one in pieces:
            for block, offset in zip(one.blocks, one.offsets, strict=True):
                wanted = content(storage, block)[: groups[one.group].block_bytes]
                assert arena(segmented)[offset:][: len(wanted)].tobytes() == wanted
        into = [Piece(one.group, [block + 1 for block in one.blocks], one.offsets) for one in pieces]
        copier.copy("load", into, None)
        assert driver.fake_batches() == batches
        for one, target in zip(pieces, into, strict=True):
            for block, number in zip(one.blocks, target.blocks, strict=True):
                size = groups[one.group].block_bytes
                assert content(storage, number)[:size] == content(storage, block)[:size]
        if pieces is in_first:
            wait_for(lambda: locks._done[0], 20, "the page lock")
    copier.detach()


class Late:
    """A device that copies only when it is waited for, in order: as late as a real one may."""

    def __init__(self, copier: CudaCopier, monkeypatch: pytest.MonkeyPatch) -> None:
        submit, synchronize, late = copier._submit, copier._stream.synchronize, self
        self.submitted: list[Callable[[], None]] = []
        self.done = 0
        self.pending_at_moves: list[int] = []

        class Event:
            def __init__(self, blocking: bool) -> None:
                self.behind = 0

            def record(self, stream: object) -> None:
                self.behind = len(late.submitted)

            def synchronize(self) -> None:
                late.until(self.behind)

        def submitted(to: Any, source: Any, sizes: Any, stable: bool, stream: int) -> None:
            self.submitted.append(lambda: submit(to, source, sizes, stable, stream))

        def synchronized() -> None:
            self.until(len(self.submitted))
            synchronize()

        def moved(to: Any, source: Any, sizes: Any) -> None:
            self.pending_at_moves.append(len(self.submitted) - self.done)
            move(to, source, sizes)

        move = copy_cuda._memmove
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(copy_cuda, "_memmove", moved)
        copier._submit = submitted
        copier._stream.synchronize = synchronized  # type: ignore[method-assign]

    def until(self, number: int) -> None:
        for copy in self.submitted[self.done : number]:
            copy()
        self.done = max(self.done, number)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_the_ring_copies_one_half_while_the_device_copies_the_other(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    fake_cuda.install(driver, monkeypatch)
    monkeypatch.setattr(copy_cuda, "_RING_HALF_BYTES", 5000)
    monkeypatch.setattr(copy_cuda._PageLocks, "request", lambda *pieces: None)
    copier, storage, _ = three_rows(mapping)
    device = Late(copier, monkeypatch) if late else None
    blocks = [5, 1, 7, 3]
    stored = [content(storage, block) for block in blocks]
    for _ in range(2):
        arena(mapping)[:] = 0
        copier.copy("store", [Piece(0, blocks, [at * 65536 for at in range(4)])], None)
        assert [arena(mapping)[at * 65536 :][: 3 * 4096].tobytes() for at in range(4)] == stored
        storage.zero_()
        copier.copy("load", [Piece(0, blocks, [at * 65536 for at in range(4)])], None)
        assert [content(storage, block) for block in blocks] == stored
    if device is not None:
        parts = -(-4 * 3 * 4096 // 5000)
        assert parts > 4, "each half is used more than once"
        # All copies of a store but its last, and all of a load but its first, overlap with a copy of the device.
        assert device.pending_at_moves == ([1] * (parts - 1) + [0] + [0] + [1] * (parts - 1)) * 2
    copier.detach()


def test_a_failed_copy_of_a_batch_is_reported_with_its_index(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier, storage, _ = three_rows(mapping)
    monkeypatch.setenv("FAKE_BATCH_FAILS", "1")
    with pytest.raises(RuntimeError, match=r"^cuMemcpyBatchAsync failed with 1 at run 1 of 3$"):
        copier.copy("store", [Piece(0, [5], [0])], None)
    monkeypatch.delenv("FAKE_BATCH_FAILS")
    stream = copier._stream.cuda_stream
    copier._stream.cuda_stream = 0  # type: ignore[misc]
    with pytest.raises(RuntimeError, match=r"^cuMemcpyBatchAsync failed with 400, 3 runs$"):
        copier.copy("store", [Piece(0, [5], [0])], None)
    copier._stream.cuda_stream = stream  # type: ignore[misc]
    copier.copy("store", [Piece(0, [6], [0])], None)
    assert arena(mapping)[: 3 * 4096].tobytes() == content(storage, 6)
    copier.detach()


def test_a_copy_thread_without_a_context_gets_the_devices(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier, storage, _ = three_rows(mapping)
    monkeypatch.delenv("FAKE_CURRENT")

    def copied() -> None:
        copier.begin_thread()
        copier.copy("store", [Piece(0, [5], [0])], None)

    fake_cuda.elsewhere(copied)
    assert arena(mapping)[: 3 * 4096].tobytes() == content(storage, 5)
    fake_cuda.elsewhere(copier.detach)


@pytest.mark.parametrize(("code", "reason"), [(2, "OutOfMemory"), (712, "DriverFailed"), (None, "DriverFailed")])
def test_the_end_of_page_locking_is_counted_once_by_name(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, code: int | None, reason: str
) -> None:
    fake_cuda.install(driver, monkeypatch)
    copier, storage, counted = three_rows(mapping)
    copier.detach()
    if code is None:
        monkeypatch.setattr(copy_cuda, "make_current", lost)
    else:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *where: code))
    copier.attach(mapping)
    for block in (5, 6):
        copier.copy("store", [Piece(0, [block], [0])], None)
        assert arena(mapping)[: 3 * 4096].tobytes() == content(storage, block)
        wait_for(lambda: counted, 20, "the event")
    locks = copier._locks
    assert locks is not None
    assert locks._failed
    copier.detach()
    assert counted == [f"copies_without_page_locks/{reason}"]


def vllm_with(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A vLLM whose `_custom_ops` has only these functions."""
    vllm, ops = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    vars(ops).update(functions)
    vars(vllm)["_custom_ops"] = ops
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)


def test_with_a_driver_before_12_8_vllms_function_copies_and_it_is_named(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.install(driver, monkeypatch)
    monkeypatch.setenv("FAKE_NO_BATCH", "1")
    orders: list[bool] = []

    def swap(source: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool) -> None:
        orders.append(is_src_access_order_any)
        for origin, target, size in zip(source.tolist(), to.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, origin, size)

    vllm_with(monkeypatch, swap_blocks_batch=swap)
    copier, storage, counted = three_rows(mapping)
    driver.fake_batches()
    copier.copy("store", [Piece(0, [5], [0])], None)
    assert arena(mapping)[: 3 * 4096].tobytes() == content(storage, 5)
    copier.copy("load", [Piece(0, [2], [0])], None)
    assert content(storage, 2) == content(storage, 5)
    copier.detach()
    assert orders == [False, True]
    assert driver.fake_batches() == 0
    assert counted == ["copies_without_batch_call/DriverTooOld"]
    assert [record.message for record in caplog.records] == [
        "DriverTooOld: the driver is older than CUDA 12.8, so vLLM's own batched copy is used"
    ]


def test_without_any_batched_copy_gpu_tests_skip_by_name(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(driver, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True, raising=False)
    assert place.missing() == ""
    monkeypatch.setenv("FAKE_NO_BATCH", "1")
    for lacks in ("function", "vllm"):
        vllm_with(monkeypatch)
        if lacks == "vllm":
            monkeypatch.setitem(sys.modules, "vllm", None)
        with pytest.raises(Unserved, match=r"^DriverTooOld: .* older than CUDA 12\.8") as refused:
            copy_cuda.batch_submit()
        assert place.missing() == str(refused.value)
    monkeypatch.setenv("KVCACHEPOOL_GPU_REHEARSAL", "1")
    assert place.missing() == ""


@pytest.fixture
def segmented() -> Iterator[Mapping]:
    """Memory of a sidecar whose arena has three segments."""
    memory = Memory(1, 4 * BLOCKS, segments=3)
    made = Mapping(1, os.dup(memory.arena_fd), os.dup(memory.table_fd), memory.arena_bytes, memory.table_bytes)
    yield made
    made.close()


def test_adjacent_runs_in_locked_segments_are_copied_directly(
    segmented: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(driver, monkeypatch)
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 0.0)
    size = 4 * ROW_BYTES
    content = np.random.default_rng(4).integers(0, 256, size * BLOCKS, dtype=np.uint8)
    storage = torch.from_numpy(content.copy())
    copier = CudaCopier(Layout((storage,), BLOCKS, (group(block_outermost(size, layers=1)),), "cuda", {}), ignored)
    copier.attach(segmented)
    copier.begin_thread()
    side_by_side = [Piece(0, list(range(BLOCKS)), [number * size for number in range(BLOCKS)])]
    copier.copy("store", side_by_side, None)
    locks = copier._locks
    assert locks is not None
    wait_for(lambda: locks._done.all(), 20, "the page locks")
    monkeypatch.setattr(copy_cuda, "_memmove", lambda *runs: pytest.fail("through the ring"))
    arena(segmented)[:] = 0
    copier.copy("store", side_by_side, None)
    assert (arena(segmented)[: len(content)] == content).all()
    storage.zero_()
    copier.copy("load", side_by_side, None)
    assert (storage.numpy() == content).all()
    copier.detach()
