"""Copies between KV blocks in device memory and the arena: one `cuMemcpyBatchAsync` per job, on a separate stream.

The arena is page-locked segment by segment: only segments that this rank's jobs have used, one at a time with pauses,
and never before the first job has ended, because a large page lock stalls CUDA calls of the whole node. The sidecar
keeps slots of other ranks out of these segments while there is room. Until a segment is locked, its jobs use a small
pinned ring of two halves: the device copies one while this thread copies the other. Threads other than vLLM's make all
their calls in a mode that does not disturb captures of CUDA graphs. `Batch` is pure and tested without a device; calls
of the driver are tested with a fake driver.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from . import cuda_driver
from .cuda_driver import beside_captures, make_current, own_stream
from .layout import GroupLayout, Layout, Unserved
from .pieces import Piece
from .shared import Mapping

logger = logging.getLogger("kvcachepool")

_SOURCE_IN_STREAM_ORDER = 1
_SOURCE_ANY_ORDER = 3
_RING_HALF_BYTES = 16 << 20
#: How long page locks of freed pages may stay while nothing is copied. Seconds.
_FOLLOW_S = 1.0
_PIN_PAUSE_S = 0.5
_CUDA_MEMCPY_BATCH_SINCE = 12080
#: `cudaErrorMemoryAllocation`.
_OUT_OF_MEMORY = 2


class Batch(NamedTuple):
    """Runs to copy: device address, offset in the arena, bytes. `uint64` arrays of one length."""

    device: npt.NDArray[np.uint64]
    arena: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]

    @staticmethod
    def of(group: GroupLayout, bases: Sequence[int], blocks: Sequence[int], offsets: Sequence[int]) -> Batch:
        """All runs of some blocks of a group, in section order. `bases`: device address of each storage."""
        ids = np.asarray(blocks, dtype=np.uint64)[:, None]
        starts = np.asarray(offsets, dtype=np.uint64)[:, None]
        sizes = np.asarray([plane.nbytes for plane in group.planes], dtype=np.uint64)
        first = np.asarray([bases[plane.storage] + plane.offset for plane in group.planes], dtype=np.uint64)
        strides = np.asarray([plane.block_stride for plane in group.planes], dtype=np.uint64)
        within = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64)
        device = first[None, :] + ids * strides[None, :]
        arena = starts + within[None, :]
        return Batch(device.ravel(), arena.ravel(), np.broadcast_to(sizes, device.shape).ravel()).coalesced()

    @staticmethod
    def of_job(layout: Layout, bases: Sequence[int], pieces: Sequence[Piece]) -> Batch:
        """All runs of a job over all KV groups, in the order of the pieces."""
        batches = [Batch.of(layout.groups[piece.group], bases, piece.blocks, piece.offsets) for piece in pieces]
        columns = zip(*batches, strict=True)
        return Batch(*(np.concatenate(column) for column in columns)) if batches else _batch([])

    def coalesced(self) -> Batch:
        """Joins runs that are adjacent on both sides into one."""
        if len(self.sizes) < 2:
            return self
        ends_device = self.device[:-1] + self.sizes[:-1]
        ends_arena = self.arena[:-1] + self.sizes[:-1]
        starts = np.concatenate(([True], (ends_device != self.device[1:]) | (ends_arena != self.arena[1:])))
        at = np.flatnonzero(starts)
        return Batch(self.device[at], self.arena[at], np.add.reduceat(self.sizes, at))

    def cut(self, segment: int) -> Batch:
        """The same bytes in runs that do not cross multiples of `segment` in the arena. The driver cannot copy to or
        from host memory that spans several page locks.
        """
        unit = np.uint64(segment)
        first = self.arena // unit
        parts = ((self.arena + self.sizes - np.uint64(1)) // unit - first + np.uint64(1)).astype(np.intp)
        if not (parts > 1).any():
            return self
        run: npt.NDArray[np.intp] = np.repeat(np.arange(len(parts)), parts)
        nth = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
        edges = (first[run] + nth.astype(np.uint64)) * unit
        starts = np.maximum(self.arena[run], edges)
        ends = np.minimum(self.arena[run] + self.sizes[run], edges + unit)
        return Batch(self.device[run] + (starts - self.arena[run]), starts, ends - starts)

    def within(self, keep: npt.NDArray[np.bool_]) -> Batch:
        """The runs that `keep` selects."""
        return Batch(self.device[keep], self.arena[keep], self.sizes[keep])

    def slices(self, most: int) -> Iterator[Batch]:
        """The runs in order, cut into batches of at most `most` bytes."""
        device, arena, sizes = (array.tolist() for array in self)
        current: list[tuple[int, int, int]] = []
        room = most
        for start, offset, size in zip(device, arena, sizes, strict=True):
            while size:
                part = min(size, room)
                current.append((start, offset, part))
                start, offset, size, room = start + part, offset + part, size - part, room - part
                if room == 0:
                    yield _batch(current)
                    current, room = [], most
        if current:
            yield _batch(current)


def _batch(runs: list[tuple[int, int, int]]) -> Batch:
    columns = np.asarray(runs, dtype=np.uint64).reshape(-1, 3)
    return Batch(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


def packed_offsets(sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Offsets of runs that are laid out one after another."""
    return np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of the driver API."""

    _fields_ = [
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


Submit = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], bool, int], None]


def _driver_submit() -> Submit | None:
    """The driver's `cuMemcpyBatchAsync`, or None before CUDA 12.8."""
    try:
        driver = cuda_driver.library()
        entry = ctypes.c_void_p()
        error = driver.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(entry), _CUDA_MEMCPY_BATCH_SINCE, ctypes.c_uint64(0), None
        )
    except (OSError, AttributeError):
        return None
    if error != 0 or not entry.value:
        return None
    call = ctypes.CFUNCTYPE(
        ctypes.c_uint,
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
    )(entry.value)

    def submit(
        to: npt.NDArray[np.uint64],
        source: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stable: bool,
        stream: int,
    ) -> None:
        attributes = _Attributes(source_access_order=_SOURCE_ANY_ORDER if stable else _SOURCE_IN_STREAM_ORDER)
        index, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = call(
            *(to.ctypes.data, source.ctypes.data, sizes.ctypes.data, len(sizes)),
            *(ctypes.addressof(attributes), ctypes.addressof(index), 1, ctypes.addressof(failed), stream),
        )
        if code != 0:
            runs = len(sizes)
            # A failure that belongs to no run has an index behind all of them.
            where = f" at run {failed.value} of {runs}" if failed.value < runs else f", {runs} runs"
            raise RuntimeError(f"cuMemcpyBatchAsync failed with {code}{where}")

    return submit


