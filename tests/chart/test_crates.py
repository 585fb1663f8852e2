"""The crates of the workspace depend on each other only as docs/internals/architecture.md says."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

from servers.paths import ROOT

# Each crate with the crates of the workspace that it may depend on. Tests and examples count, too.
ARROWS = {
    "protocol": set(),
    "metrics": set(),
    "kernels": {"protocol"},
    "engine": {"protocol"},
    "memory": {"engine", "protocol"},
    "tiers": {"engine", "kernels", "memory", "protocol"},
    "gpu": {"engine", "kernels", "memory", "protocol"},
    "simulation": {"engine", "gpu", "memory", "protocol"},
    "sidecar": {"engine", "gpu", "kernels", "memory", "metrics", "protocol", "tiers"},
    "operator": {"metrics", "protocol"},
}
# What a crate must never depend on, itself or by others of the workspace.
CLIENTS = {"aws-sdk-s3", "aws-config", "hyper", "hyper-util", "hyper-rustls", "reqwest", "redis"}
SHELL = {"tokio", "rustix", "libc", "tracing", "futures", "parking_lot", *CLIENTS}
FORBIDDEN = {
    "protocol": {*SHELL, "kube", "k8s-openapi"},
    "engine": {*SHELL, "fastrand", "kube", "k8s-openapi"},
    "memory": {"tokio", "kube", *CLIENTS},
    "gpu": {"tokio", "kube", *CLIENTS},
    "operator": {"aws-sdk-s3", "aws-config", "redis", "cudarc"},
}
PREFIX = "kvcachepool-"


@functools.cache
def _metadata() -> dict[str, Any]:
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _packages() -> dict[str, dict[str, Any]]:
    return {package["name"].removeprefix(PREFIX): package for package in _metadata()["packages"]}


def _inner(package: dict[str, Any]) -> set[str]:
    names = {dependency["name"] for dependency in package["dependencies"]}
    return {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}


def test_every_dependency_between_crates_is_in_the_table() -> None:
    assert {name: _inner(package) for name, package in _packages().items()} == ARROWS


def _outer(name: str) -> set[str]:
    """What a crate depends on outside its tests, itself or by others of the workspace."""
    names = {d["name"] for d in _packages()[name]["dependencies"] if d["kind"] is None}
    inner = {each.removeprefix(PREFIX) for each in names if each.startswith(PREFIX)}
    return names.union(*map(_outer, inner))


def test_no_crate_has_a_forbidden_dependency() -> None:
    for name, forbidden in FORBIDDEN.items():
        assert not forbidden & _outer(name), name


def test_no_program_makes_the_simulations_mistakes() -> None:
    """Beside the two seams, whose defaults make none, only implementations for tests say which mistakes are made."""
    sources = {str(path.relative_to(ROOT / "sidecar")): path.read_text() for path in (ROOT / "sidecar").rglob("*.rs")}
    assert {name for name, text in sources.items() if "fn makes(" in text} == {
        "engine/src/memory_table.rs",
        "engine/src/table.rs",
        "gpu/src/copy_engine.rs",
        "simulation/src/owner.rs",
        "simulation/src/table.rs",
    }
