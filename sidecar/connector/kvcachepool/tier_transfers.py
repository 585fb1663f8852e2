"""Copies between the host memory of vLLM's primary tier and the sidecar, on threads, as jobs with deadlines.

A job is split into parts of a few MiB, which the threads of its direction take in order. A job ends when all its parts
have: copied, refused, or dropped at the deadline. The bytes of unfinished jobs are limited per direction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .client import Client, Header, Item, Leased, Put, Refused, Unavailable

logger = logging.getLogger("kvcachepool")

LOAD, STORE = "load", "store"
#: Results of a chunk's copy, in metrics and logs.
LOADED, STORED, EXISTS = "loaded", "stored", "exists"
#: Refusals of this module. Others are the names of the client.
TOO_MANY_BYTES = "TooManyBytesInFlight"
DEADLINE = "Deadline"
DRAINED = "Drained"
ABSENT = "Absent"
DIFFERENT = "DifferentShape"
TAKEN_BACK = "TakenBack"
FAILED = "Failed"
_PUT_RESULTS = {
    Put.STORED: STORED,
    Put.EXISTS: EXISTS,
    Put.NO_ROOM: "NoRoom",
    Put.QUOTA: "QuotaExceeded",
    Put.TOO_LARGE: "ValueTooLarge",
    Put.UNAVAILABLE: "ServerUnavailable",
}
_GOOD = frozenset({LOADED, STORED, EXISTS})

_PART_BYTES = 16 << 20
_LOG_S = 60.0


class Chunk(NamedTuple):
    """A chunk of a job: vLLM's key, the sidecar's key, and its row of the primary tier's memory."""

    offload_key: bytes
    key: bytes
    row: int


class Finished(NamedTuple):
    """The end of a job. copied: offload keys that are in the primary tier (load) or in the sidecar (store)."""

    job_id: int
    kind: str
    asked: tuple[bytes, ...]
    copied: tuple[bytes, ...]
    seconds: float


class _Job:
    def __init__(self, job_id: int, kind: str, asked: tuple[bytes, ...], deadline: float) -> None:
        self.job_id = job_id
        self.kind = kind
        self.asked = asked
        self.deadline = deadline
        self.began = time.monotonic()
        self.copied: list[bytes] = []
        self.parts = 0

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


class _Part(NamedTuple):
    job: _Job
    chunks: Sequence[Chunk]


class Counts:
    """Counts chunks by (operation, result). Logs each refusal at most once per minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], float] = {}

    def add(self, operation: str, result: str, chunks: int, *, refused: bool = False) -> None:
        """`refused`: the result is worth a log line."""
        if not chunks:
            return
        now = time.monotonic()
        with self._lock:
            self._counts[operation, result] += chunks
            log = refused and now - self._logged.get((operation, result), -_LOG_S) >= _LOG_S
            if log:
                self._logged[operation, result] = now
        if log:
            logger.warning("the tier refused: operation=%s reason=%s chunks=%d", operation, result, chunks)

    def take(self) -> Counter[tuple[str, str]]:
        """The counts since the last call."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken


