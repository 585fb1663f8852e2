"""What decides KV values: the model's parts of ModelId, the fingerprint of weight files, the content of LoRA adapters.

Two checkpoints under one name must not share KV, and fine-tunes have equal file names, sizes and headers. So per
tensor at least one page is sampled: under 2 s for 100 GB.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
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
#: Requests wait for a look at an adapter's files for so long; it takes microseconds where they are local.
_LOOK_S = 0.1
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


class _Adapter:
    """What is known of an adapter under one id; guarded by the lock of `AdapterHashes`. All times are monotonic.

    digest: None while it cannot be cached. asked_s: when a look at the files was asked for that has not ended yet,
    0 = there is none. confirmed_s: when the last look began that found the files as they were hashed. again_s: without
    a digest, the files are not looked at before.
    """

    __slots__ = ("again_s", "asked_s", "confirmed_s", "digest", "folder", "path", "stamp")

    def __init__(self, path: str) -> None:
        self.path = path
        self.folder = ""
        self.stamp: Stamp = ()
        self.digest: bytes | None = None
        self.asked_s = 0.0
        self.confirmed_s = 0.0
        self.again_s = 0.0


class _Background:
    """One task after the other on a daemon thread: where a file system never answers, vLLM still ends."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Call under a lock: the first task starts the thread."""
        self._tasks.put(task)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """No task begins any more."""
        self._closed = True
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            try:
                task()
            except Exception:
                logger.exception("a bug in the KV cache connector (files of LoRA adapters)")


class AdapterHashes:
    """Content hashes of LoRA adapters; an adapter is uncached until its hash is known for the use that is asked about.

    vLLM keeps an adapter's id when it loads other files under it, in place or after it dropped the adapter from memory,
    and reads the files when it loads the adapter for a use. So a hash is known for a use only once a look at the files
    that began after that use did has found them as they were hashed: one from before it says nothing, however recent.
    An adapter whose files change under its id is uncached from then on: nobody knows which of them vLLM has loaded.

    All file system calls are made by two threads, one that reads whole files and one that only looks whether they
    changed: a network file system may take its time, or never answer. While it does, no adapter is known.
    """

    def __init__(self, on_known: Callable[[str], None] | None = None) -> None:
        """`on_known` is called with the path, on a background thread, when a hash is known for uses up to then."""
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Adapter] = {}
        self._by_stamp: dict[tuple[str, Stamp], bytes] = {}
        self._on_known = on_known
        self._reader = _Background("kvcachepool-lora-read")
        self._looker = _Background("kvcachepool-lora-look")

    def get(self, path: str, load_id: int, since_s: float) -> bytes | None:
        """32 bytes over all files of the adapter, None while they are not known for this use. Never waits.

        load_id: `lora_int_id`; another one stands for another load, which is looked at anew. since_s: monotonic time
        at which the use began.
        """
        with self._lock:
            adapter = self._known.get((path, load_id))
            if adapter is None:
                adapter = self._known[path, load_id] = _Adapter(path)
            if adapter.digest is not None and adapter.confirmed_s >= since_s:
                return adapter.digest
            now_s = time.monotonic()
            if adapter.asked_s or (adapter.digest is None and now_s < adapter.again_s):
                return None
            adapter.asked_s = now_s
            if adapter.digest is None:
                self._reader.submit(functools.partial(self._learn, adapter))
            else:
                self._looker.submit(functools.partial(self._confirm, adapter))
        return None

    def soon(self, path: str, load_id: int) -> bool:
        """Whether a hash that `get` does not give yet is worth another question: its files are being looked at, not for
        long.
        """
        with self._lock:
            adapter = self._known.get((path, load_id))
            if adapter is None or adapter.digest is None:
                return False
            return not adapter.asked_s or time.monotonic() - adapter.asked_s < _LOOK_S

    def _learn(self, adapter: _Adapter) -> None:
        try:
            found = self._look_at(adapter.path)
        except OSError as error:
            logger.warning("LoRA adapter %s cannot be hashed yet: %s", adapter.path, error)
            found = None
        with self._lock:
            adapter.asked_s = 0.0
            if found is None:
                adapter.again_s = time.monotonic() + _ADAPTER_RETRY_S
            else:
                adapter.folder, adapter.stamp, adapter.digest, adapter.confirmed_s = found
        if found is not None and self._on_known is not None:
            self._on_known(adapter.path)

    def _look_at(self, path: str) -> tuple[str, Stamp, bytes, float] | None:
        """(folder, stamp, digest, when the last look began); None where the adapter has no files on this machine (yet:
        vLLM may be downloading it).
        """
        folder = local_folder(path, None, None)
        began_s = time.monotonic()
        stamp = stamp_of(folder) if folder is not None else ()
        if folder is None or not stamp:
            return None
        with self._lock:
            digest = self._by_stamp.get((folder, stamp))
        if digest is None:
            digest = _content(folder, [name for name, _, _ in stamp])
            began_s = time.monotonic()
            if stamp_of(folder) != stamp:
                return None
            with self._lock:
                self._by_stamp[folder, stamp] = digest
        return folder, stamp, digest, began_s

    def _confirm(self, adapter: _Adapter) -> None:
        began_s = time.monotonic()
        same = stamp_of(adapter.folder) == adapter.stamp
        with self._lock:
            adapter.asked_s = 0.0
            if same:
                adapter.confirmed_s = began_s
            else:
                adapter.digest, adapter.again_s = None, math.inf
        if not same:
            logger.warning("files of LoRA adapter %s changed under its id: it stays uncached", adapter.path)
        elif self._on_known is not None:
            self._on_known(adapter.path)

    def close(self) -> None:
        """Ends the background threads, without waiting for them."""
        self._reader.close()
        self._looker.close()


def stamp_of(folder: str) -> Stamp:
    """The stamp of a folder's files; empty where it is gone.

    Each file is opened: that asks the server of a network file system, which a stat alone does not while the client
    still trusts attributes from before (nfs(5), close-to-open).
    """
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file():
                    with open(entry.path, "rb", buffering=0) as file:
                        stat = os.fstat(file.fileno())
                    found.append((entry.name, stat.st_mtime_ns, stat.st_size))
    except OSError:
        return ()
    return tuple(sorted(found))


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
