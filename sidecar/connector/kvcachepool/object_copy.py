"""Copies between buffers and the slots of objects, with the checks that keep bytes of one object out of another.

A copy has no intermediate buffer, and numpy releases the GIL for it. A slot's pages are mapped before the first copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .object_bytes import Bytes, Located, parse, piece_bytes, runs
from .object_session import Session
from .object_slots import Slots
from .shared import fence, shared


def write(session: Session, slots: Slots, parts: Sequence[Bytes]) -> bool:
    """Copies an object's bytes into slots that were granted for it. False if they are not this process's any more."""
    arena = session.begin_copy(slots.mapping)
    if arena is None:
        return False
    try:
        refs, owner = slots.refs(), shared().lock_number
        if owner is None or not slots.mapping.granted_to(owner, refs.slots, refs.generations):
            return False
        slots.mapping.populate(refs.slots, refs.lengths)
        for run in runs(slots.starts, slots.size, 0, [len(part) for part in parts]):
            part = parts[run.buffer][run.offset : run.offset + run.nbytes]
            np.copyto(arena[run.at : run.at + run.nbytes], part)
        fence()
        return True
    finally:
        session.end_copy()


def read(session: Session, slots: Slots, begin: int, buffers: Sequence[Bytes]) -> bool:
    """Fills buffers with the object's bytes from `begin` on. False if the sidecar took its memory back meanwhile, in
    which case the buffers' content is undefined.
    """
    arena = session.begin_copy(slots.mapping)
    if arena is None:
        return False
    try:
        lengths = [len(buffer) for buffer in buffers]
        refs = slots.refs(begin, begin + sum(lengths))
        slots.mapping.populate(refs.slots, refs.lengths)
        for run in runs(slots.starts, slots.size, begin, lengths):
            part = buffers[run.buffer][run.offset : run.offset + run.nbytes]
            np.copyto(part, arena[run.at : run.at + run.nbytes])
        fence()
        return slots.mapping.same_generation(refs.slots, refs.generations)
    finally:
        session.end_copy()


def locate(session: Session, keys: Sequence[bytes], objects: Sequence[Slots | None]) -> list[Located | None]:
    """Reads key and header of each object. None for one that is absent, of another key, or damaged."""
    return [None if slots is None else _locate(session, key, slots) for key, slots in zip(keys, objects, strict=True)]


def _locate(session: Session, key: bytes, slots: Slots) -> Located | None:
    arena = session.begin_copy(slots.mapping)
    if arena is None:
        return None
    try:
        start, first = slots.starts[0], min(slots.nbytes, piece_bytes(slots.nbytes))

        def front(begin: int, end: int) -> bytes:
            return arena[start + begin : start + end].tobytes()

        found = parse(key, slots.nbytes, first, front)
        refs = slots.refs(0, first)
        fence()
        if not slots.mapping.same_generation(refs.slots, refs.generations):
            return None
    finally:
        session.end_copy()
    if found is None:
        session.count_invalid()
    return found
