"""Renders the chart with the real helm and runs the real promtool. Without them tests are skipped by name."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from chart import CHART
from servers import paths

Render = Callable[..., list[dict[str, Any]]]


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, as strict readers of manifests do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"line {node.start_mark.line + 1}: a key twice in {sorted(keys)}"
        return super().construct_mapping(node, deep)


def _tool(name: str) -> str:
    """A program of `tools/setup.sh cluster`; HELM and PROMTOOL name other ones."""
    binary = os.environ.get(name.upper()) or str(paths.cache() / "cluster" / "bin" / name)
    if not os.access(binary, os.X_OK):
        pytest.skip(f"no {name} at {binary}: tools/setup.sh cluster installs it")
    return binary


@pytest.fixture(scope="session")
def promtool() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs promtool with these arguments."""
    binary = _tool("promtool")

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([binary, *args], capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm with these arguments, without a cluster."""
    binary = _tool("helm")

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "KUBECONFIG": os.devnull}
        return subprocess.run([binary, *args], capture_output=True, text=True, env=environ, timeout=60)

    return run


@pytest.fixture(scope="session")
def template(
    helm: Callable[..., subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any] | None], subprocess.CompletedProcess[str]]:
    """`helm template` in namespace `kv` with these values."""
    folder = tmp_path_factory.mktemp("values")

    def run(values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        file = folder / "values.yaml"
        file.write_text(json.dumps(values or {}))
        return helm("template", "pools", str(CHART), "-n", "kv", "--kube-version", "1.33.0", "-f", str(file))

    return run


@pytest.fixture(scope="session")
def render(template: Callable[[dict[str, Any] | None], subprocess.CompletedProcess[str]]) -> Render:
    """Objects of the chart with these values."""

    def run(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        done = template(values)
        assert done.returncode == 0, done.stderr
        return [o for o in yaml.load_all(done.stdout, _Loader) if o]

    return run
