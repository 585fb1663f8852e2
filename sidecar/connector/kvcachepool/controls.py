"""The controls of one request (`kv_transfer_params`), and its namespace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import provenance

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Controls:
    """Per-request options. Token counts are None without a limit.

    load, store: also False if vLLM's `kv_role` excludes it.
    tags: what separates the request from others. None without any, `INVALID` if it has no valid form.
    ignored: names of parameters with a wrong type.
    """

    load: bool = True
    store: bool = True
    skip_last_tokens: int = 0
    tags: Any = None
    ttl_s: int = 0
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    ignored: tuple[str, ...] = field(default=())


NO_CONTROLS = Controls()
#: Tags with a wrong type. The request must be separate, but from whom is unknown.
INVALID = object()
#: Prefix of LMCache's names for tags. It is removed.
_LMCACHE_TAG = "lmcache.tag."


def parse_controls(params: Any) -> Controls:
    """Parses `kv_transfer_params`. Never raises: values of a wrong type are named in `ignored` and not used."""
    if not params:
        return NO_CONTROLS
    if not isinstance(params, dict):
        return Controls(ignored=("kv_transfer_params",))
    values: dict[str, Any] = {}
    ignored = []
    for key, (name, accepts) in _PARAMETERS.items():
        if key not in params or params[key] is None:
            continue
        if accepts(params[key]):
            values[name] = params[key]
        else:
            ignored.append(key)
    if params.get("lmcache.skip_save") is True:
        values["store"] = False
    tags = {key: tag for key, tag in params.items() if isinstance(key, str) and key.startswith(_LMCACHE_TAG)}
    if not all(isinstance(tag, str | int | float) for tag in tags.values()):
        ignored.append(_LMCACHE_TAG + "*")
    if {"kvcachepool.tags", _LMCACHE_TAG + "*"} & set(ignored):
        values["tags"] = INVALID
    elif tags:
        values["tags"] = [values.get("tags"), {key.removeprefix(_LMCACHE_TAG): str(tags[key]) for key in tags}]
    return Controls(ignored=tuple(ignored), **values)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ttl(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _is_tags(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if isinstance(value, list):
        return all(isinstance(tag, str) for tag in value)
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())


_PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kvcachepool.store": ("store", lambda value: isinstance(value, bool)),
    "kvcachepool.skip_last_tokens": ("skip_last_tokens", _is_count),
    "kvcachepool.tags": ("tags", _is_tags),
    "kvcachepool.ttl": ("ttl_s", _is_ttl),
    "max_load_tokens": ("max_load_tokens", _is_count),
    "lmcache.max_offload_tokens": ("max_offload_tokens", _is_count),
    "max_offload_tokens": ("max_offload_tokens", _is_count),
}


class Uncacheable(Exception):
    """The request neither loads nor stores. The message is the name of the reason."""


def namespace(request: Request, controls: Controls, epoch: str, lora_digest: Callable[[Any], bytes]) -> bytes:
    """Namespace of a request: empty for the default one, otherwise the SHA-256 of what separates it.

    The last bit is set if an epoch is part of it. No other process can name such a namespace, so it is not stored in
    shared tiers.

    Args:
        epoch: the epoch that `reset_cache` drew last, empty before.
        lora_digest: returns the content hash of an adapter's files, or raises `Uncacheable`.

    Raises:
        Uncacheable: the adapter's content is unknown, the tags are invalid, or it is not proven that items are named by
            their content. The last is no reason with a salt, which others do not know, unlike tags.
    """
    by_content = provenance.proven(request)  # in any case: it remembers names
    if controls.tags is INVALID:
        raise Uncacheable("invalid_tags")
    lora = getattr(request, "lora_request", None)
    content = lora_digest(lora).hex() if lora is not None else None
    separates = {"tags": controls.tags or None, "lora": content, "epoch": epoch}
    if not by_content:
        if not getattr(request, "cache_salt", None):
            raise Uncacheable("multimodal_named_by_user")
        separates["items"] = "named_by_user"
    if not any(separates.values()):
        return b""
    canonical = json.dumps(separates, sort_keys=True, separators=(",", ":"))
    digest = bytearray(hashlib.sha256(canonical.encode()).digest())
    digest[-1] = digest[-1] & ~1 | bool(epoch)
    return bytes(digest)
