"""Content of a model's files: which files are relevant, their SHA-256, and whether vLLM loaded these files.

In the Hugging Face cache, the name of a weight file's blob is its hash. Other files are read once, in the background,
and the hash is cached on disk under the file's inode and times.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("kvcachepool")

#: Load formats whose weights are files in the model's folder.
LOCAL_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "sharded_state"}
)
#: Other load formats, with their names in messages.
_NOT_LOCAL = {
    "dummy": "DummyWeights",
    "runai_streamer": "RunaiStreamer",
    "runai_streamer_sharded": "RunaiStreamer",
    "tensorizer": "Tensorizer",
    "gguf": "Gguf",
    "remote": "RemoteWeights",
}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npy", ".npz", ".ckpt")
#: JSON files of a model's folder that cannot change KV: vocabularies at most decide token ids (tokenizer_config.json is
#: relevant, because it may name the class of a processor), and config.json is in the descriptor as vLLM parsed it.
_IRRELEVANT_JSON = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "chat_template.json",
    }
)
#: A checkpoint in its author's format, beside the one that is loaded (vLLM's default `ignore_patterns`).
_IGNORED_FOLDERS = frozenset({"original"})
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_BUFFER = 4 << 20
_MAX_READERS = 8
_NICE = 10
#: A file that changed this shortly before the check may change again with the same time stamp.
_TICK_NS = 20_000_000
_MAX_CACHED = 100_000


class Stat(NamedTuple):
    """Distinguishes versions of a file without reading it."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def stat_of(path: str) -> Stat:
    """The stat of an open file, which makes the client of a network file system revalidate it. Raises `OSError`."""
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
    return Stat(os.path.realpath(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def local_folder(model: str, revision: str | None, download_dir: str | None) -> str | None:
    """Local folder of a model's files: its own path, or the snapshot in the Hugging Face cache. None without one."""
    if os.path.isdir(model):
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        logger.debug("no local snapshot of %s: %s", model, error)
        return None


def is_snapshot(folder: str) -> bool:
    """Whether all relevant files of a folder are links of a Hugging Face cache, which names contents and never changes
    them. Raises `OSError`.
    """
    path = Path(os.path.abspath(folder))
    if path.parent.name != "snapshots" or _COMMIT.match(path.name) is None:
        return False
    names = weight_files(folder) + setting_files(folder)
    return all(Path(os.path.realpath(os.path.join(folder, name))).parent.name == "blobs" for name in names)


def _walk(folder: str) -> Iterator[str]:
    """Relative paths of all files except those in hidden folders. Raises `OSError`."""

    def failed(error: OSError) -> None:
        raise error

    seen = set()
    for root, folders, files in os.walk(folder, onerror=failed, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _IGNORED_FOLDERS)
        for name in files:
            yield os.path.relpath(os.path.join(root, name), folder)


def weight_files(folder: str) -> list[str]:
    """Relative paths of the files with weights. Raises `OSError`."""
    return sorted(name for name in _walk(folder) if name.endswith(_WEIGHTS))


def setting_files(folder: str) -> list[str]:
    """Files beside the weights that decide KV: settings of processors and of quantisation, the model's own code, and
    the index that selects the weights of several files.

    Raises `OSError`.
    """
    return sorted(
        name
        for name in _walk(folder)
        if name.endswith(".py") or (name.endswith(".json") and name not in _IRRELEVANT_JSON)
    )


def stamp(folder: str) -> str:
    """Changes when a relevant file changes. Raises `OSError`."""
    stats = [(name, *stat_of(os.path.join(folder, name))) for name in weight_files(folder) + setting_files(folder)]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


class Digests:
    """SHA-256 of large files: from names, from the cache, or computed on background threads."""

    def __init__(self, cache: str | None = None) -> None:
        """`cache`: the folder of the file with known hashes. By default one in vLLM's cache."""
        self._cache = _Cache(Path(cache) if cache is not None else _cache_folder())
        self._lock = threading.Lock()
        self._known: dict[Stat, str] = {}
        self._failed: dict[str, OSError] = {}
        self._wanted: dict[str, Stat] = {}
        self._thread: threading.Thread | None = None

    def get(self, path: str) -> str | None:
        """The hash, or None while it is computed. Raises `OSError`."""
        real = Path(os.path.realpath(path))
        if real.parent.name == "blobs" and _SHA256.match(real.name):
            stat_of(path)
            return real.name
        stat = stat_of(path)
        with self._lock:
            if path in self._failed:
                raise self._failed[path]
            known = self._known.get(stat)
            if known is None:
                self._wanted[path] = stat
            return known

    def work(self, timeout_s: float | None) -> bool:
        """Hashes the files that `get` did not know, for this long. Returns whether all are known. The work continues in
        the background.
        """
        with self._lock:
            if self._wanted and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="kvcachepool-weights", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        _lower_priority()
        with self._cache.locked():
            cached = self._cache.read()
            while True:
                with self._lock:
                    wanted, self._wanted = deque(self._wanted.items()), {}
                if not wanted:
                    return
                # Own threads, because vLLM would wait for those of a pool at exit.
                readers = [
                    threading.Thread(
                        target=self._hash_files, args=(wanted, cached), name="kvcachepool-weights", daemon=True
                    )
                    for _ in range(max(2, min(_MAX_READERS, len(os.sched_getaffinity(0)) // 2)))
                ]
                for reader in readers:
                    reader.start()
                for reader in readers:
                    reader.join()
                self._cache.write(cached)

    def _hash_files(self, wanted: deque[tuple[str, Stat]], cached: dict[Stat, str]) -> None:
        _lower_priority()
        while wanted:
            try:
                path, stat = wanted.popleft()
            except IndexError:
                return
            try:
                self._hash_file(path, stat, cached)
            except OSError as error:
                with self._lock:
                    self._failed[path] = error

    def _hash_file(self, path: str, stat: Stat, cached: dict[Stat, str]) -> None:
        digest = cached.get(stat)
        if digest is None:
            began_ns = time.time_ns()
            digest = content(path)
            if stat_of(path) != stat:
                # Changed while it was read. The next call of `get` uses its new stat.
                return
            if max(stat.mtime_ns, stat.ctime_ns) < began_ns - _TICK_NS:
                cached[stat] = digest
        with self._lock:
            self._known[stat] = digest


def content(path: str) -> str:
    """SHA-256 of a file. Raises `OSError`. The buffer is large, so that the GIL is taken rarely."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _lower_priority() -> None:
    """Lowers the priority of the calling thread below the engine's."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError:
        logger.debug("lowering the priority of a hashing thread failed", exc_info=True)


def _cache_folder() -> Path:
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm"
    )
    return Path(os.path.expanduser(root)) / "kvcachepool"


class _Cache:
    """Hashes on disk, by stat. Unreadable entries are computed again. The ranks of a node take turns, so that one of
    them reads the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other processes of this node. Does nothing if no lock can be created."""
        with contextlib.ExitStack() as stack:
            try:
                # Not beside the cache, which nodes may share: each reads its own files.
                path = os.path.join(tempfile.gettempdir(), f"kvcachepool-weights-{os.getuid()}.lock")
                fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                logger.info("each rank hashes the weights, because no lock file can be created: %s", error)
            yield

    def read(self) -> dict[Stat, str]:
        try:
            raw = json.loads((self._folder / "weights.json").read_text())
            return {Stat(str(path), *map(int, rest)): _checked(digest) for path, *rest, digest in raw["files"]}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def write(self, known: dict[Stat, str]) -> None:
        fresh = {stat: digest for stat, digest in list(known.items())[-_MAX_CACHED:] if os.path.exists(stat.path)}
        temporary = self._folder / f"weights.json.{os.getpid()}.{threading.get_native_id()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"files": [[*stat, digest] for stat, digest in fresh.items()]}))
            os.replace(temporary, self._folder / "weights.json")
        except OSError as error:
            logger.info("hashes of weights cannot be saved, so the next start computes them: %s", error)
            with contextlib.suppress(OSError):
                temporary.unlink()


def _checked(digest: Any) -> str:
    if not isinstance(digest, str) or not _SHA256.match(digest):
        raise ValueError("not a SHA-256 hash")
    return digest


def unshareable_source(location: str, load_format: str) -> str:
    """Why this process cannot identify the content of weights from this source, or ""."""
    reason = ""
    if load_format not in LOCAL_FORMATS:
        reason = _NOT_LOCAL.get(load_format, "LoadFormatUnknown")
    elif "://" in location or (from_modelscope() and not os.path.isdir(location)):
        reason = "RemoteWeights"
    elif location.endswith(".gguf"):
        reason = "Gguf"
    return reason


def from_modelscope() -> bool:
    """Models without a local folder come from another hub, so a snapshot of that name from Hugging Face is a different
    one.
    """
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def names_other_code(folder: str, hf_config: Any) -> bool:
    """Whether a config uses Python code from another repository (`auto_map` with `--`), whose content is unknown.

    Raises `OSError`.
    """
    configs = [hf_config]
    for name in setting_files(folder):
        if name.endswith(".json"):
            with contextlib.suppress(ValueError), open(os.path.join(folder, name), encoding="utf-8") as file:
                configs.append(json.load(file))
    maps = [config.get("auto_map") for config in configs if isinstance(config, dict)]
    return any("--" in json.dumps(one) for one in maps if one)


def weights_digest(folder: str, digests: Digests) -> str | None:
    """SHA-256 over names and contents of all weight files. None while they are read, "" without any.

    Raises `OSError`.
    """
    names = weight_files(folder)
    found = [(name, digests.get(os.path.join(folder, name))) for name in names]
    if not found:
        return ""
    if any(digest is None for _, digest in found):
        return None
    return _digest_of(found)


def settings_digest(folder: str) -> str:
    """SHA-256 over names and contents of the files beside the weights. Raises `OSError`."""
    return _digest_of([(name, content(os.path.join(folder, name))) for name in setting_files(folder)])


def _digest_of(found: list[Any]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


# -- Files that change while vLLM starts

#: Key of `kv_connector_extra_config` with the plugin's record of the files.
START = "kvcachepool.start"


class Source(NamedTuple):
    """Source of a model's files, as configured in vLLM."""

    model: str
    location: str
    revision: str | None
    download_dir: str | None

    def key(self) -> str:
        """Key in the plugin's record."""
        return f"{self.location}@{self.revision or ''}"


def source_of(config: Any, load: Any) -> Source:
    """The source of a ModelConfig and its LoadConfig."""
    model = str(config.model)
    return Source(
        model,
        str(getattr(config, "model_weights", "") or model),
        getattr(config, "revision", None),
        getattr(load, "download_dir", None),
    )


def source_from(fields: dict[str, Any]) -> Source:
    """A source from a mapping with its fields."""
    return Source(**{name: fields[name] for name in Source._fields})


def record_files(sources: list[Source]) -> dict[str, dict[str, str]]:
    """The state of the files before vLLM loads them. Never raises: unreadable files are left out."""
    seen: dict[str, dict[str, str]] = {}
    for source in sources:
        try:
            folder = local_folder(source.location, source.revision, source.download_dir)
            if folder is None:
                seen[source.key()] = {"folder": "", "stamp": ""}
            else:
                seen[source.key()] = {
                    "folder": os.path.realpath(folder),
                    "stamp": "" if is_snapshot(folder) else stamp(folder),
                }
        except OSError as error:
            logger.warning("files of %s cannot be read: %s", source.location, error)
    return seen


def changed_since(source: Source, folder: str, start: Any) -> str:
    """Why the current files may differ from those that vLLM loaded, or "". Raises `OSError`."""
    snapshot = is_snapshot(folder)
    now = "" if snapshot else stamp(folder)
    seen = start.get(source.key()) if isinstance(start, dict) else None
    if not isinstance(seen, dict):
        pinned = source.revision is not None and _COMMIT.match(source.revision) is not None
        return "" if snapshot and pinned else "StartNotWitnessed"
    here = os.path.realpath(folder)
    # Files that were missing before have since been downloaded into the Hugging Face cache.
    expected = {(here, ""), ("", "")} if snapshot else {(here, now)}
    return "" if (seen.get("folder"), seen.get("stamp")) in expected else "WeightsChangedDuringStart"
