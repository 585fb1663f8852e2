"""What decides KV values is in the model's descriptor, and what does not is not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
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

from kvcachepool import fingerprint
from kvcachepool.fingerprint import (
    AdapterHashes,
    folder_fingerprint,
    model_parts,
    tensor_samples,
    weight_files,
    weights,
)
from kvcachepool.layout import Unserved, canonical
from servers.waiting import wait_for


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    safetensors(made / "a.safetensors", {"w1": b"1" * 50_000, "w2": b"2" * 50_000, "empty": b""})
    safetensors(made / "b.safetensors", {"w3": b"3" * 10})
    return made


def digest(folder: Path) -> str:
    return folder_fingerprint(str(folder), weight_files(str(folder)))


def test_the_fingerprint_is_of_the_content_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    os.utime(moved / "a.safetensors", (1, 1))
    (moved / "README.md").write_text("not a weight")
    assert digest(moved) == before


@pytest.mark.parametrize("tensor", ["w1", "w2", "w3"])
def test_a_fine_tune_of_any_one_tensor_has_another_fingerprint(folder: Path, tensor: str) -> None:
    before = digest(folder)
    for file in ("a", "b"):
        path = folder / f"{file}.safetensors"
        raw = bytearray(path.read_bytes())
        length = struct.unpack("<Q", raw[:8])[0]
        entry = json.loads(raw[8 : 8 + length]).get(tensor)
        if entry is None:
            continue
        begin, end = entry["data_offsets"]
        raw[8 + length + begin : 8 + length + end] = b"x" * (end - begin)
        path.write_bytes(raw)
    assert digest(folder) != before


def test_names_sizes_and_headers_count(folder: Path) -> None:
    seen = {digest(folder)}
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    seen.add(digest(folder))
    safetensors(folder / "c.safetensors", {"w4": b"3" * 10})
    seen.add(digest(folder))
    (folder / "c.safetensors").unlink()
    seen.add(digest(folder))
    assert len(seen) == 4


def test_every_tensor_has_a_sample_and_large_ones_have_more() -> None:
    header = {
        "large": {"data_offsets": [0, 300 << 20]},
        "small": {"data_offsets": [300 << 20, (300 << 20) + 100]},
        "__metadata__": {},
    }
    samples = tensor_samples(json.dumps(header).encode(), 1000)
    assert [s.length for s in samples] == [4096] * 4 + [100]
    assert samples[-1].offset == 1000 + (300 << 20)
    assert all(1000 <= s.offset < 1000 + (300 << 20) for s in samples[:4])


def test_files_of_torch_are_sampled_where_there_are_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * (1 << 20))
    assert weight_files(str(tmp_path)) == ["pytorch_model.bin"]
    before = digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * (1 << 19) + b"1" * (1 << 19))
    assert digest(tmp_path) != before


def test_a_hundred_gigabytes_take_less_than_two_seconds(tmp_path: Path) -> None:
    """Sparse files: the pages are as many as those of real weights, their content is zero."""
    tensors, files, per_tensor = 723, 20, 7 << 20
    for number in range(files):
        header, at = {}, 0
        for tensor in range(tensors):
            header[f"layer.{number}.{tensor}"] = {"dtype": "U8", "data_offsets": [at, at + per_tensor]}
            at += per_tensor
        raw = json.dumps(header).encode()
        with open(tmp_path / f"{number}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + at)
    start = time.monotonic()
    digest(tmp_path)
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    ("model", "load_format", "reason"),
    [
        ("{folder}", "dummy", "DummyWeights"),
        ("{folder}", "runai_streamer", "RunaiStreamer"),
        ("{folder}", "tensorizer", "Tensorizer"),
        ("s3://bucket/model", "auto", "RemoteWeights"),
        ("{folder}/x.gguf", "auto", "Gguf"),
        ("nobody/has-this-model", "auto", "NoLocalWeights"),
        ("{empty}", "auto", "NoWeightFiles"),
        ("{torn}", "auto", "WeightsUnreadable"),
    ],
)
def test_without_local_files_a_model_is_unshared_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, load_format: str, reason: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "a.safetensors").write_bytes(b"\xff" * 64)
    named = model.format(folder=folder, empty=tmp_path / "empty", torn=tmp_path / "torn")
    said = weights(named, None, load_format, str(tmp_path), "engine-1")
    assert said == {"kind": "unshared", "reason": reason, "instance": "engine-1"}
    assert weights(named, None, load_format, str(tmp_path), "engine-2") != said


def config(folder: Path, **changes: Any) -> Any:
    """As much of a VllmConfig as the descriptor reads. `a__b=1` sets attribute b of part a."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            dtype="torch.bfloat16",
            max_model_len=8192,
            quantization=None,
            hf_config={"hidden_size": 64, "rope_theta": 1e6, "_name_or_path": "/x", "transformers_version": "9"},
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False, kv_cache_dtype_skip_layers=[]),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(data_parallel_rank=0),
    )
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        if attribute:
            setattr(getattr(made, part), attribute, value)
        else:
            setattr(made, part, value)
    return made


