"""The CUDA driver for the connector's own threads, which call it while vLLM captures CUDA graphs on another one."""

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
    """The driver's library. Raises `OSError` where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Calls within neither fail for a capture of another thread nor end it. Also a decorator. Raises `RuntimeError`.

    Torch captures in the global mode: then allocations, page locks, synchronous copies and questions to events are
    refused on every thread that has not said that it means no capture, and the capture is lost. The mode is the
    thread's own and is given back, whoever's thread it is.
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
    """Makes a device, on which this process has memory, and its context current on this thread. Raises `RuntimeError`.

    Older torch makes no context current when it is told the device that it takes for the thread's own anyway, as the
    first one is: what asks the driver itself would be refused.
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
            # It stays: who allocated the memory holds it.
            driver.cuDevicePrimaryCtxRelease_v2(handle)
    if code != 0:
        raise RuntimeError(f"no context: the driver failed with {code}")


@beside_captures()
def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of lowest priority on this device that nobody else has, until `destroy`. Raises `RuntimeError`.

    Torch hands out the same 32 streams of a priority in turn, and its lowest priority is that of everybody: one of
    them may be the stream on which vLLM captures a graph, and what was asked of it would become part of the graph.
    """
    driver = library()
    least, greatest, made = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_void_p(0)
    with torch.cuda.device(device):
        make_current(device)
        code = driver.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        code = code or driver.cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, least)
    if code != 0:
        raise RuntimeError(f"no stream: the driver failed with {code}")
    return torch.cuda.ExternalStream(made.value, device=device)


def destroy(stream: torch.cuda.Stream) -> None:
    """Ends a stream of `own_stream`; what was asked of it is still done. Its device's context is current."""
    library().cuStreamDestroy_v2(ctypes.c_void_p(stream.cuda_stream))
