"""Copies between KV blocks and the arena, by the kind of device that holds the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .layout import Layout, Unserved
from .pieces import Piece
from .shared import Mapping


class Copier(Protocol):
    """Copies blocks of one kind of device; see `copy_cpu.CpuCopier`, `copy_cuda.CudaCopier`."""

    def begin_thread(self) -> None: ...
    def attach(self, mapping: Mapping) -> None: ...
    def detach(self) -> None: ...
    def record(self) -> object: ...
    def copy(self, kind: str, pieces: Sequence[Piece], event: object) -> None: ...
    def synchronize(self) -> None: ...


def copier_of(layout: Layout, count: Callable[[str], None]) -> Copier:
    """The copier for a layout's blocks. `count` counts a named event. Raises `Unserved`."""
    if layout.device == "cpu":
        from .copy_cpu import CpuCopier

        return CpuCopier(layout)
    if layout.device == "cuda" and torch.version.hip is not None:
        raise Unserved("DeviceUnsupported/rocm", "ROCm is not supported: expected an NVIDIA GPU or a CPU")
    if layout.device == "cuda":
        from .copy_cuda import CudaCopier

        return CudaCopier(layout, count)
    raise Unserved(f"DeviceUnsupported/{layout.device}", "expected KV blocks on an NVIDIA GPU or a CPU")
