"""The S3 tier with a real vLLM: warm after sidecar and vLLM were replaced, correct if the server hangs or corrupts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from servers.models import token_ids
from servers.pod import Pod
from servers.s3 import S3Server
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]

#: Prompts that a deleted pod stored. Each test uses its own.
_WARM, _SPOILED, _DURING, _BEFORE, _AFTER = (token_ids(2000, 81 + n) for n in range(5))
#: A prompt that was not stored before the test.
_NEW = token_ids(2000, 86)


class Shared(NamedTuple):
    """A server, its content, and a new pod whose memory never held any of it."""

    s3: S3Server
    pod: Pod
    #: The deleted pod's answer to each prompt.
    answers: list[list[int]]
    #: Files of each prompt in the bucket.
    files: list[set[Path]]


def _total(pod: Pod, name: str, **labels: str) -> float:
    return pod.sidecar.metrics().total(f"kvcachepool_{name}", tier="s3", **labels)


@pytest.fixture(scope="module")
def shared(new_module_pod: NewPod) -> Iterator[Shared]:
    """Two vLLMs in all: one that stores and is deleted, and one for every test here."""
    s3 = S3Server()
    try:
        config: dict[str, Any] = {"s3": s3.config(), "cache": {"loadTimeout": "20s"}}
        first = new_module_pod(config=config).start()
        answers, files = [], []
        for prompt in (_WARM, _SPOILED, _DURING, _BEFORE, _AFTER):
            before = set(s3.objects())
            answer = first.generate(prompt)
            assert (answer.computed, answer.external) == (2000, 0)
            answers.append(answer.tokens)
            wait_for(lambda: first.sidecar.written_to("s3"), 30, "every chunk in the bucket")
            files.append(set(s3.objects()) - before)
        first.engine.stop()
        first.sidecar.kill_tree()
        yield Shared(s3, new_module_pod(config=config).start(), answers, files)
    finally:
        s3.stop()


def test_a_new_pod_is_warm_from_the_bucket_of_a_deleted_one(shared: Shared, truth: Truth) -> None:
    assert shared.files[0]
    before = _total(shared.pod, "hit_tokens_total")
    warm = shared.pod.generate(_WARM)
    assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
    assert warm.tokens == shared.answers[0] == truth(_WARM)
    wait_for(lambda: _total(shared.pod, "hit_tokens_total") == before + 1920, 10, "the hit under its tier")


def test_corrupt_bytes_are_detected_counted_and_recomputed(shared: Shared, truth: Truth) -> None:
    for written in shared.files[1]:
        with written.open("r+b") as opened:
            opened.seek(written.stat().st_size // 2)
            opened.write(b"not what was written")
    answer = shared.pod.generate(_SPOILED)
    assert (answer.computed, answer.local, answer.external) == (2000, 0, 0)
    assert answer.tokens == shared.answers[1] == truth(_SPOILED)
    assert _total(shared.pod, "tier_corrupt_objects_total") > 0
    again = shared.pod.generate_again(_SPOILED)
    assert (again.external, again.tokens) == (1920, truth(_SPOILED))


def test_a_server_that_hangs_during_loads_and_stores_costs_no_answer(shared: Shared, truth: Truth) -> None:
    s3, pod = shared.s3, shared.pod
    # Two chunks per second, slower than computing.
    pacing = {"readBytesPerSecond": "2Mi", "writeBytesPerSecond": "2Mi"}
    pod.sidecar.change({"pacing": pacing, "cache": {"loadTimeout": "2s", "loadOrRecompute": "AlwaysLoad"}})

    def lost(direction: str, why: str) -> float:
        return _total(pod, f"tier_{direction}_chunks", result=why)

    pod.engine.add("storing", _NEW)
    pod.freeze_amid(s3.freeze, "s3", "write")
    storing = pod.engine.run(60)["storing"]
    pod.engine.drain()
    assert (storing.reason, storing.tokens) == ("length", truth(_NEW))
    wait_for(lambda: lost("write", "timeout") > 0, 20, "what was not written by its reason")
    s3.thaw()
    wait_for(lambda: pod.sidecar.tier_state("s3") == "ready", 30, "the tier back")

    pod.engine.add("loading", _DURING)
    pod.freeze_amid(s3.freeze, "s3", "fetch")
    loading = pod.engine.run(60)["loading"]
    pod.engine.drain()
    assert (loading.reason, loading.tokens) == ("length", truth(_DURING))
    # No request waits for it any more.
    wait_for(lambda: lost("fetch", "cancelled") > 0, 10, "what did not come by its reason")
    alone = pod.generate(_BEFORE)
    assert (alone.external, alone.tokens) == (0, truth(_BEFORE))
    wait_for(lambda: pod.sidecar.tier_state("s3") != "ready", 30, "the tier named as down, or slow")
    s3.thaw()
    wait_for(lambda: pod.sidecar.tier_state("s3") != "off", 30, "the tier to be tried again")
    pod.sidecar.change({"pacing": {"readBytesPerSecond": "0"}})
    later = pod.generate(_AFTER)
    assert (later.external, later.tokens) == (1920, truth(_AFTER))
    wait_for(lambda: pod.sidecar.tier_state("s3") == "ready", 30, "the tier back")
    again = pod.generate_again(_NEW)
    assert (again.external, again.tokens) == (1920, truth(_NEW))
