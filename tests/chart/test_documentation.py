"""Pages follow the rules of `tools/prose.py`, are in the table of contents, and have valid links."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from servers.paths import ROOT, sidecar_binary


def _prose() -> Any:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_has_a_finding() -> None:
    assert _prose().findings() == []


def test_every_kind_of_finding_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    bad = {
        "a " * 60: "119 columns",
        "It waits in vain.": "'in vain': write without effect",
        f"[x](page.md#other) {'word ' * 5}": "no such heading: page.md#other",
        "[x](nowhere.md)": "no such file: nowhere.md",
        "\n".join(["one two three four five six seven eight nine ten"] * 5): "a sentence of 50 words",
    }
    prose = _prose()
    for text, finding in bad.items():
        page.write_text(f"# Page\n\n{text.strip()}\n\n```\n{'code ' * 50} in vain\n```\n\n| {'cell ' * 50} |\n")
        content = page.read_text()
        found = [what for _, what in [*prose._wording(content), *prose._links(page, content)]]
        assert any(what.startswith(finding) for what in found), (text, found)
    page.write_text("# A page\n\nA sentence. [x](#a-page)\n")
    assert not [*prose._wording(page.read_text()), *prose._links(page, page.read_text())]


def test_the_images_to_copy_are_those_of_the_operator() -> None:
    source = (ROOT / "operator/src/cli/args.rs").read_text()
    images = re.findall(r'^const REDIS\w*_IMAGE: &str =\s+"(\S+@sha256:[0-9a-f]{64})";', source, re.MULTILINE)
    guide = (ROOT / "docs/guides/release.md").read_text()
    rows = re.findall(r"^\| `docker\.io/(\S+)` \| `shared\.redis\.managed", guide, re.MULTILINE)
    assert len(images) == 2
    assert rows == images


def test_the_pod_with_lmcache_has_the_settings_of_its_guide(tmp_path: Path) -> None:
    file = ROOT / "manifests/examples/lmcache-pod.yaml"
    objects = {o["kind"]: o for o in yaml.safe_load_all(file.read_text())}
    data = objects["ConfigMap"]["data"]
    guide = (ROOT / "docs/guides/lmcache-plugin.md").read_text()
    plugin = re.search(r"^## Storage plugin\n.*?^```\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert plugin is not None
    assert yaml.safe_load(data["lmcache.yaml"]) == yaml.safe_load(plugin[1])

    config = tmp_path / "config.v1.yaml"
    config.write_text(data["config.v1.yaml"])
    command = [str(sidecar_binary()), "config", "--check", str(config)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    socket = Path(yaml.safe_load(data["config.v1.yaml"])["socket"])
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    sidecar, init = pod["initContainers"]
    (vllm,) = pod["containers"]
    assert init["command"][2:] == ["--folder", str(socket.parent)]
    assert {"name": "PYTHONPATH", "value": str(socket.parent)} in vllm["env"]

    tutorial = (ROOT / "docs/tutorials/kubernetes.md").read_text()
    overhead = re.search(r"(\d+)Mi\s+for\s+16Gi", tutorial)
    assert overhead is not None
    assert yaml.safe_load(data["config.v1.yaml"])["memory"] == {"size": "16Gi"}
    assert sidecar["resources"]["limits"]["memory"] == f"{16 * 1024 + int(overhead[1])}Mi"


def test_every_command_of_vllm_has_failed_loads_recomputed() -> None:
    """vLLM's default fails the request."""
    found = set()
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "manifests/examples").glob("*.yaml")]:
        for config in re.findall(r"--kv-transfer-config[\s\\-]+'(\{.*?\})'", page.read_text(), re.DOTALL):
            found.add(page.name)
            assert json.loads(config).get("kv_load_failure_policy") == "recompute", (page.name, config)
    assert {"lmcache-plugin.md", "lmcache-pod.yaml", "local.md", "vllm-tier.md"} <= found
