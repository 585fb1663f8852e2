"""Python classes as tiers of the real sidecar: warm from the store, and never wrong when the class is."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcachepool.shared as shared_module
from kvcachepool.client import Client, Item, Put
from kvcachepool.shared import Shared
from kvcachepool.store import parser
from servers import paths
from servers.sidecar import Sidecar
from servers.store import PACKAGES, MooncakeMaster, StoreServer
from servers.waiting import wait_for

HERE = Path(__file__).parent
WAIT_S = 20.0
MIB = 1 << 20
#: Small ones, one that is read in ranges, and one that is written in parts.
SIZES = {"tiny": 3, "small": MIB + 7, "same": MIB + 7, "ranges": 20 * MIB + 1, "parts": 66 * MIB}


@pytest.fixture(autouse=True)
def fresh_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_shared", Shared())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., StoreServer]]:
    """Starts a store that ends with the test."""
    made: list[StoreServer] = []

    def serve(store: str, config: dict[str, Any] | None = None, **more: Any) -> StoreServer:
        made.append(StoreServer(store, config, python_path=[HERE, *more.pop("python_path", [])], **more))
        return made[-1]

    yield serve
    for one in made:
        one.stop()


@pytest.fixture
def pod(volume: Path, binary: Path) -> Iterator[Callable[[StoreServer], Sidecar]]:
    """Starts a sidecar with this store as its tier."""
    made: list[Sidecar] = []

    def start(store: StoreServer, **config: Any) -> Sidecar:
        s3 = {**store.config(), **config}
        made.append(Sidecar(volume / "pod", memory="256Mi", config={"s3": s3}).start())
        wait_for(made[-1].tiers_ready, WAIT_S, "the tier ready")
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def faulty(served: Callable[..., StoreServer], tmp_path: Path) -> tuple[StoreServer, Path]:
    """A store with faults, and the file that names the current one."""
    folder, faults = tmp_path / "objects", tmp_path / "fault"
    folder.mkdir()
    config = {"folder": str(folder), "faults": str(faults)}
    arguments = ["--deadline", "3", "--concurrency", "2"]
    return served("served_stores:FaultyStore", config, arguments=arguments), faults


def content(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


def stored(sidecar: Sidecar, sizes: dict[str, int]) -> None:
    """Writes objects, and waits until the store has them."""
    with Client(str(sidecar.socket), timeout_s=WAIT_S) as client:
        for name, size in sizes.items():
            assert client.put([Item(name, content(name, size))]) == [Put.STORED]
        wait_for(lambda: sidecar.written_to("s3"), 60, "every object in the store")


def forgotten(sidecar: Sidecar) -> None:
    """The same sidecar with an empty memory."""
    sidecar.kill_tree()
    sidecar.start()
    wait_for(sidecar.tiers_ready, WAIT_S, "the tier ready")


def read(sidecar: Sidecar, name: str, seconds: float = WAIT_S) -> bytes | None:
    """The object as a client sees it."""
    with Client(str(sidecar.socket), timeout_s=seconds) as client:
        found = client.get([name])[0]
        return None if found is None else bytes(found.value)


def all_read(sidecar: Sidecar, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        assert read(sidecar, name) == content(name, size), name


def mooncake() -> Path:
    """The folder of Mooncake's package."""
    folder = paths.cache() / PACKAGES
    if not (folder / "mooncake").is_dir():
        pytest.skip("Mooncake is not installed: tools/setup.sh servers")
    return folder


@pytest.mark.parametrize("name", ["memory", "folder", "async", "infinistore"])
def test_a_sidecar_with_empty_memory_is_warm_from_the_store(
    served: Callable[..., StoreServer], pod: Callable[..., Sidecar], tmp_path: Path, name: str
) -> None:
    folder = {"folder": str(tmp_path)}
    store = {
        "memory": lambda: served("kvcachepool.store_memory:MemoryStore"),
        "folder": lambda: served("served_stores:FolderStore", folder),
        "async": lambda: served("served_stores:AsyncStore", folder),
        "infinistore": lambda: served(
            "kvcachepool.store_infinistore:InfiniStore",
            {"host": "127.0.0.1"},
            # The stand-in is a module of this process alone.
            python_path=[HERE / "stand_ins"],
        ),
    }[name]()
    sidecar = pod(store)
    stored(sidecar, SIZES)
    forgotten(sidecar)
    all_read(sidecar, SIZES)
    assert ("class has no list" in store.log_text()) == (name in ("async", "infinistore"))