def _vllm_submit() -> Submit | None:
    """vLLM's own batched copy, or None."""
    try:
        from vllm import _custom_ops as ops

        swap = ops.swap_blocks_batch
    except (ImportError, AttributeError):
        return None

    def submit(
        to: npt.NDArray[np.uint64],
        source: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stable: bool,
        stream: int,
    ) -> None:
        arrays = (torch.from_numpy(array.view(np.int64)) for array in (source, to, sizes))
        swap(*arrays, is_src_access_order_any=stable)

    return submit


def batch_submit() -> tuple[Submit, str]:
    """The best available function to submit many copies at once, and the reason if it is not the driver's own, else "".
    Raises `Unserved` if there is none.
    """
    if (best := _driver_submit()) is not None:
        return best, ""
    if (other := _vllm_submit()) is None:
        raise Unserved("DriverTooOld", "update the driver: it is older than CUDA 12.8, and vLLM has no batched copy")
    message = "the driver is older than CUDA 12.8, so vLLM's own batched copy is used"
    logger.warning("DriverTooOld: %s", message)
    return other, "DriverTooOld"


class CudaCopier:
    """Copies blocks of one rank's KV cache. `attach`, `detach` and `record` run on other threads than the copies."""

    def __init__(self, layout: Layout, count: Callable[[str], None]) -> None:
        """`count` counts a named event, on any thread. Raises `Unserved` and `RuntimeError`."""
        self._layout = layout
        self._count = count
        self._device = layout.storages[0].device
        self._bases = [storage.data_ptr() for storage in layout.storages]
        self._submit, without = batch_submit()
        self._stream = own_stream(self._device)
        if without:
            count(f"copies_without_batch_call/{without}")
        self._ring: _Ring | None = None
        self._mapping: Mapping | None = None
        self._locks: _PageLocks | None = None

    @beside_captures()
    def begin_thread(self) -> None:
        """Makes the rank's device current on the copy thread."""
        make_current(self._device)

    def attach(self, mapping: Mapping) -> None:
        """Starts to use this arena. Nothing is page-locked yet."""
        self._locks = _PageLocks(mapping, self._device, self._count)
        self._mapping = mapping

    def detach(self) -> None:
        """Releases page locks. Called after the last copy."""
        if self._locks is not None:
            self._locks.close()
        self._locks = None
        self._mapping = None

    def record(self) -> torch.cuda.Event:
        """Records a point of the model's work on the current stream, which a copy waits for."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @beside_captures()
    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None:
        """Copies all pieces after `event`. Returns when the bytes have arrived."""
        locks, mapping = self._locks, self._mapping
        if locks is None or mapping is None:
            raise RuntimeError("no arena is mapped")
        with torch.cuda.stream(self._stream):
            try:
                if event is not None:
                    self._stream.wait_event(event)
                batch = Batch.of_job(self._layout, self._bases, pieces).cut(mapping.segment_bytes)
                locked = locks.begin_copy(batch)
                self._direct(kind, batch.within(locked), mapping)
                self._through_ring(kind, batch.within(~locked), mapping)
                self._stream.synchronize()
            except BaseException:
                # Submitted copies have ended when the caller continues, even after an error, so the ring is free.
                with contextlib.suppress(RuntimeError):
                    self._stream.synchronize()
                raise
            finally:
                locks.end_copy()
        locks.request(pieces)

    @beside_captures()
    def synchronize(self) -> None:
        self._stream.synchronize()

    def _direct(self, kind: str, batch: Batch, mapping: Mapping) -> None:
        if len(batch.sizes):
            self._run(kind, batch.device, batch.arena + np.uint64(mapping.arena_address), batch.sizes)

    def _run(
        self, kind: str, device: npt.NDArray[np.uint64], host: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> None:
        if kind == "load":
            self._submit(device, host, sizes, True, self._stream.cuda_stream)
        else:
            self._submit(host, device, sizes, False, self._stream.cuda_stream)

    def _through_ring(self, kind: str, batch: Batch, mapping: Mapping) -> None:
        """Copies through pinned memory. This thread copies between ring and arena."""
        if not len(batch.sizes):
            return
        if self._ring is None:
            self._ring = _Ring()
        #: For a store: the arena's part of each half of the ring, valid when its event has completed.
        held: collections.deque[tuple[torch.cuda.Event, Batch]] = collections.deque()
        parts = batch.slices(_RING_HALF_BYTES)
        for part, (start, event) in zip(parts, itertools.cycle(self._ring.halves), strict=False):
            packed = packed_offsets(part.sizes) + np.uint64(start)
            host = part.arena + np.uint64(mapping.arena_address)
            if kind == "load":
                # The device has read the earlier content of this half.
                event.synchronize()
                _memmove(packed, host, part.sizes)
                self._run(kind, part.device, packed, part.sizes)
                event.record(self._stream)
                continue
            if len(held) == len(self._ring.halves):
                _emptied(*held.popleft())
            self._run(kind, part.device, packed, part.sizes)
            event.record(self._stream)
            held.append((event, Batch(packed, host, part.sizes)))
        while held:
            _emptied(*held.popleft())


class _Ring:
    """Pinned memory in two halves, each with an event behind the device's last copy to or from it."""

    def __init__(self) -> None:
        self._memory = torch.empty(2 * _RING_HALF_BYTES, dtype=torch.uint8, pin_memory=True)
        starts = (self._memory.data_ptr(), self._memory.data_ptr() + _RING_HALF_BYTES)
        # An event that was never recorded counts as completed.
        self.halves = [(start, torch.cuda.Event(blocking=True)) for start in starts]


