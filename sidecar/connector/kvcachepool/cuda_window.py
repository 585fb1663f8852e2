"""A window in device memory, imported from the sidecar by the driver's C interface.

Copies to and from KV blocks stay on the device. All calls are made beside captures of vLLM's CUDA graphs, and none on
the default stream, whose work a capture may be made to wait for. Never run on a GPU yet: its tests run it over a
made-up driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import cuda_driver
from .copy_cuda import Batch, batch_submit
from .cuda_driver import beside_captures
from .layout import Layout
from .messages import WindowReply
from .pieces import Piece
from .shared import SharedMemoryError

_POSIX_FD = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc of the driver API."""

    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


def _device_number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class CudaMemory:
    """A window's memory in this process's address space, and copies between it and KV blocks of the same device."""

    where = "device memory"

    @beside_captures()
    def __init__(self, layout: Layout, reply: WindowReply, fd: int | None) -> None:
        """Imports it; the descriptor stays the caller's. Raises `SharedMemoryError`."""
        self._layout = layout
        self._device = layout.storages[0].device
        self._bases = [storage.data_ptr() for storage in layout.storages]
        self._bytes = reply.bytes
        self._cuda = cuda_driver.library()
        self._imported = ctypes.c_uint64(0)
        self._address = ctypes.c_uint64(0)
        self._by_handle = reply.kind == "ipc_handle"
        torch.cuda.set_device(self._device)
        lowest, _ = torch.cuda.Stream.priority_range()
        self._stream = torch.cuda.Stream(device=self._device, priority=lowest)
        self.begin_thread()
        self._submit = batch_submit()
        if self._by_handle:
            handle = _IpcHandle.from_buffer_copy(reply.handle.ljust(64, b"\0")[:64])
            address = ctypes.c_uint64(0)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
            self._address = address
        else:
            if fd is None:
                raise SharedMemoryError("a window came without its descriptor")
            try:
                self._map(fd)
            except SharedMemoryError:
                self.close()
                raise

    def _map(self, fd: int) -> None:
        size, none = ctypes.c_size_t(self._bytes), ctypes.c_ulonglong(0)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(self._imported), ctypes.c_void_p(fd), _POSIX_FD)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), none, none)
        self._call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._imported, none)
        access = _AccessDesc(_ON_DEVICE, _device_number(self._device), _READ_WRITE)
        self._call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._cuda, name)(*arguments)
        except AttributeError:
            raise SharedMemoryError(f"the driver has no {name}") from None
        if code != 0:
            raise SharedMemoryError(f"{name} failed with {code}")

    @beside_captures()
    def read(self, nbytes: int) -> bytes:
        """The window's first bytes."""
        content = ctypes.create_string_buffer(nbytes)
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        try:
            self._call("cuMemcpyDtoHAsync_v2", content, self._address, ctypes.c_size_t(nbytes), stream)
        finally:
            self._stream.synchronize()
        return content.raw

    @beside_captures()
    def write(self, content: bytes) -> None:
        """Replaces the window's first bytes."""
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        try:
            self._call("cuMemcpyHtoDAsync_v2", self._address, content, ctypes.c_size_t(len(content)), stream)
        finally:
            self._stream.synchronize()

    @beside_captures()
    def begin_thread(self) -> None:
        """Makes the device's context current on this thread."""
        torch.cuda.set_device(self._device)
        self._stream.synchronize()

    @beside_captures()
    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None:
        """Moves pieces, whose offsets are in the window, behind `event`; returns when the bytes are there."""
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            try:
                for piece in pieces:
                    batch = Batch.of(self._layout.groups[piece.group], self._bases, piece.blocks, piece.offsets)
                    window = batch.arena + np.uint64(self._address.value)
                    to, source = (batch.device, window) if kind == "load" else (window, batch.device)
                    self._submit(to, source, batch.sizes, False, self._stream.cuda_stream)
            finally:
                # Also what was submitted before an error has ended when the caller goes on.
                self._stream.synchronize()

    @beside_captures()
    def close(self) -> bool:
        """Unmaps it. False: the driver refused, and keeps it mapped, or the device's context is lost."""
        try:
            # Any thread may be the one that closes it.
            self.begin_thread()
        except RuntimeError:
            return False
        address, imported = self._address, self._imported
        self._address, self._imported = ctypes.c_uint64(0), ctypes.c_uint64(0)
        size = ctypes.c_size_t(self._bytes)
        codes = [0]
        if address.value and self._by_handle:
            codes.append(self._cuda.cuIpcCloseMemHandle(address))
        elif address.value:
            codes.append(self._cuda.cuMemUnmap(address, size))
            codes.append(self._cuda.cuMemAddressFree(address, size))
        if imported.value:
            codes.append(self._cuda.cuMemRelease(imported))
        return not any(codes)
