"""References to the slots of objects, as replies name them, and the checks of them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .object_bytes import MAX_PIECES, piece_bytes, piece_lengths
from .shared import ROW_BYTES, Mapping, Refs

REF_BYTES = 16


class BadReplyError(Exception):
    """A reply contradicts its request, or names memory outside of the arena."""


class Slots(NamedTuple):
    """The slots of one object: its references, and where its pieces are in the arena.

    packed, whole: the references. starts: offsets of the pieces in the arena.
    size: bytes of a full piece. nbytes: bytes of the object.
    """

    mapping: Mapping
    packed: bytes
    whole: Refs
    starts: list[int]
    size: int
    nbytes: int

    def refs(self, begin: int, end: int) -> Refs:
        """References of the pieces that hold bytes `begin..end` of the object."""
        return _slice(self.whole, begin // self.size, -(-end // self.size))


def _slice(refs: Refs, begin: int, end: int) -> Refs:
    return Refs(refs.slots[begin:end], refs.generations[begin:end], refs.lengths[begin:end], refs.sections[begin:end])


def objects_of(mapping: Mapping, packed: bytes, count: int) -> list[Slots]:
    """The slots of `count` objects, each of which begins with section 0. Raises `BadReplyError`."""
    if len(packed) % REF_BYTES:
        raise BadReplyError(f"references of {len(packed)} bytes")
    refs = Refs.read(packed)
    if not mapping.inside(refs.slots, refs.lengths):
        raise BadReplyError(f"the slots {refs.slots.tolist()} are not in the arena")
    slots, lengths, sections = refs.slots.tolist(), refs.lengths.tolist(), refs.sections.tolist()
    firsts = [at for at, section in enumerate(sections) if section == 0]
    if len(firsts) != count or (packed and firsts[:1] != [0]):
        raise BadReplyError(f"references of {len(firsts)} objects, expected {count}")
    found = []
    for begin, end in itertools.pairwise([*firsts, len(sections)]):
        nbytes = sum(lengths[begin:end])
        if sections[begin:end] != list(range(end - begin)) or end - begin > MAX_PIECES:
            raise BadReplyError(f"the sections of an object are {sections[begin:end]}")
        if lengths[begin:end] != piece_lengths(nbytes):
            raise BadReplyError(f"an object of {nbytes} bytes has sections of {lengths[begin:end]} bytes")
        starts = [slot * ROW_BYTES for slot in slots[begin:end]]
        own = packed[begin * REF_BYTES : end * REF_BYTES]
        found.append(Slots(mapping, own, _slice(refs, begin, end), starts, piece_bytes(nbytes), nbytes))
    return found


def by_slot(slots: Slots) -> list[tuple[int, bytes]]:
    refs = [slots.packed[at : at + REF_BYTES] for at in range(0, len(slots.packed), REF_BYTES)]
    return [(int.from_bytes(ref[:4], "little"), ref) for ref in refs]


def overlap(held: dict[int, bytes]) -> bool:
    """Whether two of these slots share rows of the arena."""
    ends = ((slot, slot - (-int.from_bytes(ref[8:12], "little") // ROW_BYTES)) for slot, ref in sorted(held.items()))
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ends))
