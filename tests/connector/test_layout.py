"""Positions of blocks: runs, planes, shards. The layout is detected from real tensors and vLLM's own specs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcachepool import forms, layout, layout_detect
from kvcachepool.forms import Block, Member, Plane
from kvcachepool.keys import GroupSize
from kvcachepool.layout import Ranks, ShardOf, Strip, Unserved, shard_of, shards_in_tp, strips
from kvcachepool.layout_detect import merged, runs

HEADS, TOKENS, SIZE, LAYERS, BLOCKS = 2, 16, 32, 3, 8


def test_the_package_ships_the_protocols_layout_table() -> None:
    root = Path(layout.__file__).parents[2]
    shipped = Path(layout.__file__).with_name("layouts.json").read_bytes()
    source = root / "protocol" / "layouts.json"
    if not source.exists():
        pytest.skip("the package was exported from its repository")
    assert shipped == source.read_bytes()


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((1, 2, 4, 8), (64, 32, 8, 1), ([0], 128)),
        ((4, 2, 4, 8), (64, 32, 8, 1), ([0], 512)),
        ((1, 2, 4, 8), (999, 4096, 8, 1), ([0, 8192], 64)),
        ((1, 2, 4, 8), (64, 8, 16, 1), ([0], 128)),
        ((2, 1, 4, 8), (100, 32, 8, 1), ([0, 200], 64)),
    ],
    ids=["dense", "kernel blocks", "heads apart", "tokens outside of heads", "padded kernel blocks"],
)
def test_a_strided_box_is_cut_into_contiguous_runs(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[list[int], int]
) -> None:
    assert runs(shape, strides, 2) == expected


def test_adjacent_planes_are_joined() -> None:
    packed = [Plane(0, i * 100, 300, 100) for i in range(3)]
    assert merged(packed) == [Plane(0, 0, 300, 300)]
    apart = [Plane(0, i * 800, 100, 100) for i in range(3)]
    assert merged(apart) == apart


def test_equally_spaced_planes_are_one_strided_view() -> None:
    planes = (Plane(0, 64, 10, 10), Plane(0, 164, 10, 10), Plane(0, 264, 10, 10), Plane(0, 400, 20, 20))
    assert strips(planes) == [Strip(0, 64, 100, 3, 10, 10, 0), Strip(0, 400, 0, 1, 20, 20, 30)]


@pytest.mark.parametrize(
    ("ranks", "parts", "sharded", "shards", "mine"),
    [
        (Ranks(tp=4), 4, True, 4, [(0, True), (1, True), (2, True), (3, True)]),
        (Ranks(tp=4), 2, True, 2, [(0, True), (0, False), (1, True), (1, False)]),
        (Ranks(tp=4), 1, False, 1, [(0, True), (0, False), (0, False), (0, False)]),
        (Ranks(tp=4, dcp=2), 2, True, 4, [(0, True), (1, True), (2, True), (3, True)]),
        (Ranks(tp=4, dcp=2), 1, True, 2, [(0, True), (1, True), (0, False), (1, False)]),
        (Ranks(tp=4, dcp=2), 1, False, 1, [(0, True), (0, False), (0, False), (0, False)]),
    ],
)
def test_each_shard_has_one_writer_and_all_replicas_read_it(
    ranks: Ranks, parts: int, sharded: bool, shards: int, mine: list[tuple[int, bool]]
) -> None:
    assert shards_in_tp(ranks, parts, sharded) == shards
    found = [shard_of(ranks._replace(tp_rank=rank), shards, parts, sharded) for rank in range(ranks.tp)]
    assert found == [ShardOf(*one) for one in mine]


def test_pipeline_stages_have_separate_shards() -> None:
    ranks = Ranks(tp=2, pp=2)
    found = [shard_of(ranks._replace(tp_rank=t, pp_rank=p), 4, 2, True) for p in range(2) for t in range(2)]
    assert [one.shard for one in found] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "expected"),
    [
        (8, 2, 2, Ranks(tp=8, nodes=2)),
        (2, 4, 2, Ranks(tp=2, pp=2, nodes=2)),
        (2, 1, 2, Ranks(tp=1, nodes=2, tp_nodes=2)),
        (16, 2, 4, Ranks(tp=8, nodes=4, tp_nodes=2)),
    ],
)
def test_each_node_has_whole_stages_or_an_equal_part_of_one(tp: int, pp: int, nodes: int, expected: Ranks) -> None:
    made = engine([], tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes_within_dp=nodes)
    ranks = layout.ranks_of(made)
    assert ranks == expected
    places = [ranks.of(rank % tp, rank // tp) for rank in range(tp * pp)]
    assert [place.node for place in places] == [rank // ranks.world for rank in range(tp * pp)]
    assert [place.rank for place in places] == [rank % ranks.world for rank in range(tp * pp)]


@pytest.mark.parametrize(("tp", "pp", "nodes", "dcp"), [(2, 3, 2, 1), (6, 1, 4, 1), (4, 1, 2, 2)])
def test_other_divisions_into_nodes_are_refused(tp: int, pp: int, nodes: int, dcp: int) -> None:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "decode_context_parallel_size": dcp}
    with pytest.raises(Unserved) as refused:
        layout.ranks_of(engine([], **sizes, nnodes_within_dp=nodes))
    assert refused.value.reason == "MultiNodeUnsupported"


@pytest.mark.parametrize(
    ("heads", "tp", "nodes", "parts"), [(8, 16, 2, 4), (1, 16, 2, 1), (2, 8, 4, 1), (3, 12, 2, 6), (None, 4, 2, 2)]
)
def test_replicas_are_told_within_a_node(heads: int | None, tp: int, nodes: int, parts: int) -> None:
    ranks = layout.ranks_of(engine([], tensor_parallel_size=tp, nnodes_within_dp=nodes))
    declared = SimpleNamespace(max_tp_shards=heads)
    assert layout._tp_shards(ranks, declared, {"group": "full", "shards": "halves"}) == parts


# -- detection, with vLLM's own specs and views

interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="needs vLLM")


def spec(window: int = 0, **options: Any) -> Any:
    kind = interface.SlidingWindowSpec if window else interface.FullAttentionSpec
    extra = {"sliding_window": window} if window else {}
    return kind(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16, **extra, **options)


def engine(names: list[str], backend: str = "CPU_ATTN", heads: int = HEADS, **parallel: int) -> Any:
    """The fields of a VllmConfig that the layout needs."""
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), isa="vec")
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1} | parallel
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes, cp_kv_cache_interleave_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(block_size=TOKENS, kv_cache_layout=None),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads, get_total_num_hidden_layers=lambda: LAYERS),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, module)),
    )


def cache(name: str, *, groups: int = 1, kernel: int | None = None, device_layout: str = "LBHNC") -> tuple[Any, Any]:
    """A KV cache in this layout, created by vLLM's own code. The groups overlay each other."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    arrangement = KVCacheLayout[device_layout]
    page = spec().page_size_bytes
    if arrangement.is_layer_compact:
        layer_stride, block_stride = page * BLOCKS, page
        if device_layout == "LHBNC":
            block_stride = page // HEADS
    else:
        layer_stride, block_stride = page, page * LAYERS
        if device_layout == "BHLNC":
            layer_stride = page // HEADS
    raw = torch.arange(page * BLOCKS * LAYERS, dtype=torch.int32).to(torch.int8)
    caches: dict[str, torch.Tensor] = {}
    tensors, made = [], []
    for group in range(groups):
        layers = [f"{name}.{group}.{i}" for i in range(LAYERS)]
        one = spec(window=64 if group else 0)
        placed = interface.KVCacheTensor(
            size=raw.numel(), layers=layers, layer_stride=layer_stride, block_stride=block_stride
        )
        caches |= dict(
            zip(layers, interface.create_kv_cache_views(raw, one, BLOCKS, arrangement, placed, kernel), strict=True)
        )
        tensors.append(placed)
        made.append(interface.KVCacheGroupSpec(layers, one))
    config = interface.KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=made, kv_cache_layout=device_layout
    )
    return config, caches


