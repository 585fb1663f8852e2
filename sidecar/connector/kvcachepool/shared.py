"""The process's shared state with the sidecar: incarnation, proof of death, arena and slot table.

One instance per process (`shared()`), used by the scheduler part, the worker part and the object client: one pidfd, one
byte of the lock file, one mapping. The protocol's documentation has the rules ("Sessions", "Shared memory").
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("kvcachepool")

#: Arena bytes per row of the slot table. A slot starts at `slot * ROW_BYTES`.
ROW_BYTES = 64 << 10
#: Slot number of an absent section.
NO_SLOT = 0xFFFFFFFF
#: Row states.
FREE, GRANTED, COMMITTED, PUBLISHED = range(4)

_MAGIC = b"KVCPSLOT"
_TABLE_VERSION = 1
_TABLE_HEADER = struct.Struct("<8sIIQQIIQQQI")
#: Positions of `populated_rows`, `capacity_rows`, `shrinks` and `lowest_rows` in the table's header, in 32-bit words.
_POPULATED_WORD, _CAPACITY_WORD, _SHRINKS_WORD, _LOWEST_WORD = range(16, 20)
_ROW_WORDS = 16
_LOCK_BASE = 4096
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23

U32: TypeAlias = npt.NDArray[np.uint32]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def lock_offset(number: int) -> int:
    """The byte of the lock file that a process with this number locks."""
    return _LOCK_BASE + number


class SharedMemoryError(Exception):
    """Descriptors from the sidecar cannot be used. The message has the reason."""


class StillMappedError(SharedMemoryError):
    """As `SharedMemoryError`, and the mapped memory could not be unmapped."""


class Refs(NamedTuple):
    """Decoded section references: one entry per section, all arrays of the same length."""

    slots: U32
    generations: U32
    lengths: U32
    sections: U32

    @staticmethod
    def read(packed: bytes) -> Refs:
        """Decodes 16-byte references. Raises `ValueError` if the length is not a multiple of 16."""
        words = np.frombuffer(packed, dtype="<u4").reshape(-1, 4)
        return Refs(words[:, 0], words[:, 1], words[:, 2], words[:, 3])


def fence() -> None:
    """Orders earlier copies before later reads of the slot table.

    A lock that is taken and released twice, for acquire and release on weakly ordered machines. x86 does not need it.
    """
    for _ in range(2):
        with _fence_lock:
            pass


_fence_lock = threading.Lock()


def map_shared(fd: int, length: int, prot: int) -> int:
    """Maps the first bytes of a file, hidden from forked children and core dumps. Returns the address. Raises
    `SharedMemoryError`.
    """
    address = _libc.mmap(None, length, prot, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise SharedMemoryError(f"mmap of {length} bytes failed: {os.strerror(ctypes.get_errno())}")
    if _libc.madvise(address, length, _MADV_DONTFORK) != 0:
        error = os.strerror(ctypes.get_errno())
        _libc.munmap(address, length)
        raise SharedMemoryError(f"madvise(MADV_DONTFORK) failed: {error}")
    # A core dump would allocate all pages of the file.
    _libc.madvise(address, length, _MADV_DONTDUMP)
    return int(address)


def unmap(address: int, length: int) -> None:
    """Unmaps memory of `map_shared`."""
    _libc.munmap(address, length)


class Mapping:
    """The arena (read and write) and the slot table (read only) of one region, mapped into this process.

    Forked children get neither. After `close` no view may be used, so users end their copies first
    (`Participant.before_unmap`).
    """

    def __init__(self, region: int, arena_fd: int, table_fd: int, arena_bytes: int, table_bytes: int) -> None:
        """Maps both and takes the descriptors. Raises `SharedMemoryError`; the caller then keeps the descriptors."""
        for name, fd, expected in (("arena", arena_fd, arena_bytes), ("slot table", table_fd, table_bytes)):
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise SharedMemoryError(f"{name} is not a memfd: {error}") from None
            if not seals & fcntl.F_SEAL_SHRINK:
                raise SharedMemoryError(f"{name} is not sealed against shrinking")
            size = os.fstat(fd).st_size
            if expected == 0 or size < expected:
                raise SharedMemoryError(f"{name} has {size} bytes, expected {expected}")
        self.region = region
        self.arena_bytes = arena_bytes
        self.table_bytes = table_bytes
        #: `close` is about to follow: a part that has ended its copies must not begin others.
        self.retired = False
        self.closed = False
        self.table_address = map_shared(table_fd, table_bytes, mmap.PROT_READ)
        try:
            self._read_header()
            self.arena_address = map_shared(arena_fd, arena_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            unmap(self.table_address, table_bytes)
            raise
        self.arena_fd = arena_fd
        self.table_fd = table_fd

    def _read_header(self) -> None:
        raw = ctypes.string_at(self.table_address, _TABLE_HEADER.size)
        (magic, version, row_bytes, region, arena_bytes, rows, _chunks, segment_bytes, rows_offset, _, _) = (
            _TABLE_HEADER.unpack(raw)
        )
        if magic != _MAGIC or version != _TABLE_VERSION or row_bytes != ROW_BYTES:
            raise SharedMemoryError(f"slot table has an unknown format (magic {magic!r}, version {version})")
        if region != self.region or arena_bytes != self.arena_bytes:
            raise SharedMemoryError(f"slot table is of another arena: region {region}, {arena_bytes} bytes")
        if rows * ROW_BYTES > arena_bytes or rows_offset + rows * _ROW_WORDS * 4 > self.table_bytes:
            raise SharedMemoryError(f"slot table of {self.table_bytes} bytes cannot hold {rows} rows")
        self.segment_bytes = segment_bytes
        buffer = (ctypes.c_char * (rows * _ROW_WORDS * 4)).from_address(self.table_address + rows_offset)
        self._rows = np.frombuffer(buffer, dtype=np.uint32).reshape(rows, _ROW_WORDS)
        self._generations = self._rows[:, 1]
        words = (ctypes.c_char * (_LOWEST_WORD * 4 + 4)).from_address(self.table_address)
        self._header = np.frombuffer(words, dtype=np.uint32)
        self._populated = bytearray(rows)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena in use, from its start. Changes while the arena is mapped."""
        # 0 from a sidecar whose arenas have one size
        return int(self._header[_CAPACITY_WORD]) * ROW_BYTES or self.arena_bytes

    @property
    def populated_bytes(self) -> int:
        """Bytes of the arena with pages, from its start."""
        return int(self._header[_POPULATED_WORD]) * ROW_BYTES

    @property
    def shrinks(self) -> int:
        """Number of times that the sidecar freed pages at the arena's end. Page locks of before, from `lowest_bytes`
        on, are of no use: pages that come back in their place are others.
        """
        return int(self._header[_SHRINKS_WORD])

    @property
    def lowest_bytes(self) -> int:
        """Bytes at the arena's start that never lost their pages."""
        return int(self._header[_LOWEST_WORD]) * ROW_BYTES

    def arena_buffer(self) -> ctypes.Array[ctypes.c_char]:
        """The arena as a writable buffer (for `torch.frombuffer`)."""
        return (ctypes.c_char * self.arena_bytes).from_address(self.arena_address)

    def inside(self, slots: U32, lengths: U32) -> bool:
        """Whether all these slots are inside the arena, with these lengths in bytes."""
        ends = slots.astype(np.uint64) * ROW_BYTES + lengths
        return bool((slots < len(self._rows)).all() and (ends <= self.arena_bytes).all())

    def of_generation(self, slots: U32, generations: U32) -> npt.NDArray[np.bool_]:
        """Whether each of these slots still has the generation of its reference."""
        same: npt.NDArray[np.bool_] = self._generations[slots] == generations
        return same

    def same_generation(self, slots: U32, generations: U32) -> bool:
        """Whether all these slots still have the generation of their references."""
        return bool(self.of_generation(slots, generations).all())

    def granted_to(self, owner: int, slots: U32, generations: U32) -> bool:
        """Whether all these slots are GRANTED to this owner (a lock number), with the generation of their
        references.
        """
        rows = self._rows[slots, :3]
        return bool(((rows[:, 0] == GRANTED) & (rows[:, 1] == generations) & (rows[:, 2] == owner)).all())

    def populate(self, slots: U32, lengths: U32) -> None:
        """Maps the pages of these slots (lengths in bytes, all inside the arena) with one call per slot, once. Page
        faults of the copy would cost five times as much.

        Only slots of a job: a page that the sidecar has not allocated yet would be charged to this process. On kernels
        without it (before 5.14), the copy faults the pages in.
        """
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            end = slot - (-length // ROW_BYTES)
            if self._populated.find(0, slot, end) >= 0:
                _libc.madvise(self.arena_address + slot * ROW_BYTES, length, _MADV_POPULATE_WRITE)
                self._populated[slot:end] = b"\1" * (end - slot)

    def close(self) -> None:
        if self.closed:
            return
        self.retired = self.closed = True
        del self._rows, self._generations, self._header
        unmap(self.arena_address, self.arena_bytes)
        unmap(self.table_address, self.table_bytes)
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Closes only the memfds, in a forked child, which has no mapping."""
        for fd in (self.arena_fd, self.table_fd):
            with contextlib.suppress(OSError):
                os.close(fd)


class Participant(Protocol):
    """A part of the process that uses the shared state: a `Connection` with its role."""

    #: `scheduler`, `worker` or `opaque`.
    role: str
    #: The engine that this part belongs to.
    instance: str
    #: This part reads or writes the arena, so descriptors are mapped instead of closed.
    wants_memory: bool

    def before_unmap(self) -> None:
        """Ends all copies and drops all views of the mapping. Returns when none is in use."""

    def reconnect(self) -> None:
        """Sends another HELLO, because another part of the process released what the last one named."""

    def go_off(self, reason: str) -> None:
        """Turns off permanently, for this reason: a newer engine took over, or the other part of this one turned
        off.
        """


class Shared:
    """Process-wide state; thread safe. `hello_lock` is held while a HELLO is created, sent and answered."""

    def __init__(self) -> None:
        self.hello_lock = threading.Lock()
        self._lock = threading.RLock()
        self._lock_fds: list[int] = []
        self._participants: dict[str, Participant] = {}
        self._pidfd: int | None = None
        self._begin()

    def _begin(self) -> None:
        self.incarnation = os.urandom(16)
        self.lock_number: int | None = None
        self.mapping: Mapping | None = None
        self._hello_numbers: dict[str, int] = {}

    # -- participants

    def join(self, participant: Participant) -> None:
        """Adds a part. An older one of the same role in this process is turned off first."""
        with self._lock:
            older = self._participants.get(participant.role)
        if older is not None and older is not participant:
            older.go_off("Superseded")
        with self._lock:
            self._participants[participant.role] = participant

    def leave(self, participant: Participant) -> None:
        """Removes a part that has ended its copies. The last part that uses memory unmaps, and the last one of all
        unlocks the byte. The other part of the same engine is turned off too: alone it can neither load nor store, and
        the locked byte would keep the slots of the removed part owned.
        """
        with self._lock:
            if self._participants.get(participant.role) is not participant:
                return
            del self._participants[participant.role]
            if not any(p.wants_memory for p in self._participants.values()):
                self._close_mapping()
            if not self._participants:
                self._end_incarnation() if participant.role != "opaque" else self._pause()
            left = [p for p in self._participants.values() if p.instance == participant.instance]
        for other in left:
            other.go_off(f"{participant.role.title()}Off")

    def _end_incarnation(self) -> None:
        """Unlocks the byte. Later parts in this process are another incarnation."""
        self._unlock()
        self._begin()

    def _pause(self) -> None:
        """Unlocks the byte, and keeps the incarnation for the next client: the sidecar has a session per incarnation
        until the process ends. Descriptors of the lock file are closed, because clients may come and go.
        """
        self._unlock()
        _close(*self._lock_fds)
        self._lock_fds = []

    def _unlock(self) -> None:
        """Unlocks the byte, which means "dead" for all that was granted under its number."""
        if self.lock_number is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._lock_fds[-1], fcntl.LOCK_UN, 1, lock_offset(self.lock_number))
            self.lock_number = None

    # -- proof of death

    def hello_number(self, role: str) -> int:
        with self._lock:
            self._hello_numbers[role] = self._hello_numbers.get(role, 0) + 1
            return self._hello_numbers[role]

    def hello_fds(self) -> tuple[list[str], list[int], int | None]:
        """Names and descriptors for a HELLO (pidfd; arena and table if mapped), and the mapped region."""
        with self._lock:
            names, fds = [], []
            if self._pidfd is None:
                try:
                    self._pidfd = os.pidfd_open(os.getpid())
                except (OSError, AttributeError) as error:
                    logger.warning("no pidfd for this process (%s); the sidecar opens one", error)
            if self._pidfd is not None:
                names.append("pidfd")
                fds.append(self._pidfd)
            if self.mapping is None:
                return names, fds, None
            names += ["arena", "table"]
            fds += [self.mapping.arena_fd, self.mapping.table_fd]
            return names, fds, self.mapping.region

    def take_lock(self, fd: int, number: int) -> None:
        """Locks the byte of this number and keeps the descriptor as long. Raises `OSError` if another process holds
        it.
        """
        with self._lock:
            # No descriptor of the lock file is closed meanwhile, because closing any of them would drop the lock.
            self._lock_fds.append(fd)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, lock_offset(number))
            self.lock_number = number

    def start_over(self, by: Participant) -> None:
        """The sidecar does not see this process's lock, because its lock file changed. Ends all copies, unmaps,
        unlocks, and continues as another incarnation.
        """
        self.unmap(by)
        with self._lock:
            self._end_incarnation()

    # -- memory

    def adopt(self, region: int, arena_fd: int, table_fd: int, arena_bytes: int, table_bytes: int) -> None:
        """Maps a region, or closes its descriptors if no part of this process uses memory. Raises
        `SharedMemoryError`.
        """
        with self._lock:
            wanted = any(p.wants_memory for p in self._participants.values())
            try:
                if wanted and self.mapping is None:
                    self.mapping = Mapping(region, arena_fd, table_fd, arena_bytes, table_bytes)
                    return
            except BaseException:
                _close(arena_fd, table_fd)
                raise
            _close(arena_fd, table_fd)
            if wanted and self.mapping is not None and self.mapping.region != region:
                raise SharedMemoryError(f"region {self.mapping.region} is mapped, but the sidecar sent region {region}")

    def unmap(self, by: Participant) -> None:
        """Ends all copies of the process, then unmaps. All parts except `by`, which sends HELLO itself, send another
        HELLO.
        """
        with self._lock:
            if self.mapping is not None:
                self.mapping.retired = True
            participants = list(self._participants.values())
        for participant in participants:
            participant.before_unmap()
        with self._lock:
            self._close_mapping()
        for participant in participants:
            if participant is not by:
                participant.reconnect()

    def _close_mapping(self) -> None:
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            mapping.close()

    def _after_fork_in_child(self) -> None:
        if self.mapping is not None:
            self.mapping.close_descriptors()
        if self._pidfd is not None:
            _close(self._pidfd)
        self.__init__()  # type: ignore[misc]


def _close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


_shared = Shared()
_on_fork: list[Callable[[], None]] = []


def shared() -> Shared:
    return _shared


def _after_fork_in_child() -> None:
    global _fence_lock
    _fence_lock = threading.Lock()
    _shared._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
