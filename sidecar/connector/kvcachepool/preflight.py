"""Checks for everything that could make vLLM fail with a connector, before one is set. Each check has a named reason.

The sidecar's status and metrics show the reasons, and the troubleshooting guide explains them.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from .layout import Unserved, nodes_of, ranks_of

logger = logging.getLogger("kvcachepool")

CONNECTOR = "KVCachePoolConnector"
MODULE = "kvcachepool.connector"
#: Module of the secondary tier for vLLM's own offloading connector.
TIER_MODULE = "kvcachepool.vllm_tier"

#: Hooks that the connector needs on vLLM's base class. All exist since 0.30.
REQUIRED_HOOKS = (
    "get_transfer_results",
    "has_pending_push_work",
    "on_new_request",
    "bind_kv_cache_manager",
    "reset_cache",
)

#: Key of this connector's extra config: the user turned prefix caching off, and vLLM would have kept it on.
PREFIXES_WORK = "kvcachepool.prefixes_work"
#: Key of this connector's extra config: it is one of several connectors in a MultiConnector.
COMPOSED = "kvcachepool.composed"

#: Transports: connectors that hand KV from prefill to decode and keep none. This connector can run beside them in a
#: MultiConnector.
TRANSPORTS = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)


def version_refusal() -> str | None:
    """`VllmTooOld` if the base class lacks a hook that correctness needs."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    except ImportError:
        return "VllmTooOld"
    return None if all(hasattr(KVConnectorBase_V1, hook) for hook in REQUIRED_HOOKS) else "VllmTooOld"


