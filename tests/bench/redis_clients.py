"""The Redis tier over our client and over the `redis` crate, by turns on one server, beside redis-benchmark.

    PYTHONPATH=tests python -m bench.redis_clients [--sizes 1 8] [--in-flight 8] [--rounds 5] [--ways ours gets,3 mget]

Prints a line for each size, depth, operation and way: medians, and the median of the ratios to ours of the same round.
Rounds in which other programs took more than a little of the processors do not count, unless `--any`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from bench.tiers import network, redis
from bench.tiers.load import MIB, Amount, Cell, Measured, tier

WAYS = ("ours", "gets,3", "blocking,2")
#: As many bytes as a run writes at most, where the objects in flight are no more.
MOST = 1 << 30
#: How busy the processors of a quiet machine are.
QUIET = 0.3

#: Of each way, and "limit" in every other round.
Round = dict[str, Measured]


def _busy(patience: float) -> float:
    """Waits until other programs are quiet. Returns how busy they are."""
    began = time.monotonic()
    while True:
        before = _times()
        time.sleep(0.3)
        total, idle = (b - a for a, b in zip(before, _times(), strict=True))
        busy = 1 - idle / max(total, 1)
        if busy < QUIET or time.monotonic() - began > patience:
            return round(busy, 2)


def _times() -> tuple[int, int]:
    numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(numbers), numbers[3] + numbers[4]


def main() -> None:
    """Every round, every cell, every way."""
    parser = argparse.ArgumentParser(prog="python -m bench.redis_clients")
    parser.add_argument("--sizes", nargs="+", type=int, default=(1, 4, 8, 32), help="MiB")
    parser.add_argument("--in-flight", nargs="+", type=int, default=(8, 1, 64))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of puts, and of gets, per run")
    parser.add_argument("--patience", type=float, default=20.0, help="longest wait for a quiet machine, in s")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--any", action="store_true", help="rounds on a busy machine count too")
    parser.add_argument("--into", type=Path, default=Path("target/bench/redis_clients.jsonl"))
    chosen = parser.parse_args()
    # This kernel refuses cubic there; on a loopback interface, where nothing is lost, reno grows alike.
    network._USUAL = "reno"
    network.enter_own()
    chosen.into.parent.mkdir(parents=True, exist_ok=True)
    cells = [Cell(size * MIB, depth) for depth in chosen.in_flight for size in chosen.sizes]
    rounds: dict[str, list[Round]] = {cell.name: [] for cell in cells}
    with redis.subject() as subject, chosen.into.open("a") as into:
        for number in range(chosen.rounds):
            for cell in cells:
                amount = Amount(chosen.seconds, max(MOST, cell.size * cell.in_flight))
                run: Round = {}
                busiest = _busy(chosen.patience)
                if number % 2 == 0:
                    run["limit"] = subject._limit(cell, amount)
                turned = number % len(chosen.ways)
                for way in [*chosen.ways[turned:], *chosen.ways[:turned]]:
                    os.environ["KVCACHEPOOL_REDIS_CLIENT"] = way
                    subject._empty(amount)
                    busiest = max(busiest, _busy(chosen.patience))
                    run[way] = tier(subject._config, cell, amount)
                into.write(json.dumps({"cell": cell.name, "round": number, "busiest": busiest, **run}) + "\n")
                into.flush()
                if busiest < QUIET or chosen.any:
                    rounds[cell.name].append(run)
    for cell in cells:
        for op in ("put", "get"):
            for way in ("limit", *chosen.ways):
                _print(cell, op, way, rounds[cell.name])


def _print(cell: Cell, op: str, way: str, rounds: Iterable[Round]) -> None:
    pairs = [(run[way][op], run["ours"][op]) for run in rounds if way in run]
    if not pairs:
        return
    speed = statistics.median(own["gbps"] for own, _ in pairs)
    ratio = statistics.median(own["gbps"] / ours["gbps"] for own, ours in pairs)
    cpu = statistics.median(own.get("cpu_s_per_gb", 0.0) for own, _ in pairs)
    memory = max(own.get("rss_peak_mib", 0.0) for own, _ in pairs)
    costs = f" {cpu:5.2f} CPU s/GB {memory:6.0f} MiB" if memory else ""
    print(f"{cell.name:6} {op} {way:11} {len(pairs)} rounds {speed:6.2f} GB/s {ratio:5.2f} of ours{costs}")


if __name__ == "__main__":
    main()
