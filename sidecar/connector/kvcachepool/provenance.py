"""Decides whether an image, video or audio clip is named by its content or by a user.

vLLM's front process hashes the items of a request unless the request names them. The scheduler sees only the name, and
a user may choose one that looks like a hash. So the front process proves each request whose names it computed: it adds
a token that no user knows to the request's `extra_args`. A request without the token is not cached. That happens if the
front process runs without this plugin, is not written in Python, or uses items that were processed elsewhere.

vLLM keeps processed items by name. If a user gave a name that looks like a hash, that item may replace later items with
this content, so such a name is never proven again.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from . import watch

#: The token, for all processes that vLLM starts.
VARIABLE = "KVCACHEPOOL_ITEM_PROOF"
#: Key of the token in a request.
KEY = "kvcachepool.item_proof"
#: vLLM hashes items with BLAKE3, SHA-256 (64 hex digits) or SHA-512.
_LIKE_A_HASH = re.compile(r"(?:[0-9a-f]{64}|[0-9a-f]{128})\Z")
_MAX_COMPUTED = 1 << 16
_MAX_GIVEN = 1 << 17
_EXIF_IMAGE_ID = 0x800D
_MARK = "_kvcachepool_original"


class Given:
    """Names that look like hashes and were not computed from content here. For any thread."""

    def __init__(self, limit: int = _MAX_GIVEN) -> None:
        """If there are more than `limit` names, every name counts as given."""
        self._limit = limit
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def add(self, name: Any) -> None:
        if isinstance(name, str) and _LIKE_A_HASH.match(name):
            with self._lock:
                if len(self._names) <= self._limit:
                    self._names.add(name)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return len(self._names) > self._limit or name in self._names


class _FrontProcess:
    """The front process's record of names."""

    def __init__(self) -> None:
        self.given = Given()
        #: Strings that vLLM computed, by address. An equal string of a user is another object.
        self._computed: OrderedDict[int, str] = OrderedDict()
        self._lock = threading.Lock()

    def computed(self, name: str) -> None:
        with self._lock:
            self._computed[id(name)] = name
            self._computed.move_to_end(id(name))
            while len(self._computed) > _MAX_COMPUTED:
                self._computed.popitem(last=False)

    def proves(self, name: Any) -> bool:
        with self._lock:
            computed_here = self._computed.get(id(name)) is name
        return computed_here and name not in self.given


_front = _FrontProcess()
#: State of the process with the scheduler.
_given = Given()


# -- The front process


def watch_front() -> None:
    """Wraps the functions with which vLLM names items and creates requests. If one is missing, no request is proven."""
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    if not hasattr(InputProcessor, _MARK):
        # Raises if one is missing. Nothing is wrapped then.
        _ = ProcessorInputs.get_mm_hashes, InputProcessor.inject_into_mm_cache
        setattr(InputProcessor, _MARK, InputProcessor.process_inputs)
        watch.wrap(ProcessorInputs, "get_mm_hashes", after=_note)
        watch.wrap(InputProcessor, "process_inputs", after=_prove)
        watch.wrap(InputProcessor, "inject_into_mm_cache", before=_note_given)
    os.environ.setdefault(VARIABLE, secrets.token_hex(16))


def _note(inputs: Any, result: dict[str, list[str]], /, *_: Any, **__: Any) -> None:
    for modality, names in result.items():
        named = (inputs.mm_uuid_items or {}).get(modality)
        items = list(inputs.mm_data_items[modality].get_all_items_for_hash())
        for at, name in enumerate(names):
            if (named is not None and named[at] is not None) or _names_itself(items[at]):
                _front.given.add(name)
            else:
                _front.computed(name)


def _names_itself(item: Any) -> bool:
    """vLLM uses the EXIF tag ImageID as an image's hash if a program set it to a UUID."""
    image = getattr(item, "media", item)
    read = getattr(image, "getexif", None)
    if read is None:
        return False
    try:
        return isinstance(read().get(_EXIF_IMAGE_ID), uuid.UUID)
    except Exception:
        return False


def _prove(_: Any, request: Any, /, *__: Any, **___: Any) -> None:
    features, params = getattr(request, "mm_features", None), request.sampling_params
    if params is None or not (features or getattr(request, "resumable", False)):
        return
    features = features or ()
    if all(_front.proves(feature.mm_hash) for feature in features):
        params.extra_args = {**(params.extra_args or {}), KEY: os.environ[VARIABLE]}
        return
    if params.extra_args and KEY in params.extra_args:
        # The object of an earlier request, which vLLM does not always copy.
        params.extra_args = {key: value for key, value in params.extra_args.items() if key != KEY}
    for feature in features:
        if not _front.proves(feature.mm_hash):
            _front.given.add(feature.mm_hash)


def _note_given(_: Any, mm_hashes: dict[str, list[str]], *__: Any, **___: Any) -> None:
    for name in itertools.chain.from_iterable(mm_hashes.values()):
        _front.given.add(name)


# -- The process with the scheduler


def proven(request: Any) -> bool:
    """Whether all items of a request are named by their content. Call it for each request that arrives, cached or not,
    because it remembers given names.
    """
    features = getattr(request, "mm_features", None) or ()
    if not features:
        return True
    lora = getattr(request, "lora_request", None)
    names = [_without(feature.identifier, None if lora is None else lora.lora_name) for feature in features]
    token = os.environ.get(VARIABLE, "")
    arguments = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    if not token or not secrets.compare_digest(str(arguments.get(KEY, "")).encode(), token.encode()):
        _remember(names)
        return False
    return all(isinstance(name, str) and _LIKE_A_HASH.match(name) and name not in _given for name in names)


def _without(identifier: Any, lora_name: str | None) -> Any:
    """vLLM may put the adapter's name before an item's."""
    if isinstance(identifier, str) and lora_name is not None:
        return identifier.removeprefix(f"{lora_name}:")
    return identifier


def _remember(names: Iterable[Any]) -> None:
    for name in names:
        _given.add(name)
