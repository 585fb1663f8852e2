"""The KV cache of one rank: its groups, and the planes in which the bytes of a block are.

A block of a group is a list of *planes* (one per layer, or per layer and head, or one for all layers): block `b` of a
plane starts at `base + b * block_stride` and has `nbytes` bytes. A section holds `[block][plane][bytes]`.
`layout_detect` finds the planes. What is not in the table (`layouts.json`, a copy of the protocol's) raises `Unserved`:
the cache is off, with a named reason.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcachepool.forms import Plane

if TYPE_CHECKING:
    import torch


#: Kind of groups whose blocks hold a state behind tokens: linear attention, Mamba, short convolutions.
STATE = "state"


class Unserved(Exception):
    """This vLLM's KV cache is not supported. `reason` is the name in status and metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class GroupShape(NamedTuple):
    """A KV group, as both sides of the connector see it.

    kind: `full`, `window` or `state`.
    block_tokens: tokens per block id.
    shards: distinct parts over all ranks.
    window_tokens: length of the window in tokens, 0 for the other kinds.
    aligned: windows begin at multiples of their length, and do not slide.
    """

    kind: str
    block_tokens: int
    shards: int
    window_tokens: int
    aligned: bool = False


class ShardOf(NamedTuple):
    """The shard of a group that a rank holds, and whether this replica writes it."""

    shard: int
    writer: bool


class Ranks(NamedTuple):
    """Parallel sizes of the instance on one node, and the coordinates of one rank there.

    nodes: nodes of the instance. All have the same sizes: whole pipeline stages, or equal parts of one stage.
    node: index of this node. A part of the model for itself, whose objects only the same part can load.
    tp_nodes: nodes that share the tensor parallelism of a stage.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    nodes: int = 1
    node: int = 0
    tp_nodes: int = 1

    @property
    def world(self) -> int:
        """Ranks of the instance on the node. Replicas of data parallelism are separate instances."""
        return self.tp * self.pp

    def of(self, tp_rank: int, pp_rank: int) -> Ranks:
        """With the coordinates of a rank, given as those in the whole instance."""
        node = (pp_rank * self.tp * self.tp_nodes + tp_rank) // self.world
        return self._replace(tp_rank=tp_rank % self.tp, pp_rank=pp_rank % self.pp, node=node)

    def part(self) -> dict[str, int]:
        """Names the part of the model on this node; empty if it is all of it."""
        if self.nodes == 1:
            return {}
        return {"node": self.node, "nodes": self.nodes, "tp_nodes": self.tp_nodes}

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


def nodes_of(vllm_config: Any) -> int:
    """Nodes over which the ranks of an instance are spread."""
    return int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) or 1)


def steps_with_others(vllm_config: Any) -> bool:
    """Whether engines step together: data parallelism of a MoE model, whose layers exchange tokens in each step.

    vLLM sets this size to 1 in the engines of other models.
    """
    return int(getattr(vllm_config.parallel_config, "data_parallel_size", 1) or 1) > 1


def ranks_of(vllm_config: Any) -> Ranks:
    """Parallel sizes, without coordinates. Raises `Unserved` for prefill context parallelism, and for nodes that differ
    in what they hold.
    """
    parallel = vllm_config.parallel_config
    if int(getattr(parallel, "prefill_context_parallel_size", 1) or 1) > 1:
        raise Unserved(
            "PrefillContextParallelUnsupported", "--prefill-context-parallel-size splits blocks over ranks: use 1"
        )
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    dcp = int(getattr(parallel, "decode_context_parallel_size", 1) or 1)
    nodes = nodes_of(vllm_config)
    if nodes == 1:
        return Ranks(tp=tp, pp=pp, dcp=dcp)
    world = tp * pp // nodes
    if dcp > 1 or tp * pp % nodes or (world % tp and tp % world):
        raise Unserved(
            "MultiNodeUnsupported",
            f"--nnodes {nodes} with --tensor-parallel-size {tp}, --pipeline-parallel-size {pp} and"
            f" --decode-context-parallel-size {dcp}: expected whole pipeline stages per node, or whole nodes per stage,"
            " and no context parallelism",
        )
    tp_nodes = max(1, tp // world)
    return Ranks(tp=tp // tp_nodes, pp=max(1, world // tp), nodes=nodes, tp_nodes=tp_nodes)


def on_node(instance: str, nodes: int, node: int) -> str:
    """The name of an instance's part on one node. The parts of several nodes are apart even on one sidecar."""
    return f"{instance}/{node}" if nodes > 1 else instance


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
    if row["group"] == STATE:
        return 1 if getattr(spec, "tp_replicated", False) else ranks.tp
    if not hasattr(spec, "max_tp_shards"):
        # vLLM 0.30 declares it only by the kind of the group.
        return 1 if row["shards"] == "one" else ranks.tp
    everywhere = ranks.tp * ranks.tp_nodes
    parts = min(everywhere, int(spec.max_tp_shards or everywhere))
    if ranks.tp_nodes % parts == 0:
        return 1
    # If a part is on two nodes, no rank counts as a replica.
    return parts // ranks.tp_nodes if parts % ranks.tp_nodes == 0 else ranks.tp


