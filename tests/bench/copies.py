"""How fast a job's blocks move between a KV cache in host memory and the arena, against a compiled memcpy loop.

256 MiB in scattered rows, one thread each; the busy rows run beside a Python thread that never sleeps, as vLLM's engine
loop does. The time of a job is planning and copying: what happens between its arrival and its report.

    python tests/bench/copies.py [--rows 65536 16384] [--runs 15]
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import mmap
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sidecar" / "connector"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.results import Row, merge
from kvcachepool.copy_cpu import CpuCopier
from kvcachepool.layout import GroupLayout, GroupShape, Layout, Plane, ShardOf
from kvcachepool.pieces import Planner
from kvcachepool.shared import ROW_BYTES, Mapping

TOTAL = 256 << 20
LAYERS = 16
CHUNK_BLOCKS = 2
MEMCPY = """
#include <string.h>
#include <stddef.h>
void rows(char **to, char **from, size_t count, size_t bytes) {
    for (size_t i = 0; i < count; i++) memcpy(to[i], from[i], bytes);
}
"""


class Chunk(NamedTuple):
    """Like `kvcachepool.jobs.Chunk`, which needs vLLM."""

    refs: bytes
    blocks: tuple[tuple[int, ...], ...]


def compiled_memcpy(folder: str) -> ctypes.CDLL:
    """The reference: a loop over memcpy, compiled by the local C compiler."""
    source, library = Path(folder) / "rows.c", Path(folder) / "rows.so"
    source.write_text(MEMCPY)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def new_mapping(arena_bytes: int, segments: int = 1) -> Mapping:
    """An arena of equal segments with an empty slot table, as the sidecar hands it out."""
    rows = arena_bytes // ROW_BYTES
    table_bytes = 4096 + rows * 64
    arena, table = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("arena", "table"))
    for fd, size in ((arena, arena_bytes), (table, table_bytes)):
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    sizes = (arena_bytes, rows, 0, arena_bytes // segments, 4096, 4096, rows)
    header = struct.pack("<8sIIQQIIQQQI", b"KVCPSLOT", 1, ROW_BYTES, 1, *sizes)
    os.pwrite(table, header, 0)
    populate = mmap.mmap(arena, arena_bytes)
    np.frombuffer(populate, dtype=np.uint8)[:] = 1
    return Mapping(1, arena, table, arena_bytes, table_bytes)


class Setup:
    """A KV cache of twice the bytes, an arena, and one job with scattered blocks and slots."""

    def __init__(self, row_bytes: int, library: ctypes.CDLL) -> None:
        self.moved = TOTAL
        blocks = 2 * TOTAL // (LAYERS * row_bytes)
        with torch.inference_mode():
            storage = torch.ones(2 * TOTAL, dtype=torch.uint8)
        planes = tuple(Plane(0, layer * row_bytes * blocks, row_bytes, row_bytes) for layer in range(LAYERS))
        group = GroupLayout(GroupShape("full", 128, 1, 0), ShardOf(0, True), planes)
        self.layout = Layout((storage,), blocks, (group,), "cpu", {})
        section = CHUNK_BLOCKS * group.block_bytes
        slot_rows = -(-section // ROW_BYTES)
        chunks = TOTAL // section
        self.mapping = new_mapping(chunks * slot_rows * ROW_BYTES)
        ids = random.Random(1).sample(range(1, blocks), chunks * CHUNK_BLOCKS)
        slots = random.Random(2).sample(range(chunks), chunks)
        self.chunks = [
            Chunk(
                struct.pack("<IIII", slot * slot_rows, 1, section, 0),
                (tuple(ids[i * CHUNK_BLOCKS : (i + 1) * CHUNK_BLOCKS]),),
            )
            for i, slot in enumerate(slots)
        ]
        self.planner = Planner(self.layout)
        self.copier = CpuCopier(self.layout)
        self.copier.attach(self.mapping)
        self._library = library
        self._row_bytes = row_bytes
        in_cache, in_arena = [], []
        for piece in self.planner.plan(self.chunks, False).pieces:
            for block, offset in zip(piece.blocks, piece.offsets, strict=True):
                for layer, plane in enumerate(planes):
                    in_cache.append(storage.data_ptr() + plane.offset + block * plane.block_stride)
                    in_arena.append(self.mapping.arena_address + offset + layer * row_bytes)
        self._in_cache = np.array(in_cache, dtype=np.uint64)
        self._in_arena = np.array(in_arena, dtype=np.uint64)

    def job(self, kind: str) -> None:
        plan = self.planner.plan(self.chunks, kind == "store")
        self.copier.copy(kind, plan.pieces, None)

    def memcpy(self, kind: str) -> None:
        to, source = (self._in_cache, self._in_arena) if kind == "load" else (self._in_arena, self._in_cache)
        self._library.rows(
            ctypes.c_void_p(to.ctypes.data),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(len(to)),
            ctypes.c_size_t(self._row_bytes),
        )


@contextmanager
def busy_python() -> Iterator[None]:
    """A thread that holds the GIL as much as possible."""
    stop = False

    def spin() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(setup: Setup, kind: str, runs: int) -> tuple[float, float]:
    """Median GB/s of (job, memcpy loop), in alternating runs."""
    pairs = []
    for i in range(runs + 2):
        pair = (seconds(lambda: setup.job(kind)), seconds(lambda: setup.memcpy(kind)))
        if i >= 2:
            pairs.append(pair)
    ours, reference = (setup.moved / statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
    return ours, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[65536, 16384], help="bytes of a row")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    out = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        library = compiled_memcpy(folder)
        for row_bytes in options.rows:
            setup = Setup(row_bytes, library)
            setup.copier.begin_thread()
            suffix = "" if row_bytes == 65536 else f"_{row_bytes >> 10}k"
            for kind in ("store", "load"):
                out.append(row(f"{kind}_vs_memcpy{suffix}", *measure(setup, kind, options.runs), options.runs))
            with busy_python():
                for kind in ("store", "load"):
                    measured = measure(setup, kind, options.runs)
                    out.append(row(f"{kind}_vs_memcpy{suffix}_busy", *measured, options.runs))
    merge(out)


def row(name: str, ours: float, reference: float, runs: int) -> Row:
    return Row(
        name=name,
        value=round(ours, 3),
        unit="GB/s",
        reference="memcpy loop over the same rows, compiled, one thread",
        reference_value=round(reference, 3),
        ratio=round(ours / reference, 3),
        runs=runs,
        command="python tests/bench/copies.py",
    )


if __name__ == "__main__":
    main()
