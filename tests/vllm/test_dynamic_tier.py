"""A Python class as a tier with a real vLLM: warm after sidecar and vLLM were both replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from servers.models import token_ids
from servers.pod import Pod
from servers.store import StoreServer
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


@pytest.fixture
def store() -> Iterator[StoreServer]:
    made = StoreServer("kvcachepool.store_memory:MemoryStore")
    yield made
    made.stop()


def test_a_new_pod_is_warm_from_a_class(new_pod: NewPod, truth: Truth, store: StoreServer) -> None:
    prompt = token_ids(2000, 91)
    config = {"s3": store.config(), "cache": {"loadTimeout": "20s"}}
    first = new_pod(config=config).start()
    cold = first.generate(prompt)
    wait_for(lambda: first.sidecar.written_to("s3"), 30, "every chunk in the store")
    first.engine.stop()
    first.sidecar.kill_tree()
    warm = new_pod(config=config).start().generate(prompt)
    assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
    assert warm.tokens == cold.tokens == truth(prompt)
