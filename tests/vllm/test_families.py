"""One model of each family: the same answers as vLLM's own prefix hits, from memory and from disk, in every topology.

In bfloat16 an answer depends on where a prompt is split, so vLLM's own hit with the same split is the reference.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers import families
from servers.engine import Engine, EngineFailed
from servers.families import DRAFT_MODEL, N_GRAMS, ONE_RANK, TWO_RANKS, TWO_STAGES, Family, prove
from servers.models import model, token_ids
from servers.paths import ROOT
from servers.pod import Answer, Pod
from servers.sidecar import sizes
from servers.waiting import wait_for

NewPod = Callable[..., Pod]

PROMPT = 3000
_WORKERS: dict[str, Any] = {"distributed_executor_backend": "mp"}
_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
#: Arguments of an engine with two worker processes.
_TOPOLOGIES: dict[str, dict[str, Any]] = {
    TWO_RANKS: {"tensor_parallel_size": 2, "env": _CORES, **_WORKERS},
    # Only a warm-up makes the tensors between stages of vLLM for CPUs, and it skips that for eager models.
    TWO_STAGES: {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
        "env": _CORES | {"TORCHDYNAMO_DISABLE": "1"},
        **_WORKERS,
    },
}


def each(*modes: str) -> list[Any]:
    """Parameters: families with the modes in which they run."""
    return [
        pytest.param(family, mode, id=f"{family.name}-{mode.replace(' ', '-')}")
        for mode in modes
        for family in families.those_with(mode)
    ]


def loaded_bytes(pod: Pod) -> float:
    """The worker's counter, which it reports with a step."""
    pod.engine.generate([1], max_tokens=1)
    return pod.sidecar.metrics().total("kvcachepool_connector_copied_bytes_total", direction="load")


@pytest.mark.parametrize(("family", "mode"), each(ONE_RANK))
def test_answers_are_those_of_vllms_own_hits(new_pod: NewPod, disk: Path, family: Family, mode: str) -> None:
    config: dict[str, Any] = {"disk": {"path": str(disk), "size": "1Gi"}, "cache": {"loadTimeout": "20s"}}
    name, arguments = family.model, family.arguments
    prompt = token_ids(PROMPT, 301)
    pod = new_pod(config=config).start(name, **arguments)
    cold = pod.generate(prompt)
    assert (cold.local, cold.external) == (0, 0)
    wait_for(lambda: pod.sidecar.written_to("disk"), 20, "every chunk on disk")
    local = pod.generate(prompt)
    assert local.local > 2560

    before = loaded_bytes(pod)
    warm = pod.generate_again(prompt)
    assert (warm.local, warm.external, warm.tokens) == (0, local.local, local.tokens)
    chunk, needed = family.needed_bytes(warm.external)
    assert pod.chunk_bytes() == chunk
    wait_for(lambda: loaded_bytes(pod) > before, 10, "the worker's report")
    copied = int(loaded_bytes(pod) - before)
    assert needed <= copied <= needed * 1.05, f"{copied} bytes were loaded, and {needed} are needed"

    pod.engine.stop()
    wait_for(lambda: not pod.attached(), 20, "the sidecar sees vLLM's end")
    pod.start_engine(name, **arguments)
    pod.attach()
    restarted = pod.generate_again(prompt)
    assert (restarted.local, restarted.external, restarted.tokens) == (0, local.local, local.tokens)

    pod.engine.stop()
    pod.sidecar.kill_tree()
    other = new_pod(config=config).start(name, **arguments)
    from_disk = other.generate(prompt)
    assert (from_disk.local, from_disk.external, from_disk.tokens) == (0, local.local, local.tokens)
    prove(
        family.name,
        mode,
        prompt=PROMPT,
        local=local.local,
        memory=warm.external,
        restarted=restarted.external,
        disk=from_disk.external,
        needed_bytes=needed,
        loaded_bytes=copied,
    )


