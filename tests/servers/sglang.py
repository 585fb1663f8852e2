"""SGLang's own host pools and cache controller on a CPU, from a virtual environment of its own."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from servers import paths

VERSION = "0.5.23"
#: Where SGLang is, without the packages that it shares with vLLM.
SITE = paths.cache().joinpath(
    "venvs",
    f"sglang-{VERSION}",
    *("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages"),
)
PAGE = 16
LAYERS = 3
#: Pages of a device pool. Host pools have twice as many, and one more.
PAGES = 8


def installed() -> bool:
    """Whether `tools/setup.sh sglang` has run for this Python."""
    return (SITE / "sglang").is_dir()


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """SGLang can be imported, behind all other packages."""
    sys.path.append(str(SITE))
    try:
        yield
    finally:
        sys.path.remove(str(SITE))


@contextlib.contextmanager
def parallel(**ranks: int) -> Iterator[None]:
    """The parallel context that SGLang's constructors read: one rank of one, but for `ranks`."""
    from sglang.srt.runtime_context import get_parallel

    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**(alone | ranks)):
        yield


def config(**changes: Any) -> Any:
    """The `HiCacheStorageConfig` of one rank of one. `extra`: further `extra_config`."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    extra = {
        "backend_name": "kvcachepool",
        "module_path": "kvcachepool.sglang",
        "class_name": "KVCachePoolStorage",
        "interface_v1": 1,
        "model_id": "a model",
    }
    alone: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "model",
    }
    return HiCacheStorageConfig(**(alone | {"extra_config": extra | changes.pop("extra", {})} | changes))


def mha_device(*, pages: int = PAGES, **changes: Any) -> Any:
    """A device pool of keys and values in 2 heads, on the CPU."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    small: dict[str, Any] = {"page_size": PAGE, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 32}
    small |= {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
    small |= changes
    return MHATokenToKVPool(size=pages * small["page_size"], **small)


def mha_host(layout: str, device_pool: Any = None, **changes: Any) -> Any:
    """A host pool of keys and values, as SGLang builds it. `changes`: of its device pool."""
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    device_pool = device_pool or mha_device(**changes)
    info = device_pool.get_device_pool_infos()[0].buffer_info
    return get_mha_host_pool_cls(info)(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=device_pool.page_size,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device_pool.size,
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
    )


def mla_host(layout: str) -> Any:
    """A host pool of compressed rows."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device_pool = MLATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device_pool.size,
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
        target_layer_num=device_pool.layer_num,
        override_kv_cache_dim=device_pool.kv_cache_dim,
    )


def mamba_host(layout: str, *, side_state: bool = False) -> Any:
    """A host pool of states, one slot per page."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    extra = (torch.zeros(PAGES, 5, dtype=torch.int32),) if side_state else ()
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, PAGES, 2, 8, 4, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, PAGES, 12, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=extra,
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=PAGES, pin_memory=False, layout=layout)


def paged_host(layout: str) -> Any:
    """One of the side pools of DeepSeek V4."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    buffers = [torch.zeros(PAGES, 96, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool("c4", buffers, 96, 2 * PAGES, PAGE, layout, pin_memory=False)


def logical_host() -> Any:
    """DeepSeek V4's anchor: slots without bytes."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    return LogicalHostPool(2 * PAGES * PAGE, PAGE)


class Filled(NamedTuple):
    """Host pages with random bytes, and what they are."""

    indices: torch.Tensor
    content: list[bytes]


def slots(host_pool: Any) -> int:
    """Indices of one page."""
    return int(host_pool.page_size)


def tensors(host_pool: Any) -> list[torch.Tensor]:
    """All memory of a host pool."""
    names = ("kv_buffer", "k_buffer", "v_buffer", "temporal_buffer", "conv_buffer", "slot_state_buffers")
    found: list[torch.Tensor] = []
    for name in names:
        value = getattr(host_pool, name, None)
        if value is not None:
            found += list(value) if isinstance(value, (list, tuple)) else [value]
    return found


def pages_at(host_pool: Any, indices: torch.Tensor) -> list[bytes]:
    """The bytes of these pages, in the pool's own flat order."""
    pages = indices.reshape(-1, slots(host_pool))
    if type(host_pool).__name__ == "AsymmetricMHATokenToKVPoolHost":
        return [b"".join(bytes(view) for view in _addressed(host_pool, page)) for page in pages]
    return [host_pool.get_data_page(int(page[0])).contiguous().view(torch.uint8).numpy().tobytes() for page in pages]


def _addressed(host_pool: Any, page: torch.Tensor) -> list[Any]:
    import ctypes

    return [
        (ctypes.c_uint8 * size).from_address(at) for at, size in zip(*host_pool.get_page_buffer_meta(page), strict=True)
    ]


def filled(host_pool: Any, pages: list[int], seed: int = 1) -> Filled:
    """Fills the whole pool with random bytes and names these pages."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(host_pool):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8, generator=generator))
    indices = at(host_pool, pages)
    return Filled(indices, pages_at(host_pool, indices))


def wiped(host_pool: Any) -> None:
    """Sets the whole pool to zero."""
    for tensor in tensors(host_pool):
        tensor.zero_()


def at(host_pool: Any, pages: list[int]) -> torch.Tensor:
    """The host indices of pages."""
    size = slots(host_pool)
    return torch.cat([torch.arange(page * size, (page + 1) * size, dtype=torch.int64) for page in pages])


def backend(host_pool: Any, made_for: Any, **side_pools: Any) -> Any:
    """The storage backend, from SGLang's factory, with its pools registered as the controller does it."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    made = StorageBackendFactory.create_backend("dynamic", made_for, host_pool)
    made.register_mem_pool_host(host_pool)
    for name, pool in {"kv": host_pool, **side_pools}.items():
        made.register_mem_host_pool_v2(pool, PoolName(name))
    made.on_host_pools_registered()
    return made


def controller(host_pool: Any, device_pool: Any, extra: dict[str, Any], **side_pools: Any) -> Any:
    """The controller between host pools and storage, with its threads. `side_pools`: by SGLang's name."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry

    def mapped(layer: int) -> int:
        return layer

    pools = {"kv": host_pool, **side_pools}
    entries = [
        PoolEntry(PoolName(name), pool, device_pool, mapped, is_primary_index_anchor=name == "kv")
        for name, pool in pools.items()
    ]
    return HybridCacheController(
        PagedTokenToKVPoolAllocator(device_pool.size, PAGE, device_pool.dtype, "cpu", device_pool, False),
        HostPoolGroup(entries),
        PAGE,
        None,
        threading.Event(),
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="model",
        storage_backend_extra_config=dict(extra),
    )