GUIDE = (paths.ROOT / "docs/guides/dynamic-tier.md").read_text()


def test_the_class_of_the_guide_is_a_tier(
    served: Callable[..., StoreServer], pod: Callable[..., Sidecar], tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    (tmp_path / "my_store.py").write_text(code)
    (config,) = re.findall(r"my_store:MyStore --config '(.*)'", GUIDE)
    sidecar = pod(served("my_store:MyStore", json.loads(config), python_path=[tmp_path]))
    stored(sidecar, {"small": MIB})
    forgotten(sidecar)
    all_read(sidecar, {"small": MIB})


def test_the_options_of_the_guide_are_those_of_the_command() -> None:
    actions = {option: action for action in parser()._actions for option in action.option_strings}
    listed = dict(re.findall(r"^\| `(--[a-z-]+)` \| `?([^|`]+?)`? \|", GUIDE, re.M))
    assert listed.keys() == actions.keys() - {"-h", "--help", "--config"}
    for option, default in listed.items():
        expected = actions[option].default
        shown = {None: "none"}.get(expected, f"{expected:g} s" if isinstance(expected, float) else str(expected))
        assert default == shown, option


def test_the_manifests_of_the_guide_are_yaml_and_start_the_command() -> None:
    blocks = [yaml.safe_load_all(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)]
    documents = [document for block in blocks for document in block]
    (deployment,) = [document for document in documents if document.get("kind") == "Deployment"]
    (beside,) = [document["containers"] for document in documents if "containers" in document]
    for container in (*beside, *deployment["spec"]["template"]["spec"]["containers"]):
        assert container["command"][:3] == ["python", "-m", "kvcachepool.store"]
        parser().parse_args([*container["command"][3:], *container["args"]])


def test_mooncake_keeps_objects_for_a_sidecar_that_restarts(
    served: Callable[..., StoreServer], pod: Callable[..., Sidecar]
) -> None:
    folder = mooncake()
    master = MooncakeMaster()
    try:
        config = {"master": master.address, "hostname": "127.0.0.1", "segment_bytes": 512 * MIB}
        config |= {"buffer_bytes": 256 * MIB, "range_bytes": 4 * MIB}
        sidecar = pod(served("kvcachepool.store_mooncake:MooncakeStore", config, python_path=[folder]))
        stored(sidecar, SIZES)
        forgotten(sidecar)
        all_read(sidecar, SIZES)
    finally:
        master.stop()


def test_a_store_that_is_killed_costs_misses_and_comes_back(
    served: Callable[..., StoreServer], pod: Callable[..., Sidecar], tmp_path: Path
) -> None:
    store = served("served_stores:FolderStore", {"folder": str(tmp_path)})
    sidecar = pod(store)
    stored(sidecar, {"small": MIB})
    forgotten(sidecar)
    store.kill()
    assert read(sidecar, "small", 3) is None
    store.start()
    wait_for(lambda: read(sidecar, "small", 3) == content("small", MIB), 60, "the object again")


@pytest.mark.parametrize("fault", ["raise", "short", "long", "flip", "other", "hang"])
def test_a_class_that_is_wrong_costs_a_miss_and_never_other_bytes(
    faulty: tuple[StoreServer, Path], pod: Callable[..., Sidecar], fault: str
) -> None:
    store, faults = faulty
    sidecar = pod(store)
    sizes = {"small": MIB, "same": MIB}
    stored(sidecar, sizes)
    forgotten(sidecar)
    faults.write_text(fault)
    assert read(sidecar, "small", 4) is None
    if fault == "raise":
        wait_for(lambda: "ConnectionResetError" in store.log_text(), 10, "the exception in the log")
    if fault == "hang":
        wait_for(lambda: "call exceeded its deadline" in store.log_text(), 10, "the deadline in the log")
    faults.write_text("")
    result = {"flip": "corrupt", "other": "foreign"}.get(fault)
    if result:
        metrics = sidecar.metrics
        wait_for(
            lambda: metrics().total("kvcachepool_tier_fetch_chunks_total", tier="s3", result=result) > 0,
            10,
            f"a fetch that is {result}",
        )
        # The tier removed what it took for a bad object, so it is never read again.
        assert read(sidecar, "small", 4) in (None, content("small", MIB))
    else:
        wait_for(lambda: read(sidecar, "small", 4) == content("small", MIB), 60, "the object again")
    wait_for(lambda: read(sidecar, "same", 4) == content("same", MIB), 60, "the other object")


def test_a_client_waits_for_a_slow_store_until_its_own_deadline(
    faulty: tuple[StoreServer, Path], pod: Callable[..., Sidecar]
) -> None:
    store, faults = faulty
    sidecar = pod(store)
    sizes = {"small": MIB, "same": MIB}
    stored(sidecar, sizes)
    sidecar.configure({"cache": {"loadTimeout": "200ms"}})
    forgotten(sidecar)
    faults.write_text("slow")
    assert read(sidecar, "small", 0.5) is None
    all_read(sidecar, sizes)


def test_health_says_when_every_call_hangs(faulty: tuple[StoreServer, Path], pod: Callable[..., Sidecar]) -> None:
    store, faults = faulty
    sidecar = pod(store)
    stored(sidecar, {"small": MIB, "same": MIB})
    forgotten(sidecar)
    faults.write_text("hang")

    def hung() -> bool:
        assert read(sidecar, "small", 2) is None
        return store.health() == 503

    wait_for(hung, 60, "health that fails")
    faults.write_text("")
    wait_for(lambda: store.health() == 200, 10, "health again")


def test_a_full_store_is_reported_and_reads_go_on(
    served: Callable[..., StoreServer], pod: Callable[..., Sidecar]
) -> None:
    store = served("kvcachepool.store_memory:MemoryStore", {"capacity_bytes": 4 * MIB})
    sidecar = pod(store)
    stored(sidecar, {"small": MIB})
    with Client(str(sidecar.socket), timeout_s=WAIT_S) as client:
        assert client.put([Item("large", bytes(8 * MIB))]) == [Put.STORED]
    wait_for(lambda: "MemoryStore.put raised Full" in store.log_text(), WAIT_S, "the refusal")
    forgotten(sidecar)
    all_read(sidecar, {"small": MIB})


def test_the_sidecars_tools_list_and_remove_what_a_class_lists(
    served: Callable[..., StoreServer], pod: Callable[..., Sidecar], tmp_path: Path
) -> None:
    store = served("served_stores:FolderStore", {"folder": str(tmp_path)})
    sidecar = pod(store)
    stored(sidecar, {f"k{number}": 1000 for number in range(5)})
    command = [str(paths.sidecar_binary()), "purge", "--config", str(sidecar.folder / "config.v1.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".kv")]


def test_a_wrong_key_is_refused_and_named(served: Callable[..., StoreServer], volume: Path, binary: Path) -> None:
    store = served("kvcachepool.store_memory:MemoryStore")
    auth = volume / "auth"
    auth.mkdir()
    (auth / "AWS_ACCESS_KEY_ID").write_text(store.key_id)
    (auth / "AWS_SECRET_ACCESS_KEY").write_text("another one")
    config = {**store.config(), "auth": str(auth)}
    sidecar = Sidecar(volume / "pod", memory="64Mi", config={"s3": config}).start()
    try:
        wait_for(lambda: "SignatureDoesNotMatch" in str(sidecar.status()["tiers"]), WAIT_S, "the refusal in the status")
    finally:
        sidecar.stop()


def test_sigterm_ends_the_process_in_order(served: Callable[..., StoreServer]) -> None:
    store = served("kvcachepool.store_memory:MemoryStore")
    store.terminate()
    assert "stopped drained=True" in store.log_text()


@pytest.mark.skipif(not (paths.cache() / PACKAGES / "infinistore").is_dir(), reason="InfiniStore is not installed")
def test_the_stand_in_of_infinistore_has_the_signatures_of_the_package() -> None:
    script = """
import importlib.util, inspect, sys
sys.path.insert(0, sys.argv[1])
import infinistore as real
spec = importlib.util.spec_from_file_location("stand_in", sys.argv[2])
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)
assert real.TYPE_TCP == stand_in.TYPE_TCP
real.ClientConfig(host_addr="127.0.0.1", service_port=1, connection_type=real.TYPE_TCP).verify()
for name in ("connect", "close", "tcp_read_cache", "tcp_write_cache", "check_exist", "delete_keys"):
    ours, theirs = (list(inspect.signature(getattr(module.InfinityConnection, name)).parameters)
                    for module in (stand_in, real))
    assert ours == theirs, (name, ours, theirs)
"""
    command = [sys.executable, "-c", script, str(paths.cache() / PACKAGES), str(HERE / "stand_ins/infinistore.py")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert run.returncode == 0, run.stderr
