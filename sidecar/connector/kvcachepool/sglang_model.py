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
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from kvcachepool import sglang_settings, weights
from kvcachepool.sglang_settings import Settings, server_start, start_time

logger = logging.getLogger("kvcachepool")

#: Keys of a config.json with input other than text, and names of architectures that take it.
_MEDIA_KEY = re.compile("vision|visual|image|audio|video|speech|sound|thinker|multi_?modal|^mm_|vit_")
_MEDIA_ARCHITECTURE = re.compile("VL|Vision|Audio|ASR|OCR|Omni|Llava|Image|MM|CLIP|Whisper|ForConditionalGeneration")


class ModelIdentity:
    """Finds the identity while SGLang runs. For any thread."""

    def __init__(
        self, args: Any, model_name: str | None, model_id: str | None, *, trust_mm_hashes: bool = False
    ) -> None:
        """`model_id`: what the user says identifies the weights (`extra_config`). No files are read with it.
        `trust_mm_hashes`: images have the names that clients give them, and all clients are honest.
        """
        self._args = args
        self._name = model_name
        self._model_id = model_id
        self._trust_mm_hashes = trust_mm_hashes
        self._settings: Settings | None = None
        with contextlib.suppress(ValueError):  # `poll` reports it
            self._settings = Settings.of(args)
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
        if self._settings is None:
            raise ValueError("SGLang's arguments are not available")
        if self._settings.foreign:
            raise ValueError(f"weights, code or settings come from {', '.join(self._settings.foreign)}")
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
        """Digests of the weights and of the settings. Raises `ValueError` if files have changed since the server was
        started, because it may have loaded earlier ones.
        """
        digest = weights.weights_digest(folder, self._digests)
        found = None if digest is None else [digest, weights.settings_digest(folder)]
        reason = weights.changed_since(source, folder, self._start)
        if not reason and not weights.is_snapshot(folder):
            names = weights.weight_files(folder) + weights.setting_files(folder)
            names += [name for name in ("config.json",) if os.path.exists(os.path.join(folder, name))]
            reason = _changed_since_start(folder, names)
        if reason:
            raise ValueError(f"{reason}: {folder}")
        return found

    def _digest(self, model: list[Any]) -> str:
        scales = getattr(self._args, "quantization_param_path", None)
        parts = {
            "model": model,
            "name": self._name,
            "sglang": importlib.metadata.version("sglang"),
            "plugins": sglang_settings.plugins(),
            "arguments": self._settings.arguments if self._settings else None,
            "environment": self._settings.environment if self._settings else None,
            "scales": weights.content(scales) if scales else None,
        }
        if self._is_quantized(model):
            parts["device"] = _device()
        reasons = self._unshared(model)
        if reasons:
            parts["start"] = server_start()
            logger.warning(
                "this start of SGLang shares its KV with no other (%s): docs/guides/sglang.md", "; ".join(reasons)
            )
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _unshared(self, model: list[Any]) -> list[str]:
        """Why no other server, nor this one after a restart, may find these pages."""
        reasons = []
        if self._settings is None:
            reasons.append("UnknownIdentityField: SGLang's arguments")
        elif self._settings.unknown:
            reasons.append(f"UnknownIdentityField: {', '.join(self._settings.unknown)}")
        if not self._trust_mm_hashes and self._takes_media(model):
            reasons.append("MediaNamedByClients")
        return reasons

    def _takes_media(self, model: list[Any]) -> bool:
        """Whether requests may bring images, video or audio. When in doubt, they may."""
        # SGLang computes it before it starts ranks. Its frontend rejects or ignores media if this is false.
        known = getattr(getattr(self._args, "_model_config", None), "is_multimodal", None)
        if isinstance(known, bool):
            return known
        configs = _configs(model)
        return not configs or any(map(_describes_media, configs))

    def _is_quantized(self, model: list[Any]) -> bool:
        """Whether some weights are quantised. SGLang then chooses kernels of other precision by the generation of the
        GPUs. Of a model that the user named only the arguments say that.
        """
        arguments = ("quantization", "speculative_draft_model_quantization")
        return any(getattr(self._args, name, None) for name in arguments) or any(
            config.get("quantization_config") for config in _configs(model)
        )


def _configs(model: list[Any]) -> list[dict[str, Any]]:
    """What config.json of the model and of its draft model has."""
    return [part for files in model if isinstance(files, list) for part in files if isinstance(part, dict)]


def _describes_media(config: Any) -> bool:
    if isinstance(config, list):
        return any(map(_describes_media, config))
    if not isinstance(config, dict):
        return False
    architectures = config.get("architectures") or []
    return (
        any(_MEDIA_KEY.search(str(key)) for key in config)
        or any(_MEDIA_ARCHITECTURE.search(str(one)) for one in architectures)
        or any(map(_describes_media, config.values()))
    )


def _changed_since_start(folder: str, names: list[str]) -> str:
    """Why the server may have loaded other files than those that the folder has now, or "". Raises `OSError`."""
    started = start_time()
    if started is None:
        return "StartTimeUnknown"
    files = [os.path.join(folder, name) for name in names]
    # Without the folder itself: some network file systems invent its times.
    changes = [weights.stat_of(path).ctime_ns for path in files]
    changes += [os.lstat(link).st_ctime_ns for link in _links([folder, *files])]
    return "WeightsChangedDuringStart" if max(changes, default=0) > started * 1e9 else ""


def _links(paths: list[str]) -> set[str]:
    """All symbolic links on the way to these files. Raises `OSError`."""
    seen: set[str] = set()
    links: set[str] = set()
    left = [os.path.abspath(path) for path in paths]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        folder = os.path.dirname(path)
        left.append(folder)
        if os.path.islink(path):
            links.add(path)
            left.append(os.path.normpath(os.path.join(folder, os.readlink(path))))
    return links


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
