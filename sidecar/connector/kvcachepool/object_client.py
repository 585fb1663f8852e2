"""The object client: lookups, puts, leases. `client` is its public name."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from . import object_targets
from .messages import CHUNK_ABSENT
from .object_bytes import (
    MAX_OBJECT_BYTES,
    Encoded,
    Located,
    as_bytes,
    bounded,
    buffers_of,
    digest_of,
    encode,
    key_bytes,
    namespace_id,
)
from .object_transport import Holding, Range, Transport
from .object_types import Buffer, Error, Header, Item, Key, Put, Stat, Unavailable

#: Keys of one request. Its frame must fit into the socket's buffer beside those of other threads.
_KEYS_AT_ONCE = 1024
#: Objects and bytes of one GRANT, with room for keys and headers beside 128 MiB of values: a second GRANT would wait
#: behind the digests of the first batch. The slots of a batch cannot be evicted before it is written.
_PUTS_AT_ONCE = 256
_PUT_BYTES_AT_ONCE = (128 << 20) + (256 << 10)
#: Objects that `get` leases at once.
_GETS_AT_ONCE = 64

_T = TypeVar("_T")


class Object(NamedTuple):
    """A copy of an object."""

    header: Header
    value: bytearray


class _Patience:
    """How long all reads of a lease together may wait for servers."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    @contextlib.contextmanager
    def deadline(self) -> Iterator[float]:
        """The deadline of a read that begins now."""
        began_s = time.monotonic()
        try:
            yield began_s + self._left_s
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))


class Leased:
    """An object that is in memory while its lease is open. `nbytes`: size of its value."""

    def __init__(self, holding: Holding, position: int, located: Located, patience: _Patience) -> None:
        self.header = located.header
        self.nbytes = located.nbytes
        self._holding = holding
        self._position = position
        self._begin = located.begin
        self._patience = patience

    def read_into(self, buffers: Buffer | Sequence[Buffer], offset: int = 0) -> bool:
        """Fills writable buffers, one after the other, with the value's bytes from `offset` on.

        Returns False if the sidecar took the memory back, or if servers do not answer within the time of `lease`, which
        all reads of the lease share. That is a miss, and the buffers' content is then undefined.
        Raises `ValueError` if the buffers need more bytes than the value has.
        """
        targets = buffers_of(buffers)
        wanted = sum(map(len, targets))
        if offset < 0 or offset + wanted > self.nbytes:
            raise ValueError(f"expected at most {self.nbytes - offset} bytes of buffers, got {wanted}")
        if not all(target.flags.writeable for target in targets):
            raise ValueError("a buffer is read-only")
        part = Range(self._position, self._begin + offset, targets)
        try:
            with self._patience.deadline() as deadline:
                return self._holding.read([part], deadline)[0]
        except Error as error:
            if isinstance(error, Unavailable) and error.reason == "Forked":
                raise
            return False

    def read(self) -> bytearray | None:
        """A copy of the value. None is a miss, as in `read_into`."""
        value = _new_bytearray(self.nbytes)
        return value if self.read_into(value) else None


