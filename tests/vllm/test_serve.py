"""`vllm serve` without arguments for the connector: killed, restarted, and the prompt is still cached."""

from __future__ import annotations

from collections.abc import Callable

from servers.models import model, token_ids
from servers.pod import Pod
from servers.vllm_server import VllmServer
from servers.waiting import wait_for

NewPod = Callable[..., Pod]
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "8192")


def test_vllm_serve_hits_after_a_kill_and_restart(new_pod: NewPod, truth: Callable[..., list[int]]) -> None:
    pod = new_pod()
    pod.sidecar.start()
    prompt = token_ids(4000, 401)
    expected = " ".join(f"w{token}" if token > 2 else "?" for token in truth(prompt, max_tokens=16))
    first = VllmServer(pod.folder, model("tiny"), pod.folder / "serve-1.log", *ARGUMENTS).wait_ready()
    try:
        cold = first.complete(prompt, 4000)
        pod.settle()
        first.reset_prefix_cache()
        warm = first.complete(prompt, 4000)
    finally:
        first.kill()
    wait_for(lambda: not pod.attached(), 20, "the sidecar sees the death")
    second = VllmServer(pod.folder, model("tiny"), pod.folder / "serve-2.log", *ARGUMENTS).wait_ready()
    try:
        # The scheduler side registers at its first request. Before that a probe has no domain.
        second.complete(token_ids(300, 402), 300, max_tokens=1)
        wait_for(pod.attached, 20, "all sessions of the second vLLM ready")
        again = second.complete(prompt, 4000)
    finally:
        second.stop()
    assert (cold.sources["computed"], warm.sources["external"], again.sources["external"]) == (4000, 3968, 3968)
    assert warm.text == again.text == cold.text
    assert cold.text.split() == expected.split()
