"""How fast bytes move between a GPU and the cache, by the worker's own copies and by a window of the real sidecar.

    python -m bench.gpu [--out target/bench/gpu.json]

Each row beside what bounds it in the same run: plain copies of 64 MiB from page-locked memory, copies within the
device's memory, steps of an idle GPU. Written with device, driver and commit. Without a device it says so and writes
nothing. The rows of `gpu_bench`, the program for all that Python has no part in, are among them. What fails takes
nothing from what was measured before and else: it is named, in the file too, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import mps
from bench.results import Row
from gpu import place
from servers import paths

OUT = paths.ROOT / "target" / "bench" / "gpu.json"
JOB_BYTES = 64 << 20
#: Bytes that a rehearsal copies.
SMALL_BYTES = 4 << 20
PAGE_BYTES = 2 << 20
PIECES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, PAGE_BYTES)
#: Number of adjacent blocks, and of arena segments that they fill.
NEIGHBOUR_BYTES, SEGMENTS = 256 << 10, 4
RUNS = 15
#: Prefix of a row's name -> minimum and maximum of its ratio. Printed, not asserted.
BARS: dict[str, tuple[float | None, float | None]] = {
    "h2d_vs_pinned_peak": (0.9, None),
    "d2h_vs_pinned_peak": (0.9, None),
    "window_vs_pinned_peak": (0.9, None),
    "both_directions_vs_one": (1.6, None),
    "gpu_kv_cachegen_count_": (None, None),
    "gpu_kv_cachegen_encode_": (None, None),
    "gpu_kv_cachegen_decode_": (None, None),
    "gpu_kv_": (0.8, None),
    "decode_beside_engine_": (None, 1.05),
}


def row(name: str, value: float, unit: str, reference: str, bound: float | None, runs: int) -> Row:
    """One measurement and its ratio."""
    return Row(
        name=name,
        value=round(value, 4),
        unit=unit,
        reference=reference,
        reference_value=None if bound is None else round(bound, 4),
        ratio=None if bound is None else round(value / bound, 4),
        runs=runs,
        command="make bench-gpu",
    )


def settled() -> None:
    """Waits until the device is idle."""
    if place.device() == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds(run: Callable[[], None]) -> float:
    """Seconds of the call, including its work on the device."""
    settled()
    start = time.perf_counter()
    run()
    settled()
    return time.perf_counter() - start


def in_turns(first: Callable[[], None], second: Callable[[], None], runs: int) -> tuple[float, float]:
    """Median seconds of both, measured alternately."""
    pairs = [(seconds(first), seconds(second)) for _ in range(runs + 2)][2:]
    one, other = zip(*pairs, strict=True)
    return statistics.median(one), statistics.median(other)


class Peak:
    """A plain copy of a job's bytes between page-locked memory and the device."""

    def __init__(self, nbytes: int) -> None:
        import torch

        pinned = place.device() == "cuda"
        self.host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.there = torch.zeros(nbytes, dtype=torch.uint8, device=place.device())

    def copy(self, kind: str) -> None:
        to, source = (self.there, self.host) if kind == "load" else (self.host, self.there)
        to.copy_(source, non_blocking=True)


