"""Weights that change in a running vLLM: the answers are those of an engine that started with the new ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from servers import paths
from servers.engine import Engine
from servers.models import model, token_ids
from servers.pod import Pod, wait_attached
from servers.redis import RedisServer
from servers.sidecar import export_connector
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]

_FIRST, _OTHER = "tiny", "tiny-other"


@pytest.fixture(scope="module")
def other_truth() -> Iterator[Truth]:
    """Answers with the other weights and without a cache."""
    folder = paths.short_folder()
    export_connector(folder)
    engine = Engine(folder, model(_OTHER), folder / "vllm.log", env={"KVCACHEPOOL_DISABLE": "1"})

    def say(tokens: list[int]) -> list[int]:
        engine.reset()
        return engine.generate(tokens)

    yield say
    engine.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Shared by the pods of this file."""
    redis = RedisServer()
    yield redis
    redis.stop()


@pytest.fixture(scope="module")
def reloading(new_module_pod: NewPod, server: RedisServer) -> Pod:
    """A pod whose engine starts each test with the first weights, and may end it with the others."""
    return new_module_pod(config={"redis": server.config()}).start(_FIRST, weights_from_files=True)


def _reload(engine: Engine, name: str) -> None:
    engine.rpc("reload_weights", weights_path=str(model(name)))


def _by_a_function(engine: Engine, name: str) -> None:
    engine.rpc("reload_weights", callable_=True, weights_path=str(model(name)))


def _transfer(engine: Engine, name: str) -> None:
    engine.rpc("start_weight_update")
    engine.rpc("update_weights", update_info={"path": str(model(name))})
    engine.rpc("finish_weight_update")


def _asleep(level: int) -> Callable[[Engine, str], None]:
    def change(engine: Engine, name: str) -> None:
        engine.sleep(level)
        engine.wake_up()
        _reload(engine, name)

    return change


@pytest.mark.parametrize(
    ("number", "change"),
    list(enumerate([_reload, _by_a_function, _transfer, _asleep(1), _asleep(2)])),
    ids=["reload", "function", "transfer", "sleep-1", "sleep-2"],
)
def test_nothing_of_the_old_weights_is_served_after_a_change(
    reloading: Pod, truth: Truth, other_truth: Truth, number: int, change: Callable[[Engine, str], None]
) -> None:
    engine = reloading.engine
    _reload(engine, _FIRST)
    engine.reset()
    before, prompt = token_ids(300, 700 + number), token_ids(2000, 710 + number)
    reloading.generate(before)
    assert reloading.generate(prompt).tokens == truth(prompt)
    change(engine, _OTHER)
    engine.reset()
    new = reloading.generate(prompt)
    assert (new.external, new.tokens) == (0, other_truth(prompt))
    warm = reloading.generate_again(prompt)
    assert (warm.external, warm.tokens) == (1920, other_truth(prompt))


def test_a_request_across_a_change_of_weights_leaves_nothing(reloading: Pod, other_truth: Truth) -> None:
    engine = reloading.engine
    _reload(engine, _FIRST)
    engine.reset()
    prompt = token_ids(6000, 730)
    engine.add("across", prompt)
    while engine.states()["across"] == "WAITING":
        engine.step()
    assert engine.states()["across"] == "RUNNING"
    _reload(engine, _OTHER)
    engine.run()
    engine.drain()
    engine.reset()
    after = reloading.generate(prompt)
    assert (after.external, after.tokens) == (0, other_truth(prompt))
    warm = reloading.generate_again(prompt)
    assert (warm.external, warm.tokens) == (5888, other_truth(prompt))


def test_another_process_with_the_old_weights_is_right_beside_it_and_through_a_shared_tier(
    reloading: Pod, new_pod: NewPod, server: RedisServer, truth: Truth
) -> None:
    engine = reloading.engine
    _reload(engine, _FIRST)
    started_with, changed_to = token_ids(2000, 740), token_ids(2000, 741)
    elsewhere = new_pod(config={"redis": server.config()}).start(_FIRST)
    assert elsewhere.generate(started_with).tokens == truth(started_with)
    wait_for(lambda: elsewhere.sidecar.written_to("redis"), 30, "every chunk in the server")
    _reload(engine, _OTHER)
    engine.reset()
    for prompt in (started_with, changed_to):
        assert reloading.generate(prompt).external == 0
    through_redis = elsewhere.generate(changed_to)
    assert (through_redis.external, through_redis.tokens) == (0, truth(changed_to))
    beside = Engine(reloading.folder, model(_FIRST), reloading.folder / "vllm-beside.log")
    try:
        beside.generate(token_ids(300, 742), max_tokens=1)
        wait_attached(reloading.sidecar)
        # It finds chunks of engines with the old weights.
        assert beside.generate(started_with) == truth(started_with)
        assert beside.generate(changed_to) == truth(changed_to)
    finally:
        beside.stop()


def test_an_engine_in_separate_processes_detects_changes_of_weights(
    new_pod: NewPod, truth: Truth, other_truth: Truth
) -> None:
    pod = new_pod().start(
        _FIRST,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        spawned=True,
    )
    prompt = token_ids(2000, 750)

    def generate(truth: Truth) -> int:
        """Runs a request and waits until the prompt's chunks are stored: this engine steps by itself."""
        stored = pod.sidecar.status()["memory"]["chunks"]
        answer = pod.generate(prompt)
        assert answer.tokens == truth(prompt)
        if not answer.external:
            wait_for(lambda: pod.sidecar.status()["memory"]["chunks"] >= stored + 8, 20, "all chunks stored")
        pod.engine.reset()
        return answer.external

    assert generate(truth) == 0
    assert generate(truth) == 1920
    _reload(pod.engine, _OTHER)
    pod.engine.reset()
    assert generate(other_truth) == 0
    assert generate(other_truth) == 1920
