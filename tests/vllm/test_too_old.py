"""The plugin does not change a vLLM whose connector API is too old, and reports it."""

from __future__ import annotations

from collections.abc import Callable

from servers.models import token_ids
from servers.pod import Pod
from servers.waiting import wait_for


def test_a_too_old_vllm_serves_without_the_connector(
    new_pod: Callable[..., Pod], truth: Callable[..., list[int]]
) -> None:
    pod = new_pod()
    pod.sidecar.start()
    engine = pod.start_engine()
    assert engine.connector is None
    assert "VllmTooOld" in engine.log_text()
    wait_for(
        lambda: any("VllmTooOld" in s["off"] for s in pod.sidecar.status()["sessions"]), 20, "the reason at the sidecar"
    )
    prompt = token_ids(1500, 501)
    assert engine.generate(prompt) == truth(prompt)
