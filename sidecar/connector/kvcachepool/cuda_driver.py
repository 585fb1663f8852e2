"""The CUDA driver for the connector's own threads, which call it while vLLM captures CUDA graphs on another one."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

#: `CU_STREAM_CAPTURE_MODE_RELAXED`.
_RELAXED = 2


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