def engine(
    piece_bytes: int, job_bytes: int, peak: Peak, runs: int, *, neighbours: bool = False
) -> dict[str, tuple[float, float]]:
    """GB/s of a worker's job, and of a plain copy of as many bytes, by kind. One `cuMemcpyBatchAsync` a job.

    neighbours: the blocks lie side by side, in cache and arena, over several segments; else drawn at random.
    """
    import torch

    from bench.copies import new_mapping
    from kvcachepool.pieces import Piece

    blocks = job_bytes // piece_bytes
    layout = place.kv_cache("BLHNC", 2 * blocks, piece_bytes // (place.LAYERS * place.HEADS * place.STATES))
    mapping = new_mapping(job_bytes, SEGMENTS if neighbours else 1)
    copier = place.copier(layout)
    copier.attach(mapping)
    copier.begin_thread()
    # Randomly drawn, almost every block is a separate run.
    numbers = list(range(blocks)) if neighbours else random.Random(1).sample(range(2 * blocks), blocks)
    pieces = [Piece(0, numbers, list(range(0, job_bytes, piece_bytes)))]
    found = {}
    try:
        with torch.inference_mode():
            copier.copy("store", pieces, None)
            if place.device() == "cuda":
                locks = copier._locks
                place.wait_for(lambda: locks._done.all() or locks._failed, 60, "the arena's page locks")
            for kind in ("load", "store"):
                measured, plain = in_turns(
                    lambda kind=kind: copier.copy(kind, pieces, None),  # type: ignore[misc]
                    lambda kind=kind: peak.copy(kind),  # type: ignore[misc]
                    runs,
                )
                found[kind] = (job_bytes / measured / 1e9, job_bytes / plain / 1e9)
    finally:
        copier.detach()
        mapping.close()
    return found


def engine_rows(job_bytes: int, runs: int) -> Iterator[Row]:
    """The worker's own copies, by the size of a piece."""
    peak = Peak(job_bytes)
    reference = "a plain copy of as many bytes from page-locked memory, in turns"
    for piece_bytes in PIECES:
        found = engine(piece_bytes, job_bytes, peak, runs)
        for kind, way in (("load", "h2d"), ("store", "d2h")):
            yield row(f"engine_{way}_{piece_bytes >> 10}k_gbps", *_pair(found[kind], reference), runs)
            if piece_bytes == PAGE_BYTES:
                yield row(f"{way}_vs_pinned_peak", *_pair(found[kind], reference), runs)
    found = engine(NEIGHBOUR_BYTES, job_bytes, peak, runs, neighbours=True)
    for kind, way in (("load", "h2d"), ("store", "d2h")):
        yield row(f"engine_{way}_neighbours_gbps", *_pair(found[kind], reference), runs)


def _pair(found: tuple[float, float], reference: str) -> tuple[float, str, str, float]:
    return found[0], "GB/s", reference, found[1]


def page_locked(sidecar: Any) -> bool:
    """Whether the whole cache is page-locked."""
    memory = sidecar.status()["memory"]
    return bool(memory["locked_bytes"] == memory["capacity_bytes"])


def window_rows(job_bytes: int, runs: int) -> Iterator[Row]:
    """Whole jobs by a window: KV blocks, stages, arena. The row without a direction is that of the slower one."""
    from gpu.rank import CHUNK_BLOCKS, Rank
    from servers.sidecar import Sidecar

    peak = Peak(job_bytes)
    folder = paths.short_folder()
    config = {"transfer": {"mode": "CudaWindow"}, "memory": {"evictionPolicy": "FIFO"}}
    sidecar = Sidecar(folder / "pod", memory="512Mi", config=config)
    found: dict[str, tuple[float, float]] = {}
    try:
        sidecar.start()
        blocks = job_bytes // PAGE_BYTES
        rank = Rank(sidecar, place.kv_cache("BLHNC", 2 * blocks + 1, PAGE_BYTES // 128))
        try:
            if rank.reasons:
                print(f"no window: {rank.reasons}", flush=True)
                return
            if place.device() == "cuda":
                place.wait_for(lambda: page_locked(sidecar), 120, "the page locks of the sidecar's cache")
            numbers = random.Random(2).sample(range(1, 2 * blocks + 1), blocks)
            chunks = [tuple(numbers[i : i + CHUNK_BLOCKS]) for i in range(0, blocks, CHUNK_BLOCKS)]
            hashes = [hashlib.sha256(b"%d" % i).digest() for i in range(len(chunks))]
            reply = rank.granted(hashes)
            for kind in ("store", "load"):
                refs = reply.refs
                measured, plain = in_turns(
                    lambda kind=kind, refs=refs: rank.copied(kind, refs, chunks),  # type: ignore[misc]
                    lambda kind=kind: peak.copy(kind),  # type: ignore[misc]
                    runs,
                )
                found[kind] = (job_bytes / measured / 1e9, job_bytes / plain / 1e9)
                if kind == "store":
                    rank.commit(reply)
                    reply = rank.pinned(hashes, "loads")
            rank.release("loads")
        finally:
            rank.close()
    finally:
        sidecar.stop()
        shutil.rmtree(folder, ignore_errors=True)
    reference = "a plain copy of as many bytes from page-locked memory, in turns"
    slower = min(found.values(), key=lambda pair: pair[0] / pair[1])
    yield row("window_h2d_vs_pinned_peak", *_pair(found["load"], reference), runs)
    yield row("window_d2h_vs_pinned_peak", *_pair(found["store"], reference), runs)
    yield row("window_vs_pinned_peak", *_pair(slower, reference), runs)


class Failed(Exception):
    """A part could not be measured to its end."""


class Output(NamedTuple):
    """The output of `gpu_bench`: the device and rows, or the reason for skipping."""

    lines: list[dict[str, Any]]
    #: "" without a failure.
    failure: str


def program(*arguments: str, **change: str) -> Output:
    """Runs `gpu_bench`. Its output counts even if it failed."""
    path = paths.example("gpu_bench")
    small = ["--small"] if place.rehearsal() else []
    environment = os.environ | change
    command = [str(path), *small, *arguments]
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    # A line that was cut off by the end of the process has no newline.
    whole = [line for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]
    failure = f"{path.name} ended with {done.returncode}" if done.returncode else ""
    return Output([json.loads(line) for line in whole], failure)


def rows_of(output: Output) -> Iterator[Row]:
    """The rows. Prints what was skipped. Raises `Failed` after them if the program failed."""
    for line in output.lines:
        if "skipped" in line:
            print(f"skip {line.get('rows', 'all')}: {line['skipped']}")
        elif "name" in line:
            yield row(line["name"], line["value"], line["unit"], line["reference"], line["reference_value"], 1)
    if output.failure:
        raise Failed(output.failure)


def mps_rows() -> Iterator[Row]:
    """Decoding while a window copies, with both processes as clients of MPS."""
    try:
        with mps.daemon() as environment:
            output = program("--mps", **environment)
    except mps.NoMps as none:
        print(f"skip decode_beside_window_mps: {none}")
        return
    yield from rows_of(output)


def commit() -> str:
    """The commit of the sources."""
    named = paths.ROOT / "commit"
    if named.exists():
        return named.read_text().strip()
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=paths.ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def print_rows(rows: list[Row]) -> None:
    """Prints a table with the bars."""
    print(f"\n{'name':42} {'value':>10} {'unit':5} {'ratio':>7}  {'bar':>8}  met  reference")
    for one in rows:
        bar = next((bar for name, bar in BARS.items() if one["name"].startswith(name)), (None, None))
        least, most = bar
        ratio = one["ratio"]
        met = ""
        if ratio is not None and bar != (None, None):
            met = "yes" if (least is None or least <= ratio) and (most is None or ratio <= most) else "NO"
        bound = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else "report"
        bound = "" if one["reference_value"] is None else f" {one['reference_value']:g}"
        shown = "" if ratio is None else f"{ratio:.3f}"
        reference = one["reference"] + bound
        print(f"{one['name']:42} {one['value']:>10g} {one['unit']:5} {shown:>7}  {bound:>8}  {met:3}  {reference}")


class Report:
    """All results so far, in a file that is rewritten after each part."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self._out = out
        self._head = head | {"commit": commit()}
        self.rows: list[Row] = []
        self.failed: list[str] = []

    def part(self, name: str, rows: Iterator[Row]) -> None:
        """Measures a part. A failure is named, and earlier rows are kept."""
        try:
            for one in rows:
                self.rows.append(one)
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{name}: {error}")
        finally:
            self._write()

    def _write(self) -> None:
        found = self._head | {"failed": self.failed, "rows": self.rows}
        self._out.parent.mkdir(parents=True, exist_ok=True)
        staged = self._out.with_suffix(f".{os.getpid()}.tmp")
        staged.write_text(json.dumps(found, indent=1) + "\n")
        staged.replace(self._out)


def main(out: Path) -> int:
    """Measures all rows. Returns 0 also without a device, 1 after a failure."""
    output = program()
    head = output.lines[0] if output.lines else {}
    if "skipped" in head:
        print(f"skip bench-gpu: {head['skipped']}")
        return 0
    if place.rehearsal():
        head["rehearsal"] = True
    report = Report(out, head)
    report.part("gpu_bench", rows_of(output))
    report.part("decoding beside a window under MPS", mps_rows())
    if why := place.missing():
        print(f"skip the worker's copies and whole jobs by a window: {why}")
    else:
        nbytes, runs = (SMALL_BYTES, 2) if place.rehearsal() else (JOB_BYTES, RUNS)
        report.part("the worker's copies", engine_rows(nbytes, runs))
        if why := place.missing("msgspec"):
            print(f"skip whole jobs by a window: {why}")
        else:
            report.part("whole jobs by a window", window_rows(nbytes, runs))
    print(json.dumps(head))
    print_rows(report.rows)
    for failure in report.failed:
        print(f"FAIL {failure}")
    print(f"\n{out}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=OUT)
    sys.exit(main(parser.parse_args().out))
