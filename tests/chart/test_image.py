"""The file system of the image, built from stand-ins for the programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOTFS = Path(__file__).parents[2] / "tools" / "image" / "rootfs.sh"
LDCONFIG = "/sbin/ldconfig"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    programs, root = tmp_path / "programs", tmp_path / "root"
    programs.mkdir()
    for name in ("kvcachepool-operator", "kvcachepool-sidecar", "kubectl-kvcachepool"):
        shutil.copy("/bin/true", programs / name)
    subprocess.run([ROOTFS, programs, root], check=True)
    return root


def known(root: Path) -> set[str]:
    """Paths in the loader's cache."""
    listing = subprocess.run([LDCONFIG, "-r", root, "-p"], check=True, capture_output=True, text=True).stdout
    return {line.split(" => ")[1] for line in listing.splitlines() if " => " in line}


def test_the_loader_finds_the_programs_libraries(root: Path) -> None:
    assert any(path.endswith("/libc.so.6") for path in known(root))


@pytest.mark.parametrize("place", ["/usr/local/nvidia/lib64", "/usr/lib64"])
def test_the_loader_finds_a_driver_of_nvidias_toolkit(root: Path, place: str) -> None:
    library = root / place[1:] / "libcuda.so.1"
    library.parent.mkdir(parents=True)
    made = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", library]
    subprocess.run(made, check=True)
    (root / "etc" / "ld.so.conf.d" / "00-nvcr.conf").write_text("/usr/lib64\n")
    subprocess.run([LDCONFIG, "-r", root], check=True)
    assert f"{place}/libcuda.so.1" in known(root)