def block_by_shape(tensor: torch.Tensor, block: int) -> bytes:
    """A block's content as vLLM sees it, independent of the layout."""
    ratio = tensor.shape[0] // BLOCKS
    return tensor[block * ratio : (block + 1) * ratio].contiguous().view(torch.uint8).numpy().tobytes()


def block_by_planes(found: layout.Layout, block: int, group: int = 0) -> bytes:
    out = b""
    for plane in found.groups[group].planes:
        start = plane.offset + block * plane.block_stride
        out += found.storages[plane.storage][start : start + plane.nbytes].numpy().tobytes()
    return out


def detect(config: Any, caches: Any, vllm: Any = None, ranks: Ranks | None = None) -> layout.Layout:
    return layout_detect.detect(vllm or engine(list(caches)), config, caches, ranks or Ranks(), "0.32.0")


def test_the_cpu_layout_is_one_strip_of_layers() -> None:
    config, caches = cache("a")
    found = detect(config, caches)
    group = found.groups[0]
    assert len(group.planes) == LAYERS
    assert len(strips(group.planes)) == 1
    assert group.block_bytes == LAYERS * spec().page_size_bytes
    for block in range(BLOCKS):
        assert block_by_planes(found, block) == b"".join(block_by_shape(tensor, block) for tensor in caches.values())


