"""The model descriptor: everything that decides KV values, selected from vLLM's config by the identity table."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import identity, weights
from .preflight import pass_facts
from .weights import Digests

logger = logging.getLogger("kvcachepool")

#: Keys of a Hugging Face config that record where it was loaded from.
_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
#: Keys of a Hugging Face config that name other repositories, whose weights are loaded too.
_OTHER_REPOSITORIES = ("text_model_id", "audio_model_id")
#: Variable by which vLLM starts an engine that elastic expert parallelism adds. Other engines send it their weights.
_SCALED_UP = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
#: Reason for not sharing weights until their hash is known.
HASHING = "WeightsHashing"


class OpaqueError(Exception):
    """A value cannot be serialized. The message is the name of its type."""


class Described(NamedTuple):
    """A descriptor. pending: the hash of the weights is unknown, and `unshared` applies until it is known."""

    parts: dict[str, Any]
    pending: bool


def plain(value: Any, volatile: frozenset[str] = frozenset()) -> Any:
    """A JSON-like copy that is equal in all processes if and only if the value is.

    Raises:
        OpaqueError: the value cannot be serialized.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return {str(k): plain(v, volatile) for k, v in items if str(k) not in volatile}
    if isinstance(value, (list, tuple)):
        return [plain(v, volatile) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v, volatile) for v in value), key=str)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    # Before dataclasses, because a Hugging Face config is one and holds more than its class declares.
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return plain(value.to_dict(), volatile)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), volatile) for f in dataclasses.fields(value)}
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    name = getattr(value, "__qualname__", "")
    if isinstance(value, type) and "<" not in name:
        return f"{value.__module__}.{name}"
    raise OpaqueError(type(value).__name__)


