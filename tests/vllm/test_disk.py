"""The disk tier with a real vLLM: warm after sidecar and vLLM were both replaced."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from servers import paths
from servers.models import token_ids
from servers.pod import BLOCK, Pod
from servers.routers import Dynamo, LlmD, Publisher, replayed
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


class Events:
    """vLLM's own publisher of KV events, and routers that read it."""

    def __init__(self) -> None:
        self.replay = f"tcp://127.0.0.1:{paths.free_port()}"
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{paths.free_port()}",
            "replay_endpoint": self.replay,
        }

    def become(self, pod: Pod, prompt: list[int], blocks: int, *media: str) -> None:
        """Waits until routers that started with this vLLM's first event assign these blocks to it in each medium."""

        def known() -> bool:
            pod.engine.step()
            routers = Publisher(LlmD(), Dynamo(BLOCK))
            for payload in replayed(self.replay):
                routers.deliver(payload)
            return all(router.blocks(prompt, BLOCK, one) == blocks for router in routers.routers for one in media)

        wait_for(known, 20, f"{blocks} blocks known in {media}")


_WARM, _SPOILED = (token_ids(2000, seed) for seed in (71, 72))
_SLOW = [token_ids(600, seed) for seed in (91, 92, 93)]


def _config(disk: Path) -> dict[str, Any]:
    return {"disk": {"path": str(disk), "size": "1Gi"}, "cache": {"loadTimeout": "20s"}}


class Written(NamedTuple):
    """The disk of a deleted pod that computed all prompts."""

    disk: Path
    #: Its answer to the warm prompt.
    answer: list[int]
    chunk_bytes: int

    def copy(self, disk: Path) -> Path:
        """A disk of its own for a new pod."""
        return shutil.copytree(self.disk, disk, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def written(new_module_pod: NewPod) -> Iterator[Written]:
    """What one vLLM computed, for every test here."""
    disk = paths.short_folder()
    events, pod = Events(), new_module_pod(config=_config(disk))
    try:
        pod.start(kv_events_config=events.config)
        cold = pod.generate(_WARM)
        assert (cold.computed, cold.external) == (2000, 0)
        wait_for(lambda: pod.sidecar.written_to("disk"), 20, "every chunk on disk")
        events.become(pod, _WARM, 15, "GPU", "CPU", "STORAGE")
        for prompt in (_SPOILED, *_SLOW):
            pod.generate(prompt)
        wait_for(lambda: pod.sidecar.written_to("disk"), 20, "every chunk on disk")
        chunk_bytes = pod.sidecar.status()["domains"][0]["chunk_bytes"]
        pod.engine.stop()
        pod.sidecar.kill_tree()
        yield Written(disk, cold.tokens, chunk_bytes)
    finally:
        shutil.rmtree(disk, ignore_errors=True)


def test_a_new_pod_is_warm_from_the_disk_of_a_deleted_one(
    written: Written, new_pod: NewPod, truth: Truth, disk: Path
) -> None:
    prompt = _WARM
    events = Events()
    second = new_pod(config=_config(written.copy(disk))).start(kv_events_config=events.config)
    warm = second.generate(prompt)
    events.become(second, prompt, 15, "GPU", "CPU", "STORAGE")
    assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
    assert warm.tokens == written.answer == truth(prompt)
    hits = second.sidecar.metrics
    wait_for(lambda: hits().total("kvcachepool_hit_tokens_total", tier="disk") == 1920, 10, "the hit under its tier")

    samples = hits()
    reads = samples.total("kvcachepool_tier_operation_seconds_count", tier="disk", operation="get")
    assert reads >= samples.total("kvcachepool_tier_fetch_chunks_total", tier="disk", result="landed") >= 8
    slow = samples.total("kvcachepool_tier_operation_seconds_bucket", tier="disk", operation="get", le="+Inf")
    assert slow == reads
    assert 0 < samples.total("kvcachepool_tier_used_bytes", tier="disk") <= 1 << 30
    assert samples.total("kvcachepool_tier_capacity_bytes", tier="disk") == 1 << 30
    assert samples.total("kvcachepool_load_seconds_count") == 1
    assert samples.total("kvcachepool_probe_seconds_count") >= 1
    stored = samples.total("kvcachepool_stored_chunks_total")
    assert stored - samples.total("kvcachepool_store_seconds_count") == 8
    assert 0 < samples.total("kvcachepool_load_seconds_sum") < 20
    assert samples.total("process_resident_memory_bytes") > 0

    # A corrupt chunk in memory is dropped, and the next request loads it from the disk again.
    assert second.sidecar.flip_memory()
    flipped = second.generate_again(prompt, params={"kvcachepool.store": False})
    fetched = second.generate_again(prompt)
    assert (flipped.external, fetched.external) == (0, 1920)
    assert flipped.tokens == fetched.tokens == truth(prompt)
    wait_for(lambda: hits().total("kvcachepool_hit_tokens_total", tier="disk") == 3840, 10, "both hits of the disk")


def test_corrupt_bytes_are_detected_counted_and_recomputed(
    written: Written, new_pod: NewPod, truth: Truth, disk: Path
) -> None:
    prompt = _SPOILED
    written.copy(disk)
    containers = [file for file in disk.rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]
    assert containers
    for container in containers:
        with container.open("r+b") as opened:
            for place in range(40_000, container.stat().st_size, 1 << 16):
                opened.seek(place)
                opened.write(b"not what was written")

    second = new_pod(config=_config(disk)).start()
    answer = second.generate(prompt)
    assert (answer.computed, answer.local, answer.external) == (2000, 0, 0)
    assert answer.tokens == truth(prompt)
    metrics = second.sidecar.metrics
    assert metrics().total("kvcachepool_tier_corrupt_objects_total", tier="disk") > 0
    # Detected chunks are written again. Chunks behind them were not read, and are detected when they are.
    name = "kvcachepool_tier_write_chunks_total"
    wait_for(lambda: metrics().total(name, tier="disk", result="stored") > 0, 20, "chunks written anew")
    again = second.generate_again(prompt)
    assert (again.external, again.tokens) == (1920, truth(prompt))


def test_tokens_that_load_slower_than_they_compute_are_recomputed(
    written: Written, new_pod: NewPod, truth: Truth, disk: Path
) -> None:
    # A chunk takes half a second, slower than computing. That is known after three of them.
    pacing = {"readBytesPerSecond": str(2 * written.chunk_bytes)}
    second = new_pod(config=_config(written.copy(disk)) | {"pacing": pacing}).start()
    for seed in range(3):
        second.generate(token_ids(600, 1000 + seed))
    answers = [second.generate(prompt) for prompt in _SLOW]
    assert [answer.external for answer in answers] == [512, 512, 0]
    assert [answer.tokens for answer in answers] == [truth(prompt) for prompt in _SLOW]
    metrics = second.sidecar.metrics
    missed = "kvcachepool_miss_tokens"
    wait_for(lambda: metrics().total(missed, reason="recompute") == 512, 10, "the miss by its reason")
    assert metrics().total("kvcachepool_prefill_tokens_per_second") > 0
    assert metrics().by("kvcachepool_load_choices", "choice") == {"unknown": 2, "recompute": 1}
    assert metrics().total("kvcachepool_pacing_waited_seconds", direction="read") > 0
