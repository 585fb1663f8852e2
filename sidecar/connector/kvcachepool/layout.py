"""Finds the bytes of each KV block from shapes, strides, `KVCacheTensor` and the layout's name, checked against the
table.

A block of a group is a list of *planes* (one per layer, or per layer and head, or one for all layers): block `b` of a
plane starts at `base + b * block_stride` and has `nbytes` bytes. A section holds `[block][plane][bytes]`. A layout that
is not in the table (`layouts.json`, a copy of the protocol's) raises `Unserved`: the cache is off, with a named reason.
"""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcachepool.forms import Member, Plane, form

if TYPE_CHECKING:
    import torch


class Unserved(Exception):
    """This vLLM's KV cache is not supported. `reason` is the name in status and metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class GroupShape(NamedTuple):
    """A KV group, as both sides of the connector see it.

    kind: `full` or `window`.
    block_tokens: tokens per block id.
    shards: distinct parts over all ranks.
    window_tokens: length of the window in tokens, 0 for `full`.
    """

    kind: str
    block_tokens: int
    shards: int
    window_tokens: int


class ShardOf(NamedTuple):
    """The shard of a group that a rank holds, and whether this replica writes it."""

    shard: int
    writer: bool


class Ranks(NamedTuple):
    """Parallel sizes of the instance, and the coordinates of one rank."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    @property
    def world(self) -> int:
        """Ranks of the instance. Replicas of data parallelism are separate instances."""
        return self.tp * self.pp

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp + self.tp_rank


class GroupLayout(NamedTuple):
    """A group on this rank: its planes in section order."""

    shape: GroupShape
    mine: ShardOf
    planes: tuple[Plane, ...]

    @property
    def block_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


class Layout(NamedTuple):
    """The KV cache of this rank.

    storages: one flat byte view per allocation; planes point into them.
    num_blocks: block ids are below it.
    descriptor: what decides the arrangement, the same on all ranks of an instance and on equal instances.
    """

    storages: tuple[torch.Tensor, ...]
    num_blocks: int
    groups: tuple[GroupLayout, ...]
    device: str
    descriptor: dict[str, Any]


@cache
def table() -> dict[str, Any]:
    loaded = json.loads(resources.files(__package__).joinpath("layouts.json").read_text(encoding="utf-8"))
    return {
        "layouts": {row["name"]: row for row in loaded["layouts"]}
        | {row["alias"]: row for row in loaded["layouts"] if row["alias"]},
        "specs": {row["spec"]: row for row in loaded["specs"]},
        "backends": {row["name"]: row for row in loaded["backends"]},
    }


def ranks_of(vllm_config: Any) -> Ranks:
    """Parallel sizes, without coordinates. Raises `Unserved` for prefill context parallelism."""
    parallel = vllm_config.parallel_config
    if int(getattr(parallel, "prefill_context_parallel_size", 1) or 1) > 1:
        raise Unserved(
            "PrefillContextParallelUnsupported", "--prefill-context-parallel-size splits blocks over ranks: use 1"
        )
    return Ranks(
        tp=int(parallel.tensor_parallel_size),
        pp=int(parallel.pipeline_parallel_size),
        dcp=int(getattr(parallel, "decode_context_parallel_size", 1) or 1),
    )


def shards_in_tp(ranks: Ranks, parts: int, dcp_sharded: bool) -> int:
    """Distinct shards of a group over the tensor-parallel ranks, of which tensor parallelism distinguishes `parts`."""
    return min(ranks.tp, parts * (ranks.dcp if dcp_sharded else 1))


def shard_of(ranks: Ranks, shape_shards: int, parts: int, dcp_sharded: bool) -> ShardOf:
    """The shard of one rank. Replicas of a part are consecutive ranks, and context shards are among them."""
    in_tp = shape_shards // ranks.pp
    replicas = ranks.tp // parts
    context = in_tp // parts if dcp_sharded else 1
    part, replica = divmod(ranks.tp_rank, replicas)
    return ShardOf(ranks.pp_rank * in_tp + part * context + replica % context, replica < context)


