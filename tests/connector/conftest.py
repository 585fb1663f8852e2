"""The real sidecar in a short folder, one engine per test, and reset process-wide state of the connector."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.versions import newest, too_old

# With a vLLM that is too old only tests without vLLM run: the client, the copies.
if too_old():
    collect_ignore_glob = ["test_[!c]*.py"]
# The tier for vLLM's own offloading needs the newest one.
if not newest():
    collect_ignore = ["test_vllm_tier.py"]


@pytest.fixture(scope="module")
def binary() -> Path:
    """The sidecar's program. Tests that need it are skipped without it."""
    from servers.paths import sidecar_binary

    try:
        return sidecar_binary()
    except FileNotFoundError as error:
        pytest.skip(f"no sidecar binary: {error}")


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder short enough for a socket's name."""
    from servers.paths import short_folder

    folder = short_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.crt`, and `server.crt` and `server.key` for 127.0.0.1."""
    from servers.certificates import for_server

    folder = tmp_path_factory.mktemp("remote") / "certificates"
    for_server(folder, "127.0.0.1")
    return folder


@pytest.fixture
def remote(certificates: Path) -> Iterator[Any]:
    """A stand-in for a remote server."""
    from stub_remote import StubRemote

    made = StubRemote(certificates)
    yield made
    made.close()


@pytest.fixture
def credentials(certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables by which adapters connect to `remote`."""
    from stub_remote import KEY

    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("KVCACHEPOOL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("KVCACHEPOOL_CA_FILE", str(certificates / "ca.crt"))


@pytest.fixture
def mapping() -> Iterator[Any]:
    """Memory of a sidecar as a worker maps it."""
    from stub_sidecar import Memory

    from kvcachepool.shared import Mapping

    memory = Memory(1, 64)
    made = Mapping(1, os.dup(memory.arena_fd), os.dup(memory.table_fd), memory.arena_bytes, memory.table_bytes)
    yield made
    made.close()


@pytest.fixture
def serve() -> Iterator[Any]:
    """Serves classes to HTTP clients from this process."""
    from store_client import Servers

    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stops the copies of object clients."""
    from copy_gate import Gate

    made = Gate(monkeypatch)
    yield made
    made.opened.set()


@pytest.fixture
def pool(volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A ready sidecar. Its socket is the connector's."""
    from steps import CACHE

    from servers.sidecar import Sidecar

    sidecar = Sidecar(volume, memory="64Mi", config=CACHE)
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", str(sidecar.socket))
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Creates engines, which all end with the test. One process runs one engine at a time."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from stub_sidecar import StubSidecar

    import kvcachepool.shared as shared_module
    import kvcachepool.worker as worker_module
    from kvcachepool.layout import Ranks
    from kvcachepool.lookups import WaitBudget
    from kvcachepool.shared import Shared

    monkeypatch.setattr(worker_module, "current_ranks", lambda config: Ranks())
    # A busy machine may be slower than the normal limits.
    monkeypatch.setattr(WaitBudget, "_LATE_S", 1.0)
    made: list[Any] = []

    def make(**options: Any) -> Any:
        from engine_loop import Loop

        for earlier in made:
            earlier.close()
        made.clear()
        monkeypatch.setattr(shared_module, "_shared", Shared())
        made.append(Loop(**options))
        for fixture in map(request.getfixturevalue, request.fixturenames):
            if isinstance(fixture, StubSidecar):
                made[-1].frames_processed = fixture.processed_all
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def scripted(volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scripted pool instead of a sidecar."""
    from scripted_pool import ScriptedPool

    scripted = ScriptedPool(volume)
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", scripted.path)
    yield scripted
    scripted.close()
