"""The CUDA driver for the connector's own threads, which call it while vLLM captures CUDA graphs on another thread."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

#: `CU_STREAM_CAPTURE_MODE_RELAXED`.
_RELAXED = 2
#: `CU_STREAM_NON_BLOCKING`.
_NON_BLOCKING = 1


def library() -> ctypes.CDLL:
    """The driver's library. Raises `OSError` if there is none."""
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Calls inside neither fail because of another thread's capture nor end it. Also a decorator. Raises
    `RuntimeError`.

    Torch captures in the global mode. Allocations, page locks, synchronous copies and event queries are then refused on
    all threads in that mode, and end the capture. This sets the thread's own mode and restores it afterwards.
    """
    driver = library()
    mode = ctypes.c_int(_RELAXED)
    code = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if code != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with {code}")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def device_number(device: torch.device) -> int:
    """The driver's ordinal of a device."""
    return torch.cuda.current_device() if device.index is None else device.index


@beside_captures()
def make_current(device: torch.device) -> None:
    """Makes the context of a device on which this process has memory current on this thread. Raises `RuntimeError`.

    Older torch does not make a context current if the device is already the thread's default, which the first device
    is. Direct calls of the driver would then fail.
    """
    torch.cuda.set_device(device)
    driver = library()
    context, handle = ctypes.c_void_p(0), ctypes.c_int(0)
    code = driver.cuCtxGetCurrent(ctypes.byref(context))
    if code == 0 and not context.value:
        code = driver.cuDeviceGet(ctypes.byref(handle), device_number(device))
        code = code or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        if code == 0:
            code = driver.cuCtxSetCurrent(context)
            # The context stays alive, because the owner of the memory retains it.
            driver.cuDevicePrimaryCtxRelease_v2(handle)
    if code != 0:
        raise RuntimeError(f"no CUDA context: the driver failed with {code}")


@beside_captures()
def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of lowest priority on this device that no other code uses, until `destroy`. Raises `RuntimeError`.

    Torch hands out the same 32 streams per priority in turn, and its lowest priority is the default. vLLM may capture a
    graph on one of them, and work on that stream would become part of the graph.
    """
    driver = library()
    least, greatest, made = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_void_p(0)
    with torch.cuda.device(device):
        make_current(device)
        code = driver.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        code = code or driver.cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, least)
    if code != 0:
        raise RuntimeError(f"no CUDA stream: the driver failed with {code}")
    return torch.cuda.ExternalStream(made.value, device=device)


def destroy(stream: torch.cuda.Stream) -> None:
    """Destroys a stream of `own_stream`; its pending work still completes. The context of its device is current."""
    library().cuStreamDestroy_v2(ctypes.c_void_p(stream.cuda_stream))
