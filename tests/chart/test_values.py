"""Values that users may set, and error messages for others."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart import CHART, SETS

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = (CHART / "values.yaml").read_text()


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
        assert o["metadata"].get("namespace") in (None, "kv"), o["metadata"]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"registry": "x"}}, "registry"),
        ({"pki": {"mode": "none"}}, "mode"),
        ({"pki": {"self": {}}}, "self"),
        ({"replicas": 0}, "replicas"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"allowPodPatch": "yes"}, "allowPodPatch"),
        ({"statusInterval": "5m"}, "statusInterval"),
        ({"webhook": {"timeoutSeconds": 1}}, "timeoutSeconds"),
        ({"monitoring": {"podMonitor": {"enabled": True, "label": {}}}}, "label"),
        ({"podAnnotations": {"a": 1}}, "podAnnotations"),
    ],
)
def test_an_unknown_value_is_refused_by_name(template, values, word):
    done = template(values)
    assert done.returncode != 0
    assert word in done.stderr


def test_external_pki_requires_its_secret(template):
    done = template({"pki": {"mode": "external"}})
    assert done.returncode != 0
    assert "pki.external.secretName" in done.stderr


def _objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the schema with named properties."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]]
    if "properties" in schema:
        yield path, schema
        for name, below in schema["properties"].items():
            yield from _objects(below, f"{path}.{name}")


def test_the_schema_is_closed_at_every_level():
    assert [path for path, schema in _objects(SCHEMA) if schema.get("additionalProperties") is not False] == []


def test_schema_and_values_name_the_same_keys():
    values = yaml.safe_load(VALUES)
    for path, schema in _objects(SCHEMA):
        here: Any = values
        for name in path.split(".")[1:]:
            here = here[name]
        wanted = set(schema["properties"])
        # Not read by the chart, or without a default.
        wanted -= {"global", "enabled"} if not path else set()
        wanted -= {"claims"} if path == ".resources" else set()
        wanted -= {"name", "kind", "group"} if path.endswith(".issuerRef") else set()
        assert set(here) == wanted, path


def test_every_value_has_a_comment():
    lines = VALUES.splitlines()
    missing = []
    for above, line in itertools.pairwise(lines):
        key = re.match(r"^( *)([A-Za-z_]+):", line)
        if key is None or key[2] in ("enabled", "requests", "limits", "cpu", "memory", "grafana_dashboard"):
            continue
        if not above.strip().startswith("#"):
            missing.append(line)
    assert missing == []
