"""A rank with KV blocks on a fake device and a window of the real sidecar over the same driver. Either is killed."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fake_cuda
import pytest

pytest.importorskip("msgspec")

from gpu import place
from gpu.rank import Rank
from kvcachepool import messages
from kvcachepool.copy_window import WindowLostError
from kvcachepool.wire import Op
from servers.sidecar import Sidecar
from servers.waiting import wait_for

FIRST = "11111111-1111-1111-1111-111111111100"
HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
BLOCKS, OTHERS = [(7, 2), (23, 1), (5, 6)], [(4, 3), (9, 10), (22, 11)]
#: Config of the sidecar, and the expected name of its window.
EXPORTS = [({}, "descriptor"), ({"FAKE_NO_FD": "1"}, "IPC handle")]
COPIED = "kvcachepool_window_copied_bytes_total"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    return Path(shutil.copy(fake_cuda.build(folder), folder / "libnvidia-ml.so.1")).with_name("libcuda.so.1")


class Over:
    """A sidecar over the fake driver. While the file `held` exists, no copy ends."""

    def __init__(self, sidecar: Sidecar, library: Path, held: Path, export: str) -> None:
        self.sidecar = sidecar
        self.library = library
        self.export = export
        self.held = held

    def hold(self) -> None:
        self.held.write_bytes(b"")

    def holds(self) -> None:
        """Waits until a copy has started and is held."""
        wait_for(self.held.with_suffix(".asked").exists, 20, "a copy")

    def release(self) -> None:
        self.held.unlink(missing_ok=True)
        self.held.with_suffix(".asked").unlink(missing_ok=True)


@pytest.fixture(params=EXPORTS, ids=["descriptor", "handle"])
def over(
    request: pytest.FixtureRequest, volume: Path, binary: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Over]:
    settings, export = request.param
    transfer = {"mode": "CudaWindow", "windowSize": "16Mi"}
    sidecar = Sidecar(volume / "pod", memory="64Mi", config={"transfer": transfer})
    with monkeypatch.context() as environment:
        environment.setenv("LD_LIBRARY_PATH", str(library.parent))
        environment.setenv("FAKE_HOLD", str(volume / "held"))
        for name, value in settings.items():
            environment.setenv(name, value)
        sidecar.start()
    made = Over(sidecar, library, volume / "held", export)
    yield made
    made.release()
    sidecar.stop()


def on_device(driver: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
    """KV blocks in host memory count as those of the fake device, which can access them."""
    fake_cuda.install(driver, patch)
    patch.setenv("KVCACHEPOOL_GPU_REHEARSAL", "1")
    patch.setattr(place, "device_uuid", lambda: FIRST)


@contextlib.contextmanager
def rank(socket: Path, name: str = "BLHNC") -> Iterator[Rank]:
    """A rank with a window. It ends with the block."""
    layout = place.kv_cache(name)._replace(device="cuda")
    made = Rank(SimpleNamespace(socket=socket), layout)
    try:
        assert made.reasons == []
        yield made
    finally:
        made.close()


@pytest.fixture
def device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(ctypes.CDLL(str(library)), monkeypatch)


def there_and_back(made: Rank, seed: str) -> None:
    hashes = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(3)]
    wanted = place.contents(made.layout)
    made.store(hashes, BLOCKS)
    made.load(hashes, OTHERS, seed)
    for into, origin in zip(OTHERS, BLOCKS, strict=True):
        for number, source in zip(into, origin, strict=True):
            wanted[number] = wanted[source]
    assert place.contents(made.layout) == wanted


def readable(made: Rank) -> bool:
    """Whether any of the chunks can be loaded."""
    body = messages.Probe(request="p", hashes=b"".join(HASHES), local_tokens=0, budget_ms=0)
    reply, _ = made.scheduler.request(Op.PROBE, body, messages.ProbeReply)
    return messages.CHUNK_READY in reply.states


def lost(over: Over, made: Rank, kind: str, refs: bytes) -> None:
    """Kills the sidecar's engine process during its copy for this job, which ends without its window."""
    with ThreadPoolExecutor(1) as thread:
        over.hold()
        job = thread.submit(made.copied, kind, refs, BLOCKS)
        over.holds()
        over.sidecar.kill_engine()
        with pytest.raises(WindowLostError):
            job.result(20)


def test_bytes_copied_through_a_window_in_device_memory_are_unchanged(over: Over, device: None) -> None:
    for number, name in enumerate(("BLHNC", "LBHNC")):
        with rank(over.sidecar.socket, name) as made:
            there_and_back(made, name)
            assert (made.live.memory._kernels is not None) == (name == "LBHNC"), "kernels move small pieces"
            assert made.live.memory.no_kernels == ""
            sessions = over.sidecar.status()["sessions"]
            reply = [session["transfer_reason"] for session in sessions if session.get("transfer") == "cuda_window"]
            assert reply == [f"memory of Fake H100, by {over.export}"]
        nbytes = 3 * 2 * place.BLOCK_BYTES * (number + 1)
        for direction in ("store", "load"):
            assert over.sidecar.metrics().total(COPIED, direction=direction) == nbytes


def test_a_sidecar_that_dies_during_a_copy_loads_nothing(over: Over, device: None) -> None:
    with rank(over.sidecar.socket) as made:
        lost(over, made, "store", made.granted(HASHES).refs)
    over.release()
    over.sidecar.wait_ready()
    with rank(over.sidecar.socket) as made:
        assert not readable(made), "what was not committed"
        there_and_back(made, "after a store")
        refs = made.pinned([hashlib.sha256(f"after a store {i}".encode()).digest() for i in range(3)], "l").refs
        before = place.contents(made.layout)
        lost(over, made, "load", refs)
        assert place.contents(made.layout) == before
    over.release()
    over.sidecar.wait_ready()
    with rank(over.sidecar.socket) as made:
        there_and_back(made, "after a load")


def dies(library: str, socket: str) -> None:
    """A separate process that stores chunks, and is killed meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        on_device(ctypes.CDLL(library), patch)
        with rank(Path(socket)) as made:
            storage = made.layout.storages[0]
            ctypes.memset(storage.data_ptr(), 0xDD, storage.numel())
            print("ready", flush=True)
            sys.stdin.readline()
            made.store(HASHES, BLOCKS)


def test_a_worker_that_dies_during_a_copy_publishes_nothing(over: Over, device: None) -> None:
    called = f"import test_cuda_sidecar as t; t.dies({str(over.library)!r}, {str(over.sidecar.socket)!r})"
    here = Path(__file__).parent
    search = [here, here.parent, here.parents[1] / "sidecar" / "connector"]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(one) for one in search]!r}; {called}"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert cast(Any, child.stdout).readline() == b"ready\n"
        over.hold()
        cast(Any, child.stdin).write(b"\n")
        cast(Any, child.stdin).flush()
        over.holds()
    finally:
        child.kill()
        child.communicate()
    over.release()
    wait_for(lambda: over.sidecar.status()["memory"]["slots"]["granted"] == 0, 20, "its slots")
    with rank(over.sidecar.socket) as made:
        assert not readable(made)
        made.store(HASHES, BLOCKS)
        wanted = [place.content(made.layout, number) for ids in BLOCKS for number in ids]
        made.load(HASHES, OTHERS, "l")
        assert [place.content(made.layout, number) for ids in OTHERS for number in ids] == wanted
        there_and_back(made, "after a worker")
