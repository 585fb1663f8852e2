"""A small KV cache in host memory with vLLM's own specs and views, and the fields of VllmConfig that the worker
reads.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_config
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_layout import KVCacheLayout

HEADS, TOKENS, SIZE, LAYERS, BLOCKS = 2, 128, 64, 4, 24
#: Bytes of one block over all layers: 4 x 64 KiB.
BLOCK_BYTES = LAYERS * HEADS * TOKENS * 2 * SIZE * 2


def vllm_config(layers: list[str], model: Path, engine_id: str = "engine-1", **parallel: int) -> Any:
    """A stand-in for VllmConfig."""
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="vec")
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1} | parallel
    config = fake_config.vllm_config(
        model,
        engine_id,
        model_config={"hf_config": {"architectures": ["X"], "head_dim": SIZE}, "dtype": torch.bfloat16},
        parallel_config=sizes | {"cp_kv_cache_interleave_size": 1, "prefill_context_parallel_size": 1},
        cache_config={
            "block_size": TOKENS,
            "kv_cache_layout": "LBHNC",
            "enable_prefix_caching": True,
            "prefix_match_unit": None,
        },
    )
    config.model_config.get_total_num_kv_heads = lambda: HEADS * sizes["tensor_parallel_size"]
    config.model_config.get_total_num_hidden_layers = lambda: LAYERS
    config.compilation_config = SimpleNamespace(static_forward_context=dict.fromkeys(layers, module))
    config.speculative_config = None
    return config


def kv_cache(groups: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    """(KVCacheConfig, layer tensors): LBHNC. A second group is a sliding window that overlays the first."""
    caches: dict[str, torch.Tensor] = {}
    tensors, made = [], []
    page = BLOCK_BYTES // LAYERS
    with torch.inference_mode():
        raw = torch.zeros(page * BLOCKS * LAYERS, dtype=torch.int8)
    for group in range(groups):
        layers = [f"layer.{group}.{i}" for i in range(LAYERS)]
        options: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE}
        spec = (
            interface.SlidingWindowSpec(**options, dtype=torch.bfloat16, sliding_window=256)
            if group
            else interface.FullAttentionSpec(**options, dtype=torch.bfloat16)
        )
        placed = interface.KVCacheTensor(size=raw.numel(), layers=layers, layer_stride=page * BLOCKS, block_stride=page)
        views = interface.create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, placed)
        caches |= dict(zip(layers, views, strict=True))
        tensors.append(placed)
        made.append(interface.KVCacheGroupSpec(layers, spec))
    config = interface.KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=made, kv_cache_layout="LBHNC"
    )
    return config, caches


def fill(caches: dict[str, torch.Tensor], block: int, seed: int) -> bytes:
    """Writes random bytes into one block of all layers of group 0. Returns them in section order."""
    generator = torch.Generator().manual_seed(seed)
    out = b""
    with torch.inference_mode():
        for name, tensor in caches.items():
            if name.startswith("layer.0."):
                content = torch.randint(0, 256, (BLOCK_BYTES // LAYERS,), dtype=torch.uint8, generator=generator)
                tensor[block].view(torch.uint8).view(-1).copy_(content)
                out += content.numpy().tobytes()
    return out


def content(caches: dict[str, torch.Tensor], block: int) -> bytes:
    """The bytes of one block over all layers of group 0, in section order."""
    return b"".join(
        tensor[block].view(torch.uint8).numpy().tobytes() for n, tensor in caches.items() if n.startswith("layer.0.")
    )
