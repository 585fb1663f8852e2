"""The content of LoRA adapters, looked at before each use."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from .weights import local_folder

logger = logging.getLogger("kvcachepool")

_ADAPTER_RETRY_S = 5.0
#: Requests wait for a look at an adapter's files for so long; it takes microseconds where they are local.
_LOOK_S = 0.1

#: Names, times, inodes and sizes of an adapter's files: equal = not touched since.
Stamp = tuple[tuple[str, int, int, int, int], ...]


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
            digest = _content(folder, [name for name, *_ in stamp])
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
                    found.append((entry.name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size))
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
