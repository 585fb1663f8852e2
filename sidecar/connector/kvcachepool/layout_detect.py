"""Finds the bytes of each KV block from shapes, strides, `KVCacheTensor` and the layout's name, checked against the
table. Anything unexpected raises `Unserved`.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from kvcachepool import forms
from kvcachepool.forms import Member, Plane
from kvcachepool.layout import (
    STATE,
    GroupLayout,
    GroupShape,
    Layout,
    Ranks,
    Unserved,
    group_shapes,
    layer_specs,
    parts_of,
    shard_of,
    table,
)

if TYPE_CHECKING:
    import torch


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
    minor = ".".join(engine_version.split(".")[:2])
    storages: dict[int, int] = {}
    flat: list[torch.Tensor] = []
    groups, described = [], []
    device = ""
    for group, shape in zip(kv_cache_config.kv_cache_groups, shapes, strict=True):
        planes: list[Plane] = []
        layers: dict[str, Member] = {}
        specs = layer_specs(group)
        for placed in kv_cache_config.kv_cache_tensors:
            inside: list[Plane] = []
            for index, layer in enumerate(placed.layers):
                if layer not in group.layer_names:
                    continue
                if layer in layers:
                    raise Unserved("LayoutUnknown/Layers", f"layer {layer} is in two KVCacheTensors")
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
                member, found = _member(tensor, kv_cache_config.num_blocks, placed, index, storages[key])
                if shape.kind == STATE and member.nbytes != _state_bytes(specs[layer]):
                    raise Unserved("LayoutUnknown/State", f"a state of layer {layer} has {member.nbytes} bytes")
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
        parts, sharded = parts_of(ranks, group)
        groups.append(GroupLayout(shape, shard_of(ranks, shape.shards, parts, sharded), tuple(planes)))
        described.append(_describe(vllm_config, specs, shape, layers, planes, row, device, ranks, minor))
    sizes = {"tp": ranks.tp, "pp": ranks.pp, "dcp": ranks.dcp, **ranks.part()}
    sizes["cp_interleave"] = int(getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", None) or 1)
    descriptor = {
        "engine": "vllm",
        "engine_version": minor,
        "device": device,
        "kv_layout": row["name"],
        "parallel": sizes,
        "groups": described,
    }
    return Layout(tuple(flat), kv_cache_config.num_blocks, tuple(groups), device, descriptor)


def _state_bytes(spec: Any) -> int:
    """Bytes of a layer's state: its parts, one after the other."""
    return sum(math.prod(part) * dtype.itemsize for part, dtype in zip(spec.shapes, spec.dtypes, strict=True))


def _layout_name(vllm_config: Any, kv_cache_config: Any) -> str:
    name = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    return str(getattr(name, "name", name))


