"""A stub sidecar that keeps opaque objects, for replies that the real one never gives. `lie` changes them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stub_sidecar import Received, StubSidecar

from kvcachepool.object_bytes import piece_lengths
from kvcachepool.shared import ROW_BYTES
from kvcachepool.wire import Op

HASH_BYTES = 32
REF_BYTES = 16


class StubObjects(StubSidecar):
    """Objects are readable as soon as they are committed, and never evicted.

    lie(frame, reply): called with each reply to PROBE, GRANT and OBJECTS. Returns the body to send, or False for none.
    """

    def __init__(self, folder: Path, rows: int = 1024) -> None:
        super().__init__(folder, rows)
        self.lie: Callable[[Received, dict[str, Any]], dict[str, Any] | bool] = lambda frame, reply: reply
        self.features = ["objects"]
        self.objects: dict[bytes, bytes] = {}  # digest -> references
        self.granted: dict[bytes, bytes] = {}
        self.pinned: set[bytes] = set()
        self._free_row = 0
        self._generation = 0
        self.answer = self._answer

    def _answer(self, frame: Received) -> dict[str, Any] | bool | None:
        if frame.op == Op.HELLO:
            self.greet(frame, features=self.features)
            return False
        answers = {Op.PROBE: self._probe, Op.GRANT: self._grant, Op.OBJECTS: self._change}
        if frame.op in answers:
            return self.lie(frame, answers[Op(frame.op)](frame.body))
        if frame.op == Op.COMMIT:
            for digest, refs in list(self.granted.items()):
                if refs in frame.body["refs"]:
                    self.objects[digest] = self.granted.pop(digest)
        if frame.op == Op.ABORT:
            for digest, refs in list(self.granted.items()):
                if refs in frame.body["refs"]:
                    del self.granted[digest]
        return False

    def _probe(self, body: dict[str, Any]) -> dict[str, Any]:
        digests = _digests(body)
        states = bytes(digest in self.objects for digest in digests)
        refs = b"".join(self.objects.get(digest, b"") for digest in digests)
        assert self.memory is not None
        return {"states": states, "refs": refs, "region": self.memory.region, "tiers": states}

    def _grant(self, body: dict[str, Any]) -> dict[str, Any]:
        results, refs = bytearray(), b""
        assert self.memory is not None
        for chunk in body["chunks"]:
            if chunk["hash"] in self.objects or chunk["hash"] in self.granted:
                results.append(2)
                continue
            packed = b"".join(self._slot(length, at) for at, length in enumerate(piece_lengths(chunk["bytes"])))
            self.granted[chunk["hash"]] = packed
            results.append(1)
            refs += packed
        return {"results": bytes(results), "refs": refs, "region": self.memory.region}

    def _slot(self, length: int, section: int) -> bytes:
        assert self.memory is not None
        slot, self._generation = self._free_row, self._generation + 1
        self._free_row += -(-length // ROW_BYTES)
        assert self._free_row <= self.memory.rows, "the stub's arena is full"
        return self.memory.grant(slot, self._generation, self.next_lock - 1, length)[:12] + struct.pack("<I", section)

    def _change(self, body: dict[str, Any]) -> dict[str, Any]:
        digests = _digests(body)
        states = bytes(digest in self.objects for digest in digests)
        for digest in digests:
            if body["op"] == "remove":
                self.objects.pop(digest, None)
            elif body["op"] == "pin":
                self.pinned.add(digest)
        sizes = [sum(int.from_bytes(ref[8:12], "little") for ref in _refs(self.objects.get(d, b""))) for d in digests]
        pinned = bytes(digest in self.pinned for digest in digests)
        return {"count": sum(states), "states": states, "bytes": sizes, "tiers": states, "pinned": pinned}


def _digests(body: dict[str, Any]) -> list[bytes]:
    packed = body["hashes"]
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def _refs(packed: bytes) -> Iterator[bytes]:
    return (packed[at : at + REF_BYTES] for at in range(0, len(packed), REF_BYTES))