def _spec_row(spec: Any) -> dict[str, Any]:
    name = type(spec).__name__
    row = table()["specs"].get(name)
    if row is None or row["group"] is None:
        raise Unserved(row["reason"] if row else f"KvGroupUnsupported/{name}", f"{name} KV groups are not supported")
    if not getattr(spec, "prefix_cacheable", True) or int(getattr(spec, "prefix_replay_tokens", None) or 0):
        raise Unserved(f"KvGroupUnsupported/{name}", "vLLM does not cache blocks of this KV group by prefix")
    if getattr(spec, "non_causal", False):
        raise Unserved("PrefixUnsupported", "a layer's attention is not causal: KV depends on later tokens")
    return dict(row)


def _tp_shards(ranks: Ranks, spec: Any, row: dict[str, Any]) -> int:
    """Number of parts of a group that tensor parallelism distinguishes, before context parallelism splits them.

    Further ranks hold replicas. Only vLLM's own declaration proves that: a model's number of KV heads is not enough,
    because layers of some models differ in it. Unknown means not replicated, as in vLLM's contract.
    """
    if not hasattr(spec, "max_tp_shards"):
        # vLLM 0.30 declares it only by the kind of the group.
        return 1 if row["shards"] == "one" else ranks.tp
    return min(ranks.tp, int(spec.max_tp_shards or ranks.tp))


def _context_sharded(spec: Any) -> bool:
    """Whether this group's tokens are split over the decode context parallel ranks."""
    return bool(getattr(spec, "dcp_sharded", True))