def _context_sharded(spec: Any, row: dict[str, Any]) -> bool:
    """Whether this group's tokens are split over the decode context parallel ranks."""
    return bool(getattr(spec, "dcp_sharded", row["group"] != STATE))


def _window(spec: Any, row: dict[str, Any]) -> tuple[int, bool]:
    """(tokens that a window spans, whether windows begin at multiples of that); (0, False) for other kinds."""
    if row["group"] != "window":
        return 0, False
    if type(spec).__name__ == "ChunkedLocalAttentionSpec":
        return int(spec.attention_chunk_size), True
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", None) or 0), False


def layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group. Layers of a group may differ in size (MLA and its indexer)."""
    spec = group.kv_cache_spec
    merged_specs = getattr(spec, "kv_cache_specs", None)
    return {layer: merged_specs[layer] if merged_specs else spec for layer in group.layer_names}


def parts_of(ranks: Ranks, group: Any) -> tuple[int, bool]:
    """(parts that tensor parallelism distinguishes, whether context parallelism splits them), equal for all layers."""
    found = set()
    for spec in layer_specs(group).values():
        row = _spec_row(spec)
        found.add((row["group"], _window(spec, row), _tp_shards(ranks, spec, row), _context_sharded(spec, row)))
    if len(found) != 1:
        raise Unserved(
            "KvGroupUnsupported/MixedLayers", f"layers of one KV group differ in how they are cached: {found}"
        )
    ((_, _, parts, sharded),) = found
    return parts, sharded


def group_shapes(vllm_config: Any, kv_cache_config: Any) -> list[GroupShape]:
    """Shapes of all KV groups, in vLLM's order. Needs no tensors. Raises `Unserved`."""
    ranks = ranks_of(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise Unserved("NoKvCache", "the model has no KV cache")
    shapes: list[GroupShape] = []
    for group in groups:
        specs = list(layer_specs(group).values())
        spec, row = specs[0], _spec_row(specs[0])
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise Unserved("KvGroupUnsupported/NoTransfer", "vLLM does not transfer a KV group of this model")
        if row["group"] == STATE and spec.mamba_cache_mode != "align":
            raise Unserved(
                "KvGroupUnsupported/MambaCacheMode",
                f"vLLM keeps no states for other requests with mamba_cache_mode {spec.mamba_cache_mode!r}: expected"
                " 'align', which --enable-prefix-caching sets",
            )
        parts, sharded = parts_of(ranks, group)
        base = vllm_config.cache_config.block_size if len(groups) == 1 else spec.block_size
        window, aligned = _window(spec, row)
        shapes.append(
            GroupShape(
                kind=row["group"],
                block_tokens=int(base) * (ranks.dcp if sharded else 1),
                shards=ranks.pp * shards_in_tp(ranks, parts, sharded),
                window_tokens=window,
                aligned=aligned,
            )
        )
    if all(shape.kind == STATE for shape in shapes):
        raise Unserved("KvGroupUnsupported/StatesOnly", "the model has states and no attention")
    return shapes


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
