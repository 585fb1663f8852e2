"""Progress output, and the end of a demo: normal, by Ctrl-C or SIGTERM, or by a failure that names the fix."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_START = time.monotonic()
_ENDS = {signal.SIGINT, signal.SIGTERM}


class Failed(Exception):
    """The demo cannot continue. The text has the reason and the fix."""


def say(text: str) -> None:
    """Prints a line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - _START:4.0f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def at_work(text: str) -> Iterator[None]:
    """Prints the current activity, and again every 10 s while it lasts."""
    say(text)
    done = threading.Event()

    def remind() -> None:
        while not done.wait(10):
            say(f"... {text.partition(':')[0]}")

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def wait_for_end() -> None:
    """Waits for Ctrl-C or SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        signal.sigwait(_ENDS)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    say("ending")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(demo: Callable[[], int]) -> NoReturn:
    """Runs a demo that cleans up after itself, and exits with its status."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = demo()
    except KeyboardInterrupt:
        say("stopped; nothing is left running")
        status = 130
    except (Failed, AssertionError) as error:
        say(str(error))
        status = 1
    raise SystemExit(status)
