"""Copies through a window: this worker copies between KV blocks and the window's stages, and the sidecar between window
and arena.

Both sides hand stages over through the flag page. A byte on the bell, a socket pair, wakes the other side. The window
ends when the bell closes, also if the sidecar was killed. No call waits for a stage longer than `_STAGE_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .copy_cpu import CpuCopier
from .flag_page import PATTERN_BYTES, RUN_ALIGN, RUNS_MAX, FlagPage, State
from .layout import Layout
from .messages import WindowReply
from .pieces import Piece, Plan
from .shared import ROW_BYTES, Refs, SharedMemoryError, StillMappedError, map_shared, unmap

#: A stage that the sidecar holds for this long is lost, and so is the window. The same applies to a job that waits
#: longer than this plus the time that its bytes take on a slow machine.
_STAGE_TIMEOUT_S = 5.0
_LEAST_BYTES_PER_S = 250e6


#: Bytes on the bell: check the page; and the last byte, sent when this side has unmapped the window's memory.
_RING, _UNMAPPED = b"\x01", b"\x02"


class WindowLostError(Exception):
    """The sidecar did not return a stage, and may still copy for it. The window is no longer used."""


class Memory(Protocol):
    """A window's mapped memory, and copies between it and KV blocks on the same device."""

    #: Location of the memory, for logs.
    where: str
    #: Why kernels do not copy small pieces, by name. "" if they do, or if there are no small pieces.
    no_kernels: str

    def read(self, nbytes: int) -> bytes: ...
    def write(self, content: bytes) -> None: ...
    def begin_thread(self) -> None: ...
    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None: ...
    def close(self) -> bool: ...


class HostMemory:
    """A window in host memory, for engines on CPUs. It replaces the arena in `CpuCopier`."""

    where = "host memory"
    no_kernels = ""

    def __init__(self, layout: Layout, fd: int, nbytes: int) -> None:
        """Maps the memory. The caller keeps the descriptor. Raises `SharedMemoryError`."""
        if os.fstat(fd).st_size < nbytes:
            raise SharedMemoryError(f"the window has {os.fstat(fd).st_size} bytes: expected at least {nbytes}")
        self._bytes = nbytes
        self._address = map_shared(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._copier = CpuCopier(layout)
        self._copier.attach(self)

    def arena_buffer(self) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * self._bytes).from_address(self._address)

    def read(self, nbytes: int) -> bytes:
        return ctypes.string_at(self._address, nbytes)

    def write(self, content: bytes) -> None:
        ctypes.memmove(self._address, content, len(content))

    def begin_thread(self) -> None:
        """Warms up the copy."""
        self._copier.begin_thread()

    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None:
        """Copies pieces with offsets in the window. Returns when the bytes have arrived."""
        self._copier.copy(kind, pieces, event)

    def close(self) -> bool:
        self._copier.detach()
        if self._bytes:
            unmap(self._address, self._bytes)
            self._bytes = 0
        return True


class Staged(NamedTuple):
    """One stage of a job: runs as rows (slot, generation, offset in the slot, bytes), and the pieces of these bytes
    with offsets in the stage.
    """

    runs: npt.NDArray[np.uint32]
    pieces: list[Piece]


