"""LMCache's own benchmark of L2 adapters (`lmcache bench l2`): ours beside LMCache's `resp` on a Redis server and its
`fs` on the local disk, with its default (the page cache) and with direct I/O (`fs_direct`).

Each turn runs the same command once per adapter, and each run has an empty sidecar, Redis server or folder. Memory is
touched before the measured rounds, on both sides: rounds of warm-up fill ours once, which evicts from then on, and
Redis is filled and emptied before. Redis has room for everything. A lookup is for objects that exist, and locks them.
The last round is compared byte for byte.

Needs LMCache (`tools/setup.sh lmcache`) and redis-server. The bar is twice the throughput of each of the others.

    PYTHONPATH=tests:sidecar/connector python -m bench.lmcache_l2 [--turns 5] [--only 4m]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.results import Row, merge
from servers import lmcache, paths
from servers.redis import RedisServer
from servers.sidecar import Sidecar

MIB = 1 << 20
OPERATIONS = ("store", "load", "lookup")
#: Larger than any run, which would otherwise lose keys to eviction.
REDIS_GIB = 4
RUN_SECONDS = 300


class Setting(NamedTuple):
    """Arguments of `lmcache bench l2`. A round submits `in_flight` tasks of `keys` objects and waits for them."""

    name: str
    keys: int
    in_flight: int
    kib: int
    rounds: int
    #: The sidecar's memory. It pins a quarter at most, and the command does not unlock what a lookup locked.
    memory_mib: int

    @property
    def objects(self) -> int:
        """Objects of a round."""
        return self.keys * self.in_flight

    @property
    def round_mib(self) -> float:
        """Size of a round's objects."""
        return self.objects * self.kib / 1024

    def warm_ups(self, adapter: dict[str, Any]) -> int:
        """Rounds that are not measured: for ours, as many as fill the sidecar's memory."""
        return int(1.25 * self.memory_mib / self.round_mib) + 1 if adapter["type"] == "plugin" else 2

    def command(self, adapter: dict[str, Any], output: Path) -> list[str]:
        """Writes JSON into the output."""
        command = [str(lmcache.PYTHON), "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(adapter)]
        command += ["--num-keys", str(self.keys), "--in-flight", str(self.in_flight), "--data-size-kb", str(self.kib)]
        command += [
            "--rounds",
            str(self.rounds),
            "--warmup-rounds",
            str(self.warm_ups(adapter)),
            "--l1-align-bytes",
            "4096",
        ]
        command += ["--lookup-max-hit-rate", "1", "--no-skip-verify"]
        return [*command, "--format", "json", "--output", str(output), "--quiet"]


SETTINGS = (
    # The command's defaults for keys, tasks in flight and size.
    Setting("256k", 32, 1, 256, rounds=16, memory_mib=640),
    # Chunks of a model with 16 KiB per token.
    Setting("4m", 8, 4, 4096, rounds=3, memory_mib=1664),
)


@contextmanager
def ours(folder: Path, setting: Setting) -> Iterator[dict[str, Any]]:
    """Memory alone, and all other settings at their defaults."""
    sidecar = Sidecar(folder / "pod", memory=f"{setting.memory_mib}Mi").start()
    try:
        yield {
            "type": "plugin",
            "module_path": "kvcachepool.lmcache_l2",
            "class_name": "KVCachePoolL2Adapter",
            "adapter_params": {"socket": str(sidecar.socket)},
        }
    finally:
        sidecar.stop()


@contextmanager
def resp(_folder: Path, setting: Setting) -> Iterator[dict[str, Any]]:
    """A server whose memory was used before: a virtual machine gives unused memory back."""
    server = RedisServer(memory=f"{REDIS_GIB}gb")
    try:
        values = 2 * setting.objects * setting.rounds
        fill = ["redis-benchmark", "-p", str(server.port), "-t", "set", "-r", str(10**9), "-d", str(setting.kib << 10)]
        subprocess.run([*fill, "-n", str(values), "-c", "8", "-q"], check=True, stdout=subprocess.DEVNULL)
        server.command("FLUSHALL", "SYNC")
        yield {"type": "resp", "host": server.host, "port": server.port}
    finally:
        server.stop()


@contextmanager
def fs(folder: Path, _setting: Setting) -> Iterator[dict[str, Any]]:
    """Files in a new folder, read from the page cache."""
    yield {"type": "fs", "base_path": str(folder / "files")}


@contextmanager
def fs_direct(folder: Path, _setting: Setting) -> Iterator[dict[str, Any]]:
    """Files in a new folder, written to the disk and read from it."""
    yield {"type": "fs", "base_path": str(folder / "files"), "use_odirect": True}


ADAPTERS: dict[str, Callable[[Path, Setting], Any]] = {"ours": ours, "resp": resp, "fs": fs, "fs_direct": fs_direct}
OTHERS = tuple(name for name in ADAPTERS if name != "ours")


def run(name: str, setting: Setting) -> dict[str, float]:
    """Median rate of a round by operation: GB/s of stores and loads, and lookups in objects per ms."""
    folder = paths.short_folder()
    try:
        output = folder / "out.json"
        with ADAPTERS[name](folder, setting) as adapter:
            env = dict(os.environ) | {"DO_NOT_TRACK": "1", "PYTHONPATH": str(paths.ROOT / "sidecar" / "connector")}
            command = setting.command(adapter, output)
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=RUN_SECONDS)
        if done.returncode or not output.exists():
            raise RuntimeError(f"lmcache bench l2 with {name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return rates(name, setting, json.loads(output.read_text()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rates(name: str, setting: Setting, report: dict[str, Any]) -> dict[str, float]:
    """The rates of a report. Raises `RuntimeError` if an object was not stored, found or loaded."""
    found = {}
    for section in report["metrics"].values():
        if (operation := section.get("operation", "").lower()) not in OPERATIONS:
            continue
        expected = setting.objects * setting.rounds
        if section["total_success"] != expected or section["rounds_timed_out"]:
            raise RuntimeError(
                f"{operation} with {name}: expected {expected} objects, got {section['total_success']}, and "
                f"{section['rounds_timed_out']} rounds did not end: the sizes do not suit this machine"
            )
        ms = section["duration_p50_ms"]
        found[operation] = setting.objects / ms if operation == "lookup" else setting.round_mib * MIB / ms / 1e6
    if missing := [operation for operation in OPERATIONS if operation not in found]:
        raise RuntimeError(
            f"the report of lmcache bench l2 has no {', '.join(missing)}; it has {list(report['metrics'])}"
        )
    return found


def measure(setting: Setting, turns: int) -> dict[str, dict[str, float]]:
    """Medians over the turns, by adapter and operation. The order of the adapters is reversed every other turn."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ADAPTERS}
    for turn in range(turns):
        for name in list(ADAPTERS)[:: -1 if turn % 2 else 1]:
            taken[name].append(run(name, setting))
            rate = ", ".join(f"{operation} {taken[name][-1][operation]:.2f}" for operation in OPERATIONS)
            print(f"{setting.name} turn {turn + 1} {name}: {rate}", flush=True)
    return {
        name: {operation: statistics.median(each[operation] for each in runs) for operation in OPERATIONS}
        for name, runs in taken.items()
    }


def rows(setting: Setting, medians: dict[str, dict[str, float]], turns: int) -> list[Row]:
    """Ours beside each of the others."""
    return [
        Row(
            name=f"lmcache_l2_{operation}_{setting.name}_vs_{other}",
            value=round(medians["ours"][operation], 3),
            unit="obj/ms" if operation == "lookup" else "GB/s",
            reference=f"{lmcache.NAME}'s adapter {other}",
            reference_value=round(medians[other][operation], 3),
            ratio=round(medians["ours"][operation] / medians[other][operation], 2),
            runs=turns,
            command="python -m bench lmcache_l2",
        )
        for operation in OPERATIONS
        for other in OTHERS
    ]


def print_table(measured: dict[Setting, dict[str, dict[str, float]]]) -> None:
    """One line per operation and size."""
    print(f"\n{'operation':16}" + "".join(f"{name:>11}" for name in ADAPTERS), end="")
    print("".join(f"{f'/ {name}':>12}" for name in OTHERS) + "  unit")
    for setting, medians in measured.items():
        for operation in OPERATIONS:
            mine = medians["ours"][operation]
            cells = "".join(f"{medians[name][operation]:>11.2f}" for name in ADAPTERS)
            ratios = "".join(f"{mine / medians[name][operation]:>12.2f}" for name in OTHERS)
            unit = "objects/ms" if operation == "lookup" else "GB/s"
            print(f"{f'{operation} {setting.name}':16}{cells}{ratios}  {unit}")
    print()


def main() -> None:
    """Measures and merges the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=[setting.name for setting in SETTINGS], help="one size")
    chosen = parser.parse_args()
    if not lmcache.PYTHON.exists():
        raise SystemExit(f"{lmcache.PYTHON} is missing: tools/setup.sh lmcache installs {lmcache.NAME}")
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    measured = {setting: measure(setting, chosen.turns) for setting in SETTINGS if chosen.only in (None, setting.name)}
    print_table(measured)
    print(f"{chosen.turns} turns on {os.cpu_count()} cores; load average before: {load}\n")
    merge(row for setting, medians in measured.items() for row in rows(setting, medians, chosen.turns))


if __name__ == "__main__":
    main()
