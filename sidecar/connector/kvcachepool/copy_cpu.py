"""Copies between KV blocks in host memory and the arena, with one call without the GIL per job and strip.

TorchScript runs the whole loop in C++ and releases the GIL once. If vLLM's engine loop runs Python at the same time,
each call that takes the GIL back waits up to 5 ms, so the number of calls per job matters. One `Tensor.copy_` copies a
block's rows of many layers. Pieces stay below ATen's grain of 32768 elements, so that no OpenMP team starts beside the
model's own.
"""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from .jobs import STORE
from .layout import Layout, Strip, strips
from .pieces import Piece
from .shared import ROW_BYTES, Mapping

logger = logging.getLogger("kvcachepool")

_GRAIN_ELEMENTS = 32767


def _copy(
    kv: torch.Tensor, arena: torch.Tensor, blocks: list[int], offsets: list[int], limit: int, store: bool
) -> None:
    planes = kv.size(0)
    width = kv.size(2)
    step = max(1, limit // width)
    for i in range(len(blocks)):
        rows = kv.select(1, blocks[i])
        slot = torch.as_strided(arena, [planes, width], [width, 1], offsets[i])
        to = slot if store else rows
        source = rows if store else slot
        if planes * width <= limit:
            to.copy_(source)
            continue
        for p in range(0, planes, step):
            for c in range(0, width, limit):
                to[p : p + step, c : c + limit].copy_(source[p : p + step, c : c + limit])


class _Window(NamedTuple):
    """A strip as a view `[planes, blocks, elements]`, with the arena as elements of the same type."""

    kv: torch.Tensor
    arena: torch.Tensor
    at: int
    itemsize: int


def _without_gil(loop: Callable[..., None]) -> Callable[..., None]:
    """The loop as TorchScript. If a later torch has none, plain Python: correct, but slower beside busy Python
    threads.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return cast("Callable[..., None]", torch.jit.script(loop))
    except Exception as error:
        logger.warning("torch.jit.script failed, so copies hold the GIL and slow vLLM down: %s", error)
        return loop


class CpuCopier:
    """Copies blocks of one rank's KV cache. All methods except `attach` and `detach` run on the copy thread."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._windows: list[list[_Window]] = []
        self._copy = _without_gil(_copy)

    def begin_thread(self) -> None:
        """Frees the copy thread from the OpenMP pinning that it inherits, and warms up TorchScript."""
        with torch.inference_mode():
            for _ in range(3):
                for store in (False, True):
                    tiny = torch.zeros(4, dtype=torch.complex128)
                    self._copy(tiny.view(2, 2, 1), torch.zeros_like(tiny), [0, 1], [0, 1], 1, store)
        try:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        except OSError:
            # A cpuset may forbid it. The copies then share the model's cores.
            return

    @torch.inference_mode()
    def attach(self, mapping: Mapping) -> None:
        """Creates the views of the arena that `copy` uses."""
        arena = torch.frombuffer(mapping.arena_buffer(), dtype=torch.uint8)
        arena = arena[: arena.numel() - arena.numel() % ROW_BYTES]
        self._windows = [
            [self._window(arena, strip, group.block_bytes) for strip in strips(group.planes)]
            for group in self._layout.groups
        ]

    def _window(self, arena: torch.Tensor, strip: Strip, block_bytes: int) -> _Window:
        flat = self._layout.storages[strip.storage]
        numbers = (strip.offset, strip.plane_stride, strip.block_stride, strip.nbytes, strip.at, block_bytes)
        dtype = next(
            dtype
            for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
            if all(number % dtype.itemsize == 0 for number in numbers)
        )
        size = dtype.itemsize
        whole = flat[: flat.numel() - flat.numel() % size].view(dtype)
        kv = torch.as_strided(
            whole,
            (strip.planes, self._layout.num_blocks, strip.nbytes // size),
            (strip.plane_stride // size, strip.block_stride // size, 1),
            strip.offset // size,
        )
        return _Window(kv, arena.view(dtype), strip.at, size)

    def detach(self) -> None:
        self._windows = []

    def copy(self, kind: str, pieces: Sequence[Piece], event: object) -> None:
        """Copies all pieces and returns when the bytes have arrived. The caller has checked block ids and offsets."""
        for piece in pieces:
            for window in self._windows[piece.group]:
                offsets = [(offset + window.at) // window.itemsize for offset in piece.offsets]
                self._copy(window.kv, window.arena, list(piece.blocks), offsets, _GRAIN_ELEMENTS, kind == STORE)

    def record(self) -> object:
        """Returns an event that later copies wait for. Host memory needs none."""
        return None

    def synchronize(self) -> None:
        """Waits for all copies. Host copies have ended when `copy` returns."""
