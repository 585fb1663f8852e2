"""Names that the identity table must know, read from vLLM's source without importing it."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def config_fields(vllm: Path) -> dict[str, set[str]]:
    """Config class -> fields, arguments of its constructor included, of a folder with vLLM's source."""
    found: dict[str, set[str]] = {}
    for file in sorted((vllm / "config").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = {
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and not ast.unparse(statement.annotation).startswith("ClassVar")
                }
    return found


def environment_names(vllm: Path) -> set[str]:
    """Variables of `vllm/envs.py`."""
    for node in ast.parse((vllm / "envs.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("vllm/envs.py has no environment_variables")


def sglang_arguments(source: Path) -> set[str]:
    """Arguments of a server: the fields of the classes in `arg_groups/fields`."""
    return {
        statement.target.id
        for file in sorted((source / "srt" / "arg_groups" / "fields").glob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def sglang_environment(source: Path) -> set[str]:
    """Variables of `environ.py`, and names in all files that look like one."""
    found = set()
    for node in ast.parse((source / "srt" / "environ.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Envs":
            found |= {ast.unparse(one.targets[0]) for one in node.body if isinstance(one, ast.Assign)}
    assert found
    for file in [*source.glob("*.py"), *(source / "srt").rglob("*.py"), *(source / "kernels").rglob("*.py")]:
        found |= set(re.findall(r"[\"'](SGLANG_[A-Z0-9_]+)[\"']", file.read_text()))
    # An example in a comment, and a variable that does nothing any more.
    return found - {"SGLANG_OLD_NAME", "SGLANG_SKIP_RUST_TESTS"}
