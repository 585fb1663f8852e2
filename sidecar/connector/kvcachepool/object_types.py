"""Types of the object client: keys, buffers, headers, results and errors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

#: 1 byte to 64 KiB. A `str` is its UTF-8.
Key: TypeAlias = "bytes | str"
#: A contiguous object with the buffer protocol: bytes, bytearray, memoryview, a numpy or ctypes array.
Buffer: TypeAlias = Any


class Error(Exception):
    """Base of the client's errors."""


class Unavailable(Error):
    """The sidecar does not serve this call now, or did not answer before the deadline. The caller continues without.

    reason: `NotConnected`, `ConnectionLost`, `Deadline`, `Closed`, `Forked`, `BadReply`, or a name that the sidecar
    gave, such as `Unauthorized`.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason
        self.message = message


class InvalidKey(Error, ValueError):
    """A key is neither bytes nor text, is empty, or has more than 64 KiB."""


class Refused(Error):
    """The sidecar refused the request. Repeating it does not help. `code`: the sidecar's name of the reason."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message


class Header(NamedTuple):
    """What a value is. Readers get it before they read the value. At most 64 KiB encoded.

    metadata: anything that msgpack encodes.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""
    format: str = ""
    metadata: dict[str, Any] = {}


class Item(NamedTuple):
    """An object to store. Several buffers of `value` are stored one after the other."""

    key: Key
    value: Buffer | Sequence[Buffer]
    header: Header | None = None


class Put(Enum):
    """Result of one item of `put`."""

    STORED = auto()
    #: An object with this key exists, or another client is writing it. Objects never change, so nothing is written.
    EXISTS = auto()
    #: All memory is in use by leases, pins and unfinished writes, or is not allocated yet.
    NO_ROOM = auto()
    #: The namespace has used its quota.
    QUOTA = auto()
    #: The object exceeds 1 GiB, the arena, or the sidecar's limit for one object.
    TOO_LARGE = auto()
    #: Of several servers, the key's one does not serve. The object is not stored.
    UNAVAILABLE = auto()


class Stat(NamedTuple):
    """An object in memory. `nbytes` includes key and header. `tier`: the nearest one that holds it."""

    nbytes: int
    tier: str
    pinned: bool
