"""Finds where the numbers of a block are.

A codec that packs numbers by layer, token and channel must know which ones belong together, and objects that every
topology can read need the bytes of each head. Only the connector knows vLLM's layout, so it describes the numbers in
the layout descriptor, if a check finds every byte where the description says.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Plane(NamedTuple):
    """One run of bytes per block. `offset`: of block 0, in bytes from the start of storage `storage`."""

    storage: int
    offset: int
    block_stride: int
    nbytes: int


class Member(NamedTuple):
    """One layer of a group: the start of its block 0 in storage `storage`, and the box of a block in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def box(self) -> tuple[Any, ...]:
        """What decides the arrangement of a block: kernel blocks, shape and strides of one, dtype."""
        return self.shape[0], self.shape[1:], self.strides[1:], self.dtype


class Block(NamedTuple):
    """Sizes of a block of a group: a state is one token of one head in one layer. state_bytes: bytes of a state."""

    layers: int
    kernel_blocks: int
    heads: int
    tokens: int
    state_bytes: int


def block(order: list[str], layers: list[Member], planes: list[Plane]) -> Block | None:
    """The sizes of a group's block, if its planes have every state where the order of dimensions says.

    order: the layout's dimensions; B is the kernel blocks of a block.
    """
    import torch

    first = layers[0]
    names = {4: "BHNC", 3: "BNC"}.get(len(first.shape))
    if names is None or any(layer.box != first.box for layer in layers):
        return None
    sizes = {"L": len(layers), "H": 1} | dict(zip(names, first.shape, strict=True))
    steps = {"H": 0} | dict(zip(names, first.strides, strict=True))
    state = sizes["C"] * first.itemsize
    if order[-1] != "C" or steps["C"] != 1 or any(plane.nbytes % state for plane in planes):
        return None
    # Position of each state of a block by that order, and by the planes: storage, and bytes from its start.
    expected = torch.zeros((2,), dtype=torch.int64, device="cpu")
    for dim in order[:-1]:
        if dim == "L":
            step = torch.tensor([(layer.storage, layer.offset) for layer in layers], device="cpu").T
        else:
            along = torch.arange(sizes[dim], device="cpu") * (steps[dim] * first.itemsize)
            step = torch.stack((torch.zeros_like(along), along))
        expected = expected.unsqueeze(-1) + step.view(2, *[1] * (expected.dim() - 1), -1)
    starts = [plane.offset + torch.arange(0, plane.nbytes, state, device="cpu") for plane in planes]
    storages = [torch.full_like(at, plane.storage) for plane, at in zip(planes, starts, strict=True)]
    found = torch.stack((torch.cat(storages), torch.cat(starts)))
    if not torch.equal(expected.flatten(1), found):
        return None
    return Block(sizes["L"], sizes["B"], sizes["H"], sizes["N"], state)


def form(order: list[str], halves: bool, sizes: Block, itemsize: int) -> list[list[Any]]:
    """The dimensions of the numbers of a block, from the outermost to the innermost: (what it counts, how many).

    halves: a state is a key and a value. itemsize: bytes of a number.
    """
    axes = {
        "L": ("layer", sizes.layers),
        "B": ("token", sizes.kernel_blocks),
        "H": ("channel", sizes.heads),
        "N": ("token", sizes.tokens),
    }
    dims = [list(axes[dim]) for dim in order[:-1] if axes[dim][1] > 1]
    numbers = sizes.state_bytes // itemsize
    return dims + ([["half", 2], ["channel", numbers // 2]] if halves else [["channel", numbers]])


def portable(order: list[str], apart: bool, sizes: Block) -> Block | None:
    """The block as the sidecar converts it for other topologies: with what moves as a whole as its states.

    apart: only the backend knows the bytes of a head, so all tokens of a head in a kernel block are one state. Returns
    None if they are not together.
    """
    if not apart:
        return sizes
    if order[-3:] != ["H", "N", "C"]:
        return None
    return sizes._replace(tokens=1, state_bytes=sizes.tokens * sizes.state_bytes)
