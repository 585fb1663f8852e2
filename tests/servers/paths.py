"""Paths: the sidecar's binary, the cache outside of the checkout, short folders for sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cache() -> Path:
    """Folder for files that are created once and kept."""
    if chosen := os.environ.get("KVCACHEPOOL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcachepool"


def target() -> Path:
    """Cargo's target folder."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or cache() / "target")


def sidecar_binary() -> Path:
    """The built sidecar; KVCACHEPOOL_SIDECAR names another one."""
    path = Path(os.environ.get("KVCACHEPOOL_SIDECAR") or target() / "debug" / "kvcachepool-sidecar")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: cargo build --bin kvcachepool-sidecar (make test does it)")
    return path


def example(name: str) -> Path:
    """A built example; KVCACHEPOOL_EXAMPLES names another folder of them."""
    path = Path(os.environ.get("KVCACHEPOOL_EXAMPLES") or target() / "debug" / "examples") / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: cargo build --example {name} (its make target does it)")
    return path


def short_folder() -> Path:
    """A new folder with a path short enough for a socket (108 bytes in all)."""
    return Path(tempfile.mkdtemp(prefix="kvcp-", dir="/tmp"))


#: No connection that leaves is given a port below 32768, so nothing takes one while its server is down. From 30000
#: they are those of a cluster's services. Processes with neighbouring ids start far from each other.
_PORTS = itertools.islice(itertools.cycle(range(12_000, 30_000)), os.getpid() * 7_919 % 18_000, None)


def free_port() -> int:
    """A free port of the loopback interface that this process did not return before."""
    for port in itertools.islice(_PORTS, 18_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