class _Describer:
    """One traversal of a VllmConfig."""

    def __init__(self, vllm_config: Any, instance: str, digests: Digests) -> None:
        self._config = vllm_config
        self._instance = instance
        self._digests = digests
        self._start = _extra_config(vllm_config).get(weights.START)
        self.pending = False
        self._weights_found: list[dict[str, str]] = []
        #: Reasons why this domain is process-local. The first one is shown.
        self.reasons: list[str] = []

    def _own(self, reason: str) -> None:
        """Makes this domain process-local, for this reason."""
        self.reasons.append(reason)

    def unshared(self, reason: str) -> dict[str, str]:
        return {"kind": "unshared", "reason": reason, "instance": self._instance}

    def parts(self) -> dict[str, Any]:
        parts = {
            "engine": "vllm",
            **self._fields("VllmConfig", self._config, self._config.load_config),
            "environment": self._environment(),
        }
        parts["plugins"] = _plugins()
        parts["model"] = parts.pop("model_config")
        if parts["model"] and parts["model"].get("multimodal_config") is not None:
            parts["libraries"] = _versions(_PROCESSOR_LIBRARIES)
        elif self._runs_transformers():
            parts["libraries"] = _versions(("transformers",))
        draft = (parts.get("speculative_config") or {}).get("draft_model_config")
        if any(model and model.get("quantization") is not None for model in (parts["model"], draft)):
            parts["device"] = _device()
        if self.pending:
            # Ranks may hash several models in different orders.
            for found in self._weights_found:
                found.clear()
                found.update(self.unshared(HASHING))
        for reason in dict.fromkeys(self.reasons):
            logger.warning("KV is not shared with other vLLM processes: %s", reason)
        if self.reasons:
            parts["identity"] = self.unshared(self.reasons[0])
        return parts

    def _runs_transformers(self) -> bool:
        """Whether the code of a model is that of the library `transformers`."""
        speculative = getattr(self._config, "speculative_config", None)
        models = (self._config.model_config, getattr(speculative, "draft_model_config", None))
        checks = (getattr(model, "using_transformers_backend", None) for model in models)
        return any(check() for check in checks if check is not None)

    def _fields(self, kind: str, config: Any, load: Any) -> dict[str, Any]:
        """The identity fields of a config object. A field that the table does not list makes the domain
        process-local.
        """
        table = identity.CLASSES[kind]
        known = table.names()
        declared = getattr(type(config), "__dataclass_fields__", None)
        if declared is None:
            self._own(f"UnknownIdentityField/{kind}")
            return {}
        for name, field in declared.items():
            if name not in known and getattr(field, "_field_type", None) is not _CLASS_VARIABLE:
                self._own(f"UnknownIdentityField/{kind}.{name}")
        found: dict[str, Any] = {}
        for name in table.identity:
            if not hasattr(config, name) or (name == "hf_text_config" and config.hf_text_config is config.hf_config):
                continue
            if (kind, name) not in identity.AS_IF_ABSENT or getattr(config, name) != identity.AS_IF_ABSENT[kind, name]:
                found[name] = self._value(kind, name, config, load)
        if kind == "ModelConfig":
            self._model(config, found, load)
        return found

    def _value(self, kind: str, name: str, config: Any, load: Any) -> Any:
        value = getattr(config, name)
        nested = _NESTED.get((kind, name))
        if nested is not None:
            load = getattr(config, "draft_load_config", None) or load
            return None if value is None else self._fields(nested, value, load)
        if (kind, name) == ("ModelConfig", "model"):
            # A path depends on this machine. The digest of the files is used instead.
            return None if os.path.isdir(value) else value
        if (kind, name) == ("MultiModalConfig", "mm_encoder_fp8_scale_path") and value is not None:
            try:
                return weights.content(value)
            except OSError as error:
                logger.warning("FP8 scales %s cannot be read: %s", value, error)
                self._own("ProcessorUnreadable")
                return None
        volatile = _VOLATILE if name in ("hf_config", "hf_text_config") else frozenset()
        try:
            return plain(value, volatile)
        except OpaqueError as error:
            self._own(f"OpaqueValue/{kind}.{name}")
            return f"({error})"

    def _model(self, config: Any, found: dict[str, Any], load: Any) -> None:
        """Adds the content of a model's files."""
        source = weights.source_of(config, load)
        found["weights"] = self._weights(source, load)
        self._weights_found.append(found["weights"])
        hf_config = self._one_repository(found)
        try:
            folder = weights.local_folder(source.model, source.revision, source.download_dir)
            found["files"] = None if folder is None else weights.settings_digest(folder)
            if folder is None and found["weights"]["kind"] != "unshared":
                self._own("ProcessorUnreadable")
            if folder is not None and found.get("trust_remote_code") and weights.names_other_code(folder, hf_config):
                self._own("CodeElsewhere")
        except OSError as error:
            logger.warning("files beside the weights of %s cannot be read: %s", source.model, error)
            self._own("ProcessorUnreadable")

    def _one_repository(self, found: dict[str, Any]) -> Any:
        """The Hugging Face config. Weights of further repositories make the domain process-local."""
        hf_config = found.get("hf_config")
        if isinstance(hf_config, dict) and any(hf_config.get(key) for key in _OTHER_REPOSITORIES):
            self._own("SecondaryWeights")
        return hf_config

    def _weights(self, source: weights.Source, load: Any) -> dict[str, str]:
        """`{"kind": "files", "digest": hex}`, or why only this process can identify the weights."""
        load_format = str(getattr(load, "load_format", "auto"))
        reason = weights.unshareable_source(source.location, load_format)
        if os.environ.get(_SCALED_UP, "0") not in ("", "0"):
            reason = "WeightsFromPeers"
        if not reason:
            try:
                folder = weights.local_folder(source.location, source.revision, source.download_dir)
                if folder is None:
                    reason = "NoLocalWeights"
                else:
                    # Checked before, because the hash of changed files is useless, and again after the files were read.
                    reason = weights.changed_since(source, folder, self._start)
                    digest = None if reason else weights.weights_digest(folder, self._digests)
                    if not reason and digest is None:
                        self.pending = True
                        return self.unshared(HASHING)
                    if digest:
                        reason = weights.changed_since(source, folder, self._start)
                        if not reason:
                            return {"kind": "files", "digest": digest}
                    elif not reason:
                        reason = "NoWeightFiles"
            except OSError as error:
                logger.warning("weight files of %s cannot be read: %s", source.location, error)
                reason = "WeightsUnreadable"
        logger.warning("KV of %s is not shared with other vLLM processes: %s", source.location, reason)
        return self.unshared(reason)

    def _environment(self) -> dict[str, str]:
        known = identity.ENVIRONMENT.names()
        for name in sorted(os.environ):
            if name.startswith("VLLM_") and name not in known and not identity.is_service_link(name, os.environ):
                self._own(f"UnknownIdentityField/{name}")
        return {name: os.environ[name] for name in identity.ENVIRONMENT.identity if name in os.environ}


