"""Identity of the model that an SGLang server runs: contents of its files, and settings that decide the values of KV.

SGLang names a page by its tokens alone. Without the identity, a server with other weights under the same name would
load KV of the earlier ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from kvcachepool import weights
from kvcachepool.sglang_settings import server_start

logger = logging.getLogger("kvcachepool")

#: Arguments of SGLang that decide the values of KV or of states, beside the model's files.
_DECIDING = (
    "context_length",
    "dtype",
    "enable_int8_mamba_checkpoint",
    "enable_tf32_matmul",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "mamba_ssm_dtype",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "qsa_indexer_dtype",
    "quantization",
    "rl_quant_profile",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "weight_version",
)
#: Arguments that bring weights or code from elsewhere. With one of them only the user can name the model.
_FOREIGN = (
    "custom_weight_loader",
    "decrypted_config_file",
    "forward_hooks",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "uno_lora_path",
)


class ModelIdentity:
    """Finds the identity while SGLang runs. For any thread."""

    def __init__(self, args: Any, model_name: str | None, model_id: str | None) -> None:
        """`model_id`: what the user says identifies the weights (`extra_config`). No files are read with it."""
        self._args = args
        self._name = model_name
        self._model_id = model_id
        self._digests = weights.Digests()
        self._lock = threading.Lock()
        self._found: str | None = None
        self._failed = False
        #: The files as SGLang has just loaded them. They may be replaced at any time.
        self._start: dict[str, dict[str, str]] = {}
        if args is not None and not model_id:
            with contextlib.suppress(ValueError):  # `poll` reports it
                self._start = weights.record_files([source for source, _ in self._sources()])
        self.poll()

    def poll(self) -> str | None:
        """SHA-256 of the identity. None while files are read, and when there is none. Does not wait."""
        if self._found is not None or self._failed:
            return self._found
        if not self._lock.acquire(blocking=False):
            return None
        try:
            model = [self._model_id] if self._model_id else self._contents()
            if model is not None:
                self._found = self._digest(model)
                logger.info("identity of SGLang's model: %s", self._found)
        except (OSError, ValueError) as error:
            self._give_up(str(error))
        finally:
            self._lock.release()
        return self._found

    def _give_up(self, reason: str) -> None:
        self._failed = True
        logger.warning(
            "SGLang's model cannot be identified (%s): nothing is stored and all lookups are misses."
            ' Set "model_id" in --hicache-storage-backend-extra-config to a name that changes with the weights.',
            reason,
        )

    def _sources(self) -> list[tuple[weights.Source, str]]:
        """The model, its draft model and the adapters of `--lora-paths`, with their load format; adapters have none.
        Raises `ValueError`.
        """
        args = self._args

        def source(path: str, revision: str | None) -> weights.Source:
            return weights.Source(path, path, revision, getattr(args, "download_dir", None))

        found = [(source(args.model_path, getattr(args, "revision", None)), str(args.load_format))]
        draft = getattr(args, "speculative_draft_model_path", None)
        if draft:
            load_format = getattr(args, "speculative_draft_load_format", None) or args.load_format
            revision = getattr(args, "speculative_draft_model_revision", None)
            found.append((source(draft, revision), str(load_format)))
        # SGLang names these adapters by name and path, and one that is loaded later at random.
        return found + [(source(path, None), "") for path in _adapters(getattr(args, "lora_paths", None))]

    def _contents(self) -> list[Any] | None:
        """Digests of the files of the model and of its draft model. None while they are read. Raises `ValueError` when
        files do not say what the weights are, and `OSError`.
        """
        args = self._args
        if args is None:
            raise ValueError("SGLang's arguments are not available")
        foreign = [name for name in _FOREIGN if getattr(args, name, None)]
        if foreign:
            raise ValueError(f"weights or code come from {', '.join(foreign)}")
        found = [
            self._model(source, load_format) if load_format else self._adapter(source)
            for source, load_format in self._sources()
        ]
        self._digests.work(0)
        return None if any(one is None for one in found) else found

    def _adapter(self, source: weights.Source) -> list[Any] | None:
        folder = weights.local_folder(source.location, source.revision, source.download_dir)
        if folder is None:
            raise ValueError(f"no local folder of the adapter {source.location}")
        return self._files(source, folder)

    def _model(self, source: weights.Source, load_format: str) -> list[Any] | None:
        path = source.location
        reason = weights.unshareable_source(path, load_format)
        if reason:
            raise ValueError(reason)
        folder = weights.local_folder(path, source.revision, source.download_dir)
        if folder is None or (_from_modelscope() and not os.path.isdir(path)):
            raise ValueError(f"no local folder of {path}")
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        if weights.names_other_code(folder, config):
            raise ValueError("the model's code is in another repository")
        found = self._files(source, folder)
        if found and not found[0]:
            raise ValueError(f"no weights in {folder}")
        return None if found is None else [*found, config]

    def _files(self, source: weights.Source, folder: str) -> list[Any] | None:
        """Digests of the weights and of the settings. Raises `ValueError` if files have changed since the backend was
        created.
        """
        digest = weights.weights_digest(folder, self._digests)
        found = None if digest is None else [digest, weights.settings_digest(folder)]
        reason = weights.changed_since(source, folder, self._start)
        if reason:
            raise ValueError(f"{reason}: {folder}")
        return found

    def _digest(self, model: list[Any]) -> str:
        scales = getattr(self._args, "quantization_param_path", None)
        parts = {
            "model": model,
            "name": self._name,
            "sglang": importlib.metadata.version("sglang"),
            "arguments": {name: str(getattr(self._args, name, None)) for name in _DECIDING},
            "scales": weights.content(scales) if scales else None,
        }
        if self._is_quantized(model):
            parts["device"] = _device()
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _is_quantized(self, model: list[Any]) -> bool:
        """Whether some weights are quantised. SGLang then chooses kernels of other precision by the generation of the
        GPUs. Of a model that the user named only the arguments say that.
        """
        arguments = ("quantization", "speculative_draft_model_quantization")
        configs = [part for files in model if isinstance(files, list) for part in files if isinstance(part, dict)]
        return any(getattr(self._args, name, None) for name in arguments) or any(
            config.get("quantization_config") for config in configs
        )


def _device() -> str:
    """Compute capability of the GPUs, "" without one."""
    import torch

    return str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""


def _from_modelscope() -> bool:
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def _adapters(given: Any) -> Iterator[str]:
    """Paths in `--lora-paths`, before and after SGLang parsed it. Raises `ValueError`."""
    for one in given.values() if isinstance(given, dict) else given or []:
        if isinstance(one, dict):
            path = one.get("lora_path")
        else:
            path = one.rpartition("=")[2] if isinstance(one, str) else getattr(one, "lora_path", None)
        if not isinstance(path, str) or not path:
            raise ValueError(f"the adapter {one!r} has no path")
        yield path


class Clearable(Protocol):
    """A backend that forgets what was stored before."""

    def clear(self) -> bool: ...


class Epochs:
    """Epochs of the backends of this process. Ranks that clear equally often have equal ones. A backend that is
    attached later repeats none.
    """

    #: Number of the last epoch of any backend.
    last = 0
    #: That of the last change of weights; 0: the weights are those of the start.
    of_weights = 0

    @staticmethod
    def name(number: int) -> str:
        return f"{server_start()}-{number}" if number else ""


#: Backends of this process.
_watching: weakref.WeakSet[Clearable] = weakref.WeakSet()
_MARK = "_kvcachepool_original"


def clear_at_updates(backend: Clearable) -> None:
    """Clears the backend whenever SGLang changes the weights in this process."""
    _watching.add(backend)
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

        changes = ("update_weights_from_", "end_weight_update")
        updates = [name for name in vars(Updater) if name.startswith(changes)]
    except ImportError:
        updates = []
    if not updates:
        logger.warning("changes of weights are not noticed: clear the storage backend after each one")
    for name in updates:
        original = getattr(Updater, name)
        if not hasattr(original, _MARK):
            setattr(Updater, name, _watched(original))


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            # Also after a failure: some weights may have changed.
            backends = list(_watching)
            Epochs.last += not backends
            for backend in backends:
                backend.clear()
            Epochs.of_weights = Epochs.last

    setattr(update, _MARK, original)
    return update
