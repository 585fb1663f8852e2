"""Whether the sidecar's own memory stays what it is: full rate on all tiers, with faults, for as long as you like.

python -m bench.soak [--seconds 1800]

Engines draw prompts from more than memory, disk and Redis hold, so all the time chunks are stored, evicted, written to
the tiers and fetched from them, Redis with TLS. Chunks of one model are short, those of the other longer than what is
written to Redis at once. By turns Redis is killed and started empty, the S3 server hangs, the disk's folder goes away,
and an engine is killed and replaced. RssAnon of supervisor and engine is looked at once a second; the first quarter of
the time is for caches to fill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.results import Row, merge
from servers import certificates
from servers.paths import short_folder, target
from servers.process import Process, rss_anon_mib
from servers.redis import RedisServer
from servers.s3 import S3Server
from servers.sidecar import Sidecar
from servers.waiting import wait_for


class Model(NamedTuple):
    """The requests of a kind of engine: number of prompts, chunks of each, and KiB of a block, of which a chunk has
    16.
    """

    prompts: int
    chunks: int
    block_kib: int

    @property
    def chunk(self) -> str:
        """Length of a chunk, for names."""
        return f"{16 * self.block_kib}k"


#: Two engines share 512 MiB in chunks of 128 KiB, and one has 380 MiB in chunks of 5 MiB: more than memory, disk and
#: Redis hold together.
MODELS = (Model(256, 16, 8), Model(256, 16, 8), Model(38, 2, 320))
#: Chunks of 5 MiB fit into this much memory.
MEMORY = "260Mi"
#: Interval and duration of faults.
PERIOD_S, FAULT_S = 20.0, 5.0
_DID = ("get", "put")


class Rig:
    """A sidecar with every tier, and engines that send requests continuously."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        certificates.for_server(folder / "pki", "127.0.0.1")
        self.redis = RedisServer(memory="256mb", certificates=folder / "pki")
        self.s3 = S3Server()
        self.disk = folder / "disk"
        self.disk.mkdir()
        disk = {"path": str(self.disk), "size": "256Mi"}
        tiers = {"disk": disk, "redis": self.redis.config(), "s3": self.s3.config()}
        self.sidecar = Sidecar(folder / "sidecar", memory=MEMORY, config=tiers)
        self.engines: list[tuple[Model, Process]] = []
        self._seed = 0

    def start(self) -> None:
        """Starts everything. Returns when every tier is ready and the engines run."""
        self.sidecar.start()
        wait_for(self.sidecar.tiers_ready, 30, "every tier to be ready")
        for model in MODELS:
            self._begin(model)

    def _begin(self, model: Model) -> None:
        self._seed += 1
        program = target() / "debug" / "examples" / "soak_engine"
        command = [str(program), str(self.sidecar.socket), *map(str, model), str(self._seed)]
        log = self.folder / f"engine-{self._seed}-{model.chunk}.log"
        engine = Process(f"engine {self._seed}", command, log)
        self.engines.append((model, engine))

    def replace_engine(self) -> None:
        """Kills the oldest engine like a crash, and starts another."""
        model, engine = self.engines.pop(0)
        engine.kill()
        self._begin(model)

    def check(self) -> None:
        """Every engine must still run. It exits on wrong bytes and on a silent sidecar."""
        for _, engine in self.engines:
            if not engine.running():
                raise RuntimeError(f"{engine.name} ended:\n{engine.tail()}")

    def take_disk(self) -> None:
        """Like an unmounted volume."""
        self.disk.rename(self.folder / "taken")

    def give_disk(self) -> None:
        """Restores the disk unchanged."""
        (self.folder / "taken").rename(self.disk)

    def faults(self) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
        """Name, start and end of each fault, forever."""
        while True:
            yield "Redis is dead", self.redis.kill, self.redis.start
            yield "S3 hangs", self.s3.freeze, self.s3.thaw
            yield "the disk is gone", self.take_disk, self.give_disk
            yield "an engine dies", self.replace_engine, lambda: None

    def chunks(self) -> dict[str, int]:
        """Work of all engines so far, by the length of their chunks."""
        total: dict[str, int] = {}
        for log in self.folder.glob("engine-*.log"):
            chunk = log.stem.rsplit("-", 1)[1]
            for line in log.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    for key, value in json.loads(line).items():
                        total[f"{key}_{chunk}"] = total.get(f"{key}_{chunk}", 0) + int(value)
        return total

    def stop(self) -> None:
        """Stops everything."""
        for _, engine in self.engines:
            engine.kill()
        self.sidecar.stop()
        self.redis.stop()
        self.s3.stop()


