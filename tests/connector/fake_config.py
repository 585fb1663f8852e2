"""Fakes of vLLM's config classes: dataclasses with a few of their fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvcachepool import descriptor


def made(kind: str, **fields: Any) -> Any:
    """An object whose class has this name and these fields. Further attributes may be set."""
    return dataclasses.make_dataclass(kind, [(name, Any) for name in fields])(**fields)


def model_config(folder: Path, **fields: Any) -> Any:
    """A ModelConfig whose files are in a folder."""
    hf_config = {"hidden_size": 64, "rope_theta": 1e6, "_name_or_path": "/x", "transformers_version": "9"}
    given = {"model": str(folder), "dtype": "torch.bfloat16", "max_model_len": 8192, "hf_config": hf_config}
    return made("ModelConfig", **(given | fields))


def vllm_config(folder: Path, engine_id: str = "engine-1", witnessed: bool = True, **parts: dict[str, Any]) -> Any:
    """The fields of a VllmConfig that the descriptor reads. `cache_config={"a": 1}` sets a field of that part."""
    config = made(
        "VllmConfig",
        model_config=model_config(folder, **parts.pop("model_config", {})),
        cache_config=made("CacheConfig", **({"cache_dtype": "auto"} | parts.pop("cache_config", {}))),
        load_config=made(
            "LoadConfig", **({"load_format": "auto", "download_dir": None} | parts.pop("load_config", {}))
        ),
        parallel_config=made("ParallelConfig", **({"data_parallel_rank": 0} | parts.pop("parallel_config", {}))),
        kv_transfer_config=made(
            "KVTransferConfig", kv_connector="KVCachePoolConnector", engine_id=engine_id, kv_connector_extra_config={}
        ),
        **{name: None if fields is None else made(_CLASSES[name], **fields) for name, fields in parts.items()},
    )
    if witnessed:
        descriptor.witness(config)
    return config


_CLASSES = {
    "speculative_config": "SpeculativeConfig",
    "attention_config": "AttentionConfig",
    "lora_config": "LoRAConfig",
    "kernel_config": "KernelConfig",
    "scheduler_config": "SchedulerConfig",
}
