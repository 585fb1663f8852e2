"""The object client for asyncio. `client` is its public name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .object_client import Client, Lease, Leased, Object
from .object_types import Buffer, Item, Key, Put, Stat, Unavailable

_THREADS = 16

_T = TypeVar("_T")


class AsyncLeased:
    """As `Leased`. Copies run in a thread."""

    def __init__(self, client: AsyncClient, leased: Leased) -> None:
        self.header = leased.header
        self.nbytes = leased.nbytes
        self._client = client
        self._leased = leased

    async def read_into(self, buffers: Buffer | Sequence[Buffer], offset: int = 0) -> bool:
        return await self._client._run(lambda _: self._leased.read_into(buffers, offset), None)

    async def read(self) -> bytearray | None:
        return await self._client._run(lambda _: self._leased.read(), None)


class AsyncLease:
    """As `Lease`; `AsyncClient.lease` closes it."""

    def __init__(self, client: AsyncClient, lease: Lease) -> None:
        self._objects = [None if leased is None else AsyncLeased(client, leased) for leased in lease]

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> AsyncLeased | None:
        return self._objects[index]

    def __iter__(self) -> Iterator[AsyncLeased | None]:
        return iter(self._objects)


class AsyncClient:
    """The methods of `Client` as coroutines, which run in threads.

    A cancelled call ends only when its copy has ended, so that the caller can use its buffers again.
    """

    def __init__(self, target: str | None = None, **options: Any) -> None:
        """The arguments of `Client`."""
        self._client = Client(target, **options)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvcachepool-client")

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def invalid_objects(self) -> int:
        return self._client.invalid_objects

    async def wait_connected(self, timeout_s: float) -> bool:
        return await self._run(self._client.wait_connected, timeout_s)

    async def exists(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        return await self._run(lambda left: self._client.exists(keys, timeout_s=left), timeout_s)

    async def contains(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[bool]:
        return await self._run(lambda left: self._client.contains(keys, timeout_s=left), timeout_s)

    async def stat(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[Stat | None]:
        return await self._run(lambda left: self._client.stat(keys, timeout_s=left), timeout_s)

    async def put(self, items: Sequence[Item], *, ttl_s: int = 0, timeout_s: float | None = None) -> list[Put]:
        return await self._run(lambda left: self._client.put(items, ttl_s=ttl_s, timeout_s=left), timeout_s)

    async def get(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> list[Object | None]:
        return await self._run(lambda left: self._client.get(keys, timeout_s=left), timeout_s)

    async def remove(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        return await self._run(lambda left: self._client.remove(keys, timeout_s=left), timeout_s)

    async def touch(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        return await self._run(lambda left: self._client.touch(keys, timeout_s=left), timeout_s)

    async def pin(self, keys: Key | Sequence[Key], ttl_s: int = 300, *, timeout_s: float | None = None) -> int:
        return await self._run(lambda left: self._client.pin(keys, ttl_s, timeout_s=left), timeout_s)

    async def unpin(self, keys: Key | Sequence[Key], *, timeout_s: float | None = None) -> int:
        return await self._run(lambda left: self._client.unpin(keys, timeout_s=left), timeout_s)

    @contextlib.asynccontextmanager
    async def lease(
        self, keys: Key | Sequence[Key], *, prefix: bool = False, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncLease]:
        make = functools.partial(self._client.lease, keys, prefix=prefix)
        lease = await self._run(lambda left: make(timeout_s=left), timeout_s)
        try:
            yield AsyncLease(self, lease)
        finally:
            await self._close_lease(lease)

    async def _close_lease(self, lease: Lease) -> None:
        """Closes it in a thread, because a server is told."""
        try:
            self._client._begin(None)
            closing = asyncio.wrap_future(self._pool.submit(lease.close))
        except (RuntimeError, Unavailable):  # The client is closed, or that of the parent process, and so is the lease.
            return
        await asyncio.shield(closing)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._client.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[float], _T], timeout_s: float | None) -> _T:
        """Runs a call in a thread, with the time that is left when the thread begins."""
        self._client._begin(timeout_s)
        deadline = time.monotonic() + self._client._timeout(timeout_s)
        future = self._pool.submit(lambda: call(max(0.0, deadline - time.monotonic())))
        result = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([result], timeout=max(0.0, deadline - time.monotonic()))
            if not done and future.cancel():
                raise Unavailable("Deadline", "all threads of this client are busy")
            # It runs, and ends at its own deadline or after its copy.
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            while not future.cancel() and not result.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([result])
            if result.done() and not result.cancelled():
                result.exception()  # nobody else reads it
            raise
