"""The general plugin: gives every vLLM engine that can be served our connector, without a launch argument.

`register` runs in each process of vLLM before any config is built. It wraps `EngineArgs.create_engine_config`,
through which all entry points go. Whatever is wrong becomes a named "cache off" that the sidecar is told; nothing
here raises into vLLM.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from typing import Any

from . import place
from .client import say_off
from .descriptor import witness
from .internals import changed_internals
from .preflight import (
    COMPOSED,
    CONNECTOR,
    MODULE,
    PREFIXES_WORK,
    arguments_refusal,
    model_refusal,
    own_config,
    tell_connector,
)
from .provenance import watch_front

logger = logging.getLogger("kvcachepool")

_MARK = "_kvcachepool_original"


def register() -> None:
    """Entry point `vllm.general_plugins`."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        if not hasattr(EngineArgs, _MARK):
            original = EngineArgs.create_engine_config
            setattr(EngineArgs, _MARK, original)
            EngineArgs.create_engine_config = _wrapped(original)
    except Exception:
        logger.exception("the KV cache pool's plugin could not hook into vLLM")


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.kv_transfer_config
        # vLLM writes its default over None.
        turned_off = self.enable_prefix_caching is False
        try:
            chosen, reason = _choose(self)
        except Exception as error:
            logger.exception("the KV cache pool's checks failed")
            chosen, reason = None, f"PluginFailed/{type(error).__name__}"
        if chosen is None and reason:
            tell_off(reason)
        if chosen is None:
            config = original(self, *args, **kwargs)
            try:
                if own_config(config.kv_transfer_config):
                    _tell_connector(original, self, turned_off, config, *args, **kwargs)
            except Exception:
                logger.exception("the KV cache pool's connector could not be told of its engine")
            return _witnessed(config)
        self.kv_transfer_config = chosen
        try:
            config = original(self, *args, **kwargs)
            _tell_connector(original, self, turned_off, config, *args, **kwargs)
            reason = model_refusal(config)
        except Exception as error:
            config, reason = None, f"RefusedByVllm/{type(error).__name__}"
            logger.warning("vLLM refuses the KV cache connector here: %s", error)
        if not reason:
            logger.info("KV cache pool: connector set, sidecar at %s", place.socket_path())
            return _witnessed(config)
        self.kv_transfer_config = given
        config = original(self, *args, **kwargs)  # an error of the user's own comes up here, as without this plugin
        tell_off(reason)
        return config

    return create_engine_config


def _witnessed(config: Any) -> Any:
    """Notes what only this process sees: the model's files before they are loaded, and who names images."""
    if not own_config(config.kv_transfer_config):
        return config
    try:
        witness(config)
    except Exception:
        logger.exception("the model's files could not be looked at")
    try:
        # Results of an encoder elsewhere come by name: nobody here knows what they were made of.
        alone = getattr(config, "ec_transfer_config", None) is None
        if alone and config.model_config.multimodal_config is not None:
            watch_front()
    except Exception:
        logger.exception("images are not cached: it cannot be known who names them")
    return config


def _tell_connector(original: Any, engine_args: Any, turned_off: bool, config: Any, *args: Any, **kwargs: Any) -> None:
    """Hands our connector what only this process knows.

    Args:
        turned_off: the user gave `--no-enable-prefix-caching`.
    """
    facts = {}
    if config.kv_transfer_config.kv_connector == "MultiConnector":
        facts[COMPOSED] = True
    if turned_off and _keeps_prefix_caching(original, engine_args, *args, **kwargs):
        facts[PREFIXES_WORK] = True
    tell_connector(config.kv_transfer_config, **facts)


def _keeps_prefix_caching(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether prefix caching would be on in this engine if the user had not turned it off.

    vLLM turns it off for backends and models that cannot compute behind a prefix, and only vLLM knows them: its config
    is made once more, with vLLM's default.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        # Backends that refuse prefixes then are known only when the model has been loaded.
        return False
    asked = copy.copy(engine_args)
    asked.enable_prefix_caching = None
    try:
        return bool(original(asked, *args, **kwargs).cache_config.enable_prefix_caching)
    except Exception as error:
        logger.warning("vLLM refuses prefix caching here: %s", error)
        return False


def _choose(args: Any) -> tuple[Any, str | None]:
    """(config to set, None) or (None, why not); (None, None) where the user's own config names our connector."""
    existing = str(place.settings().get("existingConnector", "Refuse"))
    reason = arguments_refusal(args, existing) or changed_internals()
    if reason:
        return None, reason
    given = args.kv_transfer_config
    if own_config(given):
        return None, None
    from vllm.config import KVTransferConfig

    if getattr(given, "kv_connector", None) is None:
        return KVTransferConfig(**_ours()), None
    return KVTransferConfig(**composed(given)), None


def _ours() -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def composed(given: Any) -> dict[str, Any]:
    """A MultiConnector of the user's P/D transports, first, and ours. Loads that fail are recomputed, also theirs."""
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
        "kv_connector_extra_config": {"connectors": [*children, _ours()]},
    }


def tell_off(reason: str) -> None:
    """Says why there is no cache: to the log, and to the sidecar, in the background for 60 s."""
    logger.warning("the KV cache pool is off in this vLLM: %s", reason)
    try:
        import vllm

        say_off(place.socket_path(), reason, str(getattr(vllm, "__version__", "")))
    except Exception:
        logger.exception("the sidecar could not be told")
