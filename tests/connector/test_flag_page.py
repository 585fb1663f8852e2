"""The flag page and the cutting of jobs into stages, without a sidecar."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_sidecar import memfd

from kvcachepool import flag_page
from kvcachepool.copy_window import stage
from kvcachepool.flag_page import FlagPage, State, Word
from kvcachepool.pieces import Piece
from kvcachepool.shared import ROW_BYTES, Refs, SharedMemoryError

VECTORS = Path(__file__).parents[2] / "sidecar" / "protocol" / "vectors" / "window.json"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(VECTORS.read_text())
    return read


def test_numbers_and_words_are_those_of_the_sidecar(vectors: dict[str, Any]) -> None:
    for name in ("header_bytes", "record_bytes", "runs_at", "runs_max", "run_align", "pattern_bytes"):
        assert getattr(flag_page, name.upper()) == vectors[name], name
    assert flag_page.page_bytes(8) == vectors["page_bytes"]
    for vector in vectors["words"]:
        word = Word(State[vector["state"].upper()], vector["reason"], vector["sequence"])
        assert word.encode() == vector["word"]
        assert Word.decode(vector["word"]) == word
    runs = np.array(vectors["runs"], dtype=np.uint32)
    assert flag_page.encode_runs(runs) == bytes.fromhex(vectors["record"])[8:]


@pytest.mark.parametrize("word", [5, 6 << 8, 0xFF00, 0x1FF])
def test_a_word_that_no_side_writes_is_an_error(word: int) -> None:
    with pytest.raises(ValueError):
        Word.decode(word)


def test_a_stage_is_returned_only_for_its_current_use(vectors: dict[str, Any]) -> None:
    header = bytes.fromhex(vectors["header"])
    fd = memfd("page", vectors["page_bytes"])
    os.pwrite(fd, header, 0)
    page = FlagPage(fd, 8, 16 << 20)
    runs = np.array([[1, 2, 3, 4]], dtype=np.uint32)
    at = flag_page.HEADER_BYTES + 3 * flag_page.RECORD_BYTES

    def answer(state: State, reason: str, sequence: int) -> None:
        os.pwrite(fd, struct.pack("<Q", Word(state, reason, sequence).encode()), at)

    page.hand_over(3, State.FILLED, runs)
    assert os.pread(fd, 8 + 56 + 16, at) == struct.pack("<Q", 1 << 16 | 1) + flag_page.encode_runs(runs)
    assert page.back(3) is None
    answer(State.MOVED, "None", 1)
    assert page.back(3) == Word(State.MOVED, "None", 1)
    page.hand_over(3, State.WANTED, runs)
    assert page.back(3) is None
    answer(State.MOVED, "None", 1)
    assert page.back(3) is None, "an answer to an earlier use"
    answer(State.REFUSED, "Generation", 2)
    assert page.back(3) == Word(State.REFUSED, "Generation", 2)
    page.close()
    page.close()
    with pytest.raises(SharedMemoryError, match="format"):
        FlagPage(fd, 8, 8 << 20)
    with pytest.raises(SharedMemoryError, match="shorter"):
        FlagPage(fd, 9, 16 << 20)


def test_stages_cover_every_byte_of_a_job_once() -> None:
    draw = random.Random(5)
    for _ in range(200):
        sizes = [draw.choice([48, 4096, 70_000]) for _ in range(draw.randint(1, 2))]
        pieces, refs, block = [], [], 1
        slots = draw.sample(range(0, 4000, 40), 12)
        for group, size in enumerate(sizes):
            piece = Piece(group, [], [])
            for slot in slots[group * 6 : group * 6 + draw.randint(1, 6)]:
                first, count = draw.randint(0, 3), draw.randint(1, 9)
                refs.append((slot, slot + 7, (first + count) * size, 0))
                piece.offsets.extend(slot * ROW_BYTES + (first + i) * size for i in range(count))
                piece.blocks.extend(range(block, block + count))
                block += count
            pieces.append(piece)
        stage_bytes = draw.choice([70_000, 100_000, 1 << 20])
        packed = b"".join(struct.pack("<IIII", *ref) for ref in refs)
        wanted = {b: o for p in pieces for b, o in zip(p.blocks, p.offsets, strict=True)}
        for part in stage(pieces, Refs.read(packed), sizes, stage_bytes):
            assert len(part.runs) <= flag_page.RUNS_MAX
            places: dict[int, int] = {}
            end = 0
            for slot, generation, offset, nbytes in part.runs.tolist():
                assert generation == slot + 7
                begin = -(-end // flag_page.RUN_ALIGN) * flag_page.RUN_ALIGN
                end = begin + nbytes
                assert end <= stage_bytes
                places |= {begin + i: slot * ROW_BYTES + offset + i for i in range(0, nbytes, 2)}
            for piece in part.pieces:
                for number, place in zip(piece.blocks, piece.offsets, strict=True):
                    assert places[place] == wanted.pop(number)
                    assert place + sizes[piece.group] <= end
        assert not wanted
