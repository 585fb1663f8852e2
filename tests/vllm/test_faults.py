"""The sidecar dies, stops, is late or returns: vLLM continues with the same tokens, and hits again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

from servers.models import token_ids
from servers.pod import Pod
from servers.sidecar import Sidecar
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


def test_engine_killed_under_a_running_vllm(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(2000, 101)
    pod.generate(prompt)
    pod.sidecar.kill_engine()
    pod.sidecar.wait_ready()
    wait_for(pod.attached, 20, "sessions after the engine's death")
    warm = pod.generate_again(prompt)
    assert warm.external == 1920
    assert warm.tokens == truth(prompt)


def test_connectors_return_the_memory_after_the_container_was_killed(pod: Pod, truth: Truth) -> None:
    prompt, meanwhile = token_ids(2000, 102), token_ids(1500, 103)
    pod.generate(prompt)
    pod.sidecar.kill_tree()
    alone = pod.generate_again(meanwhile)
    assert (alone.external, alone.tokens) == (0, truth(meanwhile))
    pod.sidecar.start()
    wait_for(pod.attached, 20, "sessions after the container's death")
    warm = pod.generate_again(prompt)
    assert warm.external == 1920
    assert warm.tokens == truth(prompt)


def test_three_deaths_in_a_row_start_cold_and_serve(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(1500, 104)
    pod.generate(prompt)
    for _ in range(3):
        pod.sidecar.kill_tree()
        pod.sidecar.start()
        wait_for(pod.attached, 20, "sessions after a death")
    first = pod.generate_again(prompt)
    again = pod.generate_again(prompt)
    assert again.external == 1408
    assert first.tokens == again.tokens == truth(prompt)


def test_the_sidecar_stops_during_a_load(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(4000, 105)
    pod.generate(prompt)
    pod.engine.reset()
    pod.engine.add("loading", prompt)
    while pod.engine.states().get("loading") == "WAITING":
        pod.engine.step()
    assert pod.engine.states()["loading"] == "WAITING_FOR_REMOTE_KVS"
    pod.sidecar.freeze()
    assert pod.engine.run(60)["loading"].tokens == truth(prompt)
    pod.engine.drain()
    pod.sidecar.thaw()
    warm = pod.generate_again(prompt)
    assert warm.external == 3968
    assert warm.tokens == truth(prompt)


def test_stopped_sidecar_costs_no_answer_and_little_time(pod: Pod, truth: Truth) -> None:
    prompts = [token_ids(1500, 110 + n) for n in range(3)]
    expected = [truth(prompt) for prompt in prompts]
    pod.sidecar.freeze()
    start = time.monotonic()
    got = [pod.engine.generate(prompt) for prompt in prompts]
    elapsed = time.monotonic() - start
    pod.sidecar.thaw()
    assert got == expected
    assert elapsed < 60, f"{elapsed:.0f} s for three prompts beside a stopped sidecar"
    wait_for(pod.attached, 20, "sessions after the sidecar woke")
    pod.generate_again(prompts[0])
    assert pod.generate_again(prompts[0]).external == 1408


def test_the_sidecar_starts_after_vllm(new_pod: NewPod, truth: Truth) -> None:
    pod = new_pod()
    pod.start_engine()
    prompt = token_ids(2000, 120)
    alone = pod.generate(prompt)
    assert (alone.external, alone.tokens) == (0, truth(prompt))
    pod.sidecar.start()
    pod.attach()
    pod.generate_again(prompt)
    warm = pod.generate_again(prompt)
    assert warm.external == 1920
    assert warm.tokens == truth(prompt)


def test_vllm_killed_during_a_store_and_restarted(new_pod: NewPod, truth: Truth) -> None:
    pod = new_pod().start()
    first = pod.engine
    stored, torn = token_ids(2000, 130), token_ids(7000, 131)
    pod.generate(stored)
    first.add("torn", torn)

    def granted() -> bool:
        first.step()
        return pod.sidecar.status()["memory"]["slots"]["granted"] > 0

    wait_for(granted, 60, "a grant that a worker holds", pause=0)
    first.kill()
    wait_for(lambda: pod.sidecar.status()["memory"]["slots"]["granted"] == 0, 60, "slots of the dead writer back")
    pod.start_engine()
    pod.attach()
    warm, again = pod.generate(stored), pod.generate(torn)
    assert warm.external == 1920
    assert warm.tokens == truth(stored)
    assert again.tokens == truth(torn)
    assert pod.generate_again(torn).external == 6912


def test_preemption_and_eviction_in_tiny_memories(new_pod: NewPod, truth: Truth) -> None:
    # Space for 24 blocks in vLLM and for 64 MiB in the sidecar, so both evict continuously.
    pod = new_pod(memory="64Mi").start(num_gpu_blocks_override=24, max_num_batched_tokens=1024, max_model_len=2048)
    prompts = {f"p{n}": token_ids(1400, 140 + n) for n in range(14)}
    before = pod.engine.counters()
    for _ in range(2):
        for name, prompt in prompts.items():
            pod.engine.add(name, prompt, max_tokens=20)
        outputs = {name: output.tokens for name, output in pod.engine.run(240).items()}
        pod.engine.drain()
        pod.engine.reset()
    grown = pod.engine.counters().total("vllm:num_preemptions") - before.total("vllm:num_preemptions")
    assert grown > 0, "the case did not preempt"
    assert outputs == {name: truth(prompt, max_tokens=20) for name, prompt in prompts.items()}
    pod.settle()
    metrics = pod.sidecar.metrics()
    assert metrics.total("kvcachepool_evicted_chunks_total") > 0
    assert pod.sidecar.status()["memory"]["leased_bytes"] == 0


def test_second_sidecar_on_a_live_socket_refuses(pod: Pod) -> None:
    second = Sidecar(pod.folder, config_file="second.yaml")
    second.log = pod.folder / "second.log"
    second.start(ready_seconds=None)
    try:
        wait_for(
            lambda: "SocketTaken" in second.log.read_text() or "in use" in second.log.read_text(),
            10,
            "a refusal by name",
        )
        assert pod.attached()
    finally:
        second.stop()
