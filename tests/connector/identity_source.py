"""Names that the identity table must know, read from vLLM's source without importing it."""

from __future__ import annotations

import ast
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
