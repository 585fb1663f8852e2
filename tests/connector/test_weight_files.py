"""The hash of weights covers all bytes. It comes from names and a cache where these can be trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvcachepool import weights
from kvcachepool.weights import Digests, is_snapshot, setting_files, stamp, weight_files, weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "whisper").mkdir(parents=True)
    (made / "a.safetensors").write_bytes(b"1" * 50_000)
    (made / "b.safetensors").write_bytes(b"3" * 10)
    (made / "whisper" / "c.bin").write_bytes(b"4" * 10)
    (made / ".cache").mkdir()
    (made / ".cache" / "d.bin").write_bytes(b"5")
    return made


def digest(folder: Path, cache: Path | None = None) -> str:
    digests = Digests(str(cache or folder.parent / "cache"))
    found = weights_digest(str(folder), digests)
    if found is None:
        assert digests.work(10)
        found = weights_digest(str(folder), digests)
    assert found is not None
    return found


def test_the_hash_depends_on_the_content_not_the_path(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    os.utime(moved / "a.safetensors", (1, 1))
    (moved / "README.md").write_text("not a weight")
    (moved / ".cache" / "d.bin").write_bytes(b"6")
    assert digest(moved) == before


@pytest.mark.parametrize("file", ["a.safetensors", "b.safetensors", "whisper/c.bin"])
@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_change_of_one_byte_is_detected(folder: Path, file: str, at: int) -> None:
    before = digest(folder)
    raw = bytearray((folder / file).read_bytes())
    raw[at] ^= 1
    (folder / file).write_bytes(raw)
    assert digest(folder) != before


def test_file_names_and_new_files_are_identity(folder: Path) -> None:
    seen = {digest(folder)}
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    seen.add(digest(folder))
    (folder / "d.pt").write_bytes(b"")
    seen.add(digest(folder))
    assert len(seen) == 3
    assert weight_files(str(folder)) == ["a.safetensors", "c.safetensors", "d.pt", "whisper/c.bin"]


def test_all_json_files_are_settings_except_vocabularies(folder: Path) -> None:
    for name in (
        "preprocessor_config.json",
        "hf_quant_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "config.json",
        "modeling.py",
    ):
        (folder / name).write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert setting_files(str(folder)) == [
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "modeling.py",
        "preprocessor_config.json",
        "tokenizer_config.json",
    ]


def snapshot(cache: Path, files: dict[str, tuple[str, bytes]], commit: str = "a" * 40) -> Path:
    """A Hugging Face cache: name -> (blob's name, content)."""
    blobs, made = cache / "blobs", cache / "snapshots" / commit
    blobs.mkdir(parents=True, exist_ok=True)
    made.mkdir(parents=True)
    for name, (blob, content) in files.items():
        (blobs / blob).write_bytes(content)
        (made / name).symlink_to(f"../../blobs/{blob}")
    return made


def test_large_files_are_hashed_by_their_name_in_the_hugging_face_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "content", lambda path: pytest.fail(f"{path} was read"))
    made = snapshot(tmp_path / "models--a--b", {"a.safetensors": ("b" * 64, b"1"), "x.json": ("c" * 40, b"{}")})
    assert is_snapshot(str(made))
    assert not is_snapshot(str(tmp_path))
    assert Digests(str(tmp_path / "cache")).get(str(made / "a.safetensors")) == "b" * 64
    monkeypatch.undo()
    (made / "edited.safetensors").write_bytes(b"a file, no link")
    assert not is_snapshot(str(made))


def test_a_file_of_the_hugging_face_cache_equals_a_plain_file_with_its_content(tmp_path: Path, folder: Path) -> None:
    content = (folder / "a.safetensors").read_bytes()
    name = weights.content(str(folder / "a.safetensors"))
    made = snapshot(tmp_path / "models--a--b", {"a.safetensors": (name, content)})
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.safetensors").write_bytes(content)
    assert digest(made) == digest(plain)


def test_a_cached_hash_is_used_while_the_file_is_unchanged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_TICK_NS", -(10**12))
    before = digest(folder)
    read: list[str] = []
    original = weights.content
    monkeypatch.setattr(weights, "content", lambda path: read.append(path) or original(path))
    assert digest(folder) == before
    assert read == []
    file = folder / "a.safetensors"
    stat = file.stat()
    file.write_bytes(b"2" * stat.st_size)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest(folder) != before
    assert read == [str(file)], "the time of the change tells, although size and time of modification do not"


def test_the_hash_of_a_file_that_just_changed_is_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_TICK_NS", 10**12)
    digest(folder)
    assert json.loads((folder.parent / "cache" / "weights.json").read_text()) == {"files": []}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": [["/x", 1]]}', '{"files": [["/x",1,1,1,1,1,"0"]]}'])
def test_an_invalid_hash_cache_is_replaced(folder: Path, content: str) -> None:
    cache = folder.parent / "cache"
    cache.mkdir()
    (cache / "weights.json").write_text(content)
    assert digest(folder) == digest(folder, folder.parent / "another")
    assert "files" in json.loads((cache / "weights.json").read_text())


def test_an_unwritable_hash_cache_only_costs_another_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert digest(folder, tmp_path / "file") == digest(folder)


def test_a_stamp_changes_only_with_relevant_files(folder: Path) -> None:
    before = stamp(str(folder))
    (folder / "README.md").write_text("x")
    (folder / "tokenizer.json").write_text("x")
    assert stamp(str(folder)) == before
    os.utime(folder / "b.safetensors", (1, 1))
    assert stamp(str(folder)) != before
