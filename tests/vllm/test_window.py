"""Copies use a window of the sidecar in host memory: the same tokens and hits, even if the sidecar dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from servers.models import token_ids
from servers.pod import Pod
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]

MOVED = "kvcachepool_window_copied_bytes_total"


@pytest.fixture(scope="module")
def windowed(new_module_pod: NewPod) -> Pod:
    """A pod whose worker has a window."""
    pod = new_module_pod(config={"transfer": {"mode": "CudaWindow", "windowSize": "32Mi"}}).start()
    wait_for(lambda: has_window(pod), 20, "a window")
    return pod


def has_window(pod: Pod) -> bool:
    return pod.sidecar.metrics().total("kvcachepool_worker_transfer", mode="cuda_window") == 1


def test_a_repeated_prompt_is_loaded_through_the_window_with_the_same_answer(windowed: Pod, truth: Truth) -> None:
    prompt = token_ids(2000, 301)
    cold = windowed.generate(prompt)
    stored = windowed.sidecar.metrics().total(MOVED, direction="store")
    warm = windowed.generate_again(prompt)
    assert (cold.computed, warm.external) == (2000, 1920)
    assert cold.tokens == warm.tokens == truth(prompt)
    assert stored > 0
    assert windowed.sidecar.metrics().total(MOVED, direction="load") > 0
    events = windowed.sidecar.metrics()
    assert events.total("kvcachepool_window_copies_total") == events.total(
        "kvcachepool_window_copies_total", result="moved"
    )


def test_a_new_window_follows_the_death_of_the_sidecar(windowed: Pod, truth: Truth) -> None:
    prompt, later = token_ids(2000, 302), token_ids(1500, 303)
    windowed.generate(prompt)
    windowed.sidecar.kill_engine()
    windowed.sidecar.wait_ready()
    wait_for(windowed.attached, 20, "sessions after the engine's death")
    wait_for(lambda: has_window(windowed), 20, "another window")
    warm = windowed.generate_again(prompt)
    assert (warm.external, warm.tokens) == (1920, truth(prompt))
    assert windowed.sidecar.metrics().total(MOVED, direction="load") > 0
    assert windowed.generate(later).tokens == truth(later)
    again = windowed.generate_again(later)
    assert (again.external, again.tokens) == (1408, truth(later))
