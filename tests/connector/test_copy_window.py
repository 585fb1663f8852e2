"""The order of a window's stages within a job, with scripted responses of the sidecar."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stub_sidecar import memfd
from test_copy import block_outermost, layout_of

from kvcachepool import copy_window, window
from kvcachepool.copy_window import Staged, WindowCopier
from kvcachepool.flag_page import State
from kvcachepool.messages import WindowReply
from kvcachepool.shared import SharedMemoryError, StillMappedError
from kvcachepool.window import WindowKeeper

LAYOUT = layout_of(block_outermost(64))


class Memory:
    def __init__(self) -> None:
        self.copied = 0

        self.unmaps = True

    def copy(self, kind: str, pieces: Any, event: Any) -> None:
        self.copied += 1

    def close(self) -> bool:
        return self.unmaps


class Scripted(WindowCopier):
    """Returns stages with these results, in order."""

    def __init__(self, stages: int, answers: list[str]) -> None:
        self.memory: Any = Memory()
        self._stages, self._stage_bytes = stages, 4096
        self._answers = list(answers)
        self._handed_over: set[int] = set()
        self._timeout_s = 60.0

    def _hand_over(self, at: int, state: State, part: Staged) -> None:
        assert at not in self._handed_over, "a stage that the sidecar has is not handed over another time"
        self._handed_over.add(at)

    def _wait_returned(self, at: int) -> str:
        self._handed_over.remove(at)
        return self._answers.pop(0)


@pytest.mark.parametrize(
    "answers",
    [
        ["CopyFailed", ""],
        ["CopyFailed", "", ""],
        ["", "Generation", "", ""],
        ["", "", "Closed"],
        ["BadRecord", "Generation", ""],
        ["", "", "", "", "Generation", "", ""],
    ],
)
@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_refused_stage_decides_the_result_of_the_job(kind: str, answers: list[str]) -> None:
    parts = [Staged(np.zeros((1, 4), dtype=np.uint32), []) for _ in answers]
    copier = Scripted(3, answers)
    run = copier._load if kind == "load" else copier._store
    first = next(answer for answer in answers if answer)
    assert run(parts, None) == first
    assert not copier._handed_over, "all stages are back"
    if kind == "load":
        assert copier.memory.copied == answers.index(first), "nothing is scattered behind a refusal"


def test_a_job_is_done_when_all_stages_are_returned() -> None:
    for kind in ("load", "store"):
        copier = Scripted(3, [""] * 7)
        parts = [Staged(np.zeros((1, 4), dtype=np.uint32), []) for _ in range(7)]
        assert (copier._load if kind == "load" else copier._store)(parts, None) == ""
        assert (copier.memory.copied, copier._handed_over) == (7, set())


@pytest.mark.parametrize(("unmaps", "expected"), [(True, b"\x02"), (False, b"")])
def test_a_worker_reports_an_unmapped_window(unmaps: bool, expected: bytes) -> None:
    copier = Scripted(3, [])
    copier.memory.unmaps = unmaps
    copier._bell, far_end = socket.socketpair()
    copier._mapped, copier._closing = True, contextlib.ExitStack()
    copier._closing.callback(copier._close_bell)
    copier._closing.callback(copier._unmap)
    copier.close()
    assert far_end.recv(64) == expected
    assert far_end.recv(64) == b"", "and hangs up"
    far_end.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(SharedMemoryError("no"), b"\x02"), (StillMappedError("no"), b""), (KeyError("no"), b"\x02")],
)
def test_a_failed_window_reports_whether_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: bytes
) -> None:
    def refused(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(copy_window, "_memory", refused)
    near, far_end = socket.socketpair()
    reply = WindowReply(fds=["bell", "page"], stages=2, stage_bytes=4096, bytes=8192)
    with pytest.raises(type(error)):
        WindowCopier(LAYOUT, reply, [near.detach(), memfd("page", 4096)], 0)
    assert far_end.recv(64) == expected
    assert far_end.recv(64) == b"", "and hangs up"
    far_end.close()


def test_a_window_that_is_shorter_than_its_stages_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_window, "_memory", lambda *arguments: pytest.fail("it was mapped"))
    near, far_end = socket.socketpair()
    reply = WindowReply(fds=["bell", "page"], stages=2, stage_bytes=4096, bytes=8191)
    with pytest.raises(SharedMemoryError, match="exceed the window"):
        WindowCopier(LAYOUT, reply, [near.detach(), memfd("page", 4096)], 0)
    far_end.close()


def test_a_window_is_closed_if_its_connection_ends_during_its_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Made:
        def __init__(self, *arguments: Any) -> None:
            pass

        def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr(window, "WindowCopier", Made)
    keeper = WindowKeeper(LAYOUT, "", pytest.fail)
    answer: Any = SimpleNamespace(error=None, read=lambda kind: WindowReply(), fds=[])
    gone: Any = SimpleNamespace(hello=None, request=lambda *arguments: None)
    keeper._on_window(gone, answer)
    assert closed == ["closed"]
    there: Any = SimpleNamespace(hello=None, request=lambda *arguments: 7)
    keeper._on_window(there, answer)
    assert closed == ["closed"]
    keeper.retire()
    for retired in keeper.take_retired():
        retired.close()
    assert closed == ["closed"] * 2


def test_any_failure_to_create_a_window_leaves_the_copies_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*arguments: Any) -> None:
        raise OverflowError("of some kind")

    monkeypatch.setattr(window, "WindowCopier", odd)
    counted: list[str] = []
    keeper = WindowKeeper(LAYOUT, "", counted.append)
    answer: Any = SimpleNamespace(error=None, read=lambda kind: WindowReply(), fds=[])
    keeper._on_window(SimpleNamespace(hello=None), answer)  # type: ignore[arg-type]
    assert (counted, keeper.reason) == (["window_unavailable/NotMapped"], "NotMapped")
