"""Copies by a window: this worker between KV blocks and the stages of a window, the sidecar between window and arena.

A stage is handed over and comes back by the flag page; a byte on the bell, a socket that both sides hold, says when to
look. The bell's end is the end of the window, also where the sidecar was killed. Nothing here waits longer than
`_PATIENCE_S` for a stage.
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

#: A stage that the sidecar has for so long is lost, and the window with it; and so is one of a job that waited longer
#: than this and for its bytes at a speed that any machine has.
_PATIENCE_S = 5.0
_LEAST_BYTES_PER_S = 250e6


#: On the bell: look at the page; and the last byte that is sent: the window's memory is mapped here no more.
_RING, _UNMAPPED = b"\x01", b"\x02"


class WindowLostError(Exception):
    """The sidecar gave a stage not back: what it copies for it may still go on. The window is not used any more."""


class Memory(Protocol):
    """A window's memory, mapped, and copies between it and KV blocks on the same device."""

    #: Where it is, for people.
    where: str
    #: Why kernels that would move small pieces do not, by name; "" = they do, or there are no small pieces.
    no_kernels: str

    def read(self, nbytes: int) -> bytes: ...
    def write(self, content: bytes) -> None: ...
    def begin_thread(self) -> None: ...
    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None: ...
    def close(self) -> bool: ...


class HostMemory:
    """A window in host memory: the copies of an engine on CPUs, with the window in the arena's place."""

    where = "host memory"
    no_kernels = ""

    def __init__(self, layout: Layout, fd: int, nbytes: int) -> None:
        """Maps it; the descriptor stays the caller's. Raises `SharedMemoryError`."""
        if os.fstat(fd).st_size < nbytes:
            raise SharedMemoryError("the window is shorter than its stages")
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
        """Makes the copy's slow first calls."""
        self._copier.begin_thread()

    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None:
        """Moves pieces, whose offsets are in the window; returns when the bytes are there."""
        self._copier.copy(kind, pieces, event)

    def close(self) -> bool:
        self._copier.detach()
        if self._bytes:
            unmap(self._address, self._bytes)
            self._bytes = 0
        return True


class Staged(NamedTuple):
    """What goes through a stage at once: runs as rows (slot, generation, offset in the slot, bytes), and the pieces of
    these bytes with offsets in the stage.
    """

    runs: npt.NDArray[np.uint32]
    pieces: list[Piece]


