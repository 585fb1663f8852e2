"""The general plugin: sets this connector in every vLLM engine that it can serve, without a launch argument.

`register` runs in each process of vLLM before any config is built. It wraps `EngineArgs.create_engine_config`, which
all entry points use. A failure turns the cache off, with a reason that is reported to the sidecar. Nothing here raises
into vLLM.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from typing import Any

from . import place, presence
from .connection import report_off as send_report
from .descriptor import describe_settings, witness
from .internals import changed_internals
from .preflight import (
    COMPOSED,
    CONNECTOR,
    MODULE,
    PREFIXES_WORK,
    arguments_refusal,
    model_refusal,
    own_config,
    own_tiers,
    pass_facts,
)
from .provenance import watch_front

logger = logging.getLogger("kvcachepool")

_MARK = "_kvcachepool_original"


def register() -> None:
    """Entry point `vllm.general_plugins`."""
    try:
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import EngineArgs

        presence.guard(_is_alone, report_off)
        _keep_embedding_inputs(VllmConfig)
        if not hasattr(EngineArgs, _MARK):
            original = EngineArgs.create_engine_config
            setattr(EngineArgs, _MARK, original)
            EngineArgs.create_engine_config = _wrapped(original)
    except Exception:
        logger.exception("installing the KV cache pool's plugin failed; vLLM runs without the cache")


def _is_alone(config: Any) -> bool:
    """Whether this is the only connector. Beside a transport of the user it turns itself off on several nodes."""
    return getattr(config, "kv_connector", None) == CONNECTOR


def _keep_embedding_inputs(vllm_config_class: Any) -> None:
    """Keeps vLLM from accepting embeddings of images from clients because of this connector.

    vLLM takes every connector that loads for the consumer of another instance's prefills, which gets images as
    embeddings, or without them. Clients of an ordinary server could crash it with such inputs.
    """
    original = getattr(vllm_config_class, "_resolve_mm_embedding_inputs", None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def resolve(self: Any) -> Any:
        config = self.kv_transfer_config
        if not _is_alone(config):
            return original(self)
        object.__setattr__(self, "kv_transfer_config", None)
        try:
            return original(self)
        finally:
            object.__setattr__(self, "kv_transfer_config", config)

    setattr(resolve, _MARK, original)
    vllm_config_class._resolve_mm_embedding_inputs = resolve


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.kv_transfer_config
        # vLLM writes its default over None.
        turned_off = self.enable_prefix_caching is False
        try:
            chosen, reason = _choose(self)
        except Exception as error:
            logger.exception("the KV cache pool's checks of vLLM's arguments failed")
            chosen, reason = None, f"PluginFailed/{type(error).__name__}"
        if chosen is None and reason and not (own_tiers(given) and reason.startswith("ExistingConnector/")):
            report_off(reason)
        if chosen is None:
            config = original(self, *args, **kwargs)
            _describe_to_tiers(config)
            try:
                if own_config(config.kv_transfer_config):
                    _pass_facts(original, self, turned_off, config, *args, **kwargs)
            except Exception:
                logger.exception("passing facts about this vLLM to its KV cache connector failed")
            return _with_records(config)
        self.kv_transfer_config = chosen
        try:
            config = original(self, *args, **kwargs)
            _pass_facts(original, self, turned_off, config, *args, **kwargs)
            reason = model_refusal(config)
        except Exception as error:
            config, reason = None, f"RefusedByVllm/{type(error).__name__}"
            logger.warning("vLLM refused its config with the KV cache connector: %s", error)
        if not reason:
            logger.info("vLLM uses the KV cache pool's connector: sidecar=%s", place.socket_path())
            return _with_records(config)
        self.kv_transfer_config = given
        # An error in the user's own arguments is raised here, as without this plugin.
        config = original(self, *args, **kwargs)
        report_off(reason)
        return config

    return create_engine_config


def _describe_to_tiers(config: Any) -> None:
    """Tells this project's tiers of vLLM's offloading connector what identifies KV: vLLM gives them no VllmConfig."""
    try:
        tiers = own_tiers(config.kv_transfer_config)
        if tiers:
            described = describe_settings(config)
            if config.lora_config is not None:
                # vLLM's keys have an adapter's name and path, and neither its content.
                described["unshared"] = described["unshared"] or "LoraAdapters"
            if config.model_config.multimodal_config is not None:
                # Nor an image's content, but its name, which a request may choose.
                described["unshared"] = described["unshared"] or "MultimodalInputs"
            for tier in tiers:
                tier["model"] = described
    except Exception:
        logger.exception("describing the model to the KV cache pool's tier failed; it does not share KV")


def _with_records(config: Any) -> Any:
    """Records what only this process can see: the model's files before their load, and the origin of image names."""
    if not own_config(config.kv_transfer_config):
        return config
    try:
        witness(config)
    except Exception:
        logger.exception("reading the model's files failed; vLLM processes may not share its KV")
    try:
        # Results of an external encoder are identified by name, and their content is unknown here.
        alone = getattr(config, "ec_transfer_config", None) is None
        if alone and config.model_config.multimodal_config is not None:
            watch_front()
    except Exception:
        logger.exception("hooking into vLLM's image hashes failed; requests with images are not cached")
    return config


