"""Keys of the tier for vLLM's offloading: what makes the bytes of a chunk valid in another process.

A key is the SHA-256 of the *facts* (32 bytes), then vLLM's own offload key: the chained hash of the chunk's tokens and
the KV group. The facts are those of vLLM's own secondary tiers, the form of the bytes, and the model's identity.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from typing import Any

from . import weights
from .weights import Digests

logger = logging.getLogger("kvcachepool")

#: Length of vLLM's block hashes with sha256. Other algorithms have shorter ones, and may have collisions.
_HASH_BYTES = 32
_GROUP_BYTES = 4
#: Reasons for which a chunk has no key.
HASHING = "WeightsHashing"
HASH_REFUSED = "HashAlgorithmRefused"
#: Reasons for which no other process can name this one's chunks, besides those of the descriptor.
NO_IDENTITY = "NoModelIdentity"


class Keys:
    """Makes keys. Any thread may call `make`; `refusal` is a reason while there are none."""

    def __init__(self, facts: dict[str, Any], model: dict[str, Any] | None, identity: str) -> None:
        """Begins to read the model's files, in the background.

        Args:
            facts: plain values; processes share chunks only if all are equal.
            model: `descriptor.describe_settings` of this vLLM, or None if the plugin did not run.
            identity: the user's name for the weights, "" without one. Then the files are not read.
        """
        self._facts = facts
        self._model = model
        #: Why no other process can name these chunks, or "".
        self.private = ""
        self._lock = threading.Lock()
        self._identity: dict[str, Any] = {}
        self._prefix: bytes | None = None
        self._epoch = ""
        if model is None:
            self._settle({}, NO_IDENTITY)  # whatever the weights are called: settings decide the values, too
        elif identity:
            self._settle({"named": identity, "settings": model["settings"]}, model["unshared"])
        else:
            threading.Thread(target=self._read_files, name="kvcachepool-tier-keys", daemon=True).start()

    @property
    def refusal(self) -> str:
        """Why there are no keys yet, or ""."""
        return HASHING if self._prefix is None else ""

    @property
    def shared(self) -> bool:
        """Whether other processes with the same model can name these chunks."""
        return self._prefix is not None and not self.private

    def make(self, offload_key: bytes) -> bytes | None:
        """The key of a chunk. None while the model's files are read, and for hashes that are not SHA-256."""
        prefix = self._prefix
        if prefix is None or len(offload_key) != _HASH_BYTES + _GROUP_BYTES:
            return None
        return prefix + offload_key

    def why_none(self) -> str:
        """Why `make` returned None."""
        return self.refusal or HASH_REFUSED

    def draw_epoch(self) -> None:
        """Separates all later chunks from those before: weights may have changed."""
        with self._lock:
            self._epoch = os.urandom(16).hex()
            if self._prefix is not None:
                self._prefix = self._digest()

    def _settle(self, identity: dict[str, Any], private: str) -> None:
        self.private = private
        if private:
            logger.warning(
                "the tier's KV is not shared with other vLLM processes, nor found after a restart: %s", private
            )
            identity = {**identity, "private": os.urandom(16).hex()}
        with self._lock:
            self._identity = identity
            self._prefix = self._digest()

    def _digest(self) -> bytes:
        text = json.dumps([self._facts, self._identity, self._epoch], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def _read_files(self) -> None:
        assert self._model is not None
        try:
            found, reason = _files(self._model)
        except Exception as error:
            logger.warning("the model's files cannot be read: %s", error)
            found, reason = [], "WeightsUnreadable"
        self._settle({"files": found, "settings": self._model["settings"]}, self._model["unshared"] or reason)


def _files(model: dict[str, Any]) -> tuple[list[list[str]], str]:
    """(digests of the weights and of the files beside them, "") or ([], why they do not identify the model).

    Reads all files whose hash is unknown. Raises `OSError`.
    """
    digests, found = Digests(), []
    for fields in model["sources"]:
        source = weights.source_from(fields)
        beside = weights.local_folder(source.model, source.revision, source.download_dir)
        folder = weights.local_folder(source.location, source.revision, source.download_dir)
        if beside is None or folder is None:
            return [], "NoLocalWeights"
        if fields["remote_code"] and weights.names_other_code(beside, None):
            return [], "CodeElsewhere"
        read = _weights(folder, digests)
        # After the reading: files that changed since vLLM's start are not those that it loaded.
        reason = "" if read else "NoWeightFiles"
        reason = reason or weights.changed_since(source, folder, model["start"])
        if reason:
            return [], reason
        found.append([read, weights.settings_digest(beside)])
    return found, ""


def _weights(folder: str, digests: Digests) -> str:
    """The digest of the weight files, "" without any."""
    while (found := weights.weights_digest(folder, digests)) is None:
        digests.work(None)
    return found


def facts_of(offloading_spec: Any, chunk_bytes: int, file_mapper: Any, vllm_version: str) -> dict[str, Any]:
    """What vLLM's own secondary tiers have in their namespace, and what they leave out: vLLM's version and the form of
    the bytes.

    Args:
        file_mapper: vLLM's class `FileMapper`.
    """
    config = offloading_spec.config
    # vLLM's tiers let all TP sizes share one namespace if they consider blocks parallelism-agnostic. That is true of
    # canonical and of replicated pages only: otherwise a block has its ranks' parts one after the other.
    agnostic = bool(config.canonical_layout or config.replicated_layout)
    mapper = file_mapper.from_offloading_spec("", offloading_spec, offloading_spec.blocks_per_chunk, agnostic)
    return {
        **mapper.get_run_config(),
        "rank": mapper.rank,
        "chunk_bytes": chunk_bytes,
        "worker_block_bytes": config.worker_kv_bytes_per_block,
        "kv_cache_layout": config.kv_cache_layout,
        "vllm": vllm_version,
    }
