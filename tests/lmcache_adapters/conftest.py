"""A real sidecar for LMCache's own classes."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import certificates, paths
from servers.remote import RemoteServer
from servers.sidecar import Sidecar

# LMCache reports its use to its vendor otherwise.
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["DO_NOT_TRACK"] = "1"


@pytest.fixture
def new_sidecar() -> Iterator[Callable[..., Sidecar]]:
    """Starts sidecars that end with the test."""
    started: list[Sidecar] = []

    def start(**config: Any) -> Sidecar:
        started.append(Sidecar(paths.short_folder(), **config))
        return started[-1].start()

    yield start
    for sidecar in started:
        sidecar.stop()
        shutil.rmtree(sidecar.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_sidecar() -> Iterator[Sidecar]:
    """One sidecar for all tests that leave it as it is."""
    sidecar = Sidecar(paths.short_folder(), memory="256Mi").start()
    yield sidecar
    sidecar.stop()
    shutil.rmtree(sidecar.folder, ignore_errors=True)


@pytest.fixture
def sidecar(shared_sidecar: Sidecar) -> Sidecar:
    """The shared one, running."""
    shared_sidecar.thaw()
    return shared_sidecar


@pytest.fixture
def remote(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteServer]:
    """A server beside the shared sidecar, and the variables with its credentials."""
    certificates.for_server(tmp_path / "certificates", "127.0.0.1")
    server = RemoteServer(sidecar, tmp_path / "certificates").start()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A namespace for this test alone."""
    return hashlib.sha256(request.node.nodeid.encode()).hexdigest()