def _pass_facts(original: Any, engine_args: Any, turned_off: bool, config: Any, *args: Any, **kwargs: Any) -> None:
    """Passes facts that only this process can determine to the connector.

    Args:
        turned_off: the user gave `--no-enable-prefix-caching`.
    """
    facts = {}
    if config.kv_transfer_config.kv_connector == "MultiConnector":
        facts[COMPOSED] = True
    if turned_off and _keeps_prefix_caching(original, engine_args, *args, **kwargs):
        facts[PREFIXES_WORK] = True
    pass_facts(config.kv_transfer_config, **facts)


def _keeps_prefix_caching(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether prefix caching would be on in this engine if the user had not turned it off.

    vLLM turns it off for backends and models that cannot continue from a prefix, and only vLLM can decide that. So
    this builds a second config, with vLLM's default.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        # Backends that do not support prefixes are known only after the model has been loaded.
        return False
    default_args = copy.copy(engine_args)
    default_args.enable_prefix_caching = None
    try:
        return bool(original(default_args, *args, **kwargs).cache_config.enable_prefix_caching)
    except Exception as error:
        logger.warning("vLLM refused its config with prefix caching: %s", error)
        return False


def _choose(args: Any) -> tuple[Any, str | None]:
    """(config to set, None) or (None, reason); (None, None) if the user's own config names this connector."""
    existing = str(place.settings().get("existingConnector", "Refuse"))
    reason = arguments_refusal(args, existing) or changed_internals()
    if reason:
        return None, reason
    given = args.kv_transfer_config
    if own_config(given):
        return None, None
    from vllm.config import KVTransferConfig

    if getattr(given, "kv_connector", None) is None:
        return KVTransferConfig(**_own_connector()), None
    return KVTransferConfig(**composed(given)), None


def _own_connector() -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def composed(given: Any) -> dict[str, Any]:
    """A MultiConnector of the user's P/D transports, in first place, and this connector. vLLM recomputes failed loads
    of all of them.
    """
    if given.kv_connector == "MultiConnector":
        children = list(given.kv_connector_extra_config["connectors"])
    else:
        child = {
            "kv_connector": given.kv_connector,
            "kv_role": given.kv_role,
            "kv_buffer_device": given.kv_buffer_device,
            "kv_port": given.kv_port,
            "kv_connector_extra_config": given.kv_connector_extra_config,
        }
        for optional in ("kv_ip", "kv_connector_module_path"):
            if getattr(given, optional, None):
                child[optional] = getattr(given, optional)
        children = [child]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": given.kv_role,
        "engine_id": given.engine_id,
        "kv_buffer_device": given.kv_buffer_device,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [*children, _own_connector()]},
    }


def report_off(reason: str) -> None:
    """Reports why there is no cache: in the log, and to the sidecar, in the background for 60 s."""
    logger.warning("the KV cache pool is off in this vLLM: %s", reason)
    try:
        import vllm

        send_report(place.socket_path(), reason, str(getattr(vllm, "__version__", "")))
    except Exception:
        logger.exception("reporting to the sidecar why the cache is off failed")
