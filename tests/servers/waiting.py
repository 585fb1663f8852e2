"""Waiting for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
