"""What a class of one's own provides so that `python -m kvcachepool.store` serves it as a tier.

The process calls the class from several threads at once. Each method may be a coroutine function; coroutines of all
threads then run on one event loop, and are cancelled at their deadline. A method that raises, or exceeds the deadline,
fails one request: the sidecar counts it and treats the chunk as absent. Keys are `<bucket>/<prefix>/<model>/...`, at
most 1,024 bytes of ASCII, without empty segments, `.` and `..`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

_T = TypeVar("_T")
MaybeAsync: TypeAlias = "_T | Awaitable[_T]"
#: A contiguous object with the buffer protocol: bytes, bytearray, memoryview, a numpy array.
Buffer: TypeAlias = Any


class Stat(NamedTuple):
    """An object without its bytes."""

    size: int
    #: Seconds since 1970; None if the store does not know it.
    modified_s: float | None = None


class Entry(NamedTuple):
    """An object of a listing."""

    key: str
    size: int
    modified_s: float


class Full(Exception):
    """Raised by `put`: there is no room. The sidecar pauses its writes of refused chunks for 30 s."""


class Store(ABC):
    """Objects under keys. Keyword arguments of the constructor are the keys of `--config`."""

    def open(self) -> MaybeAsync[None]:
        """Connects. Called once before any other method; the process ends if it raises."""
        return None

    def close(self) -> MaybeAsync[None]:
        """Called once at SIGTERM, after the last request."""
        return None

    @abstractmethod
    def stat(self, key: str) -> MaybeAsync[Stat | None]:
        """The object's size; None if it does not exist."""

    @abstractmethod
    def get(self, key: str, offset: int, length: int) -> MaybeAsync[Buffer | None]:
        """Exactly the bytes `offset..offset + length`, which are within the object that `stat` described; None if the
        object no longer exists. Any other number of bytes fails the request.
        """

    @abstractmethod
    def put(self, key: str, data: memoryview) -> MaybeAsync[None]:
        """Stores an object, and replaces an existing one. `data` is valid until the method returns. The object must be
        complete or absent for readers. Raises `Full` if there is no room.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> MaybeAsync[None]:
        """Removes objects. Absent ones are no error."""

    def list(self, prefix: str, after: str, limit: int) -> MaybeAsync[Sequence[Entry]]:
        """At most `limit` objects whose key begins with `prefix` and is greater than `after`, in the order of keys.
        There may be fewer; only an empty result is the end of the listing.

        Optional. Without it the sidecar cannot count, expire, evict or clear: the store has to evict by itself.
        """
        raise NotImplementedError
