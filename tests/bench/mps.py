"""NVIDIA's MPS, which lets processes share a GPU without time slices: a daemon for the time of a measurement."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from servers.paths import short_folder

_CONTROL = "nvidia-cuda-mps-control"


class NoMps(Exception):
    """MPS is missing, does not start, or serves no client."""


def _tell(command: list[str], environment: dict[str, str], text: str = "") -> str:
    try:
        done = subprocess.run(
            command, env=os.environ | environment, input=text, capture_output=True, text=True, timeout=60, check=True
        )
    except FileNotFoundError:
        raise NoMps(f"NoMps: {_CONTROL} is not on this machine") from None
    except subprocess.CalledProcessError as error:
        raise NoMps(f"MpsFailed: {' '.join(command)}: {error.stderr.strip() or error}") from None
    except subprocess.TimeoutExpired as error:
        raise NoMps(f"MpsFailed: {error}") from None
    return done.stdout.strip()


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """The environment of clients. Raises `NoMps`, also at the end if no client was served."""
    folder = short_folder()
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in environment.values():
        os.mkdir(path)
    try:
        _tell([_CONTROL, "-d"], environment)
        try:
            yield environment
            if not _tell([_CONTROL], environment, "get_server_list\n"):
                raise NoMps("MpsUnused: its daemon served no client")
        finally:
            _tell([_CONTROL], environment, "quit\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
