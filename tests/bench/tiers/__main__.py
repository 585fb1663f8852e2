"""`make bench-tiers`: every size and depth on every tier, each beside the limit of what lies below, by turns.

python -m bench.tiers [--tiers disk redis] [--sizes 1 8] [--in-flight 8 64] [--rounds 3]

Rows are GB/s (10^9 bytes); what single operations took, processor and memory are in target/bench/tiers.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from bench.results import RESULTS, Row, merge
from bench.tiers import disk, network, redis, redis_tls, s3, s3_tls, store, ttft
from bench.tiers.load import MIB, Amount, Cell, Measured

TIERS = {"disk": disk, "redis": redis, "redis_tls": redis_tls, "s3": s3, "s3_tls": s3_tls, "store": store}
SIZES = (1, 4, 8, 16, 32)
IN_FLIGHT = (1, 8, 64)
#: Maximum bytes that a run writes, without the memory of objects in flight.
MOST = 1 << 30
_DETAILS = ("gbps", "p50_ms", "p99_ms", "cpu_s_per_gb", "rss_peak_mib")


def median(of: list[Measured], op: str, what: str) -> float:
    """Median of several runs."""
    return statistics.median(float(run[op][what]) for run in of)


def rows(tier: str, reference: str, cell: Cell, limits: list[Measured], runs: list[Measured]) -> list[Row]:
    """A row for puts and one for gets."""

    def row(op: str) -> Row:
        value, limit = median(runs, op, "gbps"), median(limits, op, "gbps")
        return Row(
            name=f"{tier}_{op}_{cell.name}_gbps",
            value=round(value, 3),
            unit="GB/s",
            reference=reference,
            reference_value=round(limit, 3),
            ratio=round(value / limit, 3),
            runs=len(runs),
            command="make bench-tiers",
        )

    return [row("put"), row("get")]


def measured(name: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Every size and depth on one tier, alternating with its limit. Adds rows to the results, and records the cost of
    each cell.
    """
    details: list[dict[str, Any]] = []
    with TIERS[name].subject() as subject:
        for cell in (Cell(size * MIB, depth) for size in chosen.sizes for depth in chosen.in_flight):
            amount = Amount(chosen.seconds, max(MOST, 2 * cell.size * cell.in_flight))
            turns = [subject.turn(cell, amount) for _ in range(chosen.rounds)]
            limits, runs = [turn.limit for turn in turns], [turn.tier for turn in turns]
            merge(rows(name, TIERS[name].REFERENCE, cell, limits, runs))
            details += [
                {"tier": name, "cell": cell.name, "op": op, **{key: median(runs, op, key) for key in _DETAILS}}
                for op in ("put", "get")
            ]
    return details


def main() -> None:
    """Runs the selected tiers and sizes."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiers")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="MiB")
    parser.add_argument("--in-flight", nargs="+", type=int, default=IN_FLIGHT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of puts, and of gets, per run")
    parser.add_argument("--index", type=int, default=1_000_000, help="objects of the disk's index; 0 leaves it out")
    parser.add_argument("--prompts", type=int, default=5, help="of the times to first tokens; 0 leaves them out")
    chosen = parser.parse_args()
    network.enter_own()
    details = [each for name in chosen.tiers for each in measured(name, chosen)]
    if "disk" in chosen.tiers and chosen.index:
        with disk.subject() as subject:
            merge([subject.index(chosen.index)])
    if chosen.prompts:
        merge(ttft.rows(chosen.prompts))
    into = RESULTS.with_name("tiers.json")
    into.write_text("[\n" + ",\n".join(json.dumps(each) for each in details) + "\n]\n")
    print(into)


if __name__ == "__main__":
    main()
