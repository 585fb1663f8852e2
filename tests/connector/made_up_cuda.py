"""The sidecar's made-up CUDA driver in this process, and as much of torch's part of CUDA as the connector uses."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvcachepool.cuda_driver as cuda_driver
import kvcachepool.cuda_window as cuda_window

SOURCE = Path(__file__).parents[2] / "sidecar" / "tests" / "served" / "fake_driver.c"


def built(folder: Path) -> ctypes.CDLL:
    """The driver. It is one for all tests of the process, as its memory is."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: cc")
    path = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(SOURCE)], check=True)
    return ctypes.CDLL(str(path))


def capture_mode(driver: ctypes.CDLL) -> int:
    """That of this thread."""
    mode = ctypes.c_int(0)
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    said = mode.value
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    return said


def install(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it in the place of the real ones. What is copied by torch's streams is copied at once."""

    class Stream:
        """A stream of the driver, and what was asked of it."""

        def __init__(self, **options: Any) -> None:
            made = ctypes.c_void_p(0)
            assert driver.cuStreamCreateWithPriority(ctypes.byref(made), 1, options["priority"]) == 0
            self.cuda_stream = made.value
            self.asked: list[str] = []

        def wait_event(self, event: object) -> None:
            self.asked.append(f"wait {event}")

        def synchronize(self) -> None:
            assert driver.cuStreamSynchronize(ctypes.c_void_p(self.cuda_stream)) == 0
            self.asked.append("synchronize")

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    def submit(to: Any, source: Any, sizes: Any, stable: bool, stream: int) -> None:
        for target, origin, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            where = (ctypes.c_uint64(target), ctypes.c_void_p(origin), ctypes.c_size_t(size))
            assert driver.cuMemcpyHtoDAsync_v2(*where, ctypes.c_void_p(stream)) == 0

    def register(address: int, nbytes: int, flags: int) -> int:
        return int(driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 1))

    def pinned(count: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        ring = torch.from_numpy(np.empty(count, dtype=np.uint8))
        assert pin_memory
        assert register(ring.data_ptr(), count, 0) == 0
        return ring

    monkeypatch.setenv("FAKE_CURRENT", "1")
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    monkeypatch.setattr(cuda_window, "_device_number", lambda device: 0)
    for module in ("kvcachepool.cuda_window", "kvcachepool.copy_cuda"):
        monkeypatch.setattr(f"{module}.batch_submit", lambda: submit)
    fake = SimpleNamespace(
        set_device=lambda device: None,
        Stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        cudart=lambda: SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=lambda address: driver.cuMemHostUnregister(ctypes.c_void_p(address)),
        ),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr("kvcachepool.copy_cuda.torch", _Torch(pinned))


class _Torch:
    """torch with pinned memory of the made-up driver."""

    def __init__(self, pinned: Any) -> None:
        self.empty = pinned

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
