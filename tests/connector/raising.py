"""Raises once at any line of the connector that vLLM's threads run. The lines are found by running them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple


class Injected(Exception):
    """The exception of these tests."""


class Line(NamedTuple):
    """A line of a function, and the thread that runs it."""

    thread: str
    module: str
    function: str
    number: int


def _line(code: CodeType, number: int) -> Line:
    thread = threading.current_thread().name
    return Line(thread, code.co_filename.rsplit("/", 1)[-1].removesuffix(".py"), code.co_qualname, number)


class Tracer:
    """Calls `at(line)` before every line of some modules that this thread, or one that it starts, runs in a hook."""

    def __init__(self, modules: Iterable[Any], at: Callable[[Line], None]) -> None:
        self._files = {module.__file__ for module in modules}
        self._at = at

    def __enter__(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._local if frame.f_code.co_filename in self._files else None

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._at(_line(frame.f_code, frame.f_lineno))
        return self._local


def lines_of(modules: Iterable[Any], run: Callable[[], None]) -> list[Line]:
    """Every line that `run` reaches, in the order of the first visit."""
    found: dict[Line, None] = {}
    with Tracer(modules, found.setdefault):
        run()
    return list(found)


def raising_at(modules: Iterable[Any], line: Line, run: Callable[[], None]) -> bool:
    """Runs with an exception before the first visit of this line. Returns whether it was reached."""
    raised = False

    def at(here: Line) -> None:
        nonlocal raised
        if here == line and not raised:
            raised = True
            raise Injected(f"{line.module}.{line.function}:{line.number} in {line.thread}")

    with Tracer(modules, at):  # the exception ends the tracing, and one is enough
        run()
    return raised
