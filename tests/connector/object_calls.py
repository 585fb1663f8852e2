"""Calls of object clients in tests: in a thread, and those that must be `Unavailable`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcachepool.client import Unavailable


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a call in a thread. The returned function waits for its result."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(10)
        assert result, "the call did not end"
        return result[0]

    return wait


def fails(reason: str, call: Callable[[], Any]) -> float:
    """Asserts that a call is Unavailable for this reason. Returns its time in seconds."""
    start = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        call()
    assert caught.value.reason == reason, str(caught.value)
    return time.monotonic() - start
