"""Copies: every byte of a block is at its place in the section, in every layout."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import struct

import numpy as np
import pytest
import torch

from kvcachepool.copy_cpu import CpuCopier
from kvcachepool.copy_cuda import Batch, packed_offsets
from kvcachepool.forms import Plane
from kvcachepool.layout import GroupLayout, GroupShape, Layout, ShardOf
from kvcachepool.pieces import Piece, Planner
from kvcachepool.shared import NO_SLOT, ROW_BYTES, Mapping

BLOCKS = 12


def group(planes: list[Plane], shards: int = 1, shard: int = 0, writer: bool = True) -> GroupLayout:
    return GroupLayout(GroupShape("full", 16, shards, 0), ShardOf(shard, writer), tuple(planes))


def layer_outermost(nbytes: int, layers: int = 3) -> list[Plane]:
    return [Plane(0, layer * nbytes * BLOCKS, nbytes, nbytes) for layer in range(layers)]


def block_outermost(nbytes: int, layers: int = 3) -> list[Plane]:
    return [Plane(0, 0, nbytes * layers, nbytes * layers)]


def uneven(nbytes: int) -> list[Plane]:
    return [Plane(0, 0, nbytes, nbytes), Plane(0, nbytes * BLOCKS + 7, nbytes + 5, nbytes - 3)]


def layout_of(planes: list[Plane]) -> Layout:
    size = max(p.offset + BLOCKS * p.block_stride for p in planes)
    with torch.inference_mode():
        content = torch.from_numpy(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8))
        storage = torch.empty(size, dtype=torch.uint8)
        storage.copy_(content)
    return Layout((storage,), BLOCKS, (group(planes),), "cpu", {})


def expected(layout: Layout, block: int) -> bytes:
    raw = layout.storages[0].numpy().tobytes()
    planes = layout.groups[0].planes
    return b"".join(raw[p.offset + block * p.block_stride :][: p.nbytes] for p in planes)


def arena(mapping: Mapping) -> np.ndarray:
    return np.frombuffer(mapping.arena_buffer(), dtype=np.uint8)


@pytest.mark.parametrize(
    "planes",
    [
        layer_outermost(64 << 10),
        layer_outermost(4096),
        layer_outermost(1000),
        layer_outermost(40),
        layer_outermost(37),
        block_outermost(600 << 10, layers=1),
        block_outermost(16 << 10),
        uneven(4099),
    ],
    ids=["64k", "4k", "8-byte", "tiny", "odd", "over the grain", "block-major", "uneven"],
)
def test_stores_and_loads_copy_exactly_the_blocks_of_the_job(planes: list[Plane], mapping: Mapping) -> None:
    layout = layout_of(planes)
    size = layout.groups[0].block_bytes
    slot_rows = -(-size * 2 // ROW_BYTES)
    offsets = [3 * slot_rows * ROW_BYTES, 3 * slot_rows * ROW_BYTES + size, 0]
    if (offsets[0] + 2 * size) > mapping.arena_bytes:
        offsets = [0, size, 2 * size]
    copier = CpuCopier(layout)
    copier.attach(mapping)
    before = arena(mapping).copy()
    blocks = [7, 2, 11]
    with torch.inference_mode():
        copier.copy("store", [Piece(0, blocks, offsets)], None)
    for block, offset in zip(blocks, offsets, strict=True):
        before[offset : offset + size] = np.frombuffer(expected(layout, block), dtype=np.uint8)
    assert (arena(mapping) == before).all(), "a store writes its sections and nothing else"

    wanted = [expected(layout, block) for block in range(BLOCKS)]
    for block, origin in ((4, 7), (5, 2), (9, 11)):
        wanted[block] = wanted[origin]
    with torch.inference_mode():
        copier.copy("load", [Piece(0, [4, 5, 9], offsets)], None)
    assert [expected(layout, block) for block in range(BLOCKS)] == wanted, "a load writes its blocks and nothing else"
    assert (arena(mapping) == before).all()
    copier.detach()


def test_populated_pages_do_not_fault_and_others_are_not_allocated(mapping: Mapping) -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    lengths = {3: 5 * ROW_BYTES - 100, 40: ROW_BYTES}
    pages = 6 * ROW_BYTES // mmap.PAGESIZE
    os.pwrite(mapping.arena_fd, b"kept", 3 * ROW_BYTES)
    for _ in range(2):
        mapping.populate(np.array(list(lengths), np.uint32), np.array(list(lengths.values()), np.uint32))
    assert os.fstat(mapping.arena_fd).st_blocks * 512 == pages * mmap.PAGESIZE
    assert os.pread(mapping.arena_fd, 4, 3 * ROW_BYTES) == b"kept"
    before = faults()
    for slot, length in lengths.items():
        ctypes.memset(mapping.arena_address + slot * ROW_BYTES, 1, length)
    assert faults() - before < pages // 4


def test_the_python_loop_gives_the_same_result_without_torchscript(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(loop: object) -> object:
        raise RuntimeError("TorchScript was removed")

    monkeypatch.setattr(torch.jit, "script", gone)
    layout = layout_of(layer_outermost(4096))
    copier = CpuCopier(layout)
    copier.attach(mapping)
    with torch.inference_mode():
        copier.copy("store", [Piece(0, [3], [ROW_BYTES])], None)
    assert arena(mapping)[ROW_BYTES:][: 3 * 4096].tobytes() == expected(layout, 3)


def ref(slot: int, length: int, section: int = 0) -> bytes:
    return struct.pack("<IIII", slot, 1, length, section)


class OneChunk:
    def __init__(self, refs: bytes, *blocks: tuple[int, ...]) -> None:
        self.refs = refs
        self.blocks = blocks


def test_a_plan_names_only_the_sections_of_this_rank() -> None:
    planes = layer_outermost(64)
    layout = Layout((), BLOCKS, (group(planes, shards=2, shard=1), group(planes, shards=1)), "cpu", {})
    size = 3 * 64
    refs = ref(5, size * 2, 0) + ref(6, size * 2, 1) + ref(NO_SLOT, 0, 2)
    plan = Planner(layout).plan([OneChunk(refs, (3, 4), (0, 0))], store=False)
    assert plan.pieces == [Piece(0, [3, 4], [6 * ROW_BYTES, 6 * ROW_BYTES + size])]
    assert plan.packed == ref(6, size * 2, 1)
    assert plan.nbytes == 2 * size
    for torn in (refs[:-1], refs[:-16], refs + ref(8, 64, 3)):
        with pytest.raises(ValueError, match="references"):
            Planner(layout).plan([OneChunk(torn, (3, 4), (0, 0))], store=False)
    with pytest.raises(ValueError, match="references"):
        Planner(layout).plan([OneChunk(refs, (3, 4))], store=False)
    with pytest.raises(ValueError, match="lacks"):
        Planner(layout).plan([OneChunk(refs, (3, 4), (0, 5))], store=False)
    with pytest.raises(ValueError, match="lacks blocks"):
        Planner(layout).plan([OneChunk(refs, (3, 0), (0, 0))], store=True)


@pytest.mark.parametrize("make", [layer_outermost, block_outermost])
def test_device_addresses_cover_what_the_host_copy_covers(make: object) -> None:
    planes = make(96)  # type: ignore[operator]
    one = group(planes)
    blocks = random.Random(3).sample(range(BLOCKS), 5) + [6, 7]
    offsets = [i * one.block_bytes for i in range(len(blocks))]
    batch = Batch.of(one, [1 << 40], blocks, offsets)
    covered = {}
    for device, offset, size in zip(*(column.tolist() for column in batch), strict=True):
        for i in range(size):
            assert offset + i not in covered
            covered[offset + i] = device + i
    wanted = {}
    for block, offset in zip(blocks, offsets, strict=True):
        at = offset
        for plane in planes:
            for i in range(plane.nbytes):
                wanted[at + i] = (1 << 40) + plane.offset + block * plane.block_stride + i
            at += plane.nbytes
    assert covered == wanted


def test_runs_adjacent_on_both_sides_are_joined() -> None:
    one = group(block_outermost(100))
    batch = Batch.of(one, [0], [4, 5, 6, 9], [0, 300, 600, 900])
    assert [column.tolist() for column in batch] == [[1200, 2700], [0, 900], [900, 300]]


def test_no_run_crosses_a_segment() -> None:
    def cut(*columns: list[int]) -> list[list[int]]:
        batch = Batch(*(np.array(column, dtype=np.uint64) for column in columns))
        return [column.tolist() for column in batch.cut(1000)]

    whole = [[7, 9000], [0, 1999], [1000, 1]]
    assert cut(*whole) == whole
    assert cut([7, 90000, 500], [990, 1500, 5000], [10, 2501, 20]) == [
        [7, 90000, 90500, 91500, 92500, 500],
        [990, 1500, 2000, 3000, 4000, 5000],
        [10, 500, 1000, 1000, 1, 20],
    ]
    assert cut([], [], []) == [[], [], []]


def test_a_batch_is_split_to_the_rings_size() -> None:
    batch = Batch(*(np.array(column, dtype=np.uint64) for column in ([0, 1000], [5000, 9000], [250, 130])))
    parts = [[column.tolist() for column in part] for part in batch.slices(100)]
    assert [sum(part[2]) for part in parts] == [100, 100, 100, 80]
    assert parts[2] == [[200, 1000], [5200, 9000], [50, 50]]
    assert packed_offsets(np.array([50, 30, 20], dtype=np.uint64)).tolist() == [0, 50, 80]
