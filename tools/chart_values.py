"""Writes the table of values in the chart's README from the comments of values.yaml; `--check` only compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parents[1] / "charts" / "kvcachepool"
PAGE = CHART / "README.md"
BEGIN, END = "<!-- tables: tools/chart_values.py -->\n", "<!-- end of tables -->\n"
_KEY = re.compile(r"^( *)([A-Za-z_]\w*):")


class Value(NamedTuple):
    """A value of the chart, or a group of them: its path and the comment above it."""

    path: tuple[str, ...]
    meaning: str


def keys(text: str) -> Iterator[Value]:
    """Every key that is on a line of its own."""
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip(" #"))
        elif key := _KEY.match(line):
            path[len(key[1]) // 2 :] = [key[2]]
            yield Value(tuple(path), " ".join(comment))
            comment.clear()
        else:
            comment.clear()


def values(text: str) -> Iterator[tuple[Value, str]]:
    """Values with their defaults as JSON, and groups with an empty one. A map without a comment inside is one value."""
    parsed = yaml.safe_load(text)
    found = list(keys(text))
    groups = {value.path[:end] for value in found if value.meaning for end in range(1, len(value.path))}
    for value in found:
        if value.path in groups:
            yield value, ""
        elif not value.path[:-1] or value.path[:-1] in groups:
            default: Any = parsed
            for name in value.path:
                default = default[name]
            yield value, json.dumps(default)


def page() -> str:
    """The README as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value, default in values((CHART / "values.yaml").read_text()):
        cells = ["`" + ".".join(value.path) + "`", default and f"`{default}`", value.meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}" + rest.split(END)[1]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(
            "charts/kvcachepool/README.md differs from values.yaml: run python3 tools/chart_values.py (needs PyYAML)"
        )
