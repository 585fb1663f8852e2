"""Models with other layouts of KV, other weights, and a model with two workers."""

from __future__ import annotations

from collections.abc import Callable

from servers.engine import Engine, by_source
from servers.models import model, token_ids
from servers.pod import Answer, Pod
from servers.sidecar import sizes
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


def test_a_backend_without_prefix_support_answers_as_without_a_cache(new_pod: NewPod) -> None:
    trunk = token_ids(1200, 304)
    prompts = [trunk[:length] + token_ids(100, 310 + at) for at, length in enumerate((1200, 900, 700, 1100))]
    pod = new_pod()
    pod.sidecar.start()
    alone = Engine(None, model("mla"), pod.folder / "alone.log", attention_backend="CPU_MLA")
    wanted = [alone.generate(prompt) for prompt in prompts]
    alone.stop()
    engine = pod.start_engine("mla", attention_backend="CPU_MLA")
    if engine.connector is not None:
        pod.attach()
    answers = [pod.generate(prompt) for prompt in prompts]
    assert [answer.tokens for answer in answers] == wanted, answers
    assert engine.connector is None
    wait_for(
        lambda: "PrefixUnsupported" in [session["off"] for session in pod.sidecar.status()["sessions"]],
        20,
        "the reason at the sidecar",
    )


def test_other_weights_and_other_dtype_share_nothing(new_pod: NewPod, truth: Truth) -> None:
    pod = new_pod()
    pod.sidecar.start()
    prompt = token_ids(1500, 302)
    domains = set()
    for name, dtype in (("tiny-other", "float32"), ("tiny", "bfloat16"), ("tiny", "float32")):
        engine = pod.start_engine(name, dtype=dtype)
        pod.attach()
        cold = pod.generate(prompt)
        assert cold.external == 0, f"{name} in {dtype} took KV of another domain"
        domains |= {(d["model_id"], d["layout_id"]) for d in pod.sidecar.status()["domains"]}
        engine.stop()
    assert cold.tokens == truth(prompt)
    assert len(domains) == 3


def test_two_workers_of_a_model_with_states(new_pod: NewPod) -> None:
    """Each rank has its heads' part of the states."""
    pod = new_pod().start(
        "gdn",
        dtype="bfloat16",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    prompt = token_ids(3000, 305)
    pod.generate(prompt)
    # With worker processes vLLM 0.32 has a state only where it sees a prefix for the second time.
    assert pod.generate(prompt).local == 0
    local = pod.generate(prompt)
    assert local.local == 2816

    def loaded() -> Answer | None:
        answer = pod.generate_again(prompt)
        return answer if answer.external == 2816 else None

    warm = wait_for(loaded, 60, "a hit on all blocks, with the states of both ranks")
    assert warm.tokens == local.tokens


def test_two_workers(new_pod: NewPod, truth: Truth) -> None:
    pod = new_pod().start(
        tensor_parallel_size=2, distributed_executor_backend="mp", env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    )
    engine = pod.engine
    prompt = token_ids(3000, 303)
    cold = engine.generate(prompt)
    pod.settle()
    wait_for(lambda: pod.sidecar.status()["memory"]["chunks"] >= 12, 20, "all chunks of the prompt stored")
    engine.reset()
    before = engine.counters()
    warm = engine.generate(prompt)
    assert by_source(before, engine.counters())["external"] == 2944
    assert cold == warm == truth(prompt)
    assert pod.chunk_bytes() == sizes(model("tiny"), "--dtype=float32", "--tp=2")["chunk_bytes"]
    workers = [s for s in pod.sidecar.status()["sessions"] if s["role"].lower() == "worker" and s["connected"]]
    assert sorted(s["rank"] for s in workers) == [0, 1]
