"""Whatever fails in the connector, vLLM's requests end with the right tokens and no block stays held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from scripted_pool import ScriptedPool
from steps import connected

from kvcachepool import scheduler as scheduler_module
from kvcachepool.scheduler import Scheduler
from kvcachepool.stores import Stores

Make = Callable[..., Loop]


class Injected(Exception):
    """What these tests raise."""


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The next call of a method raises before it does anything. Returns a list that names the call once it has."""
    original = getattr(owner, name)
    raised: list[str] = []

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not raised:
            raised.append(name)
            raise Injected(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)
    return raised


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (scheduler_module.Patience, "new_step"),
        (Scheduler, "_offer"),
        (Scheduler, "_time"),
        (Scheduler, "_send_releases"),
        (Stores, "process"),
        (Stores, "take"),
    ],
)
def test_a_step_that_fails_loses_no_load(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.add("warm", tokens)
    raised = raise_once(monkeypatch, owner, name)
    engine.run("warm")
    assert raised
    assert engine.external["warm"] in (0, 512)
    engine.forget_local()


def test_a_failed_load_is_no_success_where_only_completions_are_asked_for(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.completions_only = True
    engine.add("warm", tokens)
    assert scripted.memory is not None
    for row in scripted.slots():
        scripted.memory.bump(row)
    engine.run("warm")
    state_failed = engine.external["warm"]
    assert state_failed == 0, "computed anew, and checked against what attention must read"
    engine.forget_local()