def group_shapes(vllm_config: Any, kv_cache_config: Any) -> list[GroupShape]:
    """Shapes of all KV groups, in vLLM's order. Needs no tensors. Raises `Unserved`."""
    ranks = ranks_of(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise Unserved("NoKvCache", "the model has no KV cache")
    shapes = []
    for group in groups:
        spec = group.kv_cache_spec
        row = _spec_row(spec)
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise Unserved("KvGroupUnsupported/NoTransfer", "vLLM does not transfer a KV group of this model")
        sharded = _context_sharded(spec)
        base = vllm_config.cache_config.block_size if len(groups) == 1 else spec.block_size
        window = 0
        if row["group"] == "window":
            window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", None) or 0)
        shapes.append(
            GroupShape(
                kind=row["group"],
                block_tokens=int(base) * (ranks.dcp if sharded else 1),
                shards=ranks.pp * shards_in_tp(ranks, _tp_shards(ranks, spec, row), sharded),
                window_tokens=window,
            )
        )
    return shapes


def runs(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[list[int], int]:
    """Cuts a strided box into contiguous runs: (byte offsets of the runs, bytes of each). Strides in elements."""
    length = itemsize
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(
        (stride * itemsize, size) for size, stride in zip(shape, strides, strict=True) if size > 1
    ):
        if not outer and stride == length:
            length *= size
        else:
            outer.append((stride, size))
    offsets = [0]
    for stride, size in outer:
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return sorted(offsets), length


def merged(planes: list[Plane]) -> list[Plane]:
    """Planes by address. Those that are adjacent in every block are joined."""
    out: list[Plane] = []
    for plane in sorted(planes):
        last = out[-1] if out else None
        if (
            last is not None
            and last.storage == plane.storage
            and last.block_stride == plane.block_stride
            and last.offset + last.nbytes == plane.offset
            and last.nbytes + plane.nbytes <= plane.block_stride
        ):
            out[-1] = last._replace(nbytes=last.nbytes + plane.nbytes)
        else:
            out.append(plane)
    return out


def _member(tensor: torch.Tensor, num_blocks: int, placed: Any, index: int, storage: int) -> tuple[Member, list[Plane]]:
    """One layer and its planes."""
    itemsize = tensor.element_size()
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    if rest or ratio == 0:
        raise Unserved(
            "LayoutUnknown/Blocks", f"a layer has {tensor.shape[0]} kernel blocks: expected a multiple of {num_blocks}"
        )
    block_stride = tensor.stride(0) * ratio * itemsize
    base = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    if base != placed.offset + index * placed.layer_stride or block_stride != placed.block_stride:
        raise Unserved("LayoutUnknown/Placement", "a layer's tensor is not where its KVCacheTensor places it")
    shape = (ratio, *tensor.shape[1:])
    offsets, length = runs(shape, tuple(tensor.stride()), itemsize)
    if length * len(offsets) != math.prod(shape) * itemsize or len(offsets) > 1024:
        raise Unserved("LayoutUnknown/Strides", f"expected up to 1024 runs without overlap in a block of shape {shape}")
    strides = tuple(tensor.stride())
    member = Member(storage, base, shape, strides, str(tensor.dtype), itemsize)
    return member, [Plane(storage, base + offset, block_stride, length) for offset in offsets]


def detect(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], ranks: Ranks, engine_version: str
) -> Layout:
    """The fully checked layout of this rank's KV cache. Raises `Unserved` for anything unexpected."""
    import torch

    name = _layout_name(vllm_config, kv_cache_config)
    row = table()["layouts"].get(name)
    if row is None or not row["served"]:
        raise Unserved(f"LayoutUnknown/{name}", "vLLM's KV cache layout is not supported")
    shapes = group_shapes(vllm_config, kv_cache_config)
    storages: dict[int, int] = {}
    flat: list[torch.Tensor] = []
    groups, described = [], []
    device = ""
    for group, shape in zip(kv_cache_config.kv_cache_groups, shapes, strict=True):
        planes: list[Plane] = []
        layers: dict[str, Member] = {}
        for placed in kv_cache_config.kv_cache_tensors:
            inside: list[Plane] = []
            for index, layer in enumerate(placed.layers):
                if layer not in group.layer_names:
                    continue
                tensor = kv_caches.get(layer)
                if not isinstance(tensor, torch.Tensor):
                    raise Unserved("LayoutUnknown/Tensor", f"expected one KV tensor for layer {layer}")
                device = tensor.device.type
                key = tensor.untyped_storage().data_ptr()
                if key not in storages:
                    storages[key] = len(flat)
                    with torch.inference_mode():
                        flat.append(
                            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                        )
                if layer in layers:
                    raise Unserved("LayoutUnknown/Layers", f"layer {layer} is in two KVCacheTensors")
                member, found = _member(tensor, kv_cache_config.num_blocks, placed, index, storages[key])
                inside += found
                layers[layer] = member
            planes += merged(inside)
        if set(layers) != set(group.layer_names):
            missing = min(set(group.layer_names) - set(layers))
            raise Unserved("LayoutUnknown/Layers", f"layer {missing} is in no KVCacheTensor")
        for plane in planes:
            end = plane.offset + (kv_cache_config.num_blocks - 1) * plane.block_stride + plane.nbytes
            if end > flat[plane.storage].numel():
                raise Unserved("LayoutUnknown/Bounds", "a KV block ends beyond its allocation")
        spec = group.kv_cache_spec
        spec_row = _spec_row(spec)
        parts = _tp_shards(ranks, spec, spec_row)
        sharded = _context_sharded(spec)
        groups.append(GroupLayout(shape, shard_of(ranks, shape.shards, parts, sharded), tuple(planes)))
        described.append(_describe(vllm_config, spec, shape, layers, planes, row, device, ranks))
    sizes = {"tp": ranks.tp, "pp": ranks.pp, "dcp": ranks.dcp}
    sizes["cp_interleave"] = int(getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", None) or 1)
    descriptor = {
        "engine": "vllm",
        "engine_version": ".".join(engine_version.split(".")[:2]),
        "device": device,
        "kv_layout": row["name"],
        "parallel": sizes,
        "groups": described,
    }
    return Layout(tuple(flat), kv_cache_config.num_blocks, tuple(groups), device, descriptor)


def _layout_name(vllm_config: Any, kv_cache_config: Any) -> str:
    name = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    return str(getattr(name, "name", name))


def _describe(
    vllm_config: Any,
    spec: Any,
    shape: GroupShape,
    layers: dict[str, Member],
    planes: list[Plane],
    row: dict[str, Any],
    device: str,
    ranks: Ranks,
) -> dict[str, Any]:
    """What decides the arrangement of one group, independent of the rank and of the number of blocks."""
    spec_name = type(spec).__name__
    modules = vllm_config.compilation_config.static_forward_context
    backends, paths, contents = set(), set(), set()
    for layer in layers:
        module = modules.get(layer)
        if module is None:
            raise Unserved("LayoutUnknown/Module", f"vLLM has no attention module for layer {layer}")
        backends.add(str(module.get_attn_backend().get_name()))
        paths.add(str(getattr(module, "isa", "")))
    for backend in sorted(backends):
        known = table()["backends"].get(backend)
        if (
            known is None
            or device not in known["devices"]
            or spec_name not in known["specs"]
            or row["name"] not in known["layouts"]
        ):
            raise Unserved(f"LayoutUnknown/{backend}", f"{spec_name} in {row['name']} on {device} is not supported")
        contents.add(known["content"])
    head_size = [int(spec.head_size), int(getattr(spec, "head_size_v", spec.head_size) or 0)]
    members = list(layers.values())
    # If key and value differ in length, or bytes are between them, no codec can split a state.
    halves = contents == {"halves"} and [2 * size for size in head_size] == [members[0].shape[-1]] * 2
    known_form = form(row["order"], halves, members, planes) if halves or contents == {"one"} else None
    return {
        "kind": shape.kind,
        "spec": spec_name,
        "backends": sorted(backends),
        "isa": sorted(paths),
        # With pipeline stages a rank sees only its own layers, so they are described by their number in the model.
        "layers": list(layers) if ranks.pp == 1 else vllm_config.model_config.get_total_num_hidden_layers(),
        "block_tokens": shape.block_tokens,
        "window_tokens": shape.window_tokens,
        "shards": shape.shards,
        "head_size": head_size,
        "form": known_form,
        "page_bytes": int(spec.page_size_bytes),
        "tensors": sorted(
            (
                {"kernel_blocks": r, "shape": list(s), "strides": list(t), "dtype": d}
                for r, s, t, d in {m.box for m in members}
            ),
            key=lambda item: json.dumps(item, sort_keys=True),
        ),
    }


def canonical(descriptor: dict[str, Any]) -> str:
    """Canonical JSON: sorted, compact, ASCII."""
    return json.dumps(descriptor, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


class Strip(NamedTuple):
    """Planes at equal distances, which one strided view `[planes, blocks, bytes]` covers.

    at: offset of the first plane in a block's bytes of the section.
    """

    storage: int
    offset: int
    plane_stride: int
    planes: int
    block_stride: int
    nbytes: int
    at: int


def strips(planes: tuple[Plane, ...]) -> list[Strip]:
    """Fewest strips of equally spaced planes, in section order."""
    out: list[Strip] = []
    at = 0
    for plane in planes:
        last = out[-1] if out else None
        same = last is not None and (last.storage, last.block_stride, last.nbytes) == (
            plane.storage,
            plane.block_stride,
            plane.nbytes,
        )
        if last is not None and same:
            step = plane.offset - (last.offset + (last.planes - 1) * last.plane_stride)
            if step > 0 and (last.planes == 1 or step == last.plane_stride):
                out[-1] = last._replace(planes=last.planes + 1, plane_stride=step)
                at += plane.nbytes
                continue
        out.append(Strip(plane.storage, plane.offset, 0, 1, plane.block_stride, plane.nbytes, at))
        at += plane.nbytes
    return out


def section_starts(shapes: list[GroupShape]) -> list[int]:
    """Index of each group's first section: groups in order, shards within a group."""
    return [0, *itertools.accumulate(shape.shards for shape in shapes)][:-1]
