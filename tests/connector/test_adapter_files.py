"""Hashes of LoRA adapters: known only for uses that began before a check of their files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hanging_disk import HangingDisk
from huggingface_hub import constants

from kvcachepool import adapter_files
from kvcachepool.adapter_files import AdapterHashes, LoadedAdapters
from servers.waiting import wait_for


class Watch:
    """Waits for a hash without sleeping."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.hashes = AdapterHashes(lambda path: self.known.set())

    def get(self, path: str, load_id: int, since_s: float) -> bytes | None:
        found = self.hashes.get(path, load_id, since_s)
        return found.digest if found is not None else None

    def learn(self, path: str, load_id: int) -> bytes:
        """The hash for a use that begins now."""
        now_s = time.monotonic()
        assert self.get(path, load_id, now_s) is None
        assert self.known.wait(10)
        self.known.clear()
        found = self.get(path, load_id, now_s)
        assert found is not None
        return found


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_model.safetensors").write_bytes(b"1" * 100)
    (made / "adapter_config.json").write_text("{}")
    return made


def test_an_adapter_of_a_repository_is_known_only_where_vllm_downloads_nothing(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository, revision = tmp_path / "hub" / "models--org--adapter", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    shutil.copytree(adapter, repository / "snapshots" / revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Watch().learn("org/adapter", 1) == Watch().learn(str(adapter), 1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    online = Watch()
    assert online.get("org/adapter", 1, time.monotonic()) is None
    wait_for(lambda: "HF_HUB_OFFLINE=1" in caplog.text, 10, "the reason")
    wait_for(lambda: not online.hashes._known["org/adapter", 1].check_started_s, 10, "the end of the check")
    assert online.get("org/adapter", 1, time.monotonic()) is None
    assert not online.hashes._known["org/adapter", 1].check_started_s, "it is not tried again"


def test_a_new_revision_of_a_repository_changes_an_adapter(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads it when it loads the adapter again, also offline."""
    repository = tmp_path / "hub" / "models--org--adapter"
    (repository / "refs").mkdir(parents=True)
    for revision in ("a" * 40, "b" * 40):
        shutil.copytree(adapter, repository / "snapshots" / revision)
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    watch = Watch()
    watch.learn("org/adapter", 1)
    watch.learn("org/adapter", 1)
    (repository / "refs" / "main").write_text("b" * 40)
    assert watch.get("org/adapter", 1, time.monotonic()) is None
    wait_for(lambda: not watch.hashes._known["org/adapter", 1].check_started_s, 10, "the end of the check")
    assert watch.get("org/adapter", 1, 0.0) is None
    watch.hashes.close()


def test_an_adapter_whose_files_change_while_they_are_hashed_stays_uncached(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have read them before the change."""
    monkeypatch.setattr(adapter_files, "_ADAPTER_RETRY_S", 0.0)
    content = adapter_files._content

    def changes(folder: str, names: list[str]) -> bytes:
        digest = content(folder, names)
        (adapter / "adapter_model.safetensors").write_bytes(b"2" * 100)
        return digest

    monkeypatch.setattr(adapter_files, "_content", changes)
    watch = Watch()
    assert watch.get(str(adapter), 1, 0.0) is None
    wait_for(lambda: "changed while they were hashed" in caplog.text, 10, "the change is seen")
    wait_for(lambda: not watch.hashes._known[str(adapter), 1].check_started_s, 10, "the end of the check")
    monkeypatch.setattr(adapter_files, "_content", content)
    assert watch.get(str(adapter), 1, 0.0) is None
    assert not watch.hashes._known[str(adapter), 1].check_started_s, "it is not tried again"
    watch.learn(str(adapter), 2)
    watch.hashes.close()


class Reads:
    """What a worker records while vLLM reads an adapter."""

    def __init__(self, folder: Path) -> None:
        self.adapters = LoadedAdapters()
        self.lora = SimpleNamespace(lora_int_id=1, lora_path=str(folder))
        self.weights = folder / "adapter_model.safetensors"

    def read(self, succeeded: bool = True, changed: bytes = b"") -> bool:
        """vLLM reads the files, whose content changes meanwhile. Returns whether it has read the current ones."""
        self.adapters.begin(self.lora)
        assert not self.current(), "an error in between counts as other content"
        if changed:
            self.weights.write_bytes(changed)
        self.adapters.end(self.lora, succeeded)
        return self.current()

    def current(self) -> bool:
        return self.adapters.has_read((1, adapter_files._read_stamp(self.lora.lora_path)))


def test_a_worker_knows_which_files_vllm_has_read(adapter: Path) -> None:
    reads = Reads(adapter)
    assert not reads.current()
    assert reads.adapters.has_read(None), "a job without an adapter"
    assert reads.read()
    assert reads.read(), "the same files once more"
    assert not reads.adapters.has_read((2, adapter_files._read_stamp(str(adapter))))
    first = adapter_files._read_stamp(str(adapter))
    reads.weights.write_bytes(b"2" * 100)
    assert not reads.current()
    assert reads.adapters.has_read((1, first)), "vLLM has not read the new ones"
    assert not reads.adapters.changed
    assert not reads.read()
    assert reads.adapters.changed == {1}
    assert not reads.read(), "vLLM may hold KV of both"
    assert not reads.adapters.has_read((1, first))


def test_files_that_change_while_vllm_reads_them_are_not_known(adapter: Path) -> None:
    reads = Reads(adapter)
    assert not reads.read(changed=b"2" * 100)
    assert reads.adapters.changed == {1}
    assert not reads.read()


def test_a_failed_read_changes_nothing(adapter: Path) -> None:
    reads = Reads(adapter)
    assert not reads.read(succeeded=False)
    assert reads.read()
    first = adapter_files._read_stamp(str(adapter))
    assert not reads.read(succeeded=False, changed=b"2" * 100)
    assert reads.adapters.has_read((1, first))
    assert not reads.adapters.changed


def test_a_worker_reports_an_adapter_whose_job_it_refused(adapter: Path) -> None:
    reads = Reads(adapter)
    reads.adapters.refused((1, b"other"), False)
    assert reads.read(), "a load before vLLM has read anything"
    assert not reads.adapters.changed
    reads.adapters.refused((2, b"other"), True)
    reads.adapters.refused((1, b"other"), False)
    assert reads.adapters.changed == {1, 2}
    assert not reads.current()


def test_a_repository_that_vllm_may_download_again_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reads = LoadedAdapters()
    lora = SimpleNamespace(lora_int_id=1, lora_path="org/adapter")
    reads.begin(lora)
    reads.end(lora, True)
    assert not reads.has_read((1, b""))
    assert not reads.changed


def test_an_adapter_is_unknown_until_its_files_were_hashed_in_the_background(adapter: Path, tmp_path: Path) -> None:
    watch = Watch()
    first = watch.learn(str(adapter), 1)
    assert len(first) == 32
    assert watch.learn(str(adapter), 2) == first
    copied = tmp_path / "copied"
    shutil.copytree(adapter, copied)
    assert watch.learn(str(copied), 3) == first, "the content counts, not the place"
    (copied / "adapter_model.safetensors").write_bytes(b"2" * 100)
    assert watch.learn(str(copied), 4) != first
    watch.hashes.close()


def test_an_adapter_whose_files_change_under_its_id_stays_uncached(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    first = watch.learn(str(adapter), 1)
    before = (adapter / "adapter_model.safetensors").stat()
    (adapter / "adapter_model.safetensors").write_bytes(b"2" * 100)
    assert watch.get(str(adapter), 1, time.monotonic()) is None
    wait_for(lambda: "changed under the same id" in caplog.text, 10, "the change is seen")
    (adapter / "adapter_model.safetensors").write_bytes(b"1" * 100)
    os.utime(adapter / "adapter_model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert watch.get(str(adapter), 1, 0.0) is None, "which of them vLLM has loaded is not known any more"
    assert not watch.hashes.soon(str(adapter), 1)
    assert watch.learn(str(adapter), 2) == first, "another id is another load"
    assert watch.get(str(adapter), 1, 0.0) is None
    watch.hashes.close()


def test_cached_attributes_of_a_network_file_system_hide_no_change(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, scandir = adapter / "adapter_model.safetensors", os.scandir
    (adapter / "adapter_config.json").unlink()
    before, stamp = weights.stat(), adapter_files.stamp_of(str(adapter))
    weights.write_bytes(b"2" * 200)

    @contextlib.contextmanager
    def remembers(path: str) -> Iterator[list[Any]]:
        with scandir(path) as entries:
            yield [SimpleNamespace(name=e.name, path=e.path, is_file=e.is_file, stat=lambda: before) for e in entries]

    monkeypatch.setattr(os, "scandir", remembers)
    assert adapter_files.stamp_of(str(adapter)) != stamp


def test_a_change_that_hides_its_time_shows_in_the_stamp(adapter: Path) -> None:
    weights, stamp = adapter / "adapter_model.safetensors", adapter_files.stamp_of(str(adapter))
    before = weights.stat()
    weights.write_bytes(b"2" * before.st_size)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert adapter_files.stamp_of(str(adapter)) != stamp


def test_an_adapter_is_known_only_after_a_check_that_started_after_its_use(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, disk = Watch(), HangingDisk(monkeypatch, adapter)
    first = watch.learn(str(adapter), 1)
    disk.answers.clear()
    earlier_s = time.monotonic()
    assert watch.get(str(adapter), 1, earlier_s) is None
    wait_for(lambda: "kvcachepool-lora-check" in disk.callers, 10, "the check began")
    later_s = time.monotonic()
    assert watch.get(str(adapter), 1, later_s) is None
    disk.answers.set()
    assert watch.known.wait(10)
    watch.known.clear()
    assert watch.get(str(adapter), 1, earlier_s) == first
    assert watch.get(str(adapter), 1, later_s) is None, "the files may have changed behind that check"
    assert watch.known.wait(10)
    assert watch.get(str(adapter), 1, later_s) == first
    watch.hashes.close()


def test_a_hanging_file_system_blocks_only_the_threads_that_use_it(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "_CHECK_WAIT_S", 0.0)
    watch, disk = Watch(), HangingDisk(monkeypatch, adapter)
    first = watch.learn(str(adapter), 1)
    disk.answers.clear()
    now_s = time.monotonic()
    assert watch.get(str(adapter), 1, now_s) is None
    assert watch.get(str(adapter), 2, now_s) is None
    assert not watch.hashes.soon(str(adapter), 1), "nobody waits for a slow check"
    disk.answers.set()
    wait_for(lambda: watch.get(str(adapter), 1, now_s) == first, 10, "it answers again")
    assert set(disk.callers) == {"kvcachepool-lora-read", "kvcachepool-lora-check"}
    watch.hashes.close()


def test_a_process_exits_while_a_file_system_hangs(adapter: Path) -> None:
    code = """
import os, sys, threading, time
from kvcachepool.adapter_files import AdapterHashes
hashes, called = AdapterHashes(), threading.Event()
os.scandir = lambda path: called.set() or threading.Event().wait()
hashes.get(sys.argv[1], 1, time.monotonic())
assert called.wait(10)
hashes.close()
"""
    path = str(Path(adapter_files.__file__).parents[1])
    environ = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, str(adapter)], env=environ, check=True, timeout=60)


def test_an_adapter_without_local_files_is_checked_again(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(adapter_files, "_ADAPTER_RETRY_S", 0.05)
    watch = Watch()
    later = tmp_path / "later"
    assert watch.get(str(later), 1, 0.0) is None
    adapter.rename(later)
    deadline = time.monotonic() + 10
    while watch.get(str(later), 1, 0.0) is None:
        assert time.monotonic() < deadline
        watch.known.wait(0.02)
    watch.hashes.close()
