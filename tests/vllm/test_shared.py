"""Pods that share one Redis and one bucket, with real vLLMs: each hits the other's chunks from both tiers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers.engine import by_source
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


def _generate_and_write(pod: Pod, prompt: list[int]) -> list[int]:
    """The answer to a new prompt, which only this pod writes to both tiers."""
    before = _chunks(pod)
    cold = pod.generate(prompt)
    assert (cold.computed, cold.external) == (2000, 0)

    def written() -> bool:
        metrics, new = pod.sidecar.metrics(), _chunks(pod) - before
        done = "kvcachepool_tier_write_chunks_total"
        return new > 0 and all(metrics.total(done, tier=tier, result="stored") >= new for tier in ("redis", "s3"))

    wait_for(written, 30, "every chunk in both")
    return cold.tokens


def _unwritten(pod: Pod) -> float:
    """Chunks in a tier's write queue, and bytes being written to it."""
    metrics = pod.sidecar.metrics()
    names = ("waiting_chunks", "in_flight_bytes")
    return sum(metrics.total(f"kvcachepool_tier_{name}", direction="write") for name in names)


def _store_and_load(pod: Pod, new: list[list[int]], known: list[list[int]]) -> tuple[list[list[int]], int]:
    """Loads known prompts while new ones are written to both tiers. Returns all answers, and the loaded tokens."""
    pod.sidecar.change({"pacing": {"writeBytesPerSecond": "2Mi"}})
    before = pod.engine.counters()
    answers: list[list[int]] = []
    for batch, add in ((new, pod.engine.add), (known, pod.add_probed)):
        for number, prompt in enumerate(batch):
            add(str(number), prompt)
        outputs = pod.engine.run()
        answers += [outputs[str(number)].tokens for number in range(len(batch))]
    pod.engine.drain()
    pod.settle()
    assert _unwritten(pod) > 0, "everything was written before the load had ended"
    pod.sidecar.change({"pacing": {"writeBytesPerSecond": "0"}})
    wait_for(lambda: _unwritten(pod) == 0, 30, "nothing on its way to a tier")
    return answers, by_source(before, pod.engine.counters())["external"]


def _both_store_and_load(pods: list[Pod], redis: RedisServer, truth: Truth) -> None:
    """Concurrently, each pod stores its own prompt and a common one, and loads an earlier one of the other."""
    known: list[list[list[int]]] = [[], []]
    for number in range(3):
        if number == 2:
            # Chunks that Redis lost are loaded from S3.
            assert redis.command("FLUSHALL", "SYNC") == b"+OK"
        *own, same = (token_ids(2000, 130 + 3 * number + n) for n in range(3))
        with ThreadPoolExecutor() as threads:
            done = list(threads.map(_store_and_load, pods, [[mine, same] for mine in own], known))
        for (answers, loaded), mine, theirs in zip(done, own, known, strict=True):
            assert answers == [truth(prompt) for prompt in (mine, same, *theirs)]
            assert loaded == 1920 * len(theirs), [pod.missed() for pod in pods]
        known = [[own[1]], [own[0]]]
    for pod in pods:
        written = pod.sidecar.metrics().by("kvcachepool_tier_write_chunks", "result")
        assert set(written) <= {"stored", "already"}, written


def test_pods_hit_each_others_chunks_and_chunks_that_redis_lost(
    new_pod: NewPod, truth: Truth, redis: RedisServer, s3: S3Server
) -> None:
    cache = {"loadTimeout": "20s", "loadOrRecompute": "AlwaysLoad"}
    config: dict[str, Any] = {"redis": redis.config(), "s3": s3.config(), "cache": cache}
    first, second = pods = [new_pod(config=config).start() for _ in range(2)]
    prompts = [token_ids(2000, 121), token_ids(2000, 122)]
    for writer, reader, prompt in ((first, second, prompts[0]), (second, first, prompts[1])):
        cold = _generate_and_write(writer, prompt)
        warm = reader.generate(prompt)
        assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
        assert warm.tokens == cold == truth(prompt)
    _both_store_and_load(pods, redis, truth)
    for pod in pods:
        wait_for(lambda pod=pod: _hit(pod, "redis") == 2 * 1920, 10, "the hits under their tier")  # type: ignore[misc]
        wait_for(lambda pod=pod: _hit(pod, "s3") == 1920, 10, "the hit under its tier")  # type: ignore[misc]
    first.engine.stop()
    first.sidecar.kill_tree()
    assert redis.command("FLUSHALL", "SYNC") == b"+OK"
    third = new_pod(config=config).start()
    for prompt in prompts:
        warm = third.generate(prompt)
        assert (warm.external, warm.tokens) == (1920, truth(prompt))
    wait_for(lambda: _hit(third, "s3") == 2 * 1920, 10, "the hits under their tier")