class Transfers:
    """All jobs of a tier. No method blocks, except `drain` and `join`."""

    def __init__(
        self,
        client: Client,
        view: memoryview,
        counts: Counts,
        *,
        threads: dict[str, int],
        limits: dict[str, int],
        ttl_s: int,
    ) -> None:
        """
        Args:
            view: the primary tier's memory, of shape (rows, bytes of a row). Rows are contiguous.
            threads: how many copy, per direction.
            limits: bytes of unfinished jobs, per direction.
            ttl_s: age at which stored chunks expire; 0: never in memory.
        """
        assert view.strides is not None
        self.row_bytes = view.strides[0]
        self._client = client
        self._bytes = view.cast("B")
        self._counts = counts
        self._limits = limits
        self._ttl_s = ttl_s
        self._header = Header(shape=(self.row_bytes,), dtype="uint8", format="vllm-offload-1")
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Part]] = {LOAD: deque(), STORE: deque()}
        self._in_flight = {LOAD: 0, STORE: 0}
        self._jobs: set[_Job] = set()
        self._finished: list[Finished] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=f"kvcachepool-tier-{kind}-{i}", daemon=True)
            for kind, count in threads.items()
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, kind: str, job_id: int, asked: Sequence[bytes], chunks: Sequence[Chunk], timeout_s: float) -> None:
        """Starts a job.

        Args:
            asked: offload keys of the whole job.
            chunks: those to copy. What exceeds the limit of bytes is refused from the end, because the first chunks of
                a prefix are of use without the others.
            timeout_s: when parts that have not begun are dropped, and how long copies may wait for the sidecar.
        """
        job = _Job(job_id, kind, tuple(asked), time.monotonic() + timeout_s)
        with self._changed:
            room = max(0, self._limits[kind] - self._in_flight[kind]) // self.row_bytes
            taken = chunks[:room] if not self._closed else ()
            per_part = max(1, _PART_BYTES // self.row_bytes)
            parts = [_Part(job, taken[i : i + per_part]) for i in range(0, len(taken), per_part)]
            job.parts = len(parts)
            self._jobs.add(job)
            self._in_flight[kind] += len(taken) * self.row_bytes
            self._queues[kind].extend(parts)
            if not parts:
                self._end(job)
            self._changed.notify_all()
        self._counts.add(kind, TOO_MANY_BYTES, len(chunks) - len(taken), refused=True)

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call."""
        with self._changed:
            taken, self._finished = self._finished, []
        return taken

    def bytes_in_flight(self, kind: str) -> int:
        """Bytes of parts that have not ended."""
        return self._in_flight[kind]

    def drain(self) -> None:
        """Drops the parts that have not begun, and waits until no thread touches the primary tier's memory."""
        with self._changed:
            self._drop_queued()
            self._changed.wait_for(lambda: not self._jobs)

    def stop(self) -> None:
        """Drops the parts that have not begun. None begins any more."""
        with self._changed:
            self._closed = True
            self._drop_queued()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads after `stop`. False if one is still busy after this time: it may touch the memory."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._bytes.release()
        return True

    def _drop_queued(self) -> None:
        for kind, waiting in self._queues.items():
            while waiting:
                part = waiting.popleft()
                self._counts.add(kind, DRAINED, len(part.chunks))
                self._part_ended(part, ())

    def _run(self, kind: str) -> None:
        copy = self._load if kind == LOAD else self._store
        waiting = self._queues[kind]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: waiting or self._closed)
                if not waiting:
                    return
                part = waiting.popleft()
            results = self._results(copy, part)
            for result, count in Counter(results).items():
                self._counts.add(kind, result, count, refused=result not in _GOOD and result != ABSENT)
            copied = [chunk.offload_key for chunk, result in zip(part.chunks, results, strict=True) if result in _GOOD]
            with self._changed:
                self._part_ended(part, copied)

    def _results(self, copy: Callable[[_Part], list[str]], part: _Part) -> list[str]:
        """A result per chunk. Never raises."""
        if part.job.left_s() <= 0:
            reason = DEADLINE
        else:
            try:
                return copy(part)
            except Unavailable as error:
                reason = error.reason
            except Refused as error:
                reason = error.code
            except Exception:
                logger.exception("a %s of the tier failed", part.job.kind)
                reason = FAILED
        return [reason] * len(part.chunks)

    def _load(self, part: _Part) -> list[str]:
        with self._client.lease([chunk.key for chunk in part.chunks], timeout_s=part.job.left_s()) as lease:
            return [self._read(leased, chunk) for leased, chunk in zip(lease, part.chunks, strict=True)]

    def _read(self, leased: Leased | None, chunk: Chunk) -> str:
        if leased is None:
            return ABSENT
        if leased.nbytes != self.row_bytes or leased.header != self._header:
            return DIFFERENT
        return LOADED if leased.read_into(self._row(chunk)) else TAKEN_BACK

    def _store(self, part: _Part) -> list[str]:
        items = [Item(chunk.key, self._row(chunk), self._header) for chunk in part.chunks]
        put = self._client.put(items, ttl_s=self._ttl_s, timeout_s=part.job.left_s())
        return [_PUT_RESULTS[one] for one in put]

    def _row(self, chunk: Chunk) -> memoryview:
        return self._bytes[chunk.row * self.row_bytes : (chunk.row + 1) * self.row_bytes]

    def _part_ended(self, part: _Part, copied: Sequence[bytes]) -> None:
        job = part.job
        self._in_flight[job.kind] -= len(part.chunks) * self.row_bytes
        job.copied += copied
        job.parts -= 1
        if not job.parts:
            self._end(job)

    def _end(self, job: _Job) -> None:
        self._jobs.discard(job)
        self._finished.append(
            Finished(job.job_id, job.kind, job.asked, tuple(job.copied), time.monotonic() - job.began)
        )
        self._changed.notify_all()
