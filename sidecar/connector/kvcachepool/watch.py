"""Wraps methods of vLLM's `EngineCore` and workers, for events without a connector hook: requests before their step,
adapters before they are loaded, changes of weights, and releases of KV memory.

The wrappers always call vLLM's method, and never raise by themselves.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kvcachepool")

_MARK = "_kvcachepool_watched"

#: Worker methods that `collective_rpc` may call without an effect on KV, each with the reason. All others, including
#: callables, may change weights.
HARMLESS_RPCS = {
    "check_health": "only answers",
    "compute_weight_checksums": "only reads weights",
    "get_compilation_match_table": "only reads",
    "get_encoder_timing_stats": "only reads",
    "get_kv_cache_spec": "only reads",
    "get_model_inspection": "only reads the module tree",
    "get_supported_tasks": "only reads",
    "list_loras": "only reads",
    "profile": "writes traces",
    "reset_encoder_cache": "encoder outputs are recomputed",
    "reset_mm_cache": "processed inputs are sent again",
    "save_sharded_state": "writes weights to files",
    "save_tensorized_model": "writes weights to files",
    "supports_draft_weight_updates": "only answers",
    "synchronize_device": "only waits",
}


def watch_engine() -> None:
    """Wraps the methods of `EngineCore`, once per process."""
    core = sys.modules.get("vllm.v1.engine.core")
    engine_core: Any = getattr(core, "EngineCore", None)
    if engine_core is None or hasattr(engine_core, _MARK):
        return
    setattr(engine_core, _MARK, True)
    # A request's hashes are complete there, before its step.
    wrap(
        engine_core,
        "preprocess_add_request",
        after=lambda core, result, *_, **__: _call_hook(core, "arrive", result[0]),
    )
    wrap(engine_core, "add_lora", before=_adapter_loaded)
    wrap(engine_core, "reset_prefix_cache", before=_give_up_received)
    for name, changes in _CHANGES_WEIGHTS.items():
        changed = functools.partial(_weights_changed, name, changes)
        # Before, so that nothing old is found during the call, and after it, even if it fails half-way.
        wrap(
            engine_core,
            name,
            before=changed,
            after=lambda core, _, *args, changed=changed, **more: changed(core, *args, **more),
        )


def _adapter_loaded(core: Any, lora_request: Any, *_: Any, **__: Any) -> None:
    _call_hook(core, "adapter_loaded", lora_request)


def _give_up_received(core: Any, reset_running_requests: bool = False, *_: Any, **__: Any) -> None:
    """Gives up loads that have ended, before vLLM empties its cache: it fails while a request that is not running holds
    blocks. A paused engine keeps stepping until its loads have ended, and takes none of them into a step.

    To vLLM these loads have failed: it frees the blocks, and the requests begin again.
    """
    if not reset_running_requests:
        return
    scheduler = core.scheduler
    failed, end_load = scheduler.failed_recving_kv_req_ids, scheduler._handle_blocked_waiting_request
    for request in [one for one in scheduler.kv_holding_waiting if _has_received(scheduler, one)]:
        request.num_computed_tokens = 0
        failed.add(request.request_id)
        end_load(request)


def _has_received(scheduler: Any, request: Any) -> bool:
    waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return waits and request.request_id in scheduler.finished_recving_kv_req_ids


def _rpc_name(method: Any, *_: Any, **__: Any) -> str:
    name = method if isinstance(method, str) else getattr(method, "__name__", "callable")
    return "" if isinstance(method, str) and method in HARMLESS_RPCS else name


def _sleep_name(level: int = 1, *_: Any, **__: Any) -> str:
    return "sleep" if level >= 1 else ""  # level 0 only pauses the scheduler


def _wake_name(tags: Any = None, *_: Any, **__: Any) -> str:
    return "" if tags is not None and set(tags) <= {"scheduling"} else "wake_up"


#: Methods of EngineCore by which weights or KV memory change, and the name of the change; "" for no change.
_CHANGES_WEIGHTS: dict[str, Callable[..., str]] = {
    "collective_rpc": _rpc_name,
    "sleep": _sleep_name,
    "wake_up": _wake_name,
    "release_kv_cache_memory": lambda *_, **__: "release_kv_cache_memory",
    "set_weight_version": lambda *_, **__: "set_weight_version",
}


def _weights_changed(method: str, changes: Callable[..., str], core: Any, *args: Any, **more: Any) -> None:
    try:
        what = changes(*args, **more)
    except Exception:
        what = method
    if what:
        _call_hook(core, "weights_changed", what)


def watch_worker(worker_class_name: Any) -> None:
    """Wraps the methods of a worker's class that release and restore KV memory, and the one by which it reads the files
    of adapters, once per process.
    """
    adapters: Any = getattr(sys.modules.get("vllm.lora.worker_manager"), "WorkerLoRAManager", None)
    if adapters is not None and not hasattr(adapters, _MARK):
        setattr(adapters, _MARK, True)
        wrap(adapters, "_load_adapter", before=_adapter_read_begins, after=_adapter_read_ended)
    module, _, name = str(worker_class_name).rpartition(".")
    worker_class = getattr(sys.modules.get(module), name, None)
    if worker_class is None or hasattr(worker_class, _MARK):
        return
    setattr(worker_class, _MARK, True)
    wrap(worker_class, "sleep", before=lambda *_, **__: _call_worker_hook("kv_cache_released"))
    wrap(worker_class, "discard", before=_discarded)
    wrap(worker_class, "wake_up", after=_woken)
    for step in ("execute_model", "sample_tokens"):
        wrap(worker_class, step, failed=lambda: _call_worker_hook("step_failed"))


def _adapter_read_begins(_: Any, lora_request: Any, /, *__: Any, **___: Any) -> None:
    _call_worker_hook("adapter_read_begins", lora_request)


def _adapter_read_ended(_: Any, read: Any, lora_request: Any, /, *__: Any, **___: Any) -> None:
    _call_worker_hook("adapter_read_ended", lora_request, read is not None)


def _discarded(_: Any, tags: Any = ("kv_cache",), **__: Any) -> None:
    if "kv_cache" in tags:
        _call_worker_hook("kv_cache_released")


def _woken(_: Any, __: Any, tags: Any = None, **___: Any) -> None:
    if tags is None or "kv_cache" in tags:
        _call_worker_hook("kv_cache_restored")


def wrap(owner: Any, name: str, before: Any = None, after: Any = None, failed: Any = None) -> None:
    """Calls `before(self, *args)` and `after(self, result, *args)` around a method, and `failed()` if it raises. Does
    nothing if the method is missing.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        if before is not None:
            _suppress_errors(before, self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
            return result
        except BaseException:
            if failed is not None:
                _suppress_errors(failed)
            raise
        finally:
            if after is not None:
                _suppress_errors(after, self, result, *args, **kwargs)

    setattr(owner, name, method)


def _suppress_errors(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        hook(*args, **kwargs)
    except Exception:
        logger.debug("a hook of the connector failed", exc_info=True)


def _call_hook(core: Any, hook: str, argument: Any) -> None:
    for connector in _own_connectors(core.scheduler.get_kv_connector()):
        getattr(connector, hook)(argument)


def _call_worker_hook(hook: str, *arguments: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        for connector in _own_connectors(get_kv_transfer_group()):
            getattr(connector, hook)(*arguments)


def _own_connectors(connector: Any) -> list[Any]:
    """The connectors of this package: this one, or those in a MultiConnector."""
    children = getattr(connector, "_connectors", None)
    return [one for one in (children if children is not None else [connector]) if hasattr(one, "arrive")]