def parts(made: Any) -> str:
    return canonical(model_parts(made, "engine-1"))


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__dtype": "torch.float16"},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": {"hidden_size": 64, "rope_theta": 1e4}},
        {"model_config__model_impl": "transformers"},
        {"model_config__disable_sliding_window": True},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)},
    ],
    ids=str,
)
def test_what_decides_values_is_in_the_descriptor(folder: Path, change: dict[str, Any]) -> None:
    assert parts(config(folder, **change)) != parts(config(folder))


def test_what_does_not_decide_values_is_not(folder: Path, tmp_path: Path) -> None:
    before = parts(config(folder))
    assert parts(config(folder, parallel_config__data_parallel_rank=3, model_config__max_model_len=4096)) == before
    newer = {"hidden_size": 64, "rope_theta": 1e6, "_name_or_path": "/elsewhere", "transformers_version": "10"}
    assert parts(config(folder, model_config__hf_config=newer)) == before
    assert parts(config(folder.rename(tmp_path / "moved"))) == before
    assert not {"sections", "hashing", "chunk_tokens"} & set(json.loads(before))


def test_the_configured_length_counts_where_the_rotary_embedding_depends_on_it(folder: Path) -> None:
    scaled = {"hidden_size": 64, "rope_scaling": {"rope_type": "longrope", "factor": 4}}
    short = parts(config(folder, model_config__hf_config=scaled))
    assert parts(config(folder, model_config__hf_config=scaled, model_config__max_model_len=4096)) != short