def device_refusal() -> str | None:
    """`DeviceUnsupported/<device>` on anything but CPUs and NVIDIA GPUs.

    ROCm is detected by name, because torch calls its devices `cuda`.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    if current_platform.is_rocm() or torch.version.hip is not None:
        return "DeviceUnsupported/rocm"
    if current_platform.is_cuda():
        return None
    return f"DeviceUnsupported/{current_platform.device_type or 'unknown'}"


def arguments_refusal(args: Any, existing: str, environ: Any = os.environ) -> str | None:
    """Why this `EngineArgs` gets no connector, or None.

    Args:
        existing: what to do if the user set a connector, `Refuse` or `Compose`.
    """
    if environ.get("KVCACHEPOOL_DISABLE", "") not in ("", "0"):
        return "Disabled"
    refusal = version_refusal() or device_refusal()
    if refusal:
        return refusal
    if getattr(args, "kv_offloading_size", None) is not None:
        return "KvOffloadingSize"
    if str(getattr(args, "prefix_caching_hash_algo", "") or "").startswith("xxhash"):
        return "HashAlgorithmRefused"
    if _expandable_segments(args, environ):
        return "ExpandableSegments"
    given = getattr(args, "kv_transfer_config", None)
    if int(getattr(args, "nnodes", 1) or 1) > 1 and getattr(given, "kv_connector", None) not in (None, CONNECTOR):
        return "MultiNodeUnsupported"  # nodes without this connector would have a transport, and the others two
    return connector_refusal(getattr(args, "kv_transfer_config", None), existing)


def _expandable_segments(args: Any, environ: Any) -> bool:
    """vLLM refuses all connectors with these, unless its own allocator holds the KV cache."""
    if getattr(args, "enable_sleep_mode", False) or getattr(args, "enable_cumem_allocator", False):
        return False
    return any(
        "expandable_segments:True" in environ.get(name, "")
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )


def connector_refusal(config: Any, existing: str) -> str | None:
    """Whether a connector of the user conflicts with this one."""
    name = getattr(config, "kv_connector", None)
    if name is None:
        return None
    names = _connector_names(config)
    if CONNECTOR in names:
        return None
    if existing == "Compose" and names and all(one in TRANSPORTS for one in names):
        return None
    return f"ExistingConnector/{name}"


def _connector_names(config: Any) -> list[str]:
    if config.kv_connector != "MultiConnector":
        return [config.kv_connector]
    return [str(child.get("kv_connector")) for child in _children(config)]


def _children(config: Any) -> list[dict[str, Any]]:
    return list(_extra(config).get("connectors") or [])


def own_config(config: Any) -> bool:
    return getattr(config, "kv_connector", None) is not None and CONNECTOR in _connector_names(config)


def _extra(config: Any) -> dict[str, Any]:
    return getattr(config, "kv_connector_extra_config", None) or {}


def own_tiers(config: Any) -> list[dict[str, Any]]:
    """Config dicts of this project's tier in vLLM's tiered offloading, also below a MultiConnector."""
    connectors = [_extra(config)]
    if getattr(config, "kv_connector", None) == "MultiConnector":
        connectors = [child.get("kv_connector_extra_config") or {} for child in _children(config)]
    tiers = [tier for extra in connectors for tier in extra.get("secondary_tiers") or []]
    return [tier for tier in tiers if isinstance(tier, dict) and tier.get("module_path") == TIER_MODULE]


def is_composed(config: Any) -> bool:
    """Whether the plugin recorded that this connector, whose config this is, is one of several."""
    return bool(_extra(config).get(COMPOSED))


def pass_facts(config: Any, **facts: Any) -> None:
    """Passes facts that only the plugin knows to this connector, in its extra config, which reaches every process."""
    if config.kv_connector == CONNECTOR:
        config.kv_connector_extra_config = {**_extra(config), **facts}
        return
    for child in _children(config):
        if child.get("kv_connector") == CONNECTOR:
            child["kv_connector_extra_config"] = {**(child.get("kv_connector_extra_config") or {}), **facts}


def model_refusal(vllm_config: Any) -> str | None:
    """Checks of the complete config: models and settings that no connector, or not this one, can serve."""
    model = getattr(vllm_config, "model_config", None)
    if model is None:
        return None
    if getattr(model, "is_encoder_decoder", False):
        return "EncoderDecoder"
    encoder = getattr(vllm_config, "ec_transfer_config", None)
    only_encodes = getattr(encoder, "is_ec_producer", False) and not getattr(encoder, "is_ec_consumer", False)
    if getattr(model, "is_attention_free", False) or only_encodes:
        return "NoKvCache"
    states = getattr(model, "is_hybrid", False) or getattr(model, "has_inner_state", False)
    if states and getattr(vllm_config.cache_config, "mamba_cache_mode", "none") != "align":
        return "KvGroupUnsupported/MambaCacheMode"
    try:
        ranks_of(vllm_config)
    except Unserved as error:
        logger.warning("%s", error)
        return error.reason
    return _settings_refusal(vllm_config) or prefix_refusal(vllm_config)


def _settings_refusal(vllm_config: Any) -> str | None:
    parallel = vllm_config.parallel_config
    # vLLM knows the experts only of tokens that it computed itself, and raises behind a loaded prefix.
    outputs = getattr(vllm_config, "aux_output_config", None)
    if getattr(outputs, "enabled", False) or getattr(vllm_config.model_config, "enable_return_routed_experts", False):
        return "RoutedExperts"
    # Each rank has a scheduler, and all must decide alike. Answers to lookups arrive at different times.
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and getattr(parallel, "world_size", 1) > 1:
        return "ExternalLauncher"
    # After a fault vLLM drops results of steps, so their stores never end. The KV of such a step may be incomplete.
    return "FaultTolerance" if getattr(parallel, "enable_fault_tolerance", False) else None


def prefix_refusal(vllm_config: Any) -> str | None:
    """`PrefixUnsupported` if vLLM has turned prefix caching off.

    vLLM does that for attention backends and models that cannot continue from a prefix: tokens after a hit would be
    wrong. `--no-enable-prefix-caching` alone is a different case, see `plugin`.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not getattr(model, "is_prefix_caching_supported", True):
        return "PrefixUnsupported"
    if cache.enable_prefix_caching or _extra(vllm_config.kv_transfer_config).get(PREFIXES_WORK):
        return None
    return "PrefixUnsupported"


def transfer_refusal(config: Any) -> str | None:
    """Requirements for a user's `--kv-transfer-config`."""
    if getattr(config, "kv_load_failure_policy", "fail") != "recompute":
        return "LoadFailurePolicyNotRecompute"
    return None


def engine_refusal(vllm_config: Any) -> str | None:
    """Why this connector is off in an engine that has it, even if the plugin did not set it."""
    refusal = transfer_refusal(vllm_config.kv_transfer_config) or device_refusal() or model_refusal(vllm_config)
    if not refusal and is_composed(vllm_config.kv_transfer_config) and nodes_of(vllm_config) > 1:
        return "MultiNodeUnsupported"  # the ranks cannot agree who has this connector without the other one
    return refusal


def preferred_layout(vllm_config: Any) -> str | None:
    """Block-major on NVIDIA GPUs, if vLLM supports that layout.

    None beside other connectors: a MultiConnector does not start with two different layouts, and the peers of a
    transport expect the layout without this connector. Every layout of the table is supported.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or device_refusal() or is_composed(vllm_config.kv_transfer_config):
        return None
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    return "BLHNC" if "BLHNC" in KVCacheLayout.__members__ else None
