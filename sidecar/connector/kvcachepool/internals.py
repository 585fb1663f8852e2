"""All names of vLLM that the connector uses beyond its connector API, in one list that is checked at start.

A missing name turns the cache off (`VllmInternalsChanged/<name>`). Otherwise the first request would fail.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_EVENTS = "vllm.distributed.kv_events"
_UTILS = "vllm.v1.core.kv_cache_utils"

#: Used names by module. A dot leads to an attribute of a class, including those that only instances have.
NEEDED: dict[str, tuple[str, ...]] = {
    _BASE: (
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole.SCHEDULER",
        "KVConnectorTransferResults.failed_recving",
        "KVConnectorTransferResults.finished_recving",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    "vllm.config": ("KVTransferConfig", "ModelConfig.using_transformers_backend"),
    _EVENTS: ("BlockRemoved", "BlockStored", "KVCacheEvent"),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group", "has_kv_transfer_group", "kv_transfer_state"),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorStats",),
    # By this the ranks of several nodes create their connectors.
    "vllm.distributed.kv_transfer.kv_transfer_state": ("ensure_kv_transfer_initialized",),
    "vllm.distributed.parallel_state": ("get_pp_group", "get_tp_group"),
    "vllm.engine.arg_utils": ("EngineArgs.create_engine_config",),
    "vllm.lora.request": ("LoRARequest.lora_int_id", "LoRARequest.lora_name", "LoRARequest.lora_path"),
    "vllm.v1.core.block_pool": (
        "BlockPool.cached_block_hash_to_block",
        "BlockPool.enable_caching",
        "BlockPool.free_blocks",
        "BlockPool.get_cached_block",
        "BlockPool.touch",
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheBlocks.blocks",
        "KVCacheBlocks.get_block_ids",
        "KVCacheManager.block_pool",
        "KVCacheManager.get_blocks",
    ),
    _UTILS: (
        "KVCacheBlock.block_hash",
        "KVCacheBlock.block_id",
        "KVCacheBlock.is_null",
        "KVCacheBlock.ref_cnt",
        "maybe_convert_block_hash",
        "resolve_kv_cache_block_sizes",
    ),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.preempted_req_ids",
        "SchedulerOutput.total_num_scheduled_tokens",
    ),
    "vllm.v1.core.sched.scheduler": ("Scheduler.get_kv_connector",),
    # Weights change through these. If one is missing, changes of weights would be missed.
    "vllm.v1.engine.core": (
        "EngineCore.add_lora",
        "EngineCore.collective_rpc",
        "EngineCore.sleep",
        "EngineCore.wake_up",
    ),
    "vllm.v1.outputs": (
        "KVConnectorOutput.failed_recving",
        "KVConnectorOutput.finished_recving",
        "KVConnectorOutput.invalid_block_ids",
        "KVConnectorOutput.kv_connector_worker_meta",
    ),
    "vllm.v1.request": (
        "Request.block_hashes",
        "Request.cache_salt",
        "Request.kv_transfer_params",
        "Request.lora_request",
        "Request.mm_features",
        "Request.num_computed_tokens",
        "Request.num_prompt_tokens",
        "Request.num_tokens",
        "Request.request_id",
        "Request.skip_reading_prefix_cache",
    ),
}

#: Names that are used if a version of vLLM has them.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "vllm": ("_custom_ops",),
    # By this, workers see which files vLLM reads. Without it, LoRA adapters are not cached.
    "vllm.lora.worker_manager": ("WorkerLoRAManager._load_adapter",),
    # By this, vLLM accepts embeddings from clients because of a connector.
    "vllm.config": ("VllmConfig._resolve_mm_embedding_inputs",),
    # Without these, no item is known to be named by its content, so requests with images are not cached.
    "vllm.multimodal.processing.inputs": ("ProcessorInputs",),
    "vllm.platforms": ("current_platform",),
    "vllm.v1.core": ("kv_cache_utils",),
    # Without these, vLLM cannot empty its cache if it was paused during a load.
    "vllm.v1.core.sched.scheduler": (
        "Scheduler._handle_blocked_waiting_request",
        "Scheduler.failed_recving_kv_req_ids",
        "Scheduler.finished_recving_kv_req_ids",
        "Scheduler.kv_holding_waiting",
    ),
    "vllm.v1.engine.core": ("EngineCore.reset_prefix_cache",),
    "vllm.v1.engine.input_processor": ("InputProcessor",),
    # Without these, KV events do not name a kind of KV group.
    "vllm.v1.kv_cache_interface": ("get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window"),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
}


def changed_internals() -> str | None:
    """`VllmInternalsChanged/<name>` for the first name that this vLLM lacks."""
    for module, names in NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            return f"VllmInternalsChanged/{module}"
        for name in names:
            owner, _, attribute = name.partition(".")
            thing = getattr(found, owner, None)
            if thing is None or (attribute and not _has(thing, attribute)):
                return f"VllmInternalsChanged/{name}"
    return None


def has_optional(module: str, name: str) -> bool:
    """Whether this vLLM has an optional name."""
    assert name in OPTIONAL[module]
    owner, _, attribute = name.partition(".")
    try:
        found = getattr(importlib.import_module(module), owner, None)
    except ImportError:
        return False
    return found is not None and (not attribute or _has(found, attribute))


def _has(owner: Any, name: str) -> bool:
    """Whether a class or its instances have this attribute."""
    if hasattr(owner, name) or (dataclasses.is_dataclass(owner) and name in _fields(owner)):
        return True
    for base in getattr(owner, "__mro__", ()):
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if name in vars(base).get("__annotations__", {}) or (code is not None and name in code.co_names):
            return True
    return False


def _fields(owner: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(owner)}
