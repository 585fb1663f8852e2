"""Where the bytes of a block lie, and which numbers they are.

A codec that packs numbers by layer, token and channel must know which ones belong together. The connector alone sees
how vLLM laid them out, so it says it in the layout descriptor, and only where every byte was found where that says.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple


class Plane(NamedTuple):
    """One run of bytes per block. `offset`: of block 0, in bytes from the start of storage `storage`."""

    storage: int
    offset: int
    block_stride: int
    nbytes: int


class Member(NamedTuple):
    """One layer of a group: where its block 0 begins in storage `storage`, and a block's box in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def box(self) -> tuple[Any, ...]:
        """What decides the arrangement of a block: kernel blocks, shape and strides of one, type."""
        return self.shape[0], self.shape[1:], self.strides[1:], self.dtype


def form(order: list[str], halves: bool, layers: list[Member], planes: list[Plane]) -> list[list[Any]] | None:
    """What the bytes of a group's block are, from the outermost dimension to the innermost: (what it counts, how many).

    order: the layout's dimensions, of which B stands for the kernel blocks of a block. halves: a state is a key and a
    value. None: the planes are not what that order says.
    """
    first = layers[0]
    names = {4: "BHNC", 3: "BNC"}.get(len(first.shape))
    if names is None or any(layer.box != first.box for layer in layers):
        return None
    sizes = {"L": len(layers), "H": 1} | dict(zip(names, first.shape, strict=True))
    steps = dict(zip(names, first.strides, strict=True))
    state = sizes["C"] * first.itemsize
    outer = [dim for dim in order if dim != "C"]
    said = []
    for at in itertools.product(*(range(sizes[dim]) for dim in outer)):
        index = dict(zip(outer, at, strict=True))
        layer = layers[index.pop("L")]
        inside = sum(steps.get(dim, 0) * number for dim, number in index.items())
        said.append((layer.storage, layer.offset + inside * layer.itemsize))
    found = [(plane.storage, plane.offset + at) for plane in planes for at in range(0, plane.nbytes, state)]
    if order[-1] != "C" or steps["C"] != 1 or said != found or any(plane.nbytes % state for plane in planes):
        return None
    axes = {"L": "layer", "B": "token", "H": "channel", "N": "token"}
    dims: list[list[Any]] = [[axes[dim], sizes[dim]] for dim in outer if sizes[dim] > 1]
    return dims + ([["half", 2], ["channel", sizes["C"] // 2]] if halves else [["channel", sizes["C"]]])