#: Fields that hold an instance of another class in the table.
_NESTED = {
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "scheduler_config"): "SchedulerConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "attention_config"): "AttentionConfig",
    ("VllmConfig", "mamba_config"): "MambaConfig",
    ("VllmConfig", "kernel_config"): "KernelConfig",
    ("VllmConfig", "lora_config"): "LoRAConfig",
    ("VllmConfig", "speculative_config"): "SpeculativeConfig",
    ("ModelConfig", "multimodal_config"): "MultiModalConfig",
    ("SpeculativeConfig", "draft_model_config"): "ModelConfig",
    ("SpeculativeConfig", "draft_load_config"): "LoadConfig",
}
#: They transform images, video and audio into the model's input.
_PROCESSOR_LIBRARIES = (
    "transformers",
    "pillow",
    "opencv-python-headless",
    "mistral_common",
    "soundfile",
    "av",
    "torchvision",
)
_CLASS_VARIABLE = getattr(dataclasses, "_FIELD_CLASSVAR", None)


def describe(vllm_config: Any, instance: str, digests: Digests) -> Described:
    """The worker's part of the model descriptor. Equal on all ranks of an instance once it is not pending."""
    one = _Describer(vllm_config, instance, digests)
    parts = one.parts()
    return Described(parts, one.pending)


class _SettingsDescriber(_Describer):
    """Leaves out the content of the models' files, which vLLM may still have to download. Collects their sources."""

    def __init__(self, vllm_config: Any, instance: str) -> None:
        super().__init__(vllm_config, instance, Digests())
        self.sources: list[dict[str, Any]] = []

    def _model(self, config: Any, found: dict[str, Any], load: Any) -> None:
        source = weights.source_of(config, load)
        remote_code = bool(found.get("trust_remote_code"))
        hf_config = self._one_repository(found)
        reason = weights.unshareable_source(source.location, str(getattr(load, "load_format", "auto")))
        if reason:
            self._own(reason)
        if remote_code and isinstance(hf_config, dict) and "--" in json.dumps(hf_config.get("auto_map")):
            self._own("CodeElsewhere")
        self.sources.append({**source._asdict(), "remote_code": remote_code})


def describe_settings(vllm_config: Any) -> dict[str, Any]:
    """What a process without a VllmConfig needs to identify KV: plain values, which JSON and pickle keep.

    settings: SHA-256 of all settings that decide KV values, without the content of the models' files.
    unshared: why only this vLLM can name its KV, or "". The settings then have a random part.
    sources: the models' files, fields of `weights.Source` and whether their own code runs.
    start: the state of the files before vLLM loads them.
    """
    one = _SettingsDescriber(vllm_config, os.urandom(16).hex())
    text = json.dumps(one.parts(), sort_keys=True, separators=(",", ":"))
    sources = [weights.source_from(source) for source in one.sources]
    return {
        "settings": hashlib.sha256(text.encode()).hexdigest(),
        "unshared": one.reasons[0] if one.reasons else "",
        "sources": one.sources,
        "start": weights.record_files(sources),
    }


def _extra_config(vllm_config: Any) -> dict[str, Any]:
    """The settings of this connector. In its processes they are not wrapped by a MultiConnector."""
    return getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_connector_extra_config", None) or {}


def witness(vllm_config: Any) -> None:
    """Records the state of the model's folders, before the workers load them, in this connector's settings."""
    load = vllm_config.load_config
    sources = [weights.source_of(vllm_config.model_config, load)]
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        sources.append(weights.source_of(draft, load))
    seen = {weights.START: weights.record_files(sources) | {"run": os.urandom(16).hex()}}
    pass_facts(vllm_config.kv_transfer_config, **seen)


def run_of(vllm_config: Any) -> str:
    """A unique name of this start of the engine, even if a user chose the engine's id."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    start = _extra_config(vllm_config).get(weights.START)
    run = start.get("run", "") if isinstance(start, dict) else ""
    names = (getattr(transfer, "engine_id", ""), getattr(vllm_config, "instance_id", ""), run)
    return "/".join(str(name or "") for name in names)


def _plugins() -> list[str]:
    """Installed plugins of vLLM with their versions. They may replace models and platforms. vLLM's own have none."""
    found = set()
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        for point in importlib.metadata.entry_points(group=group):
            package = point.dist
            if point.value.startswith("vllm.plugins.lora_resolvers."):
                found.add(f"{point.name} vllm")
            elif package is not None and package.name != "kvcachepool":
                found.add(f"{point.name} {package.name} {package.version}")
    return sorted(found)


def _device() -> str:
    """Compute capability of the GPUs, "None" without one. By default vLLM chooses the kernels of quantised weights by
    it: the same FP8 or NVFP4 weights are multiplied with quantised activations on some GPUs and with 16 bits on others.
    """
    from vllm.platforms import current_platform

    return str(current_platform.get_device_capability())


def _versions(libraries: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in libraries:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