def stage(pieces: Sequence[Piece], refs: Refs, block_bytes: Sequence[int], stage_bytes: int) -> list[Staged]:
    """Cuts a job into stages. `block_bytes`: by group; no block is larger than a stage."""
    starts = refs.slots.astype(np.int64) * ROW_BYTES
    order = np.argsort(starts)
    out: list[Staged] = []
    runs: list[tuple[int, int, int, int]] = []
    now: list[Piece] = []
    at = 0
    for piece in pieces:
        size = block_bytes[piece.group]
        offsets = np.asarray(piece.offsets, dtype=np.int64)
        slots = order[np.searchsorted(starts[order], offsets, side="right") - 1]
        cuts = np.flatnonzero((np.diff(offsets) != size) | (np.diff(slots) != 0)) + 1
        edges = [0, *cuts.tolist(), len(offsets)]
        for first, end in itertools.pairwise(edges):
            while first < end:
                begin = -(-at // RUN_ALIGN) * RUN_ALIGN
                count = min(end - first, (stage_bytes - begin) // size)
                if count <= 0 or len(runs) == RUNS_MAX:
                    out.append(Staged(np.array(runs, dtype=np.uint32), now))
                    runs, now, at = [], [], 0
                    continue
                slot = int(slots[first])
                within = int(offsets[first] - starts[slot])
                runs.append((int(refs.slots[slot]), int(refs.generations[slot]), within, count * size))
                places = list(range(begin, begin + count * size, size))
                now.append(Piece(piece.group, list(piece.blocks[first : first + count]), places))
                first, at = first + count, begin + count * size
    if runs:
        out.append(Staged(np.array(runs, dtype=np.uint32), now))
    return out


def _placed(pieces: Sequence[Piece], base: int) -> list[Piece]:
    return [Piece(piece.group, piece.blocks, [base + offset for offset in piece.offsets]) for piece in pieces]


class WindowCopier:
    """One window. Created on the client's reader thread, used by the copy thread, closed when no copy uses it any
    more.
    """

    def __init__(self, layout: Layout, reply: WindowReply, fds: list[int], boot: int) -> None:
        """Maps the descriptors of a response from this boot of the sidecar, and replaces the test pattern by its
        complement. Takes the descriptors. Raises `SharedMemoryError`, including when the pattern is missing:
        each side must see what the other writes.
        """
        named = dict(zip(reply.fds, fds, strict=False))
        self._bell = socket.socket(fileno=named.pop("bell")) if "bell" in named else None
        self._closing = contextlib.ExitStack()
        self._mapped = False
        try:
            if self._bell is None or "page" not in named:
                raise SharedMemoryError("WINDOW response without the descriptors of flag page and bell")
            self._closing.callback(self._close_bell)
            if reply.stages * reply.stage_bytes > reply.bytes:
                raise SharedMemoryError(f"{reply.stages} stages exceed the window of {reply.bytes} bytes")
            self._block_bytes = [group.block_bytes for group in layout.groups]
            self._stage_bytes = reply.stage_bytes
            if max(self._block_bytes) > self._stage_bytes:
                raise SharedMemoryError(f"a KV block is larger than a stage of {self._stage_bytes} bytes")
            try:
                self.memory = _memory(layout, reply, named.get("window"))
            except StillMappedError:
                self._mapped = True
                raise
            self._mapped = True
            self._closing.callback(self._unmap)
            self._page = FlagPage(named["page"], reply.stages, reply.stage_bytes)
            self._closing.callback(self._page.close)
            if self.memory.read(PATTERN_BYTES) != reply.pattern:
                raise SharedMemoryError("the mapped memory is not the sidecar's window: no test pattern")
            self.memory.write(bytes(255 - byte for byte in reply.pattern))
        except BaseException:
            self._closing.close()
            raise
        finally:
            for fd in named.values():
                os.close(fd)
        self.boot = boot
        self._stages = reply.stages
        #: Stages that the sidecar holds.
        self._handed_over: set[int] = set()
        self._prepared = False
        #: Remaining time that the current job may wait for the sidecar.
        self._timeout_s = 0.0

    def copy(self, kind: str, plan: Plan, event: Any) -> str:
        """Copies all pieces of a plan after `event`. Returns "" when the bytes have arrived, or why the sidecar refused
        a stage; then no copy of the job is in flight. Raises `WindowLostError`.
        """
        if not self._prepared:
            self.memory.begin_thread()
            self._prepared = True
        parts = stage(plan.pieces, plan.refs, self._block_bytes, self._stage_bytes)
        nbytes = sum(int(part.runs[:, 3].sum()) for part in parts)
        self._timeout_s = _STAGE_TIMEOUT_S + nbytes / _LEAST_BYTES_PER_S
        try:
            return self._load(parts, event) if kind == "load" else self._store(parts, event)
        except WindowLostError:
            raise
        except Exception as error:
            if self._handed_over:
                # Stages that the sidecar still holds must not be used again.
                raise WindowLostError(f"a copy failed while the sidecar used the window: {error}") from error
            raise

    def close(self) -> None:
        """Closes the bell and unmaps. The sidecar ends its copies and frees the window."""
        self._closing.close()

    def _unmap(self) -> None:
        self._mapped = not self.memory.close()

    def _close_bell(self) -> None:
        """Signals whether the sidecar may free the memory: not all memory may be freed while it is mapped here."""
        assert self._bell is not None
        # A forked child may hold the socket open, so that only a shutdown ends it.
        with contextlib.suppress(OSError):
            if not self._mapped:
                self._bell.send(_UNMAPPED, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        with contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)
        self._bell.close()

    def _store(self, parts: list[Staged], event: Any) -> str:
        reason = ""
        filled: deque[int] = deque()
        for number, part in enumerate(parts):
            if len(filled) == self._stages:
                reason = reason or self._wait_returned(filled.popleft())
            if reason:
                break
            at = number % self._stages
            self.memory.copy("store", _placed(part.pieces, at * self._stage_bytes), event)
            self._hand_over(at, State.FILLED, part)
            filled.append(at)
        # Wait for all stages even after a refusal, so that no copy of this job is in flight.
        for at in filled:
            back = self._wait_returned(at)
            reason = reason or back
        return reason

    def _load(self, parts: list[Staged], event: Any) -> str:
        reason = ""
        requested: deque[tuple[int, Staged]] = deque()
        for number, part in enumerate(parts):
            if len(requested) == self._stages:
                reason = reason or self._scatter(*requested.popleft(), event)
            if reason:
                break
            at = number % self._stages
            self._hand_over(at, State.WANTED, part)
            requested.append((at, part))
        # Wait for all stages even after a refusal, which no later stage can undo.
        for at, part in requested:
            back = self._wait_returned(at) if reason else self._scatter(at, part, event)
            reason = reason or back
        return reason

    def _scatter(self, at: int, part: Staged, event: Any) -> str:
        reason = self._wait_returned(at)
        if not reason:
            self.memory.copy("load", _placed(part.pieces, at * self._stage_bytes), event)
        return reason

    def _hand_over(self, at: int, state: State, part: Staged) -> None:
        self._handed_over.add(at)
        self._page.hand_over(at, state, part.runs)
        assert self._bell is not None
        # With a full bell, the sidecar wakes without this byte. If it has ended, `_wait_returned` detects that.
        with contextlib.suppress(OSError):
            self._bell.send(_RING, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _wait_returned(self, at: int) -> str:
        """Waits until a stage is returned. Returns why it was refused, or ""."""
        assert self._bell is not None
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        began = time.monotonic()
        deadline = began + min(_STAGE_TIMEOUT_S, self._timeout_s)
        closed = False
        while True:
            try:
                word = self._page.back(at)
            except ValueError as error:
                raise WindowLostError(f"invalid flag page: {error}") from None
            if word is not None:
                self._handed_over.discard(at)
                self._timeout_s -= time.monotonic() - began
                return "" if word.state == State.MOVED else word.reason
            left = deadline - time.monotonic()
            if closed or left <= 0:
                raise WindowLostError("the sidecar closed the window" if closed else "a stage was not returned in time")
            if poll.poll(left * 1000):
                try:
                    closed = not self._bell.recv(64, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    closed = True


def _memory(layout: Layout, reply: WindowReply, fd: int | None) -> Memory:
    if reply.kind == "host" and layout.device == "cpu" and fd is not None:
        return HostMemory(layout, fd, reply.bytes)
    if reply.kind in ("posix_fd", "ipc_handle") and layout.device == "cuda":
        from .cuda_window import CudaMemory

        return CudaMemory(layout, reply, fd)
    raise SharedMemoryError(f"KV blocks on {layout.device} cannot use a window of kind {reply.kind}")
