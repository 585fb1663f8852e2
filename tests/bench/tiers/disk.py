"""The disk tier and a loop of direct I/O, in a folder of the same file system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.examples import built
from bench.results import Row
from bench.tiers.load import Amount, Cell, Turn, tier_load
from servers.paths import cache

REFERENCE = "raw O_DIRECT"


class Disk:
    """A folder with space for a tier and the comparison."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "config.yaml"
        (folder / "tier").mkdir()
        # A tier has at most one object per MiB, so this is enough for a million.
        self._config.write_text(f"disk:\n  path: {folder / 'tier'}\n  size: 1Ti\n")

    def turn(self, cell: Cell, amount: Amount) -> Turn:
        """Both use the same memory, because the kernel splits requests for scattered memory."""
        both = tier_load(["tier", "--config", str(self._config), "--raw", str(self._folder)], cell, amount)
        return Turn(both["tier"], both["raw"])

    def index(self, objects: int) -> Row:
        """How long a tier with this many objects takes to open after SIGKILL, without the page cache (root)."""
        command = [str(built("tier_load")), "fill", "--config", str(self._config), "--objects", str(objects)]
        died = subprocess.run(command, capture_output=True, text=True)
        if died.returncode != -9:
            raise RuntimeError(f"{' '.join(command)}: {died.stdout}{died.stderr}")
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        command = [str(built("tier_load")), "open", "--config", str(self._config)]
        opened = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if opened["objects"] != objects:
            raise RuntimeError(f"{opened['objects']} of {objects} objects came back")
        return Row(
            name=f"disk_index_{objects // 1_000_000}m_s",
            value=round(opened["seconds"], 2),
            unit="s",
            reference=f"{opened['rss_peak_mib']:.0f} MiB of memory",
            reference_value=None,
            ratio=None,
            runs=1,
            command="make bench-tiers",
        )


@contextmanager
def subject() -> Iterator[Disk]:
    """In the cache's folder, because temporary folders are often in memory."""
    cache().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-disk-", dir=cache()))
    try:
        yield Disk(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
