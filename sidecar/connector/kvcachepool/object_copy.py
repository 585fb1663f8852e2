"""Copies between buffers and the slots of objects, with the checks that keep bytes of one object out of another.

A copy has no intermediate buffer, and numpy releases the GIL for it. A slot's pages are mapped before the first copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .object_bytes import Bytes, Located, parse, runs
from .object_session import Session
from .object_slots import REF_BYTES, Slots
from .shared import Refs, fence, shared


def write(session: Session, slots: Slots, parts: Sequence[Bytes]) -> bool:
    """Copies an object's bytes into slots that were granted for it. False if they are not this process's any more."""
    with session.copying(slots.mapping) as arena:
        refs, owner = slots.whole, shared().lock_number
        if arena is None or owner is None or not slots.mapping.granted_to(owner, refs.slots, refs.generations):
            return False
        slots.mapping.populate(refs.slots, refs.lengths)
        for run in runs(slots.starts, slots.size, 0, [len(part) for part in parts]):
            part = parts[run.buffer][run.offset : run.offset + run.nbytes]
            np.copyto(arena[run.at : run.at + run.nbytes], part)
        fence()
        return True


def read(session: Session, slots: Slots, begin: int, buffers: Sequence[Bytes]) -> bool:
    """Fills buffers with the object's bytes from `begin` on. False if the sidecar took its memory back meanwhile, in
    which case the buffers' content is undefined.
    """
    lengths = [len(buffer) for buffer in buffers]
    refs = slots.refs(begin, begin + sum(lengths))
    with session.copying(slots.mapping) as arena:
        if arena is None or not slots.mapping.same_generation(refs.slots, refs.generations):
            return False
        slots.mapping.populate(refs.slots, refs.lengths)
        for run in runs(slots.starts, slots.size, begin, lengths):
            part = buffers[run.buffer][run.offset : run.offset + run.nbytes]
            np.copyto(part, arena[run.at : run.at + run.nbytes])
        fence()
        return slots.mapping.same_generation(refs.slots, refs.generations)


def locate(session: Session, keys: Sequence[bytes], objects: Sequence[Slots | None]) -> list[Located | None]:
    """Reads key and header of each object of one reply. None for one that is absent, of another key, or damaged."""
    located: list[Located | None] = [None] * len(keys)
    there = [(at, slots) for at, slots in enumerate(objects) if slots is not None]
    if not there:
        return located
    with session.copying(there[0][1].mapping) as arena:
        if arena is None:
            return located
        for at, slots in there:
            located[at] = _parse(arena, keys[at], slots)
        fence()
        firsts = Refs.read(b"".join(slots.packed[:REF_BYTES] for _, slots in there))
        same = there[0][1].mapping.of_generation(firsts.slots, firsts.generations)
    for (at, _), unchanged in zip(there, same.tolist(), strict=True):
        if not unchanged:
            located[at] = None
        elif located[at] is None:
            session.count_invalid()
    return located


def _parse(arena: Bytes, key: bytes, slots: Slots) -> Located | None:
    start = slots.starts[0]

    def read(begin: int, end: int) -> bytes:
        return arena[start + begin : start + end].tobytes()

    return parse(key, slots.nbytes, min(slots.nbytes, slots.size), read)
