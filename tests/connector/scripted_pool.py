"""A small fake pool that stores and finds chunks, and can be made slow, silent, full, forgetful or wrong."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stub_sidecar
from stub_sidecar import Received, StubSidecar

from kvcachepool import wire
from kvcachepool.messages import (
    CHUNK_ABSENT,
    CHUNK_READY,
    GRANT_EXISTS,
    GRANT_GRANTED,
)
from kvcachepool.shared import NO_SLOT, PUBLISHED, ROW_BYTES
from kvcachepool.wire import Op

_ABSENT = struct.pack("<IIII", NO_SLOT, 0, 0, 0)


class ScriptedPool(StubSidecar):
    """Serves PROBE, GRANT, COMMIT and ABORT from a dict.

    on_probe, on_grant: called with the frame before it is answered; True = the test answers (or nobody).
    """

    def __init__(self, folder: Path, *, chunk: int = 64, least: int = 64, sections: int = 1, rows: int = 512) -> None:
        self.settings: dict[str, Any] = stub_sidecar.SETTINGS | {
            "chunk_tokens": chunk,
            "min_load_tokens": least,
            "first_poll_wait_us": 200_000,
            "step_wait_us": 400_000,
        }
        self.sections = sections
        self.on_probe: Callable[[Received], bool] = lambda frame: False
        self.on_grant: Callable[[Received], bool] = lambda frame: False
        self.on_abort: Callable[[Received], bool] = lambda frame: False
        self.chunks: dict[tuple[bytes, bytes], list[tuple[int, int, int]]] = {}
        self.granted: dict[int, tuple[tuple[bytes, bytes], int]] = {}
        self.committed: dict[tuple[bytes, bytes], set[int]] = {}
        self.owner = 1
        self._next_row = 1
        self._guard = threading.RLock()
        super().__init__(folder, rows)
        self.answer = self._pool_answer

    def greet(self, frame: Received, **changes: Any) -> None:
        """A HELLO response with this pool's settings."""
        super().greet(frame, settings=self.settings, **changes)

    def _pool_answer(self, frame: Received) -> dict[str, Any] | bool | None:
        with self._guard:
            if frame.op == Op.PROBE and not self.on_probe(frame):
                return self.found(frame)
            if frame.op == Op.GRANT and not self.on_grant(frame):
                return self.grants(frame)
            if frame.op == Op.ABORT and "grant" in frame.body and not self.on_abort(frame):
                return {"freed": 0}
            if frame.op == Op.COMMIT:
                self._commit(frame.body["refs"])
        return frame.op in (Op.HELLO, Op.REGISTER) and None

    @staticmethod
    def keys(frame: Received) -> list[tuple[bytes, bytes]]:
        """(namespace, hash) of a PROBE's or GRANT's chunks."""
        space = frame.body.get("namespace", b"")
        if "chunks" in frame.body:
            return [(space, chunk["hash"]) for chunk in frame.body["chunks"]]
        packed = frame.body["hashes"]
        return [(space, packed[at : at + 32]) for at in range(0, len(packed), 32)]

    def found(self, frame: Received, state: int = CHUNK_READY) -> dict[str, Any]:
        """The answer to a PROBE with the stored chunks."""
        states, refs = bytearray(), b""
        for key in self.keys(frame):
            sections = self.chunks.get(key)
            states.append(state if sections else CHUNK_ABSENT)
            if sections and state == CHUNK_READY:
                refs += b"".join(
                    struct.pack("<IIII", *section, number) if section[0] != NO_SLOT else _ABSENT
                    for number, section in enumerate(sections)
                )
        assert self.memory is not None
        tiers = bytes(1 if one else 0 for one in states)
        return {"states": bytes(states), "refs": refs, "region": self.memory.region, "pending_ms": 50, "tiers": tiers}

    def grants(self, frame: Received) -> dict[str, Any]:
        """The answer to a GRANT with slots for everything."""
        results, refs = bytearray(), b""
        assert self.memory is not None
        for key, chunk in zip(self.keys(frame), frame.body["chunks"], strict=True):
            if key in self.chunks or any(one == key for one, _ in self.granted.values()):
                results.append(GRANT_EXISTS)
                continue
            results.append(GRANT_GRANTED)
            for section in range(self.sections):
                if not chunk["groups"] >> section & 1:
                    refs += _ABSENT
                    continue
                length = chunk["tokens"] * 512 * 2
                row = self._next_row
                self._next_row += -(-length // ROW_BYTES)
                ref = self.memory.grant(row, 1, self.owner, length)
                refs += ref[:12] + struct.pack("<I", section)
                self.granted[row] = (key, section)
        return {"results": bytes(results), "refs": refs, "region": self.memory.region}

    def _commit(self, refs: bytes) -> None:
        assert self.memory is not None
        for at in range(0, len(refs), 16):
            slot, generation, length, section = struct.unpack_from("<IIII", refs, at)
            key, _ = self.granted.pop(slot)
            self.memory._view[slot, 0] = PUBLISHED
            sections = self.chunks.setdefault(key, [(NO_SLOT, 0, 0)] * self.sections)
            sections[section] = (slot, generation, length)

    def slots(self) -> list[int]:
        """First rows of all chunks."""
        return [section[0] for sections in self.chunks.values() for section in sections]

    def late(self, frame: Received, body: dict[str, Any], *, partial: bool = False) -> None:
        """Answers a frame later."""
        self.reply(frame, body, wire.FLAG_PARTIAL if partial else 0)
