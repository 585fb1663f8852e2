"""Files under manifests/ are what the chart renders, and examples that the schema of the resource accepts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from chart import CHART, ROOT, one
from servers.paths import sidecar_binary

EXAMPLES = [ROOT / "manifests" / "kvcachepool.yaml", *sorted((ROOT / "manifests" / "examples").glob("*.yaml"))]


def _pool_schema() -> dict[str, Any]:
    (crd,) = [
        crd
        for file in (ROOT / "crds").glob("*.yaml")
        if (crd := yaml.safe_load(file.read_text()))["spec"]["names"]["kind"] == "KVCachePool"
    ]
    return _closed(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    """The API server drops fields outside the schema, so an example must not have any."""
    if isinstance(schema, list):
        return [_closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "format"}
    if closed.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    open_object = closed.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in closed
    if isinstance(closed.get("properties"), dict) and not open_object:
        closed["additionalProperties"] = False
    return closed


def test_the_rendered_manifests_are_up_to_date(helm):
    done = subprocess.run(
        ["tools/render_manifests.sh", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_install_manifest_creates_its_namespace_without_helm():
    objects = [o for o in yaml.safe_load_all((ROOT / "manifests" / "install.yaml").read_text()) if o]
    namespace = objects[0]
    assert namespace["kind"] == "Namespace"
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    text = (ROOT / "manifests" / "install.yaml").read_text()
    assert "helm.sh" not in text
    assert "managed-by" not in text
    for o in objects[1:]:
        assert o["metadata"].get("namespace") in (None, namespace["metadata"]["name"])


def test_the_crd_is_the_generated_one(render):
    (file,) = (ROOT / "crds").glob("*.yaml")
    wanted = yaml.safe_load(file.read_text())
    for keep in (True, False):
        got = one(render({"crds": {"keep": keep}}), "CustomResourceDefinition")
        assert got["spec"] == wanted["spec"]
        assert got["metadata"]["name"] == wanted["metadata"]["name"]
        kept = got["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
        assert kept == ("keep" if keep else None)
    assert not [o for o in render({"crds": {"enabled": False}}) if o["kind"] == "CustomResourceDefinition"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.name)
def test_examples_name_only_what_exists(file: Path):
    objects = [o for o in yaml.safe_load_all(file.read_text()) if o]
    assert objects
    for pool in (o for o in objects if o["kind"] == "KVCachePool"):
        jsonschema.validate(pool, _pool_schema() | {"additionalProperties": True})


def test_the_readme_names_a_pool_with_the_tiers_that_it_shows():
    text = (ROOT / "README.md").read_text()
    name = re.search(r"kubectl kvcachepool check (\S+)", text)[1]  # type: ignore[index]
    file = ROOT / re.search(r"kubectl apply -f (\S+tiers\S+)", text)[1]  # type: ignore[index]
    (pool,) = (o for o in yaml.safe_load_all(file.read_text()) if o["kind"] == "KVCachePool")
    assert pool["metadata"]["name"] == name
    spec = pool["spec"]
    shown = re.findall(r"^\| \w+ \| `(local|shared)\.(\w+)`", text, re.M)
    assert {part for _, part in shown} == {"disk", "redis", "s3"}
    assert all(part in spec[group] for group, part in shown)


def test_every_quickstart_shows_the_example():
    example = yaml.safe_load((ROOT / "manifests" / "kvcachepool.yaml").read_text())
    page = (ROOT / "docs" / "tutorials" / "kubernetes.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert yaml.safe_load(shown) == example
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    pool = yaml.safe_load(re.search(r"<<EOF\n(.*?)\n *EOF", notes, re.S)[1])  # type: ignore[index]
    assert pool["apiVersion"] == example["apiVersion"]
    assert pool["spec"].keys() == example["spec"].keys()


def test_the_servers_of_the_example_take_their_config_and_options(tmp_path: Path):
    file = ROOT / "manifests" / "examples" / "remote-servers.yaml"
    objects = {o["kind"]: o for o in yaml.safe_load_all(file.read_text())}
    config = tmp_path / "config.v1.yaml"
    config.write_text(objects["ConfigMap"]["data"]["config.v1.yaml"])
    _, serve = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    socket = serve["command"][-1]
    assert socket == yaml.safe_load(config.read_text())["socket"]
    binary = str(sidecar_binary())
    checked = subprocess.run([binary, "config", "--check", str(config)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    options = [*serve["command"][2:], *serve["args"]]
    # The files are missing here, so the server names the first of them; an unknown option ends with code 2.
    started = subprocess.run([binary, "serve", *options], capture_output=True, text=True, timeout=60)
    assert started.returncode == 1, started.stderr
    assert "cannot read the key file /keys/keys" in started.stderr
