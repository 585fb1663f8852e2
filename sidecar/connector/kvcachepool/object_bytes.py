"""The bytes of an opaque object: key, header and value, and how they are cut into the pieces that slots hold.

| bytes | field |
|---|---|
| 0-7 | `KVCPVAL1` |
| 8-11, 12-15 | bytes of the key, bytes of the header |
| 16-23, 24-31 | bytes of the value, offset of the value (a multiple of 64) |
| 32- | the key, the header (a msgpack map, or nothing), zeros up to the value's offset, the value |

Numbers are little-endian. Each piece of an object is full except for the last one.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .object_types import Buffer, Header, InvalidKey, Key

MAX_KEY_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10
#: Largest object, with key and header.
MAX_OBJECT_BYTES = (1 << 30) + (256 << 10)
MAX_PIECES = 128
HASH_BYTES = 32
#: Bytes before the key.
PREFIX_BYTES = 32

_PREFIX = struct.Struct("<8sIIQQ")
_MAGIC = b"KVCPVAL1"
_ALIGNMENT = 64
_FIRST_PIECE_BYTES = 4 << 20

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_T = TypeVar("_T")


class _EncodedHeader(msgspec.Struct, omit_defaults=True):
    shape: tuple[int, ...] = ()
    dtype: str = ""
    format: str = ""
    metadata: dict[str, Any] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_EncodedHeader).decode


# -- names


def key_bytes(key: Key) -> bytes:
    """Raises `InvalidKey`."""
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidKey(f"a key is not valid Unicode: {error}") from None
    elif not isinstance(key, bytes):
        raise InvalidKey(f"a key must be bytes or str, got {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise InvalidKey(f"a key must have 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
    return key


def digest_of(key: bytes) -> bytes:
    """The 32 bytes by which the sidecar knows a key."""
    return hashlib.sha256(key).digest()


def namespace_id(name: str) -> bytes:
    """The 32 bytes of a namespace; zeros for the default one. The last bit is clear: other processes may name it."""
    if not name:
        return bytes(HASH_BYTES)
    digest = bytearray(hashlib.sha256(name.encode()).digest())
    digest[-1] &= 0xFE
    return bytes(digest)


# -- buffers


def as_bytes(buffer: Buffer) -> Bytes:
    """The buffer's memory as an array `[nbytes]`. Raises `TypeError` or `ValueError` if it is not contiguous."""
    view = memoryview(buffer)
    if not view.contiguous:
        raise ValueError("a buffer is not contiguous")
    if view.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


def buffers_of(value: Buffer | Sequence[Buffer]) -> list[Bytes]:
    """One buffer, or several. Raises `TypeError` or `ValueError` if one of them is no contiguous buffer."""
    if isinstance(value, (list, tuple)):
        return [as_bytes(buffer) for buffer in value]
    return [as_bytes(value)]


def bounded(
    items: Iterable[_T], nbytes_of: Callable[[_T], int], most_bytes: int, most: int = sys.maxsize
) -> Iterator[list[_T]]:
    """The items in order, in lists of at most this many bytes and items. A larger item has a list of its own."""
    batch: list[_T] = []
    nbytes = 0
    for item in items:
        size = nbytes_of(item)
        if batch and (len(batch) == most or nbytes + size > most_bytes):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


# -- objects


class Encoded(NamedTuple):
    """An object as it is stored: its digest, its bytes in order, and their number."""

    digest: bytes
    parts: list[Bytes]
    nbytes: int


def encode(key: Key, value: Buffer | Sequence[Buffer], header: Header | None) -> Encoded:
    """Raises `InvalidKey`; `TypeError` or `ValueError` for a value or a header that cannot be stored."""
    name = key_bytes(key)
    packed = b"" if header is None else _encode(_EncodedHeader(*header))
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"a header must have at most {MAX_HEADER_BYTES} bytes encoded, got {len(packed)}")
    parts = buffers_of(value)
    nbytes = sum(map(len, parts))
    end = PREFIX_BYTES + len(name) + len(packed)
    begin = end + -end % _ALIGNMENT
    prefix = _PREFIX.pack(_MAGIC, len(name), len(packed), nbytes, begin)
    parts.insert(0, np.frombuffer(b"".join((prefix, name, packed, bytes(begin - end))), dtype=np.uint8))
    return Encoded(digest_of(name), parts, begin + nbytes)


class Located(NamedTuple):
    """Where an object's value is in its bytes."""

    header: Header
    begin: int
    nbytes: int


def parse(key: bytes, nbytes: int, first: int, read: Callable[[int, int], bytes]) -> Located | None:
    """Reads the front of an object. None if it is of another key, or damaged.

    Args:
        nbytes: all bytes of the object.
        first: bytes of its first piece, in which key and header must be.
        read: returns the bytes from one position of the first piece to another.
    """
    if first < PREFIX_BYTES:
        return None
    magic, key_len, header_len, value_len, begin = _PREFIX.unpack(read(0, PREFIX_BYTES))
    end = PREFIX_BYTES + key_len + header_len
    if magic != _MAGIC or key_len != len(key) or header_len > MAX_HEADER_BYTES or end > first:
        return None
    if begin < end or begin % _ALIGNMENT or begin + value_len != nbytes:
        return None
    front = read(PREFIX_BYTES, end)
    if front[:key_len] != key:
        return None
    if header_len == 0:
        return Located(Header(), begin, value_len)
    try:
        header = _decode(front[key_len:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Located(Header(header.shape, header.dtype, header.format, header.metadata), begin, value_len)


def front_bytes(begin: bytes | bytearray, key: bytes) -> int:
    """Where an object's header ends, by the first bytes of the object. They may be of another key, or damaged."""
    if len(begin) < PREFIX_BYTES:
        return PREFIX_BYTES
    _, key_len, header_len, _, _ = _PREFIX.unpack_from(begin)
    return PREFIX_BYTES + (key_len + header_len if key_len == len(key) and header_len <= MAX_HEADER_BYTES else 0)


# -- pieces


def piece_bytes(nbytes: int) -> int:
    """Size of a full piece of an object with this many bytes."""
    size = _FIRST_PIECE_BYTES
    while size * MAX_PIECES < nbytes:
        size *= 2
    return size


def piece_lengths(nbytes: int) -> list[int]:
    """Sizes of the pieces of an object with this many bytes (at least 1)."""
    size = piece_bytes(nbytes)
    full, rest = divmod(nbytes, size)
    return [size] * full + [rest] * (rest > 0)


class Run(NamedTuple):
    """`nbytes` bytes that are contiguous in the arena (from `at`) and in a buffer (from `offset`)."""

    at: int
    buffer: int
    offset: int
    nbytes: int


def runs(starts: Sequence[int], size: int, begin: int, lengths: Sequence[int]) -> Iterator[Run]:
    """The copies between buffers of these lengths and an object's bytes from `begin` on.

    Args:
        starts: arena offsets of the object's pieces.
        size: bytes of a full piece.
    """
    for buffer, length in enumerate(lengths):
        offset = 0
        while offset < length:
            piece, inside = divmod(begin, size)
            nbytes = min(length - offset, size - inside)
            yield Run(starts[piece] + inside, buffer, offset, nbytes)
            offset += nbytes
            begin += nbytes
