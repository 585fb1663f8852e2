"""Writes the tables of docs/reference/identity.md from the connector's identity table; `--check` only compares."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "identity.md"
BEGIN, END = "<!-- tables: tools/identity_page.py -->\n", "<!-- end of tables -->\n"


def table() -> Any:
    """The module, without the package around it, which needs vLLM's environment."""
    file = ROOT / "sidecar" / "connector" / "kvcachepool" / "identity.py"
    spec = importlib.util.spec_from_file_location("identity", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render() -> str:
    """The tables as Markdown."""
    module = table()
    lines = []
    for title, fields in {**module.CLASSES, "Environment": module.ENVIRONMENT}.items():
        lines += [f"### {title}", "", "| fields | identity? |", "|---|---|"]
        lines.append(f"| {_listed(fields.identity)} | **yes** |")
        lines += [f"| {_listed(names)} | no: {reason} |" for reason, names in fields.irrelevant.items()]
        lines.append("")
    return "\n".join(lines)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + "\n" + render() + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/reference/identity.md differs from the identity table: run python3 tools/identity_page.py")