def watch(rig: Rig, seconds: float) -> list[tuple[float, float]]:
    """Seconds since the start and RssAnon in MiB, about once a second, while faults occur."""
    samples: list[tuple[float, float]] = []
    processes = rig.sidecar.process.tree()
    start = time.monotonic()
    faults, due, end = rig.faults(), PERIOD_S, None
    while (now := time.monotonic() - start) < seconds:
        if end is None and now >= due and now + FAULT_S < seconds:
            name, begin, end = next(faults)
            print(f"{now:6.0f} s  {samples[-1][1]:7.1f} MiB  {name}", flush=True)
            begin()
        elif end is not None and now >= due + FAULT_S:
            end()
            due, end = due + PERIOD_S, None
        rig.check()
        if rig.sidecar.process.tree() != processes:
            raise RuntimeError(f"the engine process was started anew:\n{rig.sidecar.process.tail()}")
        samples.append((now, rss_anon_mib(processes)))
        # One sample per second is part of the measurement.
        time.sleep(max(0.0, 1 - (time.monotonic() - start - now)))
    return samples


def rise(samples: list[tuple[float, float]]) -> float:
    """Rise in MiB from the first to the last sample, by least squares."""
    times, sizes = zip(*samples, strict=True)
    return (times[-1] - times[0]) * statistics.linear_regression(times, sizes).slope


class Soaked(NamedTuple):
    """Results of a soak test: MiB of RssAnon in the first and the last fifth of the settled time, and the work that was
    done.
    """

    first_mib: float
    last_mib: float
    #: By least squares, over the settled time.
    rise_mib: float
    done: dict[str, int]

    @property
    def growth_percent(self) -> float:
        """Last over first."""
        return 100 * (self.last_mib - self.first_mib) / self.first_mib

    @property
    def slope_percent(self) -> float:
        """The rise over the first."""
        return 100 * self.rise_mib / self.first_mib


def soak(seconds: float) -> Soaked:
    """Runs everything, with faults, for this long."""
    folder = short_folder()
    rig = Rig(folder)
    try:
        rig.start()
        samples = watch(rig, seconds)
        wait_for(rig.sidecar.tiers_ready, 60, "every tier to be ready again")
        done, metrics = rig.chunks(), rig.sidecar.metrics()
        for tier in ("disk", "redis", "s3"):
            did = "kvcachepool_tier_operations_total"
            done |= {f"{tier}_{op}": int(metrics.total(did, tier=tier, operation=op, result="ok")) for op in _DID}
    finally:
        rig.stop()
        shutil.rmtree(folder, ignore_errors=True)
    settled = [each for each in samples if each[0] > seconds / 4]
    fifth = len(settled) // 5
    first = statistics.median(mib for _, mib in settled[:fifth])
    last = statistics.median(mib for _, mib in settled[-fifth:])
    return Soaked(first, last, rise(settled), done)


def rows(soaked: Soaked, seconds: float) -> list[Row]:
    """For the table of results."""
    print(json.dumps(soaked.done))
    print(f"RssAnon {soaked.first_mib:.1f} MiB, then {soaked.last_mib:.1f}; rise {soaked.rise_mib:.2f}", flush=True)

    def row(name: str, value: float, what: str) -> Row:
        return Row(
            name=name,
            value=round(value, 2),
            unit="%",
            reference=f"of {soaked.first_mib:.1f} MiB RssAnon, {what}, {seconds:g} s",
            reference_value=None,
            ratio=None,
            runs=1,
            command="make soak",
        )

    return [
        row("soak_rss_growth_percent", soaked.growth_percent, "last fifth over first"),
        row("soak_rss_slope_percent", soaked.slope_percent, "rise by least squares"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800)
    chosen = parser.parse_args()
    merge(rows(soak(chosen.seconds), chosen.seconds))
