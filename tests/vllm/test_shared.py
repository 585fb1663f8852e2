"""Pods that share one Redis and one bucket, under real vLLMs: what one stores the others hit, from either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servers.models import token_ids
from servers.pod import Pod
from servers.redis import RedisServer
from servers.s3 import S3Server
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


def _hit(pod: Pod, tier: str) -> float:
    return pod.sidecar.metrics().total("kvcachepool_hit_tokens_total", tier=tier)


def _chunks(pod: Pod) -> int:
    return int(pod.sidecar.status()["memory"]["chunks"])


def _asked_and_written(pod: Pod, prompt: list[int]) -> list[int]:
    """The answer to a prompt that nobody has, which this pod alone writes to both tiers."""
    before = _chunks(pod)
    cold = pod.ask(prompt)
    assert (cold.computed, cold.external) == (2000, 0)

    def written() -> bool:
        metrics, new = pod.sidecar.metrics(), _chunks(pod) - before
        done = "kvcachepool_tier_write_chunks_total"
        return new > 0 and all(metrics.total(done, tier=tier, result="stored") >= new for tier in ("redis", "s3"))

    wait_for(written, 30, "every chunk in both")
    return cold.tokens


def test_two_pods_hit_what_the_other_stored_and_a_third_what_redis_lost(
    new_pod: NewPod, truth: Truth, redis: RedisServer, s3: S3Server
) -> None:
    config: dict[str, Any] = {"redis": redis.config(), "s3": s3.config(), "cache": {"loadTimeout": "20s"}}
    first, second = (new_pod(config=config).start() for _ in range(2))
    prompts = [token_ids(2000, 121), token_ids(2000, 122)]
    for writer, reader, prompt in ((first, second, prompts[0]), (second, first, prompts[1])):
        cold = _asked_and_written(writer, prompt)
        warm = reader.ask(prompt)
        assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
        assert warm.tokens == cold == truth(prompt)
    for pod in (first, second):
        wait_for(lambda pod=pod: _hit(pod, "redis") == 1920, 10, "the hit under its tier")  # type: ignore[misc]
    first.engine.stop()
    first.sidecar.kill_tree()
    assert redis.ask("FLUSHALL", "SYNC") == b"+OK"
    third = new_pod(config=config).start()
    for prompt in prompts:
        warm = third.ask(prompt)
        assert (warm.external, warm.tokens) == (1920, truth(prompt))
    wait_for(lambda: _hit(third, "s3") == 2 * 1920, 10, "the hits under their tier")
