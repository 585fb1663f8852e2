"""Describes one rank: its coordinates, its device, and its registration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from . import keys
from .descriptor import describe, run_of
from .layout import Layout, Ranks, canonical, ranks_of
from .messages import Group, Register
from .weights import Digests
from .window import ENGINE, WINDOW

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


#: Maximum delay of a rank's registration while the hash of its weights is unknown. Small models need less.
_WEIGHTS_WAIT_S = 1.5


def current_ranks(vllm_config: VllmConfig) -> Ranks:
    """Sizes of the groups of ranks on this node, and this process's coordinates."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return ranks_of(vllm_config).of(get_tp_group().rank_in_group, get_pp_group().rank_in_group)


def current_device_uuid(device: str) -> str:
    """UUID of the calling thread's device; "" for CPUs."""
    if device != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def instance(vllm_config: VllmConfig) -> str:
    """Name of the engine, the same in all its processes."""
    return str(getattr(vllm_config.kv_transfer_config, "engine_id", "") or "")


def registrations(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: Layout, ranks: Ranks, device_uuid: str
) -> Iterator[Register]:
    """REGISTER of a rank. While its weights are being hashed, first one without the hash."""
    digests = Digests()
    of_rank = vllm_config, kv_cache_config, layout, ranks, device_uuid, digests
    register, pending = registration(*of_rank)
    if pending and digests.work(_WEIGHTS_WAIT_S):
        register, pending = registration(*of_rank)
    yield register
    if not pending:
        return
    while pending:
        digests.work(None)
        register, pending = registration(*of_rank)
    yield register


def registration(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layout: Layout,
    ranks: Ranks,
    device_uuid: str,
    digests: Digests,
) -> tuple[Register, bool]:
    """(REGISTER of a rank, whether a better one follows after `digests` has finished).

    The chunk size is missing, because it is in the sidecar's settings. Reads the model's small files. Raises
    `layout.Unserved`.
    """
    model = describe(vllm_config, run_of(vllm_config), digests)
    scheduler_block, _ = keys.block_tokens(vllm_config, kv_cache_config)
    local_world = getattr(vllm_config.parallel_config, "local_world_size", ranks.world)
    register = Register(
        world=ranks.world,
        local_world=int(local_world or ranks.world),
        model=canonical(model.parts),
        layout=canonical(layout.descriptor),
        device=layout.device,
        device_uuid=device_uuid,
        transfer_modes=[ENGINE, WINDOW],
        groups=[
            Group(
                kind=group.shape.kind,
                block_tokens=group.shape.block_tokens,
                block_bytes=group.block_bytes,
                shards=group.shape.shards,
                shard=group.mine.shard,
                writer=group.mine.writer,
                window_tokens=group.shape.window_tokens,
            )
            for group in layout.groups
        ],
        scheduler_block_tokens=scheduler_block,
    )
    return register, model.pending
