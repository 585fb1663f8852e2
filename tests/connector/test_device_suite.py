"""`make test-gpu` without a GPU: every check is skipped by name, and rehearsals pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

from servers import paths

TESTS = Path(__file__).resolve().parents[1]


def run(*command: str, **change: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS), "CUDA_VISIBLE_DEVICES": ""} | change
    environment.pop("KVCACHEPOOL_GPU_REHEARSAL", None)
    environment.update(change)
    return subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=300)


def program(name: str = "gpu_check") -> str:
    path = paths.target() / "debug" / "examples" / name
    if not path.exists():
        pytest.skip(f"{path} is missing: cargo build --example {name}")
    return str(path)


def outcomes(output: str) -> dict[str, str]:
    """Name and outcome with its detail, from the program's JSON."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {check["name"]: f"{check['outcome']} {check['detail']}" for check in found["checks"]}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake driver, which runs kernels on the host."""
    folder = tmp_path_factory.mktemp("driver")
    shutil.copy(fake_cuda.build(folder), folder / "libnvidia-ml.so.1")
    return folder


def test_without_a_device_every_check_is_skipped_by_name_and_nothing_fails() -> None:
    program()
    done = run(sys.executable, "-m", "gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    checks = [line for line in lines if line.startswith(("ok ", "skip ", "FAIL "))]
    names = {line.split()[1].split("/")[0] for line in checks}
    assert names >= {"kernels", "window"}
    tests = [line for line in checks if " gpu.test_" in line]
    assert {line.split()[1].split(".")[1] for line in tests} == {
        path.stem for path in (TESTS / "gpu").glob("test_*.py")
    }, "all files of the folder were collected"
    assert len(tests) >= 8
    assert all(line.startswith("skip ") for line in checks)
    assert all("NoDevice: " in line for line in tests)
    assert all("NoDriver: " in line or "NoDevice: " in line for line in checks)


def test_the_device_tests_pass_with_host_memory() -> None:
    program()
    done = run(sys.executable, "-m", "gpu", "gpu.test_", KVCACHEPOOL_GPU_REHEARSAL="1")
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [line for line in done.stdout.splitlines() if line.startswith("skip ")]
    assert all("Rehearsal: " in line for line in skipped), skipped
    assert done.stdout.count("\nok ") >= 5


def test_the_program_accepts_kernels_and_windows_with_a_fake_driver(driver: Path) -> None:
    chosen = ["LBHNC/Edge", "LHBNC/Random", "kv_turn_neox_bf16/Edge", "window/"]
    chosen += ["kv_cachegen_pack_f16/Edge", "kv_cachegen_unpack_f32/Random"]
    done = run(program(), *chosen, LD_LIBRARY_PATH=str(driver))
    found = outcomes(done.stdout)
    assert len(found) == 4 + 4 + 1 + 10 + 1 + 1
    wrong = [name for name, outcome in found.items() if not outcome.startswith("ok ")]
    assert wrong == [], found
    assert found["window/an IPC handle seen by another process"] == "ok a pattern each way"
    assert found["window/the sidecar dies"].endswith("handle: cuIpcOpenMemHandle failed with 205"), found
    assert done.returncode == 0


def test_the_program_rejects_kernels_that_do_nothing(driver: Path) -> None:
    done = run(program(), "LBHNC/Edge", "window/made", LD_LIBRARY_PATH=str(driver), FAKE_REST="1")
    found = outcomes(done.stdout)
    assert found.pop("window/made").startswith("ok ")
    assert len(found) == 4
    assert all(outcome.startswith("FAIL ") for outcome in found.values()), found
    assert done.returncode == 1


def test_an_old_driver_skips_kernels_by_name_and_has_windows(driver: Path) -> None:
    done = run(program(), "kv_gather/BLHNC", "window/made", LD_LIBRARY_PATH=str(driver), FAKE_PTX="7.8")
    found = outcomes(done.stdout)
    kernels = {name: outcome for name, outcome in found.items() if name.startswith("kernels/")}
    assert len(kernels) == 4
    assert all(
        outcome.startswith("skip PtxTooNew: the driver does not know PTX 8.0") for outcome in kernels.values()
    ), found
    assert found["window/made"].startswith("ok ")
    assert done.returncode == 0


def test_without_a_device_nothing_is_measured_and_nothing_written(tmp_path: Path) -> None:
    program("gpu_bench")
    out = tmp_path / "gpu.json"
    done = run(sys.executable, "-m", "bench.gpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("skip bench-gpu: NoDriver: ") or done.stdout.startswith("skip bench-gpu: NoDevice: ")
    assert not out.exists()


@pytest.fixture
def mps(tmp_path: Path) -> Path:
    """A folder with a fake MPS, which records its commands."""
    folder = tmp_path / "mps"
    folder.mkdir()
    control = folder / "nvidia-cuda-mps-control"
    recorded = folder / "recorded"
    control.write_text(
        f"""#!/bin/sh
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] || exit 1
if [ "${{1:-}}" = -d ]; then echo start >>{recorded}; exit; fi
read -r request; echo "$request" >>{recorded}
[ "$request" != get_server_list ] || cat {folder}/servers
"""
    )
    control.chmod(0o755)
    (folder / "servers").write_text("1234\n")
    return folder


def test_rows_are_skipped_by_name_without_mps(driver: Path, mps: Path, tmp_path: Path) -> None:
    program("gpu_bench")
    for change, why in [("servers", "MpsUnused: its daemon served no client"), ("start", "MpsFailed: ")]:
        if change == "servers":
            (mps / "servers").write_text("")
        else:
            (mps / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho no daemon >&2; exit 1\n")
        done = run(
            sys.executable,
            "-c",
            "from bench.gpu import mps_rows; assert list(mps_rows()) == []",
            KVCACHEPOOL_GPU_REHEARSAL="1",
            LD_LIBRARY_PATH=str(driver),
            PATH=f"{mps}:{os.environ['PATH']}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"skip decode_beside_window_mps: {why}" in done.stdout
    assert (mps / "recorded").read_text().split() == ["start", "get_server_list", "quit"]


def test_all_rows_are_measured_with_a_fake_driver_and_host_memory(driver: Path, mps: Path, tmp_path: Path) -> None:
    program("gpu_bench")
    out = tmp_path / "gpu.json"
    change = {"KVCACHEPOOL_GPU_REHEARSAL": "1", "LD_LIBRARY_PATH": str(driver)}
    change["PATH"] = f"{mps}:{os.environ['PATH']}"
    done = run(sys.executable, "-m", "bench.gpu", "--out", str(out), **change)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["device"], found["rehearsal"]) == ("Fake H100", True)
    assert {"driver", "cuda", "commit"} <= set(found)
    rows = {row["name"]: row for row in found["rows"]}
    assert {
        "h2d_vs_pinned_peak",
        "d2h_vs_pinned_peak",
        "engine_h2d_neighbours_gbps",
        "engine_d2h_neighbours_gbps",
        "window_vs_pinned_peak",
        "both_directions_vs_one",
        "decode_idle_p50_ms",
        "decode_beside_engine_p50_ms",
        "decode_beside_window_p50_ms",
        "decode_idle_mps_p50_ms",
        "decode_beside_window_mps_p50_ms",
    } <= set(rows)
    manifest = json.loads((TESTS.parent / "kernels" / "ptx" / "manifest.json").read_text())
    for entry in (entry["name"] for module in manifest["modules"] for entry in module["entries"]):
        assert any(name.startswith(f"gpu_{entry}_") for name in rows), f"no row of {entry}"
    assert all(row["value"] >= 0 and row["command"] == "make bench-gpu" for row in found["rows"])


def test_measurements_before_a_failure_are_kept_and_the_failure_is_named(tmp_path: Path) -> None:
    line = {"value": 1.0, "unit": "GB/s", "reference": "nothing", "reference_value": None}
    lines = [json.dumps({"device": "Broken"}), json.dumps({"name": "first", **line}), '{"name": "torn']
    broken = tmp_path / "gpu_bench"
    broken.write_text("#!/bin/sh\nprintf %s '" + "\n".join(lines) + "'\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o755)
    out = tmp_path / "gpu.json"
    change = {"KVCACHEPOOL_EXAMPLES": str(tmp_path), "KVCACHEPOOL_SIDECAR": str(tmp_path / "nothing")}
    done = run(sys.executable, "-m", "bench.gpu", "--out", str(out), KVCACHEPOOL_GPU_REHEARSAL="1", **change)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert [line.split(":")[0] for line in failed] == ["FAIL gpu_bench", "FAIL whole jobs by a window"], failed
    assert "gpu_bench ended with 3" in failed[0]
    assert "out of luck" in done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == [line.removeprefix("FAIL ") for line in failed]
    names = [row["name"] for row in found["rows"]]
    assert (found["device"], names[0]) == ("Broken", "first")
    assert "h2d_vs_pinned_peak" in names


def test_the_doctor_measures_a_device_on_request(driver: Path, binary: Path) -> None:
    found = json.loads(run(str(binary), "doctor", "--json", "--measure", LD_LIBRARY_PATH=str(driver)).stdout)
    speeds = {speed["name"]: speed for speed in found["speeds"]}
    for name in ("pinnedToDevice", "pinnedFromDevice", "pinnedBothWays", "windowRoundTrip"):
        assert speeds[name]["bytes_per_second"], speeds[name]
    facilities = {facility["name"]: facility for facility in found["facilities"]}
    assert facilities["windowByFd"]["works"], facilities
    modes = {mode["name"]: mode["state"] for mode in found["transfer_modes"]}
    assert modes == {"Engine": "NotTried", "CudaWindow": "Works"}
    full = run(binary, "doctor", "--json", "--measure", LD_LIBRARY_PATH=str(driver), FAKE_FREE="100")
    reasons = {speed["reason"] for speed in json.loads(full.stdout)["speeds"] if speed["name"].startswith("pinned")}
    assert {reason.split(":")[0] for reason in reasons} == {"OutOfMemory"}
