"""The S3 tier with a real vLLM: warm after sidecar and vLLM were both replaced, and correct if the server hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servers.models import token_ids
from servers.pod import Pod
from servers.s3 import S3Server
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


def _config(s3: S3Server, load_timeout: str) -> dict[str, Any]:
    return {"s3": s3.config(), "cache": {"loadTimeout": load_timeout}}


def _stored(new_pod: NewPod, s3: S3Server, prompts: list[list[int]]) -> list[list[int]]:
    """Computes prompts in a pod that is deleted afterwards, and whose chunks are in the bucket. Returns the answers."""
    pod = new_pod(config=_config(s3, "20s")).start()
    answers = [pod.generate(prompt) for prompt in prompts]
    assert [(a.computed, a.external) for a in answers] == [(len(p), 0) for p in prompts]
    wait_for(lambda: pod.sidecar.written_to("s3"), 30, "every chunk in the bucket")
    pod.engine.stop()
    pod.sidecar.kill_tree()
    return [answer.tokens for answer in answers]


def test_a_new_pod_is_warm_from_the_bucket_of_a_deleted_one(new_pod: NewPod, truth: Truth, s3: S3Server) -> None:
    prompt = token_ids(2000, 81)
    (cold,) = _stored(new_pod, s3, [prompt])
    assert s3.objects()
    second = new_pod(config=_config(s3, "20s")).start()
    warm = second.generate(prompt)
    assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
    assert warm.tokens == cold == truth(prompt)
    hits = second.sidecar.metrics
    wait_for(lambda: hits().total("kvcachepool_hit_tokens_total", tier="s3") == 1920, 10, "the hit under its tier")


def test_corrupt_bytes_are_detected_counted_and_recomputed(new_pod: NewPod, truth: Truth, s3: S3Server) -> None:
    prompt = token_ids(2000, 85)
    _stored(new_pod, s3, [prompt])
    for written in s3.objects():
        with written.open("r+b") as opened:
            opened.seek(written.stat().st_size // 2)
            opened.write(b"not what was written")
    pod = new_pod(config=_config(s3, "20s")).start()
    answer = pod.generate(prompt)
    assert (answer.computed, answer.local, answer.external) == (2000, 0, 0)
    assert answer.tokens == truth(prompt)
    metrics = pod.sidecar.metrics
    assert metrics().total("kvcachepool_tier_corrupt_objects_total", tier="s3") > 0
    again = pod.generate_again(prompt)
    assert (again.external, again.tokens) == (1920, truth(prompt))


def test_a_server_that_hangs_during_loads_and_stores_costs_no_answer(
    new_pod: NewPod, truth: Truth, s3: S3Server
) -> None:
    during, before, after, new = (token_ids(2000, seed) for seed in (82, 83, 86, 84))
    _stored(new_pod, s3, [during, before, after])
    # Two chunks per second.
    pacing = {"readBytesPerSecond": "2Mi", "writeBytesPerSecond": "2Mi"}
    pod = new_pod(config=_config(s3, "2s") | {"pacing": pacing}).start()

    def lost(direction: str, why: str) -> float:
        return pod.sidecar.metrics().total(f"kvcachepool_tier_{direction}_chunks", tier="s3", result=why)

    pod.engine.add("storing", new)
    pod.freeze_amid(s3.freeze, "s3", "write")
    storing = pod.engine.run(60)["storing"]
    pod.engine.drain()
    assert (storing.reason, storing.tokens) == ("length", truth(new))
    wait_for(lambda: lost("write", "timeout") > 0, 20, "what was not written by its reason")
    s3.thaw()
    wait_for(lambda: pod.sidecar.tier_state("s3") == "ready", 30, "the tier back")

    pod.engine.add("loading", during)
    pod.freeze_amid(s3.freeze, "s3", "fetch")
    loading = pod.engine.run(60)["loading"]
    pod.engine.drain()
    assert (loading.reason, loading.tokens) == ("length", truth(during))
    # No request waits for it any more.
    wait_for(lambda: lost("fetch", "cancelled") > 0, 10, "what did not come by its reason")
    alone = pod.generate(before)
    assert (alone.external, alone.tokens) == (0, truth(before))
    wait_for(lambda: pod.sidecar.tier_state("s3") != "ready", 30, "the tier named as down, or slow")
    s3.thaw()
    wait_for(lambda: pod.sidecar.tier_state("s3") != "off", 30, "the tier to be tried again")
    pod.sidecar.change({"pacing": {"readBytesPerSecond": "0"}})
    later = pod.generate(after)
    assert (later.external, later.tokens) == (1920, truth(after))
    wait_for(lambda: pod.sidecar.tier_state("s3") == "ready", 30, "the tier back")
    again = pod.generate_again(new)
    assert (again.external, again.tokens) == (1920, truth(new))
