"""The seam between the object client and the way to its sidecar: shared memory beside it, or servers over a network.

A transport serves one client, in one namespace, from all threads. Its methods raise `Unavailable` or `Refused`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .messages import (
    GRANT_EXISTS,
    GRANT_GRANTED,
    GRANT_NO_ROOM,
    GRANT_NOT_READY,
    GRANT_QUOTA,
    GRANT_TOO_LARGE,
    MEMORY,
    TIERS,
    Grant,
    GrantChunk,
    ObjectsReply,
    Probe,
)
from .object_bytes import Bytes, Encoded, Located
from .object_types import Put, Stat, Unavailable

#: The part of a deadline that is left for the reply of a sidecar that waits as long as it may.
_REPLY_SHARE = 0.1
_REPLY_S = 0.02

#: Results of `put`, by those of GRANT.
PUT_RESULTS = {
    GRANT_GRANTED: Put.STORED,
    GRANT_EXISTS: Put.EXISTS,
    GRANT_NO_ROOM: Put.NO_ROOM,
    GRANT_NOT_READY: Put.NO_ROOM,
    GRANT_QUOTA: Put.QUOTA,
    GRANT_TOO_LARGE: Put.TOO_LARGE,
}


class Range(NamedTuple):
    """Bytes of the object at a position, from `begin` on, which fill buffers one after the other."""

    position: int
    begin: int
    buffers: Sequence[Bytes]


class Holding(Protocol):
    """Objects that the sidecar does not evict until `release`.

    located: per key, where the value is; None: absent.
    """

    located: Sequence[Located | None]

    def read(self, ranges: Sequence[Range], deadline: float) -> list[bool]:
        """Fills the buffers. False: the memory was taken back. Then, and after an error, their content is undefined."""

    def release(self) -> None:
        """The objects may be evicted. Never raises."""

    def drop(self) -> None:
        """`release` with the next call of the client. Any thread may run this, also one that holds a lock."""


class Transport(Protocol):
    """What the client needs. Deadlines are monotonic."""

    @property
    def ready(self) -> bool:
        """Whether calls are served now."""

    @property
    def invalid(self) -> int:
        """Objects that were damaged or of another key."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until calls are served."""

    def check_process(self) -> None:
        """Raises `Unavailable` in a fork of the client's process."""

    def close(self) -> None:
        """Ends calls that wait, and returns when no call touches a buffer any more."""

    def states(self, digests: Sequence[bytes], prefix: bool, deadline: float) -> bytes:
        """A state per key (`CHUNK_*`). prefix: keys behind the first absent one need not be looked up."""

    def hold(self, names: Sequence[bytes], prefix: bool, deadline: float) -> Holding:
        """Brings objects into memory and keeps them there."""

    def put(self, objects: Sequence[Encoded], ttl_s: int, deadline: float) -> list[Put]:
        """Stores objects. A result per object."""

    def change(self, op: str, digests: Sequence[bytes], ttl_s: int, deadline: float) -> int:
        """Removes, touches, pins or unpins. How many objects were changed."""

    def stat(self, digests: Sequence[bytes], deadline: float) -> list[Stat | None]:
        """What memory has of each key."""


def budget_ms(deadline: float) -> int:
    """How long a sidecar may wait for lower tiers, so that its reply arrives before the deadline. At least 1 ms.

    A sidecar takes 0 for its `loadTimeout`.
    """
    left = max(0.0, deadline - time.monotonic())
    return max(1, int((left - min(left * _REPLY_SHARE, _REPLY_S)) * 1000))


def probe_of(
    request: str, namespace: bytes, digests: Sequence[bytes], prefix: bool, local_tokens: int | None = None
) -> Probe:
    """A PROBE for these objects. local_tokens: 0 to have them fetched from lower tiers, None not to."""
    return Probe(
        request=request,
        namespace=namespace,
        hashes=b"".join(digests),
        independent=not prefix,
        local_tokens=local_tokens,
    )


def grant_of(request: str, namespace: bytes, objects: Sequence[Encoded], ttl_s: int) -> Grant:
    """A GRANT for these objects."""
    chunks = [GrantChunk(hash=one.digest, first_token=0, tokens=1, groups=1, bytes=one.nbytes) for one in objects]
    return Grant(request=request, namespace=namespace, ttl_s=ttl_s, chunks=chunks)


def put_result(state: int) -> Put:
    """The result of an object that GRANT answered with this number."""
    result = PUT_RESULTS.get(state)
    if result is None:
        raise Unavailable("BadReply", f"unexpected result {state} of a GRANT")
    return result


def changed_of(reply: ObjectsReply, keys: int) -> int:
    """How many of these keys a reply to OBJECTS says were changed."""
    if not 0 <= reply.count <= keys:
        raise Unavailable("BadReply", f"{reply.count} of {keys} objects")
    return reply.count


def stats_of(reply: ObjectsReply, keys: int) -> list[Stat | None]:
    """What a reply to OBJECTS says of each of these keys."""
    changed_of(reply, keys)
    tiers = reply.tiers or MEMORY * keys
    if not len(reply.states) == len(reply.bytes) == len(tiers) == len(reply.pinned) == keys:
        raise Unavailable("BadReply", f"a reply for {len(reply.states)} of {keys} keys")
    return [
        Stat(nbytes, TIERS.get(tier, "unknown"), bool(pinned)) if state else None
        for state, nbytes, tier, pinned in zip(reply.states, reply.bytes, tiers, reply.pinned, strict=True)
    ]
