"""Gathers and scatters KV blocks by kernels in vLLM's own context, for groups whose blocks are in small pieces.

A copy engine needs about as long for a piece of a few KiB as for one of 28 KiB. Below that, threads that each move a
few words are faster. The kernels are the project's (`pages.ptx`, copied from the crate of kernels), and `kernels.json`
describes their launch. An out-of-bounds access of a kernel would end vLLM's context. So every plane is compared with
its storage before the first launch, and every run of blocks with the window before its launch. A kernel skips and
counts blocks that the cache does not have. Not run on a GPU yet: tests run the kernels' sources on the host, with a
fake driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import cuda_driver
from .layout import GroupLayout, Layout
from .pieces import Piece

_MODULE, _GATHER, _SCATTER = "pages", "kv_gather", "kv_scatter"
#: Version of the PTX that this file is written for. The files may be newer than the code of a running process.
_PTX_SHA256 = "edd322191e5941d81e4345e14f7b27dd000417885b9ab47e4825d2eceecb8484"
#: The compute capability that the PTX needs, and the attributes in which a device reports its own.
_CAPABILITY = (8, 0)
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
#: From this piece size on, copy engines are as fast (H100), and use no multiprocessors of the model.
_COPY_ENGINE_FROM = 28 << 10
_GRID_MAX = 65_535
#: Space for the count of skipped blocks, aligned for the block ids behind it.
_COUNT_BYTES = 16
_TYPES: dict[str, Any] = {"pointer": ctypes.c_uint64, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
_ARGUMENTS = (
    *("planes", "plane_count", "blocks", "block_count"),
    *("cache_blocks", "section", "block_bytes", "refused"),
)
#: Names of the driver's errors for PTX that it does not accept, and for a lack of memory.
_REASONS = {
    2: "OutOfMemory",
    200: "PtxRefused",
    209: "DeviceTooOld",
    218: "PtxRefused",
    221: "NoPtxCompiler",
    222: "PtxTooNew",
    223: "NoPtxCompiler",
}


class NoKernelsError(RuntimeError):
    """Kernels cannot be used here. `reason` is the name in logs and events."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class Rows(NamedTuple):
    """Planes of a group as kernels read them: rows (address, block stride, bytes, offset in a block's section
    bytes).
    """

    table: npt.NDArray[np.uint64]
    block_bytes: int

    @staticmethod
    def of(group: GroupLayout, bases: Sequence[int]) -> Rows:
        """Planes that are adjacent in every block become one row. `bases`: device address of each storage."""
        rows: list[list[int]] = []
        at = 0
        for plane in group.planes:
            address = bases[plane.storage] + plane.offset
            if rows and rows[-1][0] + rows[-1][2] == address and rows[-1][1] == plane.block_stride:
                rows[-1][2] += plane.nbytes
            else:
                rows.append([address, plane.block_stride, plane.nbytes, at])
            at += plane.nbytes
        return Rows(np.asarray(rows, dtype=np.uint64), at)

    @property
    def small(self) -> bool:
        return self.block_bytes < _COPY_ENGINE_FROM * len(self.table)

    @property
    def longest(self) -> int:
        return int(self.table[:, 2].max())


def small_groups(layout: Layout, bases: Sequence[int]) -> dict[int, Rows]:
    """The groups to copy by kernels. Raises `NoKernelsError` if a block would exceed its storage."""
    for plane in (plane for group in layout.groups for plane in group.planes):
        end = plane.offset + (layout.num_blocks - 1) * plane.block_stride + plane.nbytes
        storage = layout.storages[plane.storage]
        if plane.offset < 0 or plane.block_stride < 0 or end > storage.numel() * storage.element_size():
            raise NoKernelsError("BadLayout", f"blocks from byte {plane.offset} to {end} exceed their storage")
    rows = {number: Rows.of(group, bases) for number, group in enumerate(layout.groups)}
    return {number: group for number, group in rows.items() if group.small}


