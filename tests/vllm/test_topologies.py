"""Objects of one instance are hits for instances with another topology, and for the next version of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers import paths
from servers.engine import by_source
from servers.models import token_ids
from servers.pod import Pod
from servers.redis import RedisServer
from servers.s3 import S3Server
from servers.versions import BEFORE, newest
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]

_TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


def _loaded(pod: Pod, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and the tokens that came from the cache."""
    before = pod.engine.counters()
    pod.add_probed("one", prompt)
    tokens = pod.engine.run()["one"].tokens
    pod.engine.drain()
    return tokens, by_source(before, pod.engine.counters())["external"]


def _hit(pod: Pod, tier: str) -> float:
    return pod.sidecar.metrics().total("kvcachepool_hit_tokens_total", tier=tier)


def _written(pod: Pod, chunks: int, *tiers: str) -> None:
    def written() -> bool:
        metrics, done = pod.sidecar.metrics(), "kvcachepool_tier_write_chunks_total"
        return all(metrics.total(done, tier=tier, result="stored") >= chunks for tier in tiers)

    wait_for(written, 30, f"{chunks} chunks in {tiers}")


@pytest.fixture
def path_of_disk(disk: Path) -> dict[str, Any]:
    return {"disk": {"path": str(disk), "size": "1Gi"}, "cache": {"loadTimeout": "20s"}}


@pytest.mark.parametrize("name", ["tiny", "window"])
def test_two_ranks_load_what_one_rank_stored_and_the_reverse(
    new_pod: NewPod, path_of_disk: dict[str, Any], name: str
) -> None:
    prompts = [token_ids(3000, 321), token_ids(2500, 322)]
    one = new_pod(config=path_of_disk).start(name)
    first = one.generate(prompts[0])
    assert first.external == 0
    wait_for(lambda: one.sidecar.written_to("disk"), 20, "every chunk on disk")
    one.stop()

    two = new_pod(config=path_of_disk).start(name, **_TWO_RANKS)
    from_disk = two.generate_again(prompts[0])
    assert (from_disk.tokens, from_disk.external) == (first.tokens, 2944)
    second = two.generate(prompts[1])
    assert second.external == 0
    _written(two, 10, "disk")
    two.stop()

    again = new_pod(config=path_of_disk).start(name)
    for prompt, answer, loaded in ((prompts[1], second, 2432), (prompts[0], first, 2944)):
        from_disk = again.generate_again(prompt)
        assert (from_disk.tokens, from_disk.external) == (answer.tokens, loaded)


@pytest.fixture
def before() -> Path:
    """An interpreter with the minor version of vLLM before the newest."""
    if not newest():
        pytest.skip("this vLLM is not the newest")
    python = paths.cache() / "venvs" / f"vllm-{BEFORE}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs vLLM {BEFORE}: tools/setup.sh vllm {BEFORE}")
    return python


def test_redis_and_s3_stay_warm_through_an_upgrade_of_vllm(
    new_pod: NewPod, truth: Truth, redis: RedisServer, s3: S3Server, before: Path
) -> None:
    config = {"redis": redis.config(), "s3": s3.config(), "cache": {"loadTimeout": "20s"}}
    prompt = token_ids(2000, 323)
    old = new_pod(config=config).start(python=before)
    cold = old.generate(prompt)
    assert cold.external == 0
    _written(old, 8, "redis", "s3")
    old.stop()

    new = new_pod(config=config).start()
    assert _loaded(new, prompt) == (cold.tokens, 1920)
    wait_for(lambda: _hit(new, "redis") == 1920, 10, "the hit under its tier")
    new.stop()

    assert redis.command("FLUSHALL", "SYNC") == b"+OK"
    other = new_pod(config=config).start()
    assert _loaded(other, prompt) == (truth(prompt), 1920)
    wait_for(lambda: _hit(other, "s3") == 1920, 10, "the hit under its tier")
