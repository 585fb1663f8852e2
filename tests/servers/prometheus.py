"""Reading the text format of /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Samples:
    """All samples of one reading, summed over labels that are not selected."""

    def __init__(self, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
        self._samples = list(samples)

    @classmethod
    def parse(cls, text: str) -> Samples:
        """From the text format."""
        found = (_LINE.match(line) for line in text.splitlines())
        return cls((m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m)

    def total(self, name: str, **labels: str) -> float:
        """Sum of all samples of a name (with or without `_total`) with these labels, 0 without any."""
        names = (name, name + "_total")
        return sum(v for n, have, v in self._samples if n in names and labels.items() <= have.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums of a name by the values of one label, for samples with these labels."""
        sums: dict[str, float] = {}
        for n, have, value in self._samples:
            if n in (name, name + "_total") and label in have and labels.items() <= have.items():
                sums[have[label]] = sums.get(have[label], 0.0) + value
        return sums
