"""How many histories of the engine's deterministic simulation run per second.

python -m bench.simulation [--histories 2000]
"""

from __future__ import annotations

import argparse
import json
import subprocess

from bench.results import Row, merge
from servers.paths import target


def measure(histories: int) -> Row:
    """Runs them once."""
    command = [str(target() / "debug" / "examples" / "simulate"), "--histories", str(histories), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return Row(
        name="sim_histories_per_s",
        value=round(result["histories"] / result["seconds"], 1),
        unit="1/s",
        reference=f"{result['events'] / result['histories']:.0f} events a history",
        reference_value=None,
        ratio=None,
        runs=histories,
        command="make bench ONLY=simulation",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=2000)
    merge([measure(parser.parse_args().histories)])