def _emptied(event: torch.cuda.Event, runs: Batch) -> None:
    """Copies what the device has written to the ring (`device`) into the arena."""
    event.synchronize()
    _memmove(runs.arena, runs.device, runs.sizes)


def _memmove(to: npt.NDArray[np.uint64], source: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> None:
    runs = Batch(to, source, sizes).coalesced()
    for target, origin, size in zip(*(array.tolist() for array in runs), strict=True):
        ctypes.memmove(target, origin, size)


class _PageLocks:
    """Page locks of one mapping, by segment. A separate thread takes them, and releases those of pages that the sidecar
    has freed.
    """

    def __init__(self, mapping: Mapping, device: torch.device, count: Callable[[str], None]) -> None:
        self._mapping = mapping
        self._count = count
        self._device = device
        self._segment = mapping.segment_bytes
        self._done = np.zeros(-(-mapping.arena_bytes // self._segment), dtype=bool)
        self._wanted: list[int] = []
        #: Page-locked segments that no copy uses any more, to be released.
        self._stale: list[int] = []
        self._shrinks = mapping.shrinks
        self._copying = False
        self._failed = False
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kvcachepool-pin", daemon=True)
        self._thread.start()

    def begin_copy(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Which runs are in page-locked segments, until `end_copy`. No run crosses a segment."""
        with self._wake:
            self._follow()
            self._copying = True
            return np.asarray(self._done[batch.arena // np.uint64(self._segment)])

    def end_copy(self) -> None:
        with self._wake:
            self._copying = False

    def _follow(self) -> None:
        """Gives up the page locks of freed pages: pages that come back in their place are others. The lock is held, and
        no copy is in flight.
        """
        shrinks = self._mapping.shrinks
        if shrinks != self._shrinks:
            self._shrinks = shrinks
            self._stale += self._give_back(self._mapping.lowest_bytes // self._segment)
            self._wake.notify_all()

    def _give_back(self, first: int) -> list[int]:
        """The page-locked segments from this one on, which no copy uses from now on."""
        segments: list[int] = (np.flatnonzero(self._done[first:]) + first).tolist()
        self._done[first:] = False
        return segments

    def request(self, pieces: Sequence[Piece]) -> None:
        """Requests page locks for the segments of a job that has ended."""
        touched = {offset // self._segment for piece in pieces for offset in piece.offsets}
        with self._wake:
            self._wanted += [s for s in sorted(touched) if not self._done[s] and s not in self._wanted]
            self._wake.notify_all()

    @beside_captures()
    def close(self) -> None:
        """Stops the thread and releases all locks."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        segments = self._stale + self._give_back(0)
        if not segments:
            return
        try:
            # Any thread may close them. On a thread without a current device, the call would use the first device.
            make_current(self._device)
        except RuntimeError as error:
            logger.warning("%d page locks of the arena were not released: %s", len(segments), error)
            return
        self._unlock(segments)

    def _unlock(self, segments: Sequence[int]) -> None:
        runtime = torch.cuda.cudart()
        starts = (self._mapping.arena_address + segment * self._segment for segment in segments)
        refused = [code for code in (int(runtime.cudaHostUnregister(start)) for start in starts) if code]
        if refused:
            counts = (len(refused), len(segments), refused[0])
            logger.warning("%d of %d page locks of the arena were not released: %d", *counts)

    @beside_captures()
    def _work(self) -> None:
        try:
            make_current(self._device)
        except RuntimeError as error:
            self._give_up("DriverFailed", str(error))
            return
        while True:
            with self._wake:
                if not self._copying:
                    self._follow()
                wanted = self._wanted and not self._failed
                if not self._closing and not self._stale and not wanted:
                    # Nobody wakes this thread when the arena shrinks.
                    self._wake.wait(_FOLLOW_S)
                    continue
                if self._closing:
                    return
                stale, self._stale = self._stale, []
                segment = None if stale else self._wanted[0]
            if segment is None:
                self._unlock(stale)
                continue
            self._lock(segment)
            deadline = time.monotonic() + _PIN_PAUSE_S
            with self._wake:
                # Only now, or a job that ended meanwhile would request it again.
                self._wanted.remove(segment)
                while not self._closing and (left := deadline - time.monotonic()) > 0:
                    self._wake.wait(left)

    def _lock(self, segment: int) -> None:
        start = segment * self._segment
        size = min(self._segment, self._mapping.arena_bytes - start)
        shrinks = self._mapping.shrinks
        if start + size > self._mapping.populated_bytes:
            # The driver would allocate pages, charged to this process.
            return
        error = int(torch.cuda.cudart().cudaHostRegister(self._mapping.arena_address + start, size, 0))
        if error:
            reason = "OutOfMemory" if error == _OUT_OF_MEMORY else "DriverFailed"
            self._give_up(reason, f"cudaHostRegister failed with {error}")
            return
        with self._wake:
            # Its pages may have been freed meanwhile.
            same = self._mapping.shrinks == shrinks
            if same:
                self._done[segment] = True
        if not same:
            self._unlock([segment])

    def _give_up(self, reason: str, why: str) -> None:
        """Stops locking. A refused lock would be refused again, and each attempt stalls the node."""
        logger.warning("page-locking the arena stopped, copies use a slower pinned buffer: %s: %s", reason, why)
        self._failed = True
        self._count(f"copies_without_page_locks/{reason}")
