"""Hashes the content of LoRA adapters, checks their files before each use, and records which files vLLM has read."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from .weights import from_modelscope, local_folder

logger = logging.getLogger("kvcachepool")

_ADAPTER_RETRY_S = 5.0
#: Requests wait this long for a check of an adapter's files. It takes microseconds on a local file system.
_CHECK_WAIT_S = 0.1

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+$")
#: Names, times, inodes and sizes of an adapter's files. They are equal if the files have not changed.
Stamp = tuple[tuple[str, int, int, int, int], ...]
#: Instead of the digest of a stamp, if it is unknown which files vLLM has read.
_UNKNOWN = b""


class Content(NamedTuple):
    """An adapter's content.

    digest: hash over all files.
    stamp: digest of the stamp that these files had. Workers compare it with that of the files that vLLM has read.
    """

    digest: bytes
    stamp: bytes


class _Adapter:
    """State of an adapter under one id, guarded by the lock of `AdapterHashes`. All times are monotonic.

    content: None while it cannot be cached.
    check_started_s: when the pending check of the files was requested, 0 without one.
    confirmed_s: start of the last check that found the files as they were hashed.
    again_s: earliest time of the next check while there is no content.
    """

    __slots__ = ("again_s", "check_started_s", "confirmed_s", "content", "folder", "path", "stamp")

    def __init__(self, path: str) -> None:
        self.path = path
        self.folder = ""
        self.stamp: Stamp = ()
        self.content: Content | None = None
        self.check_started_s = 0.0
        self.confirmed_s = 0.0
        self.again_s = 0.0


class _Background:
    """Runs tasks one after another on a daemon thread, so that vLLM can exit even if a file system never answers."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Call under a lock. The first task starts the thread."""
        self._tasks.put(task)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Starts no further task."""
        self._closed = True
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            try:
                task()
            except Exception:
                logger.exception("unexpected error while reading files of LoRA adapters")


class _NeverKnown(Exception):
    """vLLM may read other files than those that would be hashed."""


class AdapterHashes:
    """Content hashes of LoRA adapters. An adapter is uncached until its hash is known for the requested use.

    vLLM keeps an adapter's id when it loads other files under it, in place or after it dropped the adapter from memory.
    It reads the files when it loads the adapter for a use. So a hash is valid for a use only if a check that started
    after the use found the files as they were hashed; earlier checks prove nothing. An adapter whose files change under
    its id stays uncached, because it is unknown which of them vLLM has loaded. Files that change between the check and
    vLLM's read are detected by `LoadedAdapters`.

    Two threads make all file system calls: one reads whole files, and the other only checks whether they changed. A
    network file system may be slow or never answer. Adapters are unknown until it does.
    """

    def __init__(self, on_known: Callable[[str], None] | None = None) -> None:
        """`on_known` is called with the path, on a background thread, when a hash becomes known for uses up to then."""
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Adapter] = {}
        self._by_stamp: dict[tuple[str, Stamp], bytes] = {}
        self._on_known = on_known
        self._reader = _Background("kvcachepool-lora-read")
        self._checker = _Background("kvcachepool-lora-check")

    def get(self, path: str, load_id: int, since_s: float) -> Content | None:
        """The adapter's content, or None while it is unknown for this use. Never waits.

        load_id: `lora_int_id`; another id means another load, which is checked again.
        since_s: monotonic time at which the use began.
        """
        with self._lock:
            adapter = self._known.get((path, load_id))
            if adapter is None:
                adapter = self._known[path, load_id] = _Adapter(path)
            if adapter.content is not None and adapter.confirmed_s >= since_s:
                return adapter.content
            now_s = time.monotonic()
            if adapter.check_started_s or (adapter.content is None and now_s < adapter.again_s):
                return None
            adapter.check_started_s = now_s
            if adapter.content is None:
                self._reader.submit(functools.partial(self._hash, adapter))
            else:
                self._checker.submit(functools.partial(self._confirm, adapter))
        return None

    def soon(self, path: str, load_id: int) -> bool:
        """Whether a hash that `get` does not return yet may be known soon: its files are being checked, and the check
        started recently.
        """
        with self._lock:
            adapter = self._known.get((path, load_id))
            if adapter is None or adapter.content is None:
                return False
            return not adapter.check_started_s or time.monotonic() - adapter.check_started_s < _CHECK_WAIT_S

    def _hash(self, adapter: _Adapter) -> None:
        found, wait_s = None, _ADAPTER_RETRY_S
        try:
            found = self._check_files(adapter.path)
        except OSError as error:
            logger.warning("LoRA adapter %s is not cached until its files can be read: %s", adapter.path, error)
        except _NeverKnown as reason:
            logger.warning("LoRA adapter %s is not cached: %s", adapter.path, reason)
            wait_s = math.inf
        with self._lock:
            adapter.check_started_s = 0.0
            if found is None:
                adapter.again_s = time.monotonic() + wait_s
            else:
                adapter.folder, adapter.stamp, digest, adapter.confirmed_s = found
                adapter.content = Content(digest, _short(adapter.stamp))
        if found is not None and self._on_known is not None:
            self._on_known(adapter.path)

    def _check_files(self, path: str) -> tuple[str, Stamp, bytes, float] | None:
        """(folder, stamp, digest, start of the last check), or None if the adapter has no files on this machine.

        Raises `OSError`, or `_NeverKnown`.
        """
        folder = _folder(path)
        began_s = time.monotonic()
        stamp = stamp_of(folder) if folder is not None else ()
        if folder is None or not stamp:
            return None
        with self._lock:
            digest = self._by_stamp.get((folder, stamp))
        if digest is None:
            digest = _content(folder, [name for name, *_ in stamp])
            began_s = time.monotonic()
            if stamp_of(folder) != stamp:
                raise _NeverKnown("its files changed while they were hashed")
            with self._lock:
                self._by_stamp[folder, stamp] = digest
        return folder, stamp, digest, began_s

    def _confirm(self, adapter: _Adapter) -> None:
        began_s, same = time.monotonic(), False
        try:
            # The folder too: a new revision of a repository may be downloaded while vLLM is offline.
            same = _folder(adapter.path) == adapter.folder and stamp_of(adapter.folder) == adapter.stamp
        finally:
            with self._lock:
                adapter.check_started_s = 0.0
                if same:
                    adapter.confirmed_s = began_s
                else:
                    adapter.content, adapter.again_s = None, math.inf
        if not same:
            logger.warning("LoRA adapter %s is not cached: its files changed under the same id", adapter.path)
        elif self._on_known is not None:
            self._on_known(adapter.path)

    def close(self) -> None:
        """Stops the background threads without waiting for them."""
        self._reader.close()
        self._checker.close()


class LoadedAdapters:
    """The files that vLLM has read for each adapter, in one worker. Used by vLLM's thread only.

    Only a worker sees when vLLM reads files, so it refuses jobs with KV of other ones. The stamps are taken right
    before and after vLLM reads the folder, on the same thread, which waits for the file system in any case.

    changed: ids for which vLLM has read other files than were hashed, or several, to be reported. Their jobs are
        refused from then on.
    """

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self._stamps: dict[int, bytes] = {}  # by id
        self._logged: set[int] = set()
        self._earlier: bytes | None = None
        self._before = _UNKNOWN

    def begin(self, lora: Any) -> None:
        """vLLM is about to read the adapter's files."""
        self._earlier, self._before = self._stamps.get(lora.lora_int_id), _UNKNOWN
        self._stamps[lora.lora_int_id] = _UNKNOWN
        self._before = _read_stamp(lora.lora_path)

    def end(self, lora: Any, succeeded: bool) -> None:
        """vLLM has read them, or failed, and keeps what it had."""
        number, earlier, before = lora.lora_int_id, self._earlier, self._before
        if not succeeded:
            del self._stamps[number]
            if earlier is not None:
                self._stamps[number] = earlier
        elif before and earlier in (None, before) and _read_stamp(lora.lora_path) == before:
            self._stamps[number] = before
        elif before or earlier:
            self._mark(number)

    def has_read(self, adapter: tuple[int, bytes] | None) -> bool:
        """Whether vLLM has read these files: id and `Content.stamp`. True for a job without an adapter."""
        if adapter is None:
            return True
        read = self._stamps.get(adapter[0], _UNKNOWN)
        return read != _UNKNOWN and read == adapter[1]

    def refused(self, adapter: tuple[int, bytes], computed: bool) -> None:
        """A job was refused because vLLM has not read these files. `computed`: it has used others."""
        if computed or adapter[0] in self._stamps:
            self._mark(adapter[0])

    def _mark(self, number: int) -> None:
        if number not in self._logged:
            self._logged.add(number)
            logger.warning("LoRA adapter %d is not cached: vLLM did not read the files that were hashed", number)
        self._stamps[number] = _UNKNOWN
        self.changed.add(number)


