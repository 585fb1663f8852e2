"""One run of `tier_load`: puts and then gets of one size, so many in flight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.examples import measured

MIB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """What is measured."""

    size: int
    in_flight: int

    @property
    def name(self) -> str:
        """As rows have it, such as `8m_64`."""
        return f"{self.size // MIB}m_{self.in_flight}"


@dataclass(frozen=True)
class Amount:
    """How long puts go on, and gets as long, and how many bytes are written at most."""

    seconds: float
    most: int


#: What was measured, by "put" and "get": `gbps` and, of a tier, what it cost.
Measured = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A tier and what bounds it, one after the other."""

    tier: Measured
    limit: Measured


def tier_load(what: list[str], cell: Cell, amount: Amount) -> dict[str, Measured]:
    """Runs `tier_load` with these first arguments. What was measured, by what it is of: "tier", "raw" or "http"."""
    size = ["--size", str(cell.size), "--in-flight", str(cell.in_flight)]
    until = ["--seconds", str(amount.seconds), "--most", str(amount.most)]
    all_of: dict[str, Measured] = {}
    for line in measured("tier_load", *what, *size, *until):
        all_of.setdefault(line["of"], {})[line["op"]] = line
    return all_of


def tier(config: Path, cell: Cell, amount: Amount) -> Measured:
    """The one tier of a sidecar's config, with all its layers."""
    return tier_load(["tier", "--config", str(config)], cell, amount)["tier"]
