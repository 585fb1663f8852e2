"""Store, forget, hit: what is loaded, how much of it, and that it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt

from servers.waiting import wait_for

Make = Callable[..., Loop]


def ready(loop: Loop, pool: Any) -> Loop:
    """Waits until the engine is registered with the sidecar."""
    wait_for(lambda: loop.connector._scheduler is not None and loop.connector._scheduler._client.connected, 20, "HELLO")
    wait_for(lambda: loop.worker._worker is not None and loop.worker._worker._mapping is not None, 20, "a mapping")
    return loop


def test_a_prompt_that_was_stored_is_loaded_whole(pool: Any, loop: Make) -> None:
    engine = ready(loop(), pool)
    tokens = prompt(1000, 1)
    assert engine.generate("cold", tokens) == 0
    engine.forget_local()
    wait_for(lambda: pool.metrics().get("kvcachepool_stored_chunks_total", 0) >= 16, 10, "digests")
    assert engine.generate("warm", tokens) == 992
