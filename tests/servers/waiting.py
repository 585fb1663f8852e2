"""Waiting for a condition with a deadline."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class _File(Protocol):
    def fileno(self) -> int: ...


class TimedOut(AssertionError):
    """The condition did not come true in time."""


def wait_for(condition: Callable[[], T | None], seconds: float, what: str, *, pause: float = 0.02) -> T:
    """Polls until the result is true and returns it. `what` names the condition in the error."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimedOut(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


def readable(file: _File, seconds: float) -> bool:
    """Whether `file` has something to read, or its end, within `seconds`; also with a descriptor of 1024 and more."""
    poll = select.poll()
    poll.register(file.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))
