"""One run of `tier_load`: puts and then gets of one size, with this many in flight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.examples import measured

MIB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """One cell of the measurement."""

    size: int
    in_flight: int

    @property
    def name(self) -> str:
        """Name in rows, such as `8m_64`."""
        return f"{self.size // MIB}m_{self.in_flight}"


@dataclass(frozen=True)
class Amount:
    """Duration of puts and of gets, and maximum bytes to write."""

    seconds: float
    most: int


#: Results by "put" and "get": `gbps`, and the cost for a tier.
Measured = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A tier and its limit, one after the other."""

    tier: Measured
    limit: Measured


def tier_load(what: list[str], cell: Cell, amount: Amount) -> dict[str, Measured]:
    """Runs `tier_load` with these first arguments. Returns the results by subject: "tier", "raw" or "http"."""
    size = ["--size", str(cell.size), "--in-flight", str(cell.in_flight)]
    until = ["--seconds", str(amount.seconds), "--most", str(amount.most)]
    all_of: dict[str, Measured] = {}
    for line in measured("tier_load", *what, *size, *until):
        all_of.setdefault(line["of"], {})[line["op"]] = line
    return all_of


def tier(config: Path, cell: Cell, amount: Amount) -> Measured:
    """The one tier of a sidecar's config, with all its layers."""
    return tier_load(["tier", "--config", str(config)], cell, amount)["tier"]
