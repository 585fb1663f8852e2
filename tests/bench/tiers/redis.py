"""The Redis tier and redis-benchmark: the same server, values of 1 MiB at most, as many connections."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.tiers.load import MIB, Amount, Cell, Measured, Turn, tier
from servers import certificates
from servers.paths import short_folder
from servers.redis import RedisServer

REFERENCE = "redis-benchmark"
#: The tier has as many connections for bytes. A value with the server's overhead takes 1 MiB of its memory.
CONNECTIONS, VALUE = 8, MIB - 4096
#: Number of random keys: repetitions are rare, and the values exceed a processor's cache.
ANY, KEYS = 10**9, 256


class Redis:
    """A server and a config that names it."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self._server = server
        self._config = folder / "config.yaml"
        self._config.write_text(json.dumps({"redis": server.config()}))

    def turn(self, cell: Cell, amount: Amount) -> Turn:
        """Both use memory that the server did not use before."""
        limit = self._limit(cell, amount)
        self._empty(amount)
        return Turn(tier(self._config, cell, amount), limit)

    def _limit(self, cell: Cell, amount: Amount) -> Measured:
        """Like the tier: gets of many values."""
        value = min(cell.size, VALUE)
        values = cell.size // value
        count = max(values, min(int(amount.seconds * 2000), amount.most // value))
        connections = min(CONNECTIONS, cell.in_flight * values)
        self._empty(amount)
        put = self._values_per_second("set", count, ANY, connections, value)
        self._server.command("FLUSHALL", "SYNC")
        # Enough that almost every key has a value.
        self._values_per_second("set", 10 * KEYS, KEYS, connections, value)
        # For about as long as the tier's gets take.
        get = self._values_per_second("get", int(amount.seconds * 2000), KEYS, connections, value)
        return {"put": {"gbps": put * value / 1e9}, "get": {"gbps": get * value / 1e9}}

    def _empty(self, amount: Amount) -> None:
        """Empties the server. Its memory must have been used before, because a virtual machine returns idle memory."""
        self._values_per_second("set", amount.most // VALUE, ANY, CONNECTIONS, VALUE, encrypted=False)
        self._server.command("FLUSHALL", "SYNC")

    def _values_per_second(
        self, what: str, count: int, keys: int, connections: int, value: int, *, encrypted: bool = True
    ) -> float:
        port, tls = self._server.port, []
        if self._server.authority and encrypted:
            port, tls = self._server.tls_port, ["--tls", "--cacert", str(self._server.authority)]
        command = ["redis-benchmark", "-p", str(port), *tls, "-t", what, "--csv", "-r", str(keys)]
        command += ["-d", str(value), "-n", str(count), "-c", str(connections)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        (line,) = csv.DictReader(done.stdout.splitlines())
        return float(line["rps"])


@contextmanager
def subject(tls: bool = False) -> Iterator[Redis]:
    """A server with space for all puts of a run."""
    folder = short_folder()
    pki = folder / "pki" if tls else None
    if pki:
        certificates.for_server(pki, "127.0.0.1")
    server = RedisServer(memory="6gb", certificates=pki)
    try:
        yield Redis(folder, server)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
