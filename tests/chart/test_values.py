"""Values that users may set, and error messages for others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart import CHART, ROOT, SETS

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = (CHART / "values.yaml").read_text()
_TIMING = {"initialDelaySeconds", "timeoutSeconds", "successThreshold", "failureThreshold"}
#: Fields that are set only if a user sets them; `enabled` is for the condition of an umbrella chart.
NO_DEFAULT = {
    "": {"enabled"},
    ".resources": {"claims"},
    ".pki.certManager.issuerRef": {"name", "kind", "group"},
    ".webhook.namespaceSelector": {"matchLabels", "matchExpressions"},
    ".webhook.objectSelector": {"matchLabels", "matchExpressions"},
    ".livenessProbe": _TIMING,
    ".readinessProbe": _TIMING,
}


@pytest.mark.parametrize("name", SETS)
def test_every_set_of_values_lints_and_renders_unique_objects(helm, template, render, tmp_path, name):
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(SETS[name]))
    linted = helm("lint", str(CHART), "--strict", "-f", str(file))
    assert linted.returncode == 0, linted.stdout + linted.stderr
    objects = render(SETS[name])
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names))
    for o in objects:
        namespaces = (None, "kv", *SETS[name].get("watchNamespaces", []))
        assert o["metadata"].get("namespace") in namespaces, o["metadata"]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"name": "x"}}, "name"),
        ({"extraEnv": [{"value": "x"}]}, "extraEnv"),
        ({"readinessProbe": {"httpGet": 1}}, "readinessProbe"),
        ({"webhook": {"objectSelector": {"pool": {}}}}, "objectSelector"),
        ({"podDisruptionBudget": {"minAvailable": "half"}}, "minAvailable"),
        ({"fullnameOverride": "Caches"}, "fullnameOverride"),
        ({"dnsPolicy": "cluster"}, "dnsPolicy"),
        ({"logFormat": "xml"}, "logFormat"),
        ({"pki": {"mode": "none"}}, "mode"),
        ({"pki": {"self": {}}}, "self"),
        ({"replicas": 0}, "replicas"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"allowPodPatch": "yes"}, "allowPodPatch"),
        ({"statusInterval": "5m"}, "statusInterval"),
        ({"webhook": {"timeoutSeconds": 1}}, "timeoutSeconds"),
        ({"monitoring": {"podMonitor": {"enabled": True, "label": {}}}}, "label"),
        ({"podAnnotations": {"a": 1}}, "podAnnotations"),
        ({"policy": {"gpuAccess": ["All"]}}, "gpuAccess"),
        ({"policy": {"maxMemoryPerPod": "64 GB"}}, "maxMemoryPerPod"),
        ({"pki": {"certManager": {"issuerRef": {"kind": "ClusterIssuer"}}}}, "'name'"),
        ({"pki": {"certManager": {"issuerRef": {"name": ""}}}}, "name"),
    ],
)
def test_an_unknown_value_is_refused_by_name(template, values, word):
    done = template(values)
    assert done.returncode != 0
    assert word in done.stderr


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"pki": {"mode": "external"}}, "pki.external.secretName"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
        ({"hostNetwork": True}, "set webhook.port, such as 9443"),
        ({"adminPort": 10250}, "webhook.port and adminPort are both 10250"),
    ],
)
def test_a_value_that_another_one_requires_is_named(template, values, missing):
    done = template(values)
    assert done.returncode != 0
    assert missing in done.stderr


def _objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the schema with named properties."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]]
    if "properties" in schema:
        yield path, schema
        for name, below in schema["properties"].items():
            yield from _objects(below, f"{path}.{name}")


def test_the_schema_is_closed_at_every_level():
    open_objects = [path for path, schema in _objects(SCHEMA) if schema.get("additionalProperties") is not False]
    assert open_objects == [".global"], "an umbrella chart shares values with other charts"


def test_schema_and_values_name_the_same_keys():
    values = yaml.safe_load(VALUES)
    for path, schema in _objects(SCHEMA):
        here: Any = values
        for name in path.split(".")[1:]:
            here = here[name]
        assert set(here) == set(schema["properties"]) - NO_DEFAULT.get(path, set()), path


def test_every_value_has_a_meaning_in_the_readme():
    """Comments of values.yaml are what the table in the chart's README is written from."""
    table = (CHART / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| (.*) \|$", table, re.M))
    assert [path for path, meaning in rows.items() if not meaning] == []
    paths = {path.strip(".") for path, _ in _objects(SCHEMA)}
    assert len(rows) > 100
    assert {path.partition(".")[0] for path in rows} == set(SCHEMA["properties"]) - {"enabled"}
    assert {path.rpartition(".")[0] for path in rows} <= paths


def test_the_readme_belongs_to_the_values():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "chart_values.py"), "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr
