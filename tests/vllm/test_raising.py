"""An exception in a hook costs a real vLLM no answer and no block, and the cache recovers.

`tests/connector/test_safety.py` raises at every line that a hook runs, with vLLM's scheduler alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from servers.models import token_ids
from servers.pod import Pod

Truth = Callable[..., list[int]]

METHODS = [
    ("scheduler.Scheduler", "on_new_request"),
    ("scheduler.Scheduler", "matched_tokens"),
    ("scheduler.Scheduler", "allocated"),
    ("scheduler.Scheduler", "step"),
    ("stores.Stores", "offer_step"),
    ("scheduler.Scheduler", "ship"),
    ("scheduler.Scheduler", "output"),
    ("scheduler.Scheduler", "_load_ended"),
    ("scheduler.Scheduler", "finished"),
    ("scheduler.Scheduler", "is_busy"),
    ("loads.Loads", "begin"),
    ("stores.Stores", "offer"),
    ("stores.Stores", "process"),
    ("worker.Worker", "handle_preemptions"),
    ("worker.Worker", "bind"),
    ("worker.Worker", "wait_for_save"),
    ("worker.Worker", "take_ended_loads"),
    ("worker.Worker", "take_report"),
]


@pytest.fixture(scope="module")
def pod(new_module_pod: Callable[..., Pod]) -> Pod:
    """One engine for all tests of this file. The last one turns its cache off."""
    return new_module_pod().start()


def test_an_exception_in_a_hook_costs_no_answer_and_no_block(pod: Pod, truth: Truth) -> None:
    seen = token_ids(700, 81)
    pod.generate(seen)
    for number, (owner, name) in enumerate(METHODS):
        new = token_ids(300, 900 + number)
        pod.engine.reset()
        pod.engine.raise_next(owner, name)
        pod.add_probed("seen", seen)
        pod.engine.step()
        pod.engine.add("new", new)
        outputs = pod.engine.run()
        pod.engine.drain()
        where = f"{owner}.{name}"
        assert pod.engine.take_raised() == [where]
        assert outputs["seen"].tokens == truth(seen), where
        assert outputs["new"].tokens == truth(new), where
        assert pod.engine.try_reset(external=False), f"blocks are held after {where}"
        assert pod.generate_again(seen).external == 640, f"no hit after {where}"


def test_repeated_exceptions_turn_the_cache_off_by_name(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(700, 82)
    pod.generate(prompt)
    pod.engine.raise_next("scheduler.Scheduler", "step", times=3)
    pod.engine.reset()
    assert pod.engine.generate(prompt) == truth(prompt)
    assert "ConnectorBug/step" in [session["off"] for session in pod.sidecar.status()["sessions"]]
    pod.engine.reset()
    assert pod.generate(prompt).external == 0