class Lease:
    """Objects in the order of their keys; None for an absent one. Close it, so that the sidecar can evict them."""

    def __init__(self) -> None:
        self._objects: list[Leased | None] = []
        self._held: list[Holding] = []

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> Leased | None:
        return self._objects[index]

    def __iter__(self) -> Iterator[Leased | None]:
        return iter(self._objects)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lease. Later reads are misses once the sidecar has evicted the object."""
        held, self._held = self._held, []
        for holding in held:
            holding.release()

    def __del__(self) -> None:
        # Any thread may run this at any point, also one that holds a transport's lock.
        for holding in self._held:
            holding.drop()

    def _add(self, holding: Holding, patience: _Patience) -> None:
        self._held.append(holding)
        self._objects += [
            None if located is None else Leased(holding, position, located, patience)
            for position, located in enumerate(holding.located)
        ]

    def _copies(self, deadline: float) -> Iterator[Object | None]:
        """Copies of all objects. Those of one request are read together."""
        for holding in self._held:
            copies = [
                None if located is None else Object(located.header, _new_bytearray(located.nbytes))
                for located in holding.located
            ]
            ranges = [
                Range(position, located.begin, [as_bytes(copy.value)])
                for position, (located, copy) in enumerate(zip(holding.located, copies, strict=True))
                if located is not None and copy is not None
            ]
            read = iter(holding.read(ranges, deadline))
            for copy in copies:
                yield copy if copy is not None and next(read) else None


class Client:
    """A client of the sidecar beside this process, or of servers. Its methods may be called from all threads.

    They raise `Unavailable`, `InvalidKey` and `Refused`; see the module. `timeout_s` of a call replaces the client's.
    Arguments `keys` may also be one key.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        namespace: str = "",
        timeout_s: float = 5.0,
        name: str = "client",
        key: str | None = None,
        key_file: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        """Connects in the background. The first call waits for the first attempt.

        Args:
            target: path of `sidecar.sock`, or servers: `tls://host:port`, several separated by commas. The default is
                `KVCACHEPOOL_SOCKET`, or the socket beside this package.
            namespace: clients of different namespaces see different objects.
            timeout_s: longest wait of a call.
            name: what uses the client. The sidecar's status shows it.
            key: the key of the servers. A path needs none.
            key_file: file with the key, which is read for each connection. Default: `KVCACHEPOOL_KEY_FILE`.
            ca_file: certificates (PEM) that sign those of the servers. A changed file is read for the next connection.
                Default: `KVCACHEPOOL_CA_FILE`, or the system's.

        Raises:
            Error: the process has a client of another sidecar, and both targets are paths.
            ValueError: the target is neither, or key or certificates are missing or cannot be read.
        """
        self._timeout_s = timeout_s
        self._closed = False
        access = object_targets.Credentials(key, key_file, ca_file)
        self._transport = object_targets.open_transport(target, name, namespace_id(namespace), access)

    @property
    def connected(self) -> bool:
        """Whether calls are served now."""
        return not self._closed and self._transport.ready

    @property
    def invalid_objects(self) -> int:
        """Objects that were damaged or of another key, and were treated as absent."""
        return self._transport.invalid

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits until calls are served."""
        return not self._closed and self._transport.wait_ready(timeout_s)

    def close(self) -> None:
        """Ends this client, and with the process's last one the connection: calls that wait raise `Unavailable`."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- lookups

    def exists(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """How many keys exist in any tier, counted from the front up to the first absent one."""
        count = 0
        for states in self._states(keys, True, timeout_s):
            absent = states.find(CHUNK_ABSENT)
            if absent >= 0:
                return count + absent
            count += len(states)
        return count

    def contains(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[bool]:
        """Whether each key exists in any tier."""
        return [state != CHUNK_ABSENT for states in self._states(keys, False, timeout_s) for state in states]

    def stat(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[Stat | None]:
        """What the sidecar's memory has of each key; None if it is not in memory."""
        transport, deadline = self._begin(timeout_s)
        return [one for digests in _digests(keys) for one in transport.stat(digests, deadline)]

    def _states(self, keys: Key | Sequence[Key], prefix: bool, timeout_s: float | None) -> Iterator[bytes]:
        transport, deadline = self._begin(timeout_s)
        for digests in _digests(keys):
            yield transport.states(digests, prefix, deadline)

    # -- writing

    def put(self, items: Sequence[Item], *, ttl_s: int = 0, timeout_s: float | None = None) -> list[Put]:
        """Stores objects. Returns a result per item.

        Returns when the bytes are in the sidecar's memory. Readers see an object some milliseconds later, once the
        sidecar has taken its digest. The buffers must not change before that: not before `put` returns.

        Args:
            ttl_s: age at which the objects expire. 0: never in memory; lower tiers have `redis.ttl` and `expireAfter`.

        Raises:
            Unavailable: earlier items may be stored. Repeating the call is safe.
            TypeError, ValueError: an item cannot be stored; nothing was.
        """
        transport, deadline = self._begin(timeout_s)
        objects = [encode(item.key, item.value, item.header) for item in items]
        results = [Put.TOO_LARGE] * len(objects)
        for batch in _put_batches(objects):
            stored = transport.put([objects[index] for index in batch], ttl_s, deadline)
            for index, result in zip(batch, stored, strict=True):
                results[index] = result
        return results

    # -- reading

    def lease(self, keys: Key | Sequence[Key], *, prefix: bool = False, timeout_s: float | None = None) -> Lease:
        """Brings objects into memory, from lower tiers too, and keeps them there until the lease is closed.

        Waits for lower tiers until the deadline; what has not arrived then is absent.

        Args:
            prefix: the keys are a prefix, and those behind the first absent one are absent. A sidecar fetches nothing
                behind it; of several servers, each counts its own keys.
        """
        transport, deadline = self._begin(timeout_s)
        lease, patience = Lease(), _Patience(self._timeout(timeout_s))
        try:
            for names in _batches(_names(keys), _KEYS_AT_ONCE):
                if prefix and None in lease._objects[-1:]:
                    lease._objects += [None] * len(names)
                    continue
                lease._add(transport.hold(names, prefix, deadline), patience)
        except BaseException:
            lease.close()
            raise
        return lease

    def get(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[Object | None]:
        """Copies of objects; None for an absent one."""
        deadline = time.monotonic() + self._timeout(timeout_s)
        objects: list[Object | None] = []
        for names in _batches(_names(keys), _GETS_AT_ONCE):
            with self.lease(names, timeout_s=max(0.0, deadline - time.monotonic())) as lease:
                objects += lease._copies(deadline)
        return objects

    # -- keeping and removing

    def remove(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Removes objects from memory and from the tiers that this sidecar writes. Returns how many were in memory."""
        return self._change("remove", keys, 0, timeout_s)

    def touch(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Counts as a read of each object, so that it is evicted later. Returns how many are in memory."""
        return self._change("touch", keys, 0, timeout_s)

    def pin(self, keys: Key | Sequence[Key], ttl_s: int = 300, *, timeout_s: float | None = None) -> int:
        """Keeps objects in memory for this long (0: until `unpin`), also after the end of this process. Returns how
        many are pinned: pins of all clients together have a limited share of the memory.
        """
        return self._change("pin", keys, ttl_s, timeout_s)

    def unpin(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Ends pins. Returns how many objects were pinned."""
        return self._change("unpin", keys, 0, timeout_s)

    def _change(self, op: str, keys: Key | Sequence[Key], ttl_s: int, timeout_s: float | None) -> int:
        transport, deadline = self._begin(timeout_s)
        return sum(transport.change(op, digests, ttl_s, deadline) for digests in _digests(keys))

    def _begin(self, timeout_s: float | None) -> tuple[Transport, float]:
        """The transport, and the deadline of a call that begins now."""
        if self._closed:
            raise Unavailable("Closed")
        self._transport.check_process()
        return self._transport, time.monotonic() + self._timeout(timeout_s)

    def _timeout(self, timeout_s: float | None) -> float:
        return min(self._timeout_s if timeout_s is None else timeout_s, threading.TIMEOUT_MAX)


def _names(keys: Key | Sequence[Key]) -> list[bytes]:
    """The bytes of one key or of several. Raises `InvalidKey`."""
    return [key_bytes(key) for key in ([keys] if isinstance(keys, (str, bytes)) else keys)]


def _digests(keys: Key | Sequence[Key]) -> Iterator[Sequence[bytes]]:
    """The digests of keys, by request. Raises `InvalidKey` before the first one."""
    return _batches([digest_of(name) for name in _names(keys)], _KEYS_AT_ONCE)


def _put_batches(objects: Sequence[Encoded]) -> Iterator[list[int]]:
    """Positions of objects, by request. Those that no sidecar takes are left out."""
    fitting = (index for index, one in enumerate(objects) if one.nbytes <= MAX_OBJECT_BYTES)
    return bounded(fitting, lambda index: objects[index].nbytes, _PUT_BYTES_AT_ONCE, _PUTS_AT_ONCE)


def _batches(items: Sequence[_T], count: int) -> Iterator[Sequence[_T]]:
    return (items[at : at + count] for at in range(0, len(items), count))


_allocate = ctypes.pythonapi.PyByteArray_FromStringAndSize
_allocate.restype = ctypes.py_object
_allocate.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


def _new_bytearray(nbytes: int) -> bytearray:
    """A bytearray of undefined content: `bytearray(nbytes)` would write all its bytes first."""
    return cast("bytearray", _allocate(None, nbytes))
