"""What decides KV values: the model's parts of ModelId, the fingerprint of weight files, the content of LoRA adapters.

Two checkpoints under one name must not share KV, and fine-tunes have equal file names, sizes and headers. So per
tensor at least one page is sampled: under 2 s for 100 GB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from .layout import Unserved

logger = logging.getLogger("kvcachepool")

_PAGE = 4096
_PAGES_PER_TENSOR = 4
_BYTES_PER_PAGE_SAMPLED = 64 << 20
_PAGES_PER_OPAQUE_FILE = 256
_MAX_HEADER = 100 << 20
_READERS = 8
_ADAPTER_RETRY_S = 5.0
#: Load formats whose weights do not come from files in the model's folder, with the name that is said for it.
_NOT_LOCAL = {
    "dummy": "DummyWeights",
    "runai_streamer": "RunaiStreamer",
    "runai_streamer_sharded": "RunaiStreamer",
    "tensorizer": "Tensorizer",
    "gguf": "Gguf",
    "remote": "RemoteWeights",
}
_SAFETENSORS = (".safetensors",)
_OPAQUE = (".bin", ".pt", ".pth")
_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
_LENGTH_DEPENDENT_ROPE = {"longrope", "su", "dynamic"}


class Sample(NamedTuple):
    """Bytes of a file that go into the fingerprint."""

    offset: int
    length: int


def safetensors_header(file: Any) -> tuple[bytes, int]:
    """(raw JSON header, offset of the data). Raises `ValueError` where the file is none."""
    raw = file.read(8)
    if len(raw) != 8:
        raise ValueError("file is too short for safetensors")
    (length,) = struct.unpack("<Q", raw)
    if length > _MAX_HEADER:
        raise ValueError(f"safetensors header of {length} bytes")
    header = file.read(length)
    if len(header) != length:
        raise ValueError("safetensors header is cut off")
    return header, 8 + length


def tensor_samples(header: bytes, data: int) -> list[Sample]:
    """At least one page per tensor, more of large ones, spread over the tensor."""
    samples = []
    tensors = json.loads(header)
    for name in sorted(tensors):
        if name == "__metadata__":
            continue
        begin, end = tensors[name]["data_offsets"]
        samples += _spread(
            data + begin, end - begin, min(_PAGES_PER_TENSOR, 1 + (end - begin) // _BYTES_PER_PAGE_SAMPLED)
        )
    return samples


def _spread(start: int, length: int, pages: int) -> list[Sample]:
    """`pages` samples in the middles of as many equal parts."""
    if length <= 0:
        return []
    part = length // pages
    size = min(_PAGE, part) or length
    return [Sample(start + i * part + (part - size) // 2, size) for i in range(pages)]


def file_fingerprint(path: str) -> str:
    """Hex digest of a weight file: size, header, sampled pages. Raises `OSError`, `ValueError`."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(struct.pack("<Q", size))
        if path.endswith(_SAFETENSORS):
            header, data = safetensors_header(file)
            digest.update(header)
            samples = tensor_samples(header, data)
        else:
            samples = _spread(0, size, max(1, min(_PAGES_PER_OPAQUE_FILE, size // _PAGE)))
        for offset, length in samples:
            digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()


def weight_files(folder: str) -> list[str]:
    """Names of the weight files that vLLM reads from a folder: safetensors, else what torch saves."""
    names = sorted(os.listdir(folder))
    return [n for n in names if n.endswith(_SAFETENSORS)] or [n for n in names if n.endswith(_OPAQUE)]


def folder_fingerprint(folder: str, names: Iterable[str]) -> str:
    """Hex digest of files by name and content sample."""
    listed = sorted(names)
    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(file_fingerprint, [os.path.join(folder, name) for name in listed]))
    whole = hashlib.blake2b(digest_size=32)
    for name, digest in zip(listed, digests, strict=True):
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


def local_folder(model: str, revision: str | None, download_dir: str | None) -> str | None:
    """Where a model's files lie here: its own path, or the snapshot in the Hugging Face cache; None = nowhere."""
    if os.path.isdir(model):
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        logger.debug("no local snapshot of %s: %s", model, error)
        return None


def weights(
    model: str, revision: str | None, load_format: str, download_dir: str | None, instance: str
) -> dict[str, str]:
    """The fingerprint of a model's weights, or, where no local files tell it, a name of its own with the reason.

    `{"kind": "files", "digest": hex}`, or `{"kind": "unshared", "reason": name, "instance": id}`: shared by the ranks
    of one instance and by nobody else.
    """
    reason = _NOT_LOCAL.get(load_format, "")
    if not reason and "://" in model:
        reason = "RemoteWeights"
    if not reason and model.endswith(".gguf"):
        reason = "Gguf"
    if not reason:
        folder = local_folder(model, revision, download_dir)
        if folder is None:
            reason = "NoLocalWeights"
        else:
            try:
                names = weight_files(folder)
                if names:
                    return {"kind": "files", "digest": folder_fingerprint(folder, names)}
                reason = "NoWeightFiles"
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("weight files of %s cannot be fingerprinted: %s", model, error)
                reason = "WeightsUnreadable"
    logger.warning("KV of %s is not shared with other vLLM processes: %s", model, reason)
    return {"kind": "unshared", "reason": reason, "instance": instance}


def plain(value: Any) -> Any:
    """A JSON-shaped copy: sorted keys where sets or mappings have none, names of dtypes, no addresses."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, dict):
        return {
            str(k): plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0])) if str(k) not in _VOLATILE
        }
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(v) for v in value)
    if callable(getattr(value, "to_dict", None)):
        return plain(value.to_dict())
    text = str(value)
    # An address in the text would differ from process to process.
    return type(value).__name__ if " at 0x" in text else text


def _code(folder: str | None) -> str:
    """Digest of a model's own Python files (`--trust-remote-code`)."""
    if folder is None:
        return ""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(n for n in os.listdir(folder) if n.endswith(".py")):
        with open(os.path.join(folder, name), "rb") as file:
            digest.update(f"{name}\0".encode() + file.read())
    return digest.hexdigest()


def _one_model(config: Any, load: Any, instance: str) -> dict[str, Any]:
    revision = getattr(config, "revision", None)
    download_dir = getattr(load, "download_dir", None)
    model = str(config.model)
    location = str(getattr(config, "model_weights", "") or model)
    trusts = bool(getattr(config, "trust_remote_code", False))
    hf = plain(config.hf_config)
    parts = {
        # A path says where this machine keeps the files, not what they are: the fingerprint does.
        "id": None if os.path.isdir(model) else model,
        "weights": weights(location, revision, str(getattr(load, "load_format", "auto")), download_dir, instance),
        "dtype": plain(config.dtype),
        "quantization": plain(getattr(config, "quantization", None)),
        "implementation": plain(getattr(config, "model_impl", None)),
        "attention_dtype": plain(getattr(config, "override_attention_dtype", None)),
        "disable_sliding_window": bool(getattr(config, "disable_sliding_window", False)),
        "hf_config": hf,
    }
    if trusts:
        parts["code"] = {
            "revision": plain(getattr(config, "code_revision", None)),
            "digest": _code(local_folder(model, revision, download_dir)),
        }
    if _length_dependent(hf):
        parts["max_model_len"] = int(config.max_model_len)
    return parts


def _length_dependent(hf: Any) -> bool:
    """Does the rotary embedding depend on the configured length?"""
    if isinstance(hf, dict):
        kind = str(hf.get("rope_type") or hf.get("type") or "")
        return kind in _LENGTH_DEPENDENT_ROPE or any(_length_dependent(v) for v in hf.values())
    return False


def model_parts(vllm_config: Any, instance: str) -> dict[str, Any]:
    """The worker's part of the model descriptor; equal on all ranks of an instance. Raises `Unserved`."""
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise Unserved(
            "KvScalesFromFirstBatch", "scales of the first batch decide the stored values (calculate_kv_scales)"
        )
    load = vllm_config.load_config
    parts = {
        "engine": "vllm",
        "model": _one_model(vllm_config.model_config, load, instance),
        "kv_cache": {
            "dtype": str(cache.cache_dtype),
            "scales": "checkpoint",
            "skip_layers": plain(getattr(cache, "kv_cache_dtype_skip_layers", None)),
            "sliding_window": plain(getattr(cache, "sliding_window", None)),
        },
    }
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        draft = getattr(speculative, "draft_model_config", None)
        parts["speculative"] = {
            "method": plain(getattr(speculative, "method", None)),
            "draft": None if draft is None else _one_model(draft, load, instance),
        }
    return parts


#: Names, modification times and sizes of an adapter's files: equal = not touched since.
Stamp = tuple[tuple[str, int, int], ...]


class _Adapter(NamedTuple):
    """What is known of an adapter. No digest: it was looked at and cannot be cached, until `again_at` (monotonic)."""

    folder: str
    stamp: Stamp
    digest: bytes | None
    again_at: float


class AdapterHashes:
    """Content hashes of LoRA adapters, made off the engine's thread; an adapter is uncached until its hash is known.

    vLLM keeps an adapter's id when it loads other files under it, in place or after it dropped the adapter from memory.
    So an adapter whose files change under its id is uncached from then on: nobody knows which of them vLLM has loaded.
    """

    def __init__(self, on_known: Callable[[str], None] | None = None) -> None:
        """`on_known` is called with the path, on the background thread, when a hash has become known."""
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Adapter | None] = {}
        self._by_stamp: dict[tuple[str, Stamp], bytes] = {}
        self._on_known = on_known
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvcachepool-lora")

    def get(self, path: str, load_id: int = 0) -> bytes | None:
        """32 bytes over all files of the adapter, None while unknown. Reads no file: a stat for each, at most.

        load_id: `lora_int_id`; another one stands for another load, which is looked at anew.
        """
        key = (path, load_id)
        with self._lock:
            if key in self._known:
                adapter = self._known[key]
                if adapter is None or (adapter.digest is None and time.monotonic() < adapter.again_at):
                    return None
                if adapter.digest is not None:
                    if stamp_of(adapter.folder) == adapter.stamp:
                        return adapter.digest
                    logger.warning("files of LoRA adapter %s changed under its id: it stays uncached", path)
                    self._known[key] = adapter._replace(digest=None, again_at=float("inf"))
                    return None
            self._known[key] = None
        self._pool.submit(self._learn, key)
        return None

    def _learn(self, key: tuple[str, int]) -> None:
        adapter = _Adapter("", (), None, time.monotonic() + _ADAPTER_RETRY_S)
        try:
            adapter = self._look_at(key[0]) or adapter
        except OSError as error:
            logger.warning("LoRA adapter %s cannot be hashed yet: %s", key[0], error)
        with self._lock:
            self._known[key] = adapter
        if adapter.digest is not None and self._on_known is not None:
            self._on_known(key[0])

    def _look_at(self, path: str) -> _Adapter | None:
        """None where the adapter has no files on this machine (yet: vLLM may be downloading it)."""
        folder = local_folder(path, None, None)
        stamp = stamp_of(folder) if folder is not None else ()
        if folder is None or not stamp:
            return None
        with self._lock:
            digest = self._by_stamp.get((folder, stamp))
        if digest is None:
            digest = _content(folder, [name for name, _, _ in stamp])
            if stamp_of(folder) != stamp:
                return None
            with self._lock:
                self._by_stamp[folder, stamp] = digest
        return _Adapter(folder, stamp, digest, 0.0)

    def close(self) -> None:
        """Ends the background thread."""
        with contextlib.suppress(RuntimeError):
            self._pool.shutdown(wait=False, cancel_futures=True)


def stamp_of(folder: str) -> Stamp:
    """The stamp of a folder's files; empty where it is gone."""
    try:
        with os.scandir(folder) as entries:
            found = ((entry.name, entry.stat()) for entry in entries if entry.is_file())
            return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in found))
    except OSError:
        return ()


def _content(folder: str, names: list[str]) -> bytes:
    """32 bytes over names and whole contents."""
    whole = hashlib.blake2b(digest_size=32)
    for name in names:
        one = hashlib.blake2b(digest_size=32)
        with open(os.path.join(folder, name), "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                one.update(block)
        whole.update(name.encode() + b"\0" + one.digest())
    return whole.digest()