def _read_stamp(path: str) -> bytes:
    """Digest of the stamp of the files that vLLM reads now, or `_UNKNOWN`."""
    try:
        folder = _folder(path)
    except _NeverKnown:
        return _UNKNOWN
    stamp = stamp_of(folder) if folder is not None else ()
    return _short(stamp) if stamp else _UNKNOWN


def _short(stamp: Stamp) -> bytes:
    return hashlib.blake2b(repr(stamp).encode(), digest_size=16).digest()


def _folder(path: str) -> str | None:
    """The folder from which vLLM loads an adapter. Raises `_NeverKnown` for a repository that it may download again."""
    local = os.path.expanduser(path)
    if os.path.isabs(local) or os.path.exists(local) or not _REPOSITORY.match(path):
        return local
    from huggingface_hub import constants

    if from_modelscope() or not constants.HF_HUB_OFFLINE:
        raise _NeverKnown("vLLM loads its newest revision at any time; use a local folder, or set HF_HUB_OFFLINE=1")
    return local_folder(path, None, None)


def stamp_of(folder: str) -> Stamp:
    """The stamp of a folder's files; empty if it does not exist.

    Each file is opened, which makes the client of a network file system revalidate its attributes. A stat alone does
    not (nfs(5), close-to-open).
    """
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file():
                    with open(entry.path, "rb", buffering=0) as file:
                        stat = os.fstat(file.fileno())
                    found.append((entry.name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size))
    except OSError:
        return ()
    return tuple(sorted(found))


def _content(folder: str, names: list[str]) -> bytes:
    """SHA-256 over names and contents."""
    whole = hashlib.blake2b(digest_size=32)
    for name in names:
        one = hashlib.blake2b(digest_size=32)
        with open(os.path.join(folder, name), "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                one.update(block)
        whole.update(name.encode() + b"\0" + one.digest())
    return whole.digest()
