"""The flag page of a window: one record per stage, in memory that the sidecar maps too.

Twin of `protocol/src/window.rs`. The worker owns the ring. It writes a record and then the state word, which is one
aligned store of 8 bytes. The sidecar answers by exchanging that word.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .shared import SharedMemoryError, fence, map_shared, unmap

HEADER_BYTES = 4096
RECORD_BYTES = 16 << 10
RUNS_AT = 64
RUNS_MAX = (RECORD_BYTES - RUNS_AT) // 16
#: Each run starts at a multiple of this many bytes in its stage.
RUN_ALIGN = 256
PATTERN_BYTES = 64

_HEADER = struct.Struct("<8sIIQII")
_MAGIC = b"KVCPWNDW"
_VERSION = 1


class State(IntEnum):
    """State of a stage; see `State` of the sidecar's side."""

    FREE = 0
    FILLED = 1
    WANTED = 2
    MOVED = 3
    REFUSED = 4


#: Why a stage was refused, by number.
REASONS = ("None", "BadRecord", "NotGranted", "Generation", "CopyFailed", "Closed")


class Word(NamedTuple):
    state: State
    reason: str
    sequence: int

    def encode(self) -> int:
        """The word as stored in the page."""
        return self.sequence << 16 | REASONS.index(self.reason) << 8 | self.state

    @staticmethod
    def decode(word: int) -> Word:
        """Decodes a word. Raises `ValueError` if neither side can have written it."""
        reason = word >> 8 & 0xFF
        if reason >= len(REASONS):
            raise ValueError(f"invalid state word: {word:#x}")
        return Word(State(word & 0xFF), REASONS[reason], word >> 16)


def page_bytes(stages: int) -> int:
    """Bytes of a page for this many stages."""
    return HEADER_BYTES + stages * RECORD_BYTES


def encode_runs(runs: npt.NDArray[np.uint32]) -> bytes:
    """Encodes the record after the state word from rows (slot, generation, offset in the slot, bytes)."""
    return struct.pack("<I", len(runs)).ljust(RUNS_AT - 8, b"\0") + runs.astype("<u4").tobytes()


class FlagPage:
    """The mapped page. For one thread at a time."""

    def __init__(self, fd: int, stages: int, stage_bytes: int) -> None:
        """Maps the page. The caller keeps the descriptor. Raises `SharedMemoryError`."""
        self._bytes = page_bytes(stages)
        if os.fstat(fd).st_size < self._bytes:
            raise SharedMemoryError(f"the flag page is shorter than {self._bytes} bytes")
        self._address = map_shared(fd, self._bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        header = _HEADER.unpack(ctypes.string_at(self._address, _HEADER.size))
        if header != (_MAGIC, _VERSION, stages, stage_bytes, RECORD_BYTES, RUNS_MAX):
            unmap(self._address, self._bytes)
            raise SharedMemoryError(f"the flag page has an unknown format: {header}")
        buffer = (ctypes.c_char * self._bytes).from_address(self._address)
        words = np.frombuffer(buffer, dtype=np.uint64)
        self._words = words[HEADER_BYTES // 8 :: RECORD_BYTES // 8]
        self._sequences = [0] * stages

    def hand_over(self, stage: int, state: State, runs: npt.NDArray[np.uint32]) -> None:
        """Hands a stage to the sidecar, after all writes to the stage and its record."""
        record = encode_runs(runs)
        ctypes.memmove(self._address + HEADER_BYTES + stage * RECORD_BYTES + 8, record, len(record))
        self._sequences[stage] += 1
        fence()
        self._words[stage] = Word(state, "None", self._sequences[stage]).encode()

    def back(self, stage: int) -> Word | None:
        """The word with which the sidecar returned a stage, or None while it holds the stage. Raises `ValueError`."""
        word = Word.decode(int(self._words[stage]))
        if word.sequence != self._sequences[stage] or word.state not in (State.MOVED, State.REFUSED):
            return None
        fence()
        return word

    def close(self) -> None:
        if self._bytes:
            del self._words
            unmap(self._address, self._bytes)
            self._bytes = 0
