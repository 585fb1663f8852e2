"""Calls of the user's class: a bounded number at once, each with a deadline, errors by the class's name.

A call that hangs keeps its thread. The number of threads is bounded, so `stuck` says when none is left; a liveness
check then restarts the process.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

from .store_api import Full, Store
from .store_errors import SHOWN, Refused, line, log

_METHODS = ("open", "close", "stat", "get", "put", "delete")


class _Late(Exception):
    """A coroutine was cancelled at its deadline."""


class Unfinished(Refused):
    """A call exceeded its deadline, and may still run."""

    def __init__(self, message: str, ended: Future[Any]) -> None:
        super().__init__(503, "RequestTimeout", message)
        #: Done once the call has ended.
        self.ended = ended


class BadClass(Exception):
    """The class cannot be loaded or created."""


def load(path: str, config: Mapping[str, Any]) -> Any:
    """Creates an instance of the class at `module:Class`."""
    module_name, colon, class_name = path.partition(":")
    if not (module_name and colon and class_name):
        raise BadClass(f"expected MODULE:CLASS, such as kvcachepool.store_memory:MemoryStore, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadClass(f"cannot import {module_name}: {error}; install it, or add its folder to PYTHONPATH") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise BadClass(f"{module_name} has no class {class_name}")
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise BadClass(f"{path} lacks {', '.join(missing)}; derive it from kvcachepool.store_api.Store")
    try:
        return found(**config)
    except (TypeError, ValueError) as error:
        raise BadClass(f"{path} does not accept --config: {error}") from error


class _Call:
    """A call in the queue."""

    def __init__(self, method: str, args: tuple[Any, ...], deadline_s: float) -> None:
        self.method, self.args, self.deadline_s = method, args, deadline_s
        self.future: Future[Any] = Future()

    def cancel(self) -> None:
        """Lets go of the arguments, unless the call has begun."""
        if self.future.cancel():
            self.args = ()


class Calls:
    """Runs methods of one store in threads of its own."""

    def __init__(self, store: Any, concurrency: int, deadline_s: float) -> None:
        self.name = type(store).__name__
        self.deadline_s = deadline_s
        self._store = store
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._started: list[float | None] = [None] * concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        for number in range(concurrency):
            # Daemons, so that a call that hangs does not keep the process.
            threading.Thread(target=self._work, args=(number,), name=f"store-{number}", daemon=True).start()

    def lists(self) -> bool:
        """Whether the class can list."""
        method = getattr(type(self._store), "list", None)
        return method is not None and method is not Store.list

    def stuck(self) -> bool:
        """Whether every thread runs a call that has exceeded its deadline."""
        now = time.monotonic()
        return all(start is not None and now - start > self.deadline_s for start in tuple(self._started))

    def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """The result of a method. Raises `Refused`, which is `Unfinished` at the deadline."""
        deadline_s = deadline_s or self.deadline_s
        call = _Call(method, args, deadline_s)
        future = call.future
        self._queue.put(call)
        wait_for_futures([future], deadline_s)
        error = future.exception() if future.done() else _Late()
        if isinstance(error, _Late):
            call.cancel()
            log.warning(line("call exceeded its deadline", method=method, store=self.name, deadline_s=deadline_s))
            message = f"{self.name}.{method} did not return within {deadline_s:g} s"
            raise Unfinished(message, future)
        if error is None:
            return future.result()
        told = f"{self.name}.{method} raised {type(error).__name__}: {error}"[:SHOWN]
        fields = {"method": method, "store": self.name, "error": type(error).__name__}
        log.warning(line("call failed", **fields, detail=error), exc_info=None if isinstance(error, Full) else error)
        if isinstance(error, Full):
            raise Refused(507, "InsufficientCapacity", told) from error
        raise Refused(500, "InternalError", told) from error

    def _work(self, number: int) -> None:
        while True:
            call = self._queue.get()
            future = call.future
            if not future.set_running_or_notify_cancel():
                continue
            self._started[number] = time.monotonic()
            try:
                result = self._run(call.method, call.args, call.deadline_s)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                self._started[number] = None
                del future, call
                result = None

    def _run(self, method: str, args: tuple[Any, ...], deadline_s: float) -> Any:
        result = getattr(self._store, method)(*args)
        if not inspect.isawaitable(result):
            return result

        async def waited() -> Any:
            # Cancelled at the deadline, so that the thread is free again.
            task = asyncio.ensure_future(result)
            await asyncio.wait([task], timeout=deadline_s)
            if not task.done():
                task.cancel()
                # Until the coroutine has ended it may change the object.
                await asyncio.wait([task])
                raise _Late
            return task.result()

        return asyncio.run_coroutine_threadsafe(waited(), self._event_loop()).result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="store-loop", daemon=True).start()
            return self._loop


class Budget:
    """Bytes of objects in this process at once."""

    def __init__(self, total: int, deadline_s: float) -> None:
        self.total = total
        self._free = total
        self._deadline_s = deadline_s
        self._changed = threading.Condition()

    def take(self, wanted: int) -> None:
        """Waits for room. Raises `Refused`."""
        if wanted > self.total:
            message = f"the request has {wanted} bytes, and --memory is {self.total}: raise it"
            raise Refused(413, "EntityTooLarge", message)
        with self._changed:
            if not self._changed.wait_for(lambda: self._free >= wanted, self._deadline_s):
                message = f"no room for {wanted} bytes within {self._deadline_s:g} s: raise --memory"
                raise Refused(503, "SlowDown", message)
            self._free -= wanted

    def give(self, taken: int) -> None:
        """Returns room."""
        with self._changed:
            self._free += taken
            self._changed.notify_all()