def _describe(
    vllm_config: Any,
    specs: dict[str, Any],
    shape: GroupShape,
    layers: dict[str, Member],
    planes: list[Plane],
    row: dict[str, Any],
    device: str,
    ranks: Ranks,
    minor: str,
) -> dict[str, Any]:
    """What decides the arrangement of one group, independent of the rank and of the number of blocks."""
    import torch

    modules = vllm_config.compilation_config.static_forward_context
    backends, paths, contents, names, formats = set(), set(), set(), set(), set()
    apart = True
    for layer, spec in specs.items():
        module = modules.get(layer)
        if module is None:
            raise Unserved("LayoutUnknown/Module", f"vLLM has no attention module for layer {layer}")
        backend, name = str(module.get_attn_backend().get_name()), type(spec).__name__
        known = table()["backends"].get(backend)
        if (
            known is None
            or device not in known["devices"]
            or name not in known["specs"]
            or row["name"] not in known["layouts"]
        ):
            raise Unserved(f"LayoutUnknown/{backend}", f"{name} in {row['name']} on {device} is not supported")
        backends.add(backend)
        paths.add(str(getattr(module, "isa", "")))
        contents.add(known["content"])
        same = known.get("same", [])
        # The oldest version with the same format, or this one.
        formats.add(same[0] if minor in same else minor)
        apart = apart and known["content"] == "own" and known.get("heads_apart", False)
        names.add(name)
    # Sizes of a key and a value. States have none.
    sizes = {
        (int(spec.head_size), int(getattr(spec, "head_size_v", spec.head_size) or 0))
        for spec in specs.values()
        if hasattr(spec, "head_size")
    }
    members = list(layers.values())
    # If key and value differ in length, or bytes are between them, no codec can split a state.
    halves = contents == {"halves"} and sizes == {(members[0].shape[-1] / 2,) * 2}
    # The records of such a content may differ between generations of GPUs.
    generation = str(torch.cuda.get_device_capability()) if device == "cuda" and "own" in contents else ""
    block = None if shape.kind == STATE else forms.block(row["order"], members, planes)
    known_form = None
    if block and (halves or contents == {"one"}):
        known_form = forms.form(row["order"], halves, block, members[0].itemsize)
    described: dict[str, Any] = {
        "kind": shape.kind,
        "specs": sorted(names),
        "backends": sorted(backends),
        "isa": sorted(paths),
        "generation": generation,
        # With pipeline stages a rank sees only its own layers, so they are described by their number in the model.
        "layers": list(layers) if ranks.pp == 1 else vllm_config.model_config.get_total_num_hidden_layers(),
        "block_tokens": shape.block_tokens,
        "window_tokens": shape.window_tokens,
        "shards": shape.shards,
        "head_sizes": [list(size) for size in sorted(sizes)],
        "form": known_form,
        "page_bytes": sorted({int(spec.page_size_bytes) for spec in specs.values()}),
        # Formats of states, and of records of sparse MLA and its indexer. No other field has them.
        "records": sorted({_record(spec) for spec in specs.values()}),
        "tensors": sorted(
            (
                {"kernel_blocks": r, "shape": list(s), "strides": list(t), "dtype": d}
                for r, s, t, d in {m.box for m in members}
            ),
            key=lambda item: json.dumps(item, sort_keys=True),
        ),
    }
    described["portable"] = None
    if block and ranks.dcp == 1 and (apart or _is_state(block, contents, sizes, list(specs.values()), members[0])):
        moved = forms.portable(row["order"], apart, block)
        meaning = {key: described[key] for key in ("specs", "layers", "head_sizes", "records")}
        meaning |= {"content": sorted(contents), "dtype": members[0].dtype, **ranks.part()}
        if ranks.pp > 1:
            # How vLLM groups and orders the layers of a stage is not described by their number.
            meaning |= {"version": minor, "kv_layout": row["name"]}
        if apart:
            # Bytes that only the backend knows are the same only with the same backend, processor and block.
            meaning |= {key: described[key] for key in ("backends", "isa", "generation", "block_tokens")}
            meaning["format"] = sorted(formats)
        described["portable"] = moved._asdict() | {"meaning": meaning} if moved else None
    return described


def _is_state(
    block: forms.Block, contents: set[str], sizes: set[tuple[int, int]], specs: list[Any], member: Member
) -> bool:
    """Whether a state of the block is what the content says: a key and a value, or one vector, of one KV head. Formats
    with scales, or with all keys before all values, are not.
    """
    if len(sizes) != 1 or len(contents) != 1 or block.heads != (1 if contents == {"one"} else specs[0].num_kv_heads):
        return False
    ((key, value),) = sizes
    numbers = {"halves": key + value, "one": key}.get(next(iter(contents)))
    return numbers is not None and block.state_bytes == numbers * member.itemsize


def _record(spec: Any) -> str:
    """What decides the format of the bytes of a layer's block beyond their number."""
    if hasattr(spec, "mamba_cache_mode"):
        kind = getattr(spec.mamba_type, "name", spec.mamba_type)
        return f"{kind}/{[list(part) for part in spec.shapes]}/{[str(dtype) for dtype in spec.dtypes]}"
    role = getattr(spec, "cache_role", None)
    return f"{getattr(role, 'value', role)}/{getattr(spec, 'cache_dtype_str', None)}"
