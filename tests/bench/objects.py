"""How fast opaque objects are written and read, against memcpy of the same bytes, and how long a lookup takes.

One process, one thread, the real sidecar. 128 MiB per run in one `put`, or in one lease that is read into prepared
buffers; the copies of memcpy alternate with it. The rows `checked` include the digests of all bytes, which the sidecar
compares before it grants a lease (`memory.verify: Always`, the default); the others are without (`Background`).
`exists` asks for 512 objects that are in memory.

    PYTHONPATH=tests python -m bench.objects [--runs 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sidecar" / "connector"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.results import Row, merge
from kvcachepool.client import Client, Item, Put
from servers.sidecar import Sidecar
from servers.waiting import wait_for

TOTAL = 128 << 20
SIZES = (1 << 20, 8 << 20)
LOOKUP_KEYS = 512
SMALL_BYTES = 1024
WAIT_S = 30.0
WARM_UPS = 3


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Objects:
    """Objects of one size, their buffers, and buffers to read them into."""

    def __init__(self, client: Client, nbytes: int) -> None:
        count = TOTAL // nbytes
        self.nbytes = nbytes
        self.keys = [f"{nbytes}-{index}" for index in range(count)]
        self._client = client
        self._source = np.random.default_rng(1).integers(0, 255, (count, nbytes), dtype=np.uint8)
        self._target: np.ndarray = np.ones((count, nbytes), dtype=np.uint8)
        self._items = [Item(key, row) for key, row in zip(self.keys, self._source, strict=True)]

    def put(self) -> None:
        results = self._client.put(self._items)
        assert set(results) == {Put.STORED}, results

    def ready(self) -> None:
        """Waits until all can be read."""
        wait_for(lambda: self._client.exists(self.keys) == len(self.keys), WAIT_S, "objects readable", pause=0.001)

    def remove(self) -> None:
        self.ready()
        self._client.remove(self.keys)

    def get(self) -> None:
        with self._client.lease(self.keys) as lease:
            for leased, row in zip(lease, self._target, strict=True):
                assert leased is not None
                assert leased.read_into(row)

    def memcpy(self) -> None:
        for row, source in zip(self._target, self._source, strict=True):
            np.copyto(row, source)

    def arrived(self) -> bool:
        return bool((self._target == self._source).all())


def measure(objects: Objects, runs: int) -> dict[str, tuple[float, float]]:
    """Median GB/s of (client, memcpy) of put and get."""
    columns: dict[str, list[float]] = {"put": [], "get": [], "memcpy": []}
    for run in range(runs + WARM_UPS):
        # Before the put, after which the sidecar takes digests.
        took = {"memcpy": seconds(objects.memcpy), "put": seconds(objects.put)}
        objects.ready()
        took["get"] = seconds(objects.get)
        assert objects.arrived()
        objects.remove()
        if run >= WARM_UPS:
            for name, column in columns.items():
                column.append(took[name])
    speeds = {name: TOTAL / statistics.median(column) / 1e9 for name, column in columns.items()}
    return {kind: (speeds[kind], speeds["memcpy"]) for kind in ("put", "get")}


def lookup_rows(client: Client, runs: int) -> list[Row]:
    """Time of `exists`, and the time per object of a batch of small ones."""
    keys = [f"small-{index}" for index in range(LOOKUP_KEYS)]
    items = [Item(key, bytes(SMALL_BYTES)) for key in keys]
    took: dict[str, list[float]] = {"put": [], "get": []}
    for _ in range(runs):
        client.remove(keys)
        took["put"].append(seconds(lambda: client.put(items)))
        wait_for(lambda: client.exists(keys) == LOOKUP_KEYS, WAIT_S, "objects readable")
        took["get"].append(seconds(lambda: client.get(keys)))
    out = [
        row(f"object_{kind}_1k_us", round(statistics.median(column) / LOOKUP_KEYS * 1e6, 1), "us", None, runs)
        for kind, column in took.items()
    ]
    lookups = [seconds(lambda: client.exists(keys)) for _ in range(runs * 20)]
    out.append(row("object_exists_512_p50_ms", round(statistics.median(lookups) * 1e3, 3), "ms", None, len(lookups)))
    return out


def row(name: str, value: float, unit: str, reference: float | None, runs: int) -> Row:
    return Row(
        name=name,
        value=value,
        unit=unit,
        reference="" if reference is None else "memcpy of the same bytes, one thread",
        reference_value=None if reference is None else round(reference, 3),
        ratio=None if reference is None else round(value / reference, 3),
        runs=runs,
        command="python -m bench objects",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    out: list[Row] = []
    for verify in ("Background", "Always"):
        with tempfile.TemporaryDirectory() as folder:
            sidecar = Sidecar(Path(folder) / "pod", memory="512Mi", config={"memory": {"verify": verify}}).start()
            try:
                with Client(str(sidecar.socket), timeout_s=WAIT_S) as client:
                    out += measure_all(client, options.runs, verify == "Always")
            finally:
                sidecar.stop()
    merge(out)


def measure_all(client: Client, runs: int, checked: bool) -> list[Row]:
    """All rows of one configuration."""
    out = [] if checked else lookup_rows(client, runs)
    for nbytes in SIZES:
        for kind, (ours, reference) in measure(Objects(client, nbytes), runs).items():
            if not checked or kind == "get":
                name = f"object_{kind}_{nbytes >> 20}m{'_checked' if checked else ''}_vs_memcpy"
                out.append(row(name, round(ours, 3), "GB/s", reference, runs))
    return out


if __name__ == "__main__":
    main()
