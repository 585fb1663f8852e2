"""docs/guides/troubleshooting.md explains every name that a sidecar or a connector gives as a reason.

The operator's own reasons are compared by a test of its crate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from chart import ROOT

CONNECTOR = ROOT / "sidecar" / "connector" / "kvcachepool"
SIDECAR = ROOT / "sidecar"
NAME = re.compile(r"^[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*(/([A-Za-z0-9]+|\.\.\.))?$")


def _explained(title: str) -> set[str]:
    """Names in the first column of the tables below this heading."""
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    section = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return {name for cell in re.findall(r"^\| (`[^|]*) \|", section, re.M) for name in re.findall(r"`([^`]+)`", cell)}


def _unexplained(names: set[str], title: str) -> set[str]:
    """The names that are not explained: neither themselves nor by their family, `Family/...`."""
    explained = _explained(title)
    return {name for name in names if name not in explained and name.split("/")[0] + "/..." not in explained}


def _strings(node: ast.AST) -> Iterator[str]:
    """The text of an expression. Parts that are only known at run time are `...`."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, (ast.Call, ast.Dict, ast.Compare)):
        for below in ast.iter_child_nodes(node):
            yield from _strings(below)


def _names(node: ast.Assign, *wanted: str) -> bool:
    """Whether a variable or attribute with this name is set, also as one of several."""
    return any(
        getattr(target, "id", getattr(target, "attr", "")) in wanted
        for assigned in node.targets
        for target in (assigned.elts if isinstance(assigned, ast.Tuple) else [assigned])
    )


def _texts_given_to(files: Iterable[Path], functions: str) -> set[str]:
    """First arguments of calls of these functions."""
    return {
        text
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and node.args
        if re.fullmatch(functions, getattr(node.func, "attr", getattr(node.func, "id", "")))
        for text in _strings(node.args[0])
    }


def _off_reasons() -> set[str]:
    """Reasons of a connector that is off: results of preflight, arguments of `Unserved`, reasons for turning off."""
    reasons = _texts_given_to(CONNECTOR.glob("*.py"), r"Unserved|_?go_off(_later)?|_off")
    for name in ("preflight.py", "plugin.py"):
        for node in ast.walk(ast.parse((CONNECTOR / name).read_text())):
            gives = isinstance(node, ast.Return) or (isinstance(node, ast.Assign) and _names(node, "reason", "refusal"))
            if gives and node.value is not None:
                reasons |= set(_strings(node.value))
    return {reason for reason in reasons if NAME.match(reason)}


def _unshared_reasons() -> set[str]:
    """Reasons of process-local domains."""
    files = [CONNECTOR / "descriptor.py", CONNECTOR / "weights.py"]
    reasons = _texts_given_to(files, "_own")
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        values: list[ast.AST] = []
        if isinstance(node, ast.Assign) and _names(node, "reason", "_NOT_LOCAL", "HASHING"):
            values = list(node.value.values) if isinstance(node.value, ast.Dict) else [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name == "changed_since":
            values = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and len(node.args) == 2:
            values = [node.args[1]]
        reasons |= {text for value in values for text in _strings(value)}
    return {reason for reason in reasons if NAME.match(reason)}


def _degradations() -> set[str]:
    """Names of a sidecar's degradations."""
    reasons: set[str] = set()
    for file in [*SIDECAR.glob("src/**/*.rs"), *SIDECAR.glob("*/src/**/*.rs")]:
        text = file.read_text()
        reasons |= set(re.findall(r'\.degrade\(\s*"(\w+)"', text))
        reasons |= set(re.findall(r'no_arena = \(\s*"(\w+)"', text))
    codes = (SIDECAR / "src" / "config_file" / "mod.rs").read_text()
    standby = (SIDECAR / "src" / "supervisor" / "standby.rs").read_text()
    return reasons | set(re.findall(r'=> "(Config\w+)"', codes)) | set(re.findall(r'"(Engine\w+): ', standby))


def test_every_reason_why_a_connector_is_off_is_explained():
    reasons = _off_reasons()
    assert {"VllmTooOld", "LayoutUnknown/Strides", "ExistingConnector/...", "CopyFailed"} <= reasons
    assert _unexplained(reasons, "vLLM is attached, but the cache is off") == set()


def test_every_reason_why_weights_are_not_shared_and_every_miss_is_explained():
    title = "It does not hit"
    unshared = _unshared_reasons()
    named = {"Gguf", "NoLocalWeights", "LoadFormatUnknown", "WeightsHashing", "UnknownIdentityField/..."}
    assert named | {"StartNotWitnessed", "WeightsChangedDuringStart", "ProcessorUnreadable"} <= unshared
    assert _unexplained(unshared, title) == set()
    misses = _texts_given_to(CONNECTOR.glob("*.py"), "Uncacheable")
    for name in ("namespaces.py", "lookups.py"):
        for node in ast.walk(ast.parse((CONNECTOR / name).read_text())):
            if isinstance(node, ast.Assign) and _names(node, "CONTENT_UNKNOWN", "missed"):
                misses |= set(_strings(node.value))
            elif isinstance(node, ast.FunctionDef) and node.name == "_why_not":
                returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
                misses |= {text for value in returned for text in _strings(value)}
    assert {"unconnected", "min_load_tokens", "lora_content_unknown"} <= misses
    assert _unexplained(misses, title) == set()


def test_exactly_the_degradations_of_a_sidecar_are_explained():
    degradations = _degradations()
    assert len(degradations) > 10
    assert _explained("A sidecar is degraded") == degradations
