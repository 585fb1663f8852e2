"""Pods for the tests, and the reference answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import paths
from servers.engine import Engine
from servers.models import model
from servers.pod import Pod
from servers.redis import RedisServer
from servers.s3 import S3Server
from servers.sidecar import export_connector
from servers.versions import too_old

# The current ones: a failed test shows the end of their logs.
_pods: list[Pod] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a vLLM that is too old only the test for that runs, and with others all except it."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    dropped = [item for item in here if (item.path.name == "test_too_old.py") != too_old()]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def _new_pod(**config: Any) -> Pod:
    _pods.append(Pod(**config))
    return _pods[-1]


def _end(pod: Pod) -> None:
    _pods.remove(pod)
    pod.stop()


@pytest.fixture(scope="session")
def truth() -> Iterator[Callable[..., list[int]]]:
    """The tiny model's answers without a cache (KVCACHEPOOL_DISABLE, with the plugin in place)."""
    folder = paths.short_folder()
    export_connector(folder)
    engine = Engine(
        folder, model("tiny"), folder / "vllm.log", env={"KVCACHEPOOL_DISABLE": "1"}, enable_prefix_caching=False
    )
    assert engine.connector is None, "KVCACHEPOOL_DISABLE=1 must leave vLLM without a connector"
    assert "off in this vLLM: Disabled" in engine.log_text(), "the log must say why the cache is off"
    known: dict[tuple[Any, ...], list[int]] = {}

    def say(tokens: list[int], max_tokens: int = 8) -> list[int]:
        key = (max_tokens, *tokens)
        if key not in known:
            known[key] = engine.generate(tokens, max_tokens=max_tokens)
        return known[key]

    yield say
    engine.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_pod() -> Iterator[Pod]:
    """One engine for all tests that do not change it."""
    pod = _new_pod()
    pod.sidecar.start()
    pod.start_engine()
    assert pod.engine.connector == "KVCachePoolConnector", pod.engine.process.tail()
    yield pod
    _end(pod)


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    """The shared pod with its sidecar running and attached, and vLLM's own prefix cache empty."""
    if not shared_pod.sidecar.running():
        shared_pod.sidecar.start()
    shared_pod.sidecar.thaw()
    shared_pod.sidecar.wait_ready()
    shared_pod.attach()
    shared_pod.engine.reset()
    return shared_pod


def _pods_of_their_own() -> Iterator[Callable[..., Pod]]:
    made: list[Pod] = []

    def make(**config: Any) -> Pod:
        made.append(_new_pod(**config))
        return made[-1]

    yield make
    for each in made:
        _end(each)


@pytest.fixture
def new_pod() -> Iterator[Callable[..., Pod]]:
    """Creates pods that end with the test."""
    yield from _pods_of_their_own()


@pytest.fixture(scope="module")
def new_module_pod() -> Iterator[Callable[..., Pod]]:
    """Creates pods that all tests of a file share."""
    yield from _pods_of_their_own()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Failed tests show the end of the logs of all running pods."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for each in _pods:
            for log in sorted(each.folder.glob("*.log")):
                report.sections.append((str(log), "\n".join(log.read_text(errors="replace").splitlines()[-30:])))


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder that outlives the pods of a test."""
    folder = paths.short_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server that outlives the pods of a test."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def s3() -> Iterator[S3Server]:
    """A server that outlives the pods of a test."""
    server = S3Server()
    yield server
    server.stop()
