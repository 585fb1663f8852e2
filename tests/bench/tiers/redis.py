"""The Redis tier and redis-benchmark: the same server, values as large as the tier writes them, as many connections."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.tiers.load import MIB, Amount, Cell, Measured, tier
from servers.paths import short_folder
from servers.redis import RedisServer

REFERENCE = "redis-benchmark"
#: The tier has as many connections for bytes, and cuts values so that none is longer.
CONNECTIONS, VALUE = 8, MIB


class Redis:
    """A server and a config that names it."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self._server = server
        self._config = folder / "config.yaml"
        self._config.write_text(f'redis:\n  urls: ["{server.url}"]\n')

    def measure(self, cell: Cell, amount: Amount) -> Measured:
        """Through the tier."""
        self._server.ask("FLUSHALL", "SYNC")
        return tier(self._config, cell, amount)

    def limit(self, cell: Cell, amount: Amount) -> Measured:
        """Without it. All values go to one key, so the server always has room for them."""
        self._server.ask("FLUSHALL", "SYNC")
        value = min(cell.size, VALUE)
        values = cell.size // value
        count = max(values, min(int(amount.seconds * 2000), amount.most // value))
        command = ["redis-benchmark", "-p", str(self._server.port), "-t", "set,get", "--csv"]
        command += ["-d", str(value), "-n", str(count), "-c", str(min(CONNECTIONS, cell.in_flight * values))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines = csv.DictReader(done.stdout.splitlines())
        gbps = {line["test"].lower(): float(line["rps"]) * value / 1e9 for line in lines}
        return {"put": {"gbps": gbps["set"]}, "get": {"gbps": gbps["get"]}}


@contextmanager
def subject() -> Iterator[Redis]:
    """A server with room for all that one run puts."""
    folder, server = short_folder(), RedisServer(memory="6gb")
    try:
        yield Redis(folder, server)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