def test_kernel_blocks_stay_inside_of_a_block() -> None:
    config, caches = cache("a", kernel=TOKENS // 4)
    found = detect(config, caches)
    assert next(iter(caches.values())).shape[0] == BLOCKS * 4
    assert block_by_planes(found, 5) == b"".join(block_by_shape(tensor, 5) for tensor in caches.values())
    unsplit = cache("a")
    assert found.descriptor != detect(*unsplit).descriptor


@pytest.mark.parametrize(
    ("name", "planes"), [("BLHNC", 1), ("BHLNC", 1), ("BLNHC", 1), ("LBNHC", LAYERS), ("LHBNC", 6)]
)
def test_every_layout_of_the_table_covers_each_byte_of_a_block_once(
    name: str, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(layout.table())
    known["backends"] = {"CPU_ATTN": known["backends"]["CPU_ATTN"] | {"layouts": [name]}}
    monkeypatch.setattr(layout_detect, "table", lambda: known)
    config, caches = cache("a", device_layout=name)
    found = detect(config, caches)
    assert len(found.groups[0].planes) == planes
    assert found.groups[0].block_bytes == LAYERS * spec().page_size_bytes
    for block in range(BLOCKS):
        whole = b"".join(block_by_shape(tensor, block) for tensor in caches.values())
        assert sorted(block_by_planes(found, block)) == sorted(whole)


def arranged(found: layout.Layout, block: int) -> torch.Tensor:
    """A block as `[layers][halves][tokens][channels]`, from its bytes and its form only."""
    dims = found.descriptor["groups"][0]["form"]
    flat = torch.frombuffer(bytearray(block_by_planes(found, block)), dtype=torch.bfloat16)
    order = ["layer", "half", "token", "channel"]
    by_axis = sorted(range(len(dims)), key=lambda at: order.index(dims[at][0]))
    sizes = [math.prod(size for axis, size in dims if axis == name) for name in order]
    return flat.view([size for _, size in dims]).permute(by_axis).reshape(sizes)


@pytest.mark.parametrize("content", ["halves", "one", "own"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, None) for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")]
    # vLLM splits only these blocks.
    + [("LBHNC", TOKENS // 2), ("LBNHC", TOKENS // 2)],
)
def test_the_form_describes_the_numbers_of_a_block(
    name: str, kernel: int | None, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(layout.table())
    known["backends"] = {"CPU_ATTN": known["backends"]["CPU_ATTN"] | {"layouts": [name], "content": content}}
    monkeypatch.setattr(layout_detect, "table", lambda: known)
    config, caches = cache("a", device_layout=name, kernel=kernel)
    found = detect(config, caches)
    if content == "own":
        assert found.descriptor["groups"][0]["form"] is None
        return
    for block in (0, BLOCKS - 1):
        # A layer as vLLM sees it: [kernel blocks, heads, tokens, key and value].
        ratio = next(iter(caches.values())).shape[0] // BLOCKS
        whole = torch.stack([tensor[block * ratio : (block + 1) * ratio] for tensor in caches.values()])
        parts = whole.unflatten(-1, (2, SIZE) if content == "halves" else (1, 2 * SIZE))
        # From [layers, kernel blocks, heads, tokens, halves, numbers].
        wanted = parts.permute(0, 4, 1, 3, 2, 5).reshape(LAYERS, parts.shape[4], TOKENS, -1)
        assert torch.equal(arranged(found, block).view(torch.int16), wanted.contiguous().view(torch.int16))


def test_planes_that_do_not_match_the_layout_have_no_form() -> None:
    member = Member(0, 0, (1, 2, 4, 8), (64, 32, 8, 1), "torch.bfloat16", 2)
    planes = [Plane(0, 0, 128, 128)]
    order = ["L", "B", "H", "N", "C"]
    known = forms.block(order, [member], planes)
    assert known == Block(layers=1, kernel_blocks=1, heads=2, tokens=4, state_bytes=16)
    assert forms.form(order, True, known, 2) == [["channel", 2], ["token", 4], ["half", 2], ["channel", 4]]
    swapped = member._replace(strides=(64, 8, 16, 1))
    for order, members, found in [
        (["L", "B", "N", "H", "C"], [member], planes),
        (["L", "B", "H", "N", "C"], [swapped], planes),
        (["L", "B", "H", "N", "C"], [member, member._replace(offset=256)], planes),
        (["L", "B", "H", "N", "C"], [member, swapped], planes * 2),
        (["L", "B", "H", "N", "C"], [member], [Plane(1, 0, 128, 128)]),
        (["L", "B", "H", "N", "C"], [member], [Plane(0, 0, 128, 120)]),
        (["L", "B", "H", "C", "N"], [member], planes),
        (["L", "B", "H", "N", "C"], [member._replace(shape=(1, 8), strides=(8, 1))], planes),
    ]:
        assert forms.block(order, members, found) is None


def test_a_form_that_is_a_byte_off_in_a_large_cache_is_detected() -> None:
    nbytes, far = 8 * 256 * 2, 1 << 40
    layers = [Member(0, far + at * nbytes, (1, 8, 1, 256), (2048, 256, 256, 1), "torch.int16", 2) for at in range(80)]
    planes = [Plane(0, layer.offset, nbytes, nbytes) for layer in layers]
    order = ["L", "B", "N", "H", "C"]
    known = forms.block(order, layers, planes)
    assert known == Block(layers=80, kernel_blocks=1, heads=8, tokens=1, state_bytes=512)
    assert forms.form(order, False, known, 2) == [["layer", 80], ["channel", 8], ["channel", 256]]
    planes[-1] = planes[-1]._replace(offset=planes[-1].offset + 1)
    assert forms.block(order, layers, planes) is None


def test_what_only_the_backend_knows_moves_as_a_whole() -> None:
    sizes = Block(layers=3, kernel_blocks=1, heads=2, tokens=4, state_bytes=16)
    for order, apart, moved in [
        ("LBHNC", False, sizes),
        ("LBNHC", False, sizes),
        ("LBHNC", True, sizes._replace(tokens=1, state_bytes=64)),
        ("LBNHC", True, None),
    ]:
        assert forms.portable(list(order), apart, sizes) == moved


def described(
    monkeypatch: pytest.MonkeyPatch,
    name: str = "LBHNC",
    content: str = "halves",
    version: str = "0.32.0",
    **parallel: int,
) -> Any:
    """What a layout says of portable objects."""
    known = dict(layout.table())
    known["backends"] = {"CPU_ATTN": known["backends"]["CPU_ATTN"] | {"layouts": [name], "content": content}}
    monkeypatch.setattr(layout_detect, "table", lambda: known)
    config, caches = cache("a", device_layout=name)
    made = engine(list(caches), **parallel)
    ranks = layout.ranks_of(made)
    found = layout_detect.detect(made, config, caches, ranks, version)
    return found.descriptor["groups"][0]["portable"]


def test_a_part_on_a_node_is_another_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    config, caches = cache("a")
    made = engine(list(caches), tensor_parallel_size=2, nnodes_within_dp=2)
    whole = layout_detect.detect(engine(list(caches)), config, caches, Ranks(), "0.32.0").descriptor
    parts = [
        layout_detect.detect(made, config, caches, layout.ranks_of(made).of(rank, 0), "0.32.0").descriptor
        for rank in range(2)
    ]
    meanings = [json.dumps(one["groups"][0]["portable"], sort_keys=True) for one in (whole, *parts)]
    assert len(set(meanings)) == 3
    assert len({json.dumps(one["parallel"], sort_keys=True) for one in (whole, *parts)}) == 3


def test_the_meaning_of_objects_is_the_same_in_every_layout_topology_and_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = described(monkeypatch)
    assert one | {"meaning": None} == {
        "layers": LAYERS,
        "kernel_blocks": 1,
        "heads": HEADS,
        "tokens": TOKENS,
        "state_bytes": 2 * SIZE * 2,
        "meaning": None,
    }
    for name in ("LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"):
        assert described(monkeypatch, name) == one
    assert described(monkeypatch, version="0.33.1") == one
    assert described(monkeypatch, tensor_parallel_size=2) == one
    stages = described(monkeypatch, pipeline_parallel_size=2)["meaning"]
    assert (stages["version"], stages["kv_layout"]) == ("0.32", "LBHNC")
    # Tokens of a block are split over context parallel ranks.
    assert described(monkeypatch, tensor_parallel_size=2, decode_context_parallel_size=2) is None


@pytest.mark.parametrize(
    ("content", "sizes", "heads"),
    [("halves", {(32, 32)}, 4), ("halves", {(32, 48)}, 2), ("halves", {(32, 32), (16, 16)}, 2), ("one", {(64, 0)}, 2)],
    ids=["keys of all heads first", "scales behind", "two sizes", "several heads of one vector"],
)
def test_a_state_that_is_not_the_key_and_the_value_of_a_head_is_not_portable(
    content: str, sizes: set[tuple[int, int]], heads: int
) -> None:
    block = Block(layers=1, kernel_blocks=1, heads=heads, tokens=4, state_bytes=64)
    member = Member(0, 0, (1, heads, 4, 64), (256 * heads, 256, 64, 1), "torch.uint8", 1)
    assert layout_detect._is_state(block._replace(heads=2), {"halves"}, {(32, 32)}, [spec()], member)
    assert layout_detect._is_state(block._replace(heads=1), {"one"}, {(64, 0)}, [spec()], member)
    assert not layout_detect._is_state(block, {content}, sizes, [spec()], member)


def test_bytes_that_only_the_backend_knows_keep_backend_processor_block_and_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = described(monkeypatch, content="own")
    assert (own["tokens"], own["state_bytes"]) == (1, TOKENS * 2 * SIZE * 2)
    meaning = own["meaning"]
    assert (meaning["backends"], meaning["isa"], meaning["block_tokens"]) == (["CPU_ATTN"], ["vec"], TOKENS)
    assert meaning["format"] == ["0.31"]
    assert described(monkeypatch, content="own", version="0.31.0") == own
    assert described(monkeypatch, content="own", version="0.33.0")["meaning"]["format"] == ["0.33"]
    assert described(monkeypatch, "LBNHC", content="own") is None


def test_hybrid_groups_have_separate_planes() -> None:
    config, caches = cache("a", groups=2)
    found = detect(config, caches)
    assert [group.shape.kind for group in found.groups] == ["full", "window"]
    assert [group.shape.window_tokens for group in found.groups] == [0, 64]
    assert layout.section_starts([group.shape for group in found.groups]) == [0, 1]


def one_group(made: Any, pages: list[int], backend: str) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A KV cache of one full group and one with this spec, whose layers have pages of these bytes, one after the
    other.
    """
    from vllm.v1.kv_cache_layout import KVCacheLayout

    full, page = spec(), spec().page_size_bytes
    merged_specs = getattr(made, "kv_cache_specs", None)
    layers = list(merged_specs) if merged_specs else [f"s.{n}" for n in range(len(pages))]
    raw = torch.zeros((page + sum(pages)) * BLOCKS, dtype=torch.int8)
    tensors, caches, at = [], {}, 0
    for layer, size, one in zip(
        ["a", *layers], [page, *pages], [full, *((merged_specs or {}).get(name, made) for name in layers)], strict=True
    ):
        placed = interface.KVCacheTensor(
            size=size * BLOCKS, layers=[layer], layer_stride=size * BLOCKS, block_stride=size, offset=at
        )
        tensors.append(placed)
        (caches[layer],) = interface.create_kv_cache_views(raw, one, BLOCKS, KVCacheLayout.LBHNC, placed)
        at += size * BLOCKS
    groups = [interface.KVCacheGroupSpec(["a"], full), interface.KVCacheGroupSpec(layers, made)]
    config = interface.KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )
    vllm = engine(["a"])
    vllm.compilation_config.static_forward_context |= engine(layers, backend).compilation_config.static_forward_context
    return config, caches, vllm


def mamba(page: int | None = None, **options: Any) -> Any:
    shapes, dtypes = ((3, 24), (HEADS, 8, 8)), (torch.bfloat16, torch.float32)
    given = {"mamba_cache_mode": "align"} | options
    return interface.MambaSpec(block_size=TOKENS, shapes=shapes, dtypes=dtypes, page_size_padded=page, **given)


def test_a_state_is_the_bytes_of_its_parts_without_the_padding() -> None:
    state = 3 * 24 * 2 + HEADS * 8 * 8 * 4
    config, caches, vllm = one_group(mamba(4096), [4096, 4096], "GDN_ATTN")
    group = detect(config, caches, vllm).groups[1]
    assert (group.shape.kind, group.shape.block_tokens, group.shape.window_tokens) == ("state", TOKENS, 0)
    assert [(plane.nbytes, plane.block_stride) for plane in group.planes] == [(state, 4096)] * 2


def test_ranks_share_a_state_only_if_vllm_says_so() -> None:
    for replicated, shards in ((False, [(0, True), (1, True)]), (True, [(0, True), (0, False)])):
        config, caches, vllm = one_group(mamba(4096, tp_replicated=replicated), [4096], "GDN_ATTN")
        vllm.parallel_config.tensor_parallel_size = 2
        found = [detect(config, caches, vllm, Ranks(tp=2, tp_rank=rank)).groups[1].mine for rank in range(2)]
        assert found == [ShardOf(*one) for one in shards]


def test_states_without_prefix_caching_or_attention_turn_the_cache_off() -> None:
    for made, full, reason in (
        (mamba(4096, mamba_cache_mode="none"), True, "KvGroupUnsupported/MambaCacheMode"),
        (mamba(4096), False, "KvGroupUnsupported/StatesOnly"),
    ):
        config, caches, vllm = one_group(made, [4096], "GDN_ATTN")
        config.kv_cache_groups = config.kv_cache_groups[0 if full else 1 :]
        with pytest.raises(Unserved) as refused:
            detect(config, caches, vllm)
        assert refused.value.reason == reason


def test_layers_of_one_group_may_differ_in_size() -> None:
    """MLA and its indexer: vLLM puts both into one group, with a spec for each layer."""
    pages = {"latent": 64, "indexer": 24}
    specs = {
        f"{name}.{n}": interface.MLAAttentionSpec(
            block_size=TOKENS, num_kv_heads=1, head_size=size, dtype=torch.bfloat16, max_tp_shards=1
        )
        for n in range(2)
        for name, size in pages.items()
    }
    mixed = interface.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    sizes = [one.page_size_bytes for one in specs.values()]
    config, caches, vllm = one_group(mixed, sizes, "AMX_MLA")
    vllm.parallel_config.tensor_parallel_size = 2
    found = [detect(config, caches, vllm, Ranks(tp=2, tp_rank=rank)).groups[1] for rank in range(2)]
    assert [group.mine for group in found] == [ShardOf(0, True), ShardOf(0, False)]
    assert [plane.nbytes for plane in found[0].planes] == sizes == [TOKENS * 64 * 2, TOKENS * 24 * 2] * 2


def test_layers_of_one_group_must_be_shared_by_the_same_ranks() -> None:
    options = dict(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    specs = {f"m.{n}": interface.MLAAttentionSpec(**options, max_tp_shards=n or None) for n in range(2)}
    mixed = interface.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    config, caches, vllm = one_group(mixed, [one.page_size_bytes for one in specs.values()], "AMX_MLA")
    vllm.parallel_config.tensor_parallel_size = 2
    with pytest.raises(Unserved) as refused:
        detect(config, caches, vllm, Ranks(tp=2))
    assert refused.value.reason == "KvGroupUnsupported/MixedLayers"


def test_attention_within_chunks_needs_the_current_chunk_only() -> None:
    local = interface.ChunkedLocalAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16, attention_chunk_size=64
    )
    config, caches, vllm = one_group(local, [local.page_size_bytes], "CPU_ATTN")
    shape = detect(config, caches, vllm).groups[1].shape
    assert (shape.kind, shape.window_tokens, shape.aligned) == ("window", 64, True)
    group = GroupSize(TOKENS, shape.window_tokens, 1, 1, shape.aligned)
    assert [group.first_needed(end) for end in (48, 64, 80, 128, 144)] == [0, 64, 64, 128, 128]


def test_equal_instances_have_equal_descriptors_whatever_their_memory() -> None:
    config, caches = cache("a")
    found = detect(config, caches)
    text = layout.canonical(found.descriptor)
    assert json.loads(text) == found.descriptor
    again = detect(*cache("a"))
    assert layout.canonical(again.descriptor) == text
    assert not {"sections", "hashing", "chunk_tokens"} & set(found.descriptor)
    older = layout_detect.detect(engine(list(caches)), config, caches, Ranks(), "0.31.0")
    assert older.descriptor != found.descriptor


def test_descriptors_of_all_ranks_are_equal() -> None:
    config, caches = cache("a")
    vllm = engine(list(caches), heads=4, tensor_parallel_size=2)
    one = detect(config, caches, vllm, Ranks(tp=2, tp_rank=0))
    two = detect(config, caches, vllm, Ranks(tp=2, tp_rank=1))
    assert one.descriptor == two.descriptor
    assert [g.groups[0].mine for g in (one, two)] == [ShardOf(0, True), ShardOf(1, True)]


def shards_of_ranks(one: Any, heads: int, most: int | None = None, **parallel: int) -> list[ShardOf]:
    """The shards of a group with this spec on all ranks of an instance. vLLM reports `most` of them."""
    # vLLM's specs are frozen, and 0.30 has no such field.
    object.__setattr__(one, "max_tp_shards", most)
    config, caches = cache("a")
    for group in config.kv_cache_groups:
        group.kv_cache_spec = one
    sizes = {"tensor_parallel_size": 4} | parallel
    backend = "CPU_MLA" if isinstance(one, interface.MLAAttentionSpec) else "CPU_ATTN"
    vllm = engine(list(caches), heads=heads, backend=backend, **sizes)
    dcp = sizes.get("decode_context_parallel_size", 1)
    ranks = [Ranks(tp=4, dcp=dcp, tp_rank=rank) for rank in range(4)]
    return [detect(config, caches, vllm, rank).groups[0].mine for rank in ranks]


_OWN = [ShardOf(rank, True) for rank in range(4)]


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_the_number_of_kv_heads_of_a_model_does_not_prove_replicas(heads: int) -> None:
    """A layer may have more heads than the model declares, and ranks that shared KV would compute with wrong KV."""
    assert shards_of_ranks(spec(), heads) == _OWN
    assert shards_of_ranks(spec(), heads, decode_context_parallel_size=2) == _OWN


def test_ranks_share_what_vllm_says_is_replicated() -> None:
    replicas = [ShardOf(0, True), ShardOf(0, False), ShardOf(1, True), ShardOf(1, False)]
    assert shards_of_ranks(spec(), heads=8, most=2) == replicas
    assert shards_of_ranks(spec(), heads=1, most=8) == _OWN
    latent = dict(block_size=TOKENS, num_kv_heads=1, head_size=2 * HEADS * SIZE, dtype=torch.bfloat16)
    same = [ShardOf(0, rank == 0) for rank in range(4)]
    assert shards_of_ranks(interface.MLAAttentionSpec(**latent), heads=1, most=1) == same
    assert shards_of_ranks(interface.MLAAttentionSpec(**latent), heads=1) == _OWN


def test_non_causal_layers_turn_the_cache_off() -> None:
    with pytest.raises(Unserved) as refused:
        shards_of_ranks(spec(non_causal=True), heads=2)
    assert refused.value.reason == "PrefixUnsupported"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v, c, k: setattr(c, "kv_cache_layout", "XYZ"), "LayoutUnknown/XYZ"),
        (lambda v, c, k: setattr(c.kv_cache_tensors[0], "offset", 64), "LayoutUnknown/Placement"),
        (lambda v, c, k: setattr(c.kv_cache_tensors[0], "block_stride", 8192), "LayoutUnknown/Placement"),
        (lambda v, c, k: setattr(c, "num_blocks", 7), "LayoutUnknown/Blocks"),
        (lambda v, c, k: k.pop("a.0.1"), "LayoutUnknown/Tensor"),
        (lambda v, c, k: setattr(c, "kv_cache_tensors", []), "LayoutUnknown/Layers"),
        (lambda v, c, k: setattr(c, "kv_cache_groups", []), "NoKvCache"),
        (lambda v, c, k: v.compilation_config.static_forward_context.clear(), "LayoutUnknown/Module"),
    ],
    ids=["name", "offset", "stride", "blocks", "layer", "tensors", "groups", "module"],
)
def test_unexpected_layouts_turn_the_cache_off(change: Any, reason: str) -> None:
    config, caches = cache("a")
    vllm = engine(list(caches))
    change(vllm, config, caches)
    with pytest.raises(Unserved) as refused:
        detect(config, caches, vllm)
    assert refused.value.reason == reason


def test_an_unknown_backend_is_off_by_name() -> None:
    config, caches = cache("a")
    with pytest.raises(Unserved) as refused:
        detect(config, caches, engine(list(caches), backend="NEW_ATTN"))
    assert refused.value.reason == "LayoutUnknown/NEW_ATTN"


@pytest.mark.parametrize("name", ["RSWASpec", "SlidingWindowMLASpec", "CrossAttentionSpec", "Unheard"])
def test_groups_without_prefix_hashes_turn_the_cache_off(name: str) -> None:
    config, caches = cache("a")
    config.kv_cache_groups[0].kv_cache_spec = type(name, (), {})()
    with pytest.raises(Unserved) as refused:
        layout.group_shapes(engine(list(caches)), config)
    assert refused.value.reason.startswith("KvGroupUnsupported/")


def test_context_parallel_prefill_is_off_by_name() -> None:
    config, caches = cache("a")
    vllm = engine(list(caches))
    vllm.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(Unserved, match="PrefillContextParallelUnsupported"):
        layout.group_shapes(vllm, config)