class _Entry(NamedTuple):
    """A loaded kernel, and how to launch it."""

    function: ctypes.c_void_p
    manifest: dict[str, Any]

    def shape(self, counts: dict[str, int]) -> list[int]:
        """Thread blocks in x and y, then threads of each."""
        axes = [-(-counts[axis["count"]] // axis["per_block"]) for axis in self.manifest["grid"]]
        return [min(max(blocks, 1), _GRID_MAX) for blocks in axes] + list(self.manifest["block"])


class PageKernels:
    """The kernels in the current context, with tables of the planes in device memory. Used by one thread at a time."""

    def __init__(self, groups: dict[int, Rows], cache_blocks: int, window: int, window_bytes: int, stream: int) -> None:
        """`groups`: from `small_groups`, at least one. `cache_blocks`: block ids are below it. `window`: device address
        of `window_bytes` bytes. `stream`: a stream of the current context, which this waits for. Raises
        `NoKernelsError` and errors of reading a package; nothing is left behind then.
        """
        self._groups = groups
        self._cache_blocks = cache_blocks
        self._window, self._window_bytes = window, window_bytes
        self._blocks_max = window_bytes // min(rows.block_bytes for rows in groups.values())
        self._kept: npt.NDArray[np.uint32] | None = None
        self._cuda = cuda_driver.library()
        self._module = ctypes.c_void_p(0)
        self._memory = ctypes.c_uint64(0)
        self._planes: dict[int, int] = {}
        try:
            self._check_device()
            self._entries = self._load()
            self._place_planes(stream)
            # The first launch of a kernel is slow and may stall the device. A launch without blocks copies nothing.
            for kind, number in itertools.product(("load", "store"), groups):
                self._launch(kind, number, 0, 0, window, stream)
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        except BaseException:
            # A launch may still be running.
            with contextlib.suppress(NoKernelsError):
                self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
            self.close()
            raise

    def takes(self, piece: Piece) -> bool:
        """Whether these kernels should copy the group's blocks."""
        return piece.group in self._groups

    def place(self, pieces: Sequence[Piece], stream: int) -> None:
        """Queues the copy of the block ids of the next `copy` to the device. Call it before the stream waits for
        anything, because it waits for all queued work. Raises `NoKernelsError`.
        """
        blocks = np.concatenate([np.asarray(piece.blocks, dtype=np.uint32) for piece in pieces])
        if len(blocks) > self._blocks_max:
            raise NoKernelsError("TooManyBlocks", f"{len(blocks)} blocks in one copy, at most {self._blocks_max} fit")
        # The count of skipped blocks, and the ids behind it. Kept alive, because a driver may read pageable memory
        # late.
        self._kept = np.concatenate((np.zeros(_COUNT_BYTES // 4, dtype=np.uint32), blocks))
        self._write(self._refused, self._kept, stream)

    def copy(self, kind: str, pieces: Sequence[Piece], stream: int) -> None:
        """Queues the copy of the pieces that `place` was given, with offsets in the window. Raises `NoKernelsError` if
        a launch fails, and `ValueError` for offsets outside of the window; earlier launches may still run. After the
        stream has finished, `refused` returns how many pieces were skipped.
        """
        first = 0
        for piece in pieces:
            size = self._groups[piece.group].block_bytes
            cuts = np.flatnonzero(np.diff(np.asarray(piece.offsets, dtype=np.int64)) != size) + 1
            for begin, end in itertools.pairwise([0, *cuts.tolist(), len(piece.offsets)]):
                at, count = piece.offsets[begin], end - begin
                if at < 0 or at + count * size > self._window_bytes:
                    raise ValueError(f"{count} blocks at byte {at} exceed the window")
                self._launch(kind, piece.group, first + begin, count, self._window + at, stream)
            first += len(piece.offsets)

    def refused(self, stream: int) -> int:
        """Number of pieces of the last `copy` that were skipped because the cache has no such block. Waits for the
        stream.
        """
        count = ctypes.c_uint32(0)
        self._call(
            "cuMemcpyDtoHAsync_v2",
            *(ctypes.byref(count), ctypes.c_uint64(self._refused), ctypes.c_size_t(4), ctypes.c_void_p(stream)),
        )
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        return count.value

    def close(self) -> None:
        """Releases module and memory. No kernel may be running."""
        memory, module = self._memory, self._module
        self._memory, self._module = ctypes.c_uint64(0), ctypes.c_void_p(0)
        if memory.value:
            self._cuda.cuMemFree_v2(memory)
        if module.value:
            self._cuda.cuModuleUnload(module)

    def _check_device(self) -> None:
        """The driver cannot use PTX for a newer device."""
        device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
        self._call("cuCtxGetDevice", ctypes.byref(device))
        for attribute, value in ((_CAPABILITY_MAJOR, major), (_CAPABILITY_MINOR, minor)):
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        if (major.value, minor.value) < _CAPABILITY:
            needed, found = "{}.{}".format(*_CAPABILITY), f"{major.value}.{minor.value}"
            raise NoKernelsError("DeviceTooOld", f"the GPU has compute capability {found}, the kernels need {needed}")

    def _load(self) -> dict[str, _Entry]:
        package = resources.files(__package__)
        manifest = json.loads(package.joinpath("kernels.json").read_text(encoding="utf-8"))
        ptx = package.joinpath(f"{_MODULE}.ptx").read_bytes()
        module: dict[str, Any] = {"ptx_sha256": ""}
        for each in manifest["modules"]:
            module = each if each["name"] == _MODULE else module
        if not hashlib.sha256(ptx).hexdigest() == module["ptx_sha256"] == _PTX_SHA256:
            raise NoKernelsError("BadPackage", f"{_MODULE}.ptx, kernels.json and the code have different versions")
        entries = {entry["name"]: entry for entry in module["entries"]}
        found: dict[str, _Entry] = {}
        self._call("cuModuleLoadDataEx", ctypes.byref(self._module), ptx, 0, None, None)
        for kind, name in (("load", _SCATTER), ("store", _GATHER)):
            entry = entries.get(name, {"arguments": []})
            if tuple(argument["name"] for argument in entry["arguments"]) != _ARGUMENTS:
                raise NoKernelsError("BadPackage", f"kernels.json has no {name} with the expected arguments")
            function = ctypes.c_void_p(0)
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            found[kind] = _Entry(function, entry)
        return found

    def _place_planes(self, stream: int) -> None:
        """Allocates device memory for the planes by group, the count of skipped blocks, and block ids."""
        tables = {number: rows.table for number, rows in self._groups.items()}
        nbytes = sum(table.nbytes for table in tables.values()) + _COUNT_BYTES + 4 * self._blocks_max
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(nbytes))
        at = self._memory.value
        for number, table in tables.items():
            self._planes[number] = at
            self._write(at, table, stream)
            at += table.nbytes
        self._refused, self._blocks = at, at + _COUNT_BYTES
        # The driver may read this memory after these calls too.
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def _write(self, address: int, content: npt.NDArray[Any], stream: int) -> None:
        """`content` is pageable memory and must stay alive until the stream has finished."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            *(ctypes.c_uint64(address), ctypes.c_void_p(content.ctypes.data)),
            *(ctypes.c_size_t(content.nbytes), ctypes.c_void_p(stream)),
        )

    def _launch(self, kind: str, group: int, first: int, count: int, section: int, stream: int) -> None:
        rows, entry = self._groups[group], self._entries[kind]
        given = (
            *(self._planes[group], len(rows.table), self._blocks + 4 * first, count),
            *(self._cache_blocks, section, rows.block_bytes, self._refused),
        )
        arguments = zip(entry.manifest["arguments"], given, strict=True)
        words = [_TYPES[argument["type"]](value) for argument, value in arguments]
        pointers = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        x, y, threads_x, threads_y = entry.shape({"pieces": len(rows.table) * count, "piece_bytes": rows.longest})
        self._call(
            "cuLaunchKernel",
            *(entry.function, x, y, 1, threads_x, threads_y, 1, entry.manifest["shared_bytes"]),
            *(ctypes.c_void_p(stream), pointers, None),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._cuda, name)(*arguments)
        except AttributeError:
            raise NoKernelsError("DriverFailed", f"the driver has no {name}") from None
        if code != 0:
            raise NoKernelsError(_REASONS.get(code, "DriverFailed"), f"{name} failed with {code}")
