"""The S3 tier over a Python class in memory, and the same tier over the S3 server of the tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.tiers.load import Amount, Cell, Measured, Turn, tier
from servers.paths import short_folder
from servers.s3 import S3Server
from servers.store import StoreServer

REFERENCE = "S3 tier over versitygw"


class Store:
    """Two servers of one interface."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "config.yaml"

    def turn(self, cell: Cell, amount: Amount) -> Turn:
        """Both with new servers, one after the other."""
        capacity = {"capacity_bytes": 2 * amount.most}
        arguments = ["--memory", "2Gi"]
        store = StoreServer("kvcachepool.store_memory:MemoryStore", capacity, arguments=arguments)
        return Turn(self._measured(store, cell, amount), self._measured(S3Server(), cell, amount))

    def _measured(self, server: Any, cell: Cell, amount: Amount) -> Measured:
        try:
            self._config.write_text(json.dumps({"s3": server.config()}))
            return tier(self._config, cell, amount)
        finally:
            server.stop()


@contextmanager
def subject() -> Iterator[Store]:
    """Servers that start with each turn."""
    folder = short_folder()
    try:
        yield Store(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
