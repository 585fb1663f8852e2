"""Where the bytes of a block lie, and which numbers they are.

A codec that packs numbers by layer, token and channel must know which ones belong together. The connector alone sees
how vLLM laid them out, so it says it in the layout descriptor, and only where every byte was found where that says.
"""

from __future__ import annotations

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
    # Where each state of a block lies, by that order and by the planes: storage, and bytes from its start.
    outer = order[:-1]
    said = torch.zeros((2,), dtype=torch.int64, device="cpu")
    for dim in outer:
        if dim == "L":
            step = torch.tensor([(layer.storage, layer.offset) for layer in layers], device="cpu").T
        else:
            along = torch.arange(sizes[dim], device="cpu") * (steps[dim] * first.itemsize)
            step = torch.stack((torch.zeros_like(along), along))
        said = said.unsqueeze(-1) + step.view(2, *[1] * (said.dim() - 1), -1)
    starts = [plane.offset + torch.arange(0, plane.nbytes, state, device="cpu") for plane in planes]
    storages = [torch.full_like(at, plane.storage) for plane, at in zip(planes, starts, strict=True)]
    found = torch.stack((torch.cat(storages), torch.cat(starts)))
    if not torch.equal(said.flatten(1), found):
        return None
    axes = {"L": "layer", "B": "token", "H": "channel", "N": "token"}
    dims: list[list[Any]] = [[axes[dim], sizes[dim]] for dim in outer if sizes[dim] > 1]
    return dims + ([["half", 2], ["channel", sizes["C"] // 2]] if halves else [["channel", sizes["C"]]])