@pytest.mark.parametrize(("family", "mode"), each(TWO_RANKS, TWO_STAGES))
def test_two_workers_answer_as_vllms_own_hits(new_pod: NewPod, family: Family, mode: str) -> None:
    """Each rank has its heads' part of KV and states, and each stage those of its layers."""
    name = family.staged if mode == TWO_STAGES and family.staged else family.model
    pod = new_pod().start(name, **family.arguments, **_TOPOLOGIES[mode])
    prompt = token_ids(PROMPT, 305)
    cold = pod.generate(prompt)
    assert (cold.local, cold.external) == (0, 0)
    # With worker processes vLLM 0.32 has a state only where it sees a prefix for the second time.
    repeated = (pod.generate(prompt) for _ in range(2))
    local = next(answer for answer in repeated if answer.local)
    assert local.local > 2560

    def warm() -> Answer | None:
        """A hit on all that vLLM had. Worker processes store while requests run, and not before their end."""
        answer = pod.generate_again(prompt)
        return answer if answer.external == local.local else None

    loaded = wait_for(warm, 60, "a hit on all blocks, with the parts of both workers")
    assert loaded.tokens == local.tokens
    if family.dtype == "float32":
        assert loaded.tokens == cold.tokens
    if mode == TWO_RANKS and not family.theory:
        size = sizes(model(name), "--dtype", family.dtype, f"--block-size={family.block}", "--tp=2")
        assert pod.chunk_bytes() == size["chunk_bytes"]
    workers = [s for s in pod.sidecar.status()["sessions"] if s["role"].lower() == "worker" and s["connected"]]
    assert sorted(s["rank"] for s in workers) == [0, 1]
    prove(family.name, mode, prompt=PROMPT, local=local.local, memory=loaded.external)


def speculation(mode: str) -> dict[str, Any]:
    """vLLM's speculative_config."""
    if mode == DRAFT_MODEL:
        return {"method": "draft_model", "model": str(model("tiny-other")), "num_speculative_tokens": 2}
    return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@pytest.mark.parametrize(("family", "mode"), each(N_GRAMS, DRAFT_MODEL))
def test_speculation_changes_no_answer_and_the_drafts_kv_is_loaded(
    new_pod: NewPod, truth: Callable[..., list[int]], family: Family, mode: str
) -> None:
    """A draft model's layers are in the KV groups of the model, so a hit has their KV too."""
    pod = new_pod().start(family.model, **family.arguments, speculative_config=speculation(mode))
    prompt = token_ids(400, 306) * 3
    cold = pod.generate(prompt, max_tokens=24)
    local = pod.generate(prompt, max_tokens=24)
    warm = pod.generate_again(prompt, max_tokens=24)
    assert (cold.external, local.local, warm.external) == (0, 1152, 1152)
    assert local.tokens == warm.tokens
    if family.model == "tiny":
        assert warm.tokens == truth(prompt, max_tokens=24)
    if mode == DRAFT_MODEL:
        assert pod.chunk_bytes() == 2 * sizes(model(family.model), "--dtype", family.dtype)["chunk_bytes"]
    prove(family.name, mode, prompt=len(prompt), local=local.local, memory=warm.external)


def run_without_the_cache(log: Path, name: str, errors: list[str], **arguments: Any) -> None:
    """Runs a prompt without a connector. Raises unless vLLM fails with one of these errors, which other versions may
    word differently.
    """
    if not families.recorded_vllm():
        return
    engine: Engine | None = None

    def run() -> None:
        nonlocal engine
        engine = Engine(None, model(name), log, enable_prefix_caching=True, **arguments)
        engine.generate(token_ids(400, 307) * 3)

    try:
        with pytest.raises(EngineFailed, match="|".join(map(re.escape, errors))):
            run()
    finally:
        if engine is not None:
            engine.stop()


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.model) for kind in families.UNTESTED if kind.fails_here()])
def test_vllm_for_cpus_does_not_run_a_kind(tmp_path: Path, kind: families.Untested) -> None:
    """A kind that a later vLLM runs is a family to test."""
    run_without_the_cache(tmp_path / "vllm.log", kind.model, kind.errors(), dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "mode", "error"),
    [
        pytest.param(family, mode, error, id=f"{family.name}-{mode.replace(' ', '-')}")
        for family in families.FAMILIES
        for mode, error in family.refused.items()
    ],
)
def test_vllm_for_cpus_does_not_speculate(tmp_path: Path, family: Family, mode: str, error: str) -> None:
    """What a later vLLM runs is a mode to test."""
    log = tmp_path / "vllm.log"
    run_without_the_cache(log, family.model, [error], **family.arguments, speculative_config=speculation(mode))


def test_the_page_says_what_these_tests_prove_and_nothing_else() -> None:
    subprocess.run([sys.executable, ROOT / "tools/compatibility.py", "--check"], check=True)
    recorded = {(name, mode) for name, modes in families.record()["families"].items() for mode in modes}
    declared = {(family.name, mode) for family in families.FAMILIES for mode in family.modes}
    needs_a_cpu = {(family.name, mode) for family in families.FAMILIES if family.cpu_flag for mode in family.modes}
    assert declared - needs_a_cpu <= recorded <= declared
