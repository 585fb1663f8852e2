"""The archive for a GPU host: unpacked into an empty folder, it needs nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from servers import paths

PACK = paths.ROOT / "tools" / "gpu_bundle" / "pack.sh"
TREE = "kvcachepool-gpu"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the programs of the tests, because a release build takes minutes."""
    programs = paths.target() / "debug"
    for program in ("kvcachepool-sidecar", "examples/gpu_check", "examples/gpu_bench"):
        if not (programs / program).exists():
            pytest.skip(f"{programs / program} is missing: cargo build --bins --examples")
    folder = tmp_path_factory.mktemp("bundle")
    archive = folder / "made" / "gpu-bundle.tar.gz"
    subprocess.run([PACK, programs, archive], check=True, capture_output=True, text=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / TREE


def run(tree: Path, *arguments: str, **change: str) -> subprocess.CompletedProcess[str]:
    """Runs `run.sh` in an environment without the checkout and the cache."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tree.parent), "PYTHON": sys.executable} | change
    return subprocess.run(
        [tree / "run.sh", *arguments], env=environment, cwd=tree.parent, capture_output=True, text=True, timeout=300
    )


def test_every_check_is_found_and_skipped_by_name_without_a_device(unpacked: Path) -> None:
    done = run(unpacked, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("[run] commit ")
    checks = [line for line in lines if line.startswith(("ok ", "skip ", "FAIL "))]
    assert len(checks) > 130
    assert all(line.startswith("skip ") for line in checks), [line for line in checks if not line.startswith("skip ")]
    assert all("NoDriver: " in line or "NoDevice: " in line for line in checks)
    modules = {line.split()[1].split(".")[1] for line in checks if " gpu.test_" in line}
    assert modules == {"test_engine_copies", "test_vllm_tier", "test_window"}


def test_its_tests_run_from_its_own_files(unpacked: Path) -> None:
    done = run(unpacked, "test", "gpu.test_", KVCACHEPOOL_GPU_REHEARSAL="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") >= 5
    assert str(paths.ROOT) not in done.stdout


def test_nothing_is_measured_without_a_device_and_an_unknown_word_is_refused(unpacked: Path) -> None:
    done = run(unpacked, "bench")
    assert (done.returncode, "skip bench-gpu: " in done.stdout) == (0, True), done.stdout + done.stderr
    assert not (unpacked / "gpu.json").exists()
    done = run(unpacked, "dance")
    assert (done.returncode, "nothing called dance" in done.stderr) == (2, True)


def test_a_machine_with_an_old_c_library_gets_a_message(unpacked: Path) -> None:
    (unpacked / "glibc").rename(unpacked / "kept")
    try:
        (unpacked / "glibc").write_text("99.1\n")
        done = run(unpacked, "test")
    finally:
        os.replace(unpacked / "kept", unpacked / "glibc")
    assert done.returncode == 2
    assert "need glibc 99.1 or newer" in done.stderr
