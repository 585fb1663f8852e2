"""The sidecar's fake CUDA driver in this process, and the parts of torch's CUDA API that the connector uses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import kvcachepool.cuda_driver as cuda_driver

T = TypeVar("T")
FAKES = Path(__file__).parents[2] / "sidecar" / "gpu" / "tests"


def build(folder: Path) -> Path:
    """The driver with its kernels, which run on the host, as a library in this folder."""
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-fPIC"]
    subprocess.run(["cc", "-c", "-fPIC", "-o", folder / "driver.o", FAKES / "fake_driver.c"], check=True)
    library = folder / "libcuda.so.1"
    sources = [FAKES / "fake_kernels.cpp", folder / "driver.o"]
    subprocess.run(["g++", *flags, "-shared", "-o", library, *sources], check=True)
    return library


def built(folder: Path) -> ctypes.CDLL:
    """The driver. All tests of the process share it, including its memory."""
    return ctypes.CDLL(str(build(folder)))


# Ends with its standard input, so with its parent.
_EXPORTER = """
import ctypes, sys
driver, address, handle = ctypes.CDLL(sys.argv[1]), ctypes.c_uint64(0), ctypes.create_string_buffer(64)
assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[2]))) == 0
assert driver.cuIpcGetMemHandle(handle, address) == 0
ctypes.memmove(address.value, b"pattern!", 8)
print(handle.raw.hex(), flush=True)
sys.stdin.read()
"""


class Exporter:
    """Another process with memory of the driver, which begins with `pattern!`."""

    def __init__(self, driver: ctypes.CDLL, nbytes: int) -> None:
        command = [sys.executable, "-S", "-c", _EXPORTER, driver._name, str(nbytes)]
        environment = os.environ | {"FAKE_CURRENT": "1"}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.handle = bytes.fromhex(self._process.stdout.readline().decode())

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def exported(driver: ctypes.CDLL, nbytes: int) -> Iterator[Exporter]:
    """A process that is killed at the end."""
    exporter = Exporter(driver, nbytes)
    try:
        yield exporter
    finally:
        exporter.kill()


def capture_mode(driver: ctypes.CDLL) -> int:
    """The capture mode of this thread."""
    mode = ctypes.c_int(0)
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    found = mode.value
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    return found


def elsewhere(run: Callable[[], T]) -> T:
    """The result of a call on another thread, whose errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class Recorded:
    """The driver with a record of calls, in order."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return int(function(*arguments))

        return call


def install(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the real driver. Returns the fake that the connector calls from now on."""
    recorded = Recorded(driver)

    class Stream:
        """A stream of the driver, with a record of its calls."""

        def __init__(self, stream: int, device: object) -> None:
            self.cuda_stream = stream
            self.calls: list[str] = []

        def wait_event(self, event: object) -> None:
            self.calls.append(f"wait {event}")
            recorded.calls.append(f"wait {event}")

        def synchronize(self) -> None:
            if code := driver.cuStreamSynchronize(ctypes.c_void_p(self.cuda_stream)):
                raise RuntimeError(f"cuStreamSynchronize failed with {code}")
            self.calls.append("synchronize")
            recorded.calls.append("synchronize")

    class Event:
        """An event of a stream. The driver copies synchronously, so it has always completed."""

        def __init__(self, blocking: bool) -> None:
            self.recorded = False

        def record(self, stream: Stream) -> None:
            self.recorded = True

        def synchronize(self) -> None:
            assert not driver.fake_captured()

    def register(address: int, nbytes: int, flags: int) -> int:
        return int(driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 1))

    def pinned(count: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        memory = np.empty(count, dtype=np.uint8)
        assert pin_memory
        assert register(memory.ctypes.data, count, 0) == 0
        weakref.finalize(memory, driver.fake_freed, ctypes.c_void_p(memory.ctypes.data))
        return torch.from_numpy(memory)

    monkeypatch.setenv("FAKE_CURRENT", "1")
    monkeypatch.setattr(cuda_driver, "library", lambda: recorded)
    monkeypatch.setattr(cuda_driver, "device_number", lambda device: 0)
    fake = SimpleNamespace(
        set_device=lambda device: None,
        ExternalStream=Stream,
        Event=Event,
        device=lambda device: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
        cudart=lambda: SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=lambda address: driver.cuMemHostUnregister(ctypes.c_void_p(address)),
        ),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr("kvcachepool.copy_cuda.torch", _Torch(pinned))
    return recorded.calls


class _Torch:
    """torch with pinned memory of the fake driver."""

    def __init__(self, pinned: Any) -> None:
        self.empty = pinned

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
