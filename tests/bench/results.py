"""Benchmark rows: printed as a table and merged into `target/bench/results.json` by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

RESULTS = Path(__file__).resolve().parents[2] / "target" / "bench" / "results.json"


class Row(TypedDict):
    """One measurement. `ratio` = value / reference_value; None where there is no reference."""

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float | None
    ratio: float | None
    runs: int
    command: str


def merge(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Prints the rows and replaces rows of the same names in the results file."""
    new = list(rows)
    for row in new:
        reference = "" if row["reference_value"] is None else f"  {row['reference_value']} ({row['ratio']})"
        print(f"{row['name']:32} {row['value']:>10} {row['unit']:6}{reference}")
    kept: list[Any] = []
    if path.exists():
        names = {row["name"] for row in new}
        kept = [row for row in json.loads(path.read_text()) if row["name"] not in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}.tmp")
    staged.write_text(json.dumps([*kept, *new], indent=1) + "\n")
    staged.replace(path)
