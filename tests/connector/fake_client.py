"""A client without a sidecar, for what a real one does not do on demand. Clients of one `Store` share objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvcachepool.client import Header, Item, Put, Unavailable


class Store:
    """Objects, and how the clients behave."""

    def __init__(self) -> None:
        self.objects: dict[bytes, tuple[Header, bytes]] = {}
        #: Operations wait until theirs is set.
        self.open = {"contains": threading.Event(), "put": threading.Event(), "lease": threading.Event()}
        for one in self.open.values():
            one.set()
        #: Keys of each question.
        self.asked: list[list[bytes]] = []
        self.reason = ""
        self.put_result = Put.STORED
        self.reads = True
        self.closed = 0

    def client(self, *given: Any, **options: Any) -> FakeClient:
        """Takes the arguments of the real client."""
        return FakeClient(self)

    def enter(self, operation: str) -> None:
        """Waits until the operation may go on, and fails it if there is a reason."""
        assert self.open[operation].wait(30), operation
        if self.reason:
            raise Unavailable(self.reason)


class FakeLeased:
    def __init__(self, store: Store, header: Header, value: bytes) -> None:
        self.header = header
        self.nbytes = len(value)
        self._store = store
        self._value = value

    def read_into(self, buffer: memoryview, offset: int = 0) -> bool:
        buffer[:] = self._value
        return self._store.reads


class FakeLease:
    def __init__(self, leased: list[FakeLeased | None]) -> None:
        self._leased = leased

    def __iter__(self) -> Iterator[FakeLeased | None]:
        return iter(self._leased)

    def __enter__(self) -> FakeLease:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class FakeClient:
    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def connected(self) -> bool:
        return not self._store.reason

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        self._store.asked.append(list(keys))
        self._store.enter("contains")
        return [key in self._store.objects for key in keys]

    def put(self, items: Sequence[Item], *, ttl_s: int = 0, timeout_s: float | None = None) -> list[Put]:
        self._store.enter("put")
        if self._store.put_result is Put.STORED:
            for item in items:
                assert isinstance(item.key, bytes)
                assert item.header is not None
                self._store.objects[item.key] = (item.header, bytes(item.value))
        return [self._store.put_result] * len(items)

    def lease(self, keys: Sequence[bytes], *, prefix: bool = False, timeout_s: float | None = None) -> FakeLease:
        self._store.enter("lease")
        found = [self._store.objects.get(key) for key in keys]
        return FakeLease([None if one is None else FakeLeased(self._store, *one) for one in found])

    def close(self) -> None:
        self._store.closed += 1