def test_a_draft_models_weights_count(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    safetensors(draft / "d.safetensors", {"w": b"1" * 100})
    speculative = SimpleNamespace(method="eagle", draft_model_config=config(draft).model_config)
    before = parts(config(folder, speculative_config=speculative))
    safetensors(draft / "d.safetensors", {"w": b"2" * 100})
    assert parts(config(folder, speculative_config=speculative)) != before


def test_a_models_own_code_counts_where_it_is_trusted(folder: Path) -> None:
    (folder / "modeling.py").write_text("a = 1")
    trusted = {"model_config__trust_remote_code": True}
    before = parts(config(folder, **trusted))
    (folder / "modeling.py").write_text("a = 2")
    assert parts(config(folder, **trusted)) != before


def test_scales_of_the_first_batch_are_refused(folder: Path) -> None:
    with pytest.raises(Unserved, match="KvScalesFromFirstBatch"):
        model_parts(config(folder, cache_config__calculate_kv_scales=True), "engine-1")


def test_the_descriptor_has_no_addresses_and_no_order_of_its_own() -> None:
    class Opaque:
        pass

    value = {"b": {2, 1}, "a": Opaque(), 1: (float("inf"), 0.5)}
    assert canonical(fingerprint.plain(value)) == '{"1":["inf",0.5],"a":"Opaque","b":["1","2"]}'


class Watch:
    """Waits for a hash without sleeping."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.hashes = AdapterHashes(lambda path: self.known.set())

    def learn(self, path: str, load_id: int) -> bytes:
        """The hash for a use that begins now."""
        now_s = time.monotonic()
        assert self.hashes.get(path, load_id, now_s) is None
        assert self.known.wait(10)
        self.known.clear()
        found = self.hashes.get(path, load_id, now_s)
        assert found is not None
        return found


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_model.safetensors").write_bytes(b"1" * 100)
    (made / "adapter_config.json").write_text("{}")
    return made


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


def test_an_adapter_whose_files_change_under_its_id_is_uncached_for_good(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    first = watch.learn(str(adapter), 1)
    before = (adapter / "adapter_model.safetensors").stat()
    (adapter / "adapter_model.safetensors").write_bytes(b"2" * 100)
    assert watch.hashes.get(str(adapter), 1, time.monotonic()) is None
    wait_for(lambda: "changed under its id" in caplog.text, 10, "the change is seen")
    (adapter / "adapter_model.safetensors").write_bytes(b"1" * 100)
    os.utime(adapter / "adapter_model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert watch.hashes.get(str(adapter), 1, 0.0) is None, "which of them vLLM has loaded is not known any more"
    assert not watch.hashes.soon(str(adapter), 1)
    assert watch.learn(str(adapter), 2) == first, "another id is another load"
    assert watch.hashes.get(str(adapter), 1, 0.0) is None
    watch.hashes.close()


def test_attributes_that_a_network_file_system_remembers_hide_no_change(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, scandir = adapter / "adapter_model.safetensors", os.scandir
    (adapter / "adapter_config.json").unlink()
    before, stamp = weights.stat(), fingerprint.stamp_of(str(adapter))
    weights.write_bytes(b"2" * 200)

    @contextlib.contextmanager
    def remembers(path: str) -> Iterator[list[Any]]:
        with scandir(path) as entries:
            yield [SimpleNamespace(name=e.name, path=e.path, is_file=e.is_file, stat=lambda: before) for e in entries]

    monkeypatch.setattr(os, "scandir", remembers)
    assert fingerprint.stamp_of(str(adapter)) != stamp


def test_each_use_of_an_adapter_is_known_by_a_look_that_began_after_it(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, disk = Watch(), HangingDisk(monkeypatch, adapter)
    first = watch.learn(str(adapter), 1)
    disk.answers.clear()
    earlier_s = time.monotonic()
    assert watch.hashes.get(str(adapter), 1, earlier_s) is None
    wait_for(lambda: "kvcachepool-lora-look" in disk.asked, 10, "the look began")
    later_s = time.monotonic()
    assert watch.hashes.get(str(adapter), 1, later_s) is None
    disk.answers.set()
    assert watch.known.wait(10)
    watch.known.clear()
    assert watch.hashes.get(str(adapter), 1, earlier_s) == first
    assert watch.hashes.get(str(adapter), 1, later_s) is None, "the files may have changed behind that look"
    assert watch.known.wait(10)
    assert watch.hashes.get(str(adapter), 1, later_s) == first
    watch.hashes.close()


def test_a_file_system_that_hangs_holds_up_nobody_but_the_threads_that_ask_it(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_LOOK_S", 0.0)
    watch, disk = Watch(), HangingDisk(monkeypatch, adapter)
    first = watch.learn(str(adapter), 1)
    disk.answers.clear()
    now_s = time.monotonic()
    assert watch.hashes.get(str(adapter), 1, now_s) is None
    assert watch.hashes.get(str(adapter), 2, now_s) is None
    assert not watch.hashes.soon(str(adapter), 1), "nobody waits for a look that takes long"
    disk.answers.set()
    wait_for(lambda: watch.hashes.get(str(adapter), 1, now_s) == first, 10, "it answers again")
    assert set(disk.asked) == {"kvcachepool-lora-read", "kvcachepool-lora-look"}
    watch.hashes.close()


def test_a_process_ends_while_a_file_system_hangs(adapter: Path) -> None:
    code = """
import os, sys, threading, time
from kvcachepool.fingerprint import AdapterHashes
hashes, asked = AdapterHashes(), threading.Event()
os.scandir = lambda path: asked.set() or threading.Event().wait()
hashes.get(sys.argv[1], 1, time.monotonic())
assert asked.wait(10)
hashes.close()
"""
    path = str(Path(fingerprint.__file__).parents[1])
    environ = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, str(adapter)], env=environ, check=True, timeout=60)


def test_an_adapter_without_local_files_is_looked_for_again(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(fingerprint, "_ADAPTER_RETRY_S", 0.05)
    watch = Watch()
    later = tmp_path / "later"
    assert watch.hashes.get(str(later), 1, 0.0) is None
    adapter.rename(later)
    deadline = time.monotonic() + 10
    while watch.hashes.get(str(later), 1, 0.0) is None:
        assert time.monotonic() < deadline
        watch.known.wait(0.02)
    watch.hashes.close()