def stage(pieces: Sequence[Piece], refs: Refs, block_bytes: Sequence[int], stage_bytes: int) -> list[Staged]:
    """Cuts a job into stages. `block_bytes`: by group; none is larger than a stage."""
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
    """One window. Made on the client's reader thread, used by the copy thread, closed when no copy uses it any more."""

    def __init__(self, layout: Layout, reply: WindowReply, fds: list[int], boot: int) -> None:
        """Maps what came with the answer of the sidecar's boot with this token, and puts the complement of the pattern
        in its place. Takes the descriptors. Raises `SharedMemoryError`, also where the pattern is not there: each side
        must see what the other writes.
        """
        named = dict(zip(reply.fds, fds, strict=False))
        self._bell = socket.socket(fileno=named.pop("bell")) if "bell" in named else None
        self._closing = contextlib.ExitStack()
        self._mapped = False
        try:
            if self._bell is None or "page" not in named:
                raise SharedMemoryError("a window came without page or bell")
            self._closing.callback(self._hang_up)
            if reply.stages * reply.stage_bytes > reply.bytes:
                raise SharedMemoryError("the stages of a window are longer than the window")
            self._block_bytes = [group.block_bytes for group in layout.groups]
            self._stage_bytes = reply.stage_bytes
            if max(self._block_bytes) > self._stage_bytes:
                raise SharedMemoryError(f"a block is larger than a stage of {self._stage_bytes} bytes")
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
                raise SharedMemoryError("what the sidecar wrote into the window is not seen here")
            self.memory.write(bytes(255 - byte for byte in reply.pattern))
        except BaseException:
            self._closing.close()
            raise
        finally:
            for fd in named.values():
                os.close(fd)
        self.boot = boot
        self._stages = reply.stages
        #: Stages that the sidecar has.
        self._out: set[int] = set()
        self._prepared = False
        #: How long the job that is being copied may still wait for the sidecar.
        self._patience_s = 0.0

    def copy(self, kind: str, plan: Plan, event: Any) -> str:
        """Moves all pieces of a plan behind `event`. Returns "" when the bytes are there, or why the sidecar refused a
        stage; nothing of the job moves any more then. Raises `WindowLostError`.
        """
        if not self._prepared:
            self.memory.begin_thread()
            self._prepared = True
        parts = stage(plan.pieces, plan.refs, self._block_bytes, self._stage_bytes)
        nbytes = sum(int(part.runs[:, 3].sum()) for part in parts)
        self._patience_s = _PATIENCE_S + nbytes / _LEAST_BYTES_PER_S
        try:
            return self._load(parts, event) if kind == "load" else self._store(parts, event)
        except WindowLostError:
            raise
        except Exception as error:
            if self._out:
                # What the sidecar still has must not be used again.
                raise WindowLostError(f"a copy failed while the sidecar had stages: {error}") from error
            raise

    def close(self) -> None:
        """Hangs up and unmaps: the sidecar ends what it copies and frees the window."""
        self._closing.close()

    def _unmap(self) -> None:
        self._mapped = not self.memory.close()

    def _hang_up(self) -> None:
        """Tells the sidecar whether it may free the memory: some must not be freed while it is mapped here."""
        assert self._bell is not None
        # A forked child may hold the socket open: only a shutdown ends it then.
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
                reason = reason or self._back(filled.popleft())
            if reason:
                break
            at = number % self._stages
            self.memory.copy("store", _placed(part.pieces, at * self._stage_bytes), event)
            self._hand_over(at, State.FILLED, part)
            filled.append(at)
        # All come back, also behind a refusal: then nothing of this job is copied any more.
        for at in filled:
            back = self._back(at)
            reason = reason or back
        return reason

    def _load(self, parts: list[Staged], event: Any) -> str:
        reason = ""
        wanted: deque[tuple[int, Staged]] = deque()
        for number, part in enumerate(parts):
            if len(wanted) == self._stages:
                reason = reason or self._scatter(*wanted.popleft(), event)
            if reason:
                break
            at = number % self._stages
            self._hand_over(at, State.WANTED, part)
            wanted.append((at, part))
        # All come back, also behind a refusal, which no later stage makes good.
        for at, part in wanted:
            back = self._back(at) if reason else self._scatter(at, part, event)
            reason = reason or back
        return reason

    def _scatter(self, at: int, part: Staged, event: Any) -> str:
        reason = self._back(at)
        if not reason:
            self.memory.copy("load", _placed(part.pieces, at * self._stage_bytes), event)
        return reason

    def _hand_over(self, at: int, state: State, part: Staged) -> None:
        self._out.add(at)
        self._page.hand_over(at, state, part.runs)
        assert self._bell is not None
        # One that is full is heard all the same; one that nobody holds is seen while waiting.
        with contextlib.suppress(OSError):
            self._bell.send(_RING, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _back(self, at: int) -> str:
        """Waits until a stage is back. Returns why it was refused, or ""."""
        assert self._bell is not None
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        began = time.monotonic()
        deadline = began + min(_PATIENCE_S, self._patience_s)
        over = False
        while True:
            try:
                word = self._page.back(at)
            except ValueError as error:
                raise WindowLostError(f"the flag page is torn: {error}") from None
            if word is not None:
                self._out.discard(at)
                self._patience_s -= time.monotonic() - began
                return "" if word.state == State.MOVED else word.reason
            left = deadline - time.monotonic()
            if over or left <= 0:
                raise WindowLostError("the sidecar hung up" if over else "no answer in time")
            if poll.poll(left * 1000):
                try:
                    over = not self._bell.recv(64, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    over = True


def _memory(layout: Layout, reply: WindowReply, fd: int | None) -> Memory:
    if reply.kind == "host" and layout.device == "cpu" and fd is not None:
        return HostMemory(layout, fd, reply.bytes)
    if reply.kind in ("posix_fd", "ipc_handle") and layout.device == "cuda":
        from .cuda_window import CudaMemory

        return CudaMemory(layout, reply, fd)
    raise SharedMemoryError(f"a window of kind {reply.kind} is of no use to KV blocks on {layout.device}")
