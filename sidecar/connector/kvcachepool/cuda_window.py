"""A window in device memory, imported from the sidecar through the driver's C interface.

Copies to and from KV blocks stay on the device. Kernels copy small pieces if the driver accepts them, and copy engines
copy the rest. All calls use the mode that does not disturb captures of CUDA graphs, and none use the default stream,
because a capture may have to wait for it. Not run on a GPU yet: tests use a fake driver.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import cuda_driver
from .copy_cuda import Batch, batch_submit
from .cuda_driver import beside_captures, destroy, make_current, own_stream
from .layout import Layout
from .messages import WindowReply
from .page_kernels import NoKernelsError, PageKernels, small_groups
from .pieces import Piece
from .shared import SharedMemoryError, StillMappedError

logger = logging.getLogger("kvcachepool")

_POSIX_FD = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_LAZY_PEER_ACCESS = 1
#: `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
_ORDINAL = 9


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc of the driver API."""

    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


class CudaMemory:
    """A window's memory in this process's address space, and copies between it and KV blocks of the same device."""

    where = "device memory"

    @beside_captures()
    def __init__(self, layout: Layout, reply: WindowReply, fd: int | None) -> None:
        """Imports the memory. The caller keeps the descriptor. Raises `SharedMemoryError`, `RuntimeError`, and
        `StillMappedError` if the memory was imported and could not be unmapped.
        """
        self._layout = layout
        self._device = layout.storages[0].device
        self._bases = [storage.data_ptr() for storage in layout.storages]
        self._bytes = reply.bytes
        self._cuda = cuda_driver.library()
        self._imported = ctypes.c_uint64(0)
        self._address = ctypes.c_uint64(0)
        self._by_handle = reply.kind == "ipc_handle"
        self._closed = False
        self._kernels: PageKernels | None = None
        self.no_kernels = ""
        make_current(self._device)
        self._stream = own_stream(self._device)
        try:
            self.begin_thread()
            self._submit, _ = batch_submit()
            if self._by_handle:
                self._open(reply.handle)
            elif fd is None:
                raise SharedMemoryError("WINDOW response without the descriptor of the window's memory")
            else:
                self._map(fd)
            self._check_device()
            self._load_kernels()
        except BaseException as error:
            if not self.close():
                raise StillMappedError(str(error)) from error
            raise

    def _open(self, handle: bytes) -> None:
        given = _IpcHandle.from_buffer_copy(handle.ljust(64, b"\0")[:64])
        address = ctypes.c_uint64(0)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        self._address = address

    def _map(self, fd: int) -> None:
        size, none = ctypes.c_size_t(self._bytes), ctypes.c_ulonglong(0)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(self._imported), ctypes.c_void_p(fd), _POSIX_FD)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), none, none)
        self._call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._imported, none)
        access = _AccessDesc(_ON_DEVICE, cuda_driver.device_number(self._device), _READ_WRITE)
        self._call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _check_device(self) -> None:
        """Memory of another device could be mapped too, but all copies would cross devices, slowly."""
        ordinal, own = ctypes.c_int(-1), cuda_driver.device_number(self._device)
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _ORDINAL, self._address)
        if ordinal.value != own:
            raise SharedMemoryError(f"the window is on device {ordinal.value}, the KV blocks are on device {own}")

    def _load_kernels(self) -> None:
        """A window works without kernels, so no failure here is an error."""
        address, stream = self._address.value, self._stream.cuda_stream
        try:
            if groups := small_groups(self._layout, self._bases):
                self._kernels = PageKernels(groups, self._layout.num_blocks, address, self._bytes, stream)
        except NoKernelsError as error:
            self._do_without(error)
        except (OSError, LookupError, TypeError, ValueError) as error:
            self._do_without(NoKernelsError("BadPackage", repr(error)))

    def _do_without(self, error: NoKernelsError) -> None:
        self.no_kernels = error.reason
        logger.warning("copy kernels are not available, so copy engines copy small pieces of KV blocks: %s", error)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._cuda, name)(*arguments)
        except AttributeError:
            raise SharedMemoryError(f"the driver has no {name}") from None
        if code != 0:
            raise SharedMemoryError(f"{name} failed with {code}")

    @beside_captures()
    def read(self, nbytes: int) -> bytes:
        content = ctypes.create_string_buffer(nbytes)
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        try:
            self._call("cuMemcpyDtoHAsync_v2", content, self._address, ctypes.c_size_t(nbytes), stream)
        finally:
            self._stream.synchronize()
        return content.raw

    @beside_captures()
    def write(self, content: bytes) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        try:
            self._call("cuMemcpyHtoDAsync_v2", self._address, content, ctypes.c_size_t(len(content)), stream)
        finally:
            self._stream.synchronize()

    @beside_captures()
    def begin_thread(self) -> None:
        """Makes the device's context current on this thread."""
        make_current(self._device)
        self._stream.synchronize()

    @beside_captures()
    def copy(self, kind: str, pieces: Sequence[Piece], event: Any) -> None:
        """Copies pieces with offsets in the window, after `event`. Returns when the bytes have arrived."""
        with torch.cuda.stream(self._stream):
            try:
                small = self._placed(pieces)
                if event is not None:
                    self._stream.wait_event(event)
                moved = self._launched(kind, small)
                batch = Batch.of_job(self._layout, self._bases, [one for one in pieces if one.group not in moved])
                if len(batch.sizes):
                    window = batch.arena + np.uint64(self._address.value)
                    to, source = (batch.device, window) if kind == "load" else (window, batch.device)
                    self._submit(to, source, batch.sizes, False, self._stream.cuda_stream)
            finally:
                # Submitted copies have ended when the caller continues, even after an error.
                self._stream.synchronize()
        if moved and self._kernels is not None and self._kernels.refused(self._stream.cuda_stream):
            raise RuntimeError("kernels got block ids that are not in the KV cache")

    def _placed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces for the kernels, which have their block ids now."""
        if self._kernels is None:
            return []
        small = [piece for piece in pieces if self._kernels.takes(piece)]
        try:
            if small:
                self._kernels.place(small, self._stream.cuda_stream)
        except NoKernelsError as error:
            self._lose_kernels(error)
            return []
        return small

    def _launched(self, kind: str, pieces: Sequence[Piece]) -> set[int]:
        """Launches the kernels. Returns the groups that they copy."""
        if self._kernels is None:
            return set()
        try:
            self._kernels.copy(kind, pieces, self._stream.cuda_stream)
        except NoKernelsError as error:
            self._lose_kernels(error)
            return set()
        return {piece.group for piece in pieces}

    def _lose_kernels(self, error: NoKernelsError) -> None:
        """Stops using kernels, including for the copies that were just launched."""
        # Launched kernels may still read their tables.
        self._stream.synchronize()
        self._give_kernels_back()
        self._do_without(error)

    def _give_kernels_back(self) -> None:
        if self._kernels is not None:
            self._kernels.close()
        self._kernels = None

    @beside_captures()
    def close(self) -> bool:
        """Unmaps the memory. Returns False if the driver refused and keeps it mapped, or if the device's context is
        lost.
        """
        if self._closed:
            return True
        try:
            # Any thread may close it.
            self.begin_thread()
        except RuntimeError:
            return False
        self._closed = True
        self._give_kernels_back()
        destroy(self._stream)
        size = ctypes.c_size_t(self._bytes)
        codes = [0]
        if self._address.value and self._by_handle:
            codes.append(self._cuda.cuIpcCloseMemHandle(self._address))
        elif self._address.value:
            codes.append(self._cuda.cuMemUnmap(self._address, size))
            codes.append(self._cuda.cuMemAddressFree(self._address, size))
        if self._imported.value:
            codes.append(self._cuda.cuMemRelease(self._imported))
        return not any(codes)
