"""One engine over two nodes by vLLM's `--nnodes`: each node has a rank and a sidecar, and both agree on every hit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import paths
from servers.engine import environment
from servers.models import model, token_ids
from servers.pod import settle
from servers.process import Process
from servers.sidecar import Sidecar
from servers.vllm_server import Reply, VllmServer
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
_MODEL = ("--dtype", "float32", "--max-model-len", "8192", "--max-num-batched-tokens", "2048")
_PROMPT = 3000
#: Blocks of 128 tokens, and a last token that is always computed.
_HIT = 2944
_CHUNKS = 12
#: Chunks of the prompt that runs first.
_FIRST = 4
_TWO_PARTS = ("--tensor-parallel-size", "2")
#: Only a warm-up makes the tensors between stages of vLLM for CPUs, and it skips that for eager models.
_TWO_STAGES = ("--pipeline-parallel-size", "2", "--no-enforce-eager", "-cc", '{"mode": 2, "backend": "eager"}')
_STAGES_WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}


class Group:
    """A leader and a follower, with a folder as the shared volume of each pod."""

    def __init__(self, disks: Path) -> None:
        self.sidecars = [self._sidecar(disks / f"disk-{node}") for node in range(2)]
        self._starts = 0
        self._processes: list[Process | VllmServer] = []

    @staticmethod
    def _sidecar(disk: Path) -> Sidecar:
        disk.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {"disk": {"path": str(disk), "size": "1Gi"}, "cache": {"loadTimeout": "20s"}}
        made = Sidecar(paths.short_folder(), memory="128Mi", config=config)
        made.accept_clear()
        return made

    def start(self, *arguments: str, volumes: tuple[bool, bool] = (True, True)) -> Group:
        """Starts the engine with two ranks and waits until both sidecars serve it. `volumes`: whether the pod of a node
        was injected; if one is not, this only waits until the engine serves.
        """
        self._starts += 1
        folders = [one.folder if has else None for one, has in zip(self.sidecars, volumes, strict=True)]
        shared = [*_MODEL, *arguments, "--nnodes", "2", "--master-addr", "127.0.0.1"]
        shared += ["--master-port", str(paths.free_port())]
        variables = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **_STAGES_WITHOUT_COMPILER}
        logs = [one.folder / f"vllm-{self._starts}.log" for one in self.sidecars]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model("tiny")), "--enforce-eager"]
        follower = variables | {"VLLM_CPU_OMP_THREADS_BIND": "1", "TMPDIR": str(logs[1].parent)}
        other = Process(
            "vllm serve --headless",
            [*command, *shared, "--node-rank", "1", "--headless"],
            logs[1],
            env=environment(folders[1], **follower),
        )
        leader = variables | {"VLLM_CPU_OMP_THREADS_BIND": "0"}
        self.leader = VllmServer(folders[0], model("tiny"), logs[0], *shared, "--node-rank", "0", env=leader)
        self._processes = [self.leader, other]
        self.leader.wait_ready()
        if all(volumes):
            self.attach()
        return self

    def attach(self) -> None:
        """Runs a short prompt until it is a hit: an idle engine learns of no new connection."""
        prompt = token_ids(1000, 1)
        wait_for(lambda: self.complete(prompt).sources["external"] > 0, 60, "hits")

    def settle(self) -> None:
        for sidecar in self.sidecars:
            if sidecar.running():
                settle(sidecar)

    def complete(self, prompt: list[int]) -> Reply:
        """Runs one prompt behind an empty prefix cache of vLLM, and waits until what it stored is readable."""
        self.leader.reset_prefix_cache()
        reply = self.leader.complete(prompt, len(prompt), max_tokens=8)
        self.settle()
        return reply

    def stored(self) -> list[float]:
        """Chunks that each sidecar's ranks have stored."""
        return [one.metrics().total("kvcachepool_stored_chunks_total") for one in self.sidecars]

    def written(self) -> list[float]:
        """Chunks that each sidecar has written to its disk."""
        of = {"tier": "disk", "result": "stored"}
        return [one.metrics().total("kvcachepool_tier_write_chunks_total", **of) for one in self.sidecars]

    def stop_engine(self) -> None:
        for process in self._processes:
            process.kill()

    def stop(self) -> None:
        self.stop_engine()
        for sidecar in self.sidecars:
            sidecar.stop()
            shutil.rmtree(sidecar.folder, ignore_errors=True)


@pytest.fixture
def group(disk: Path) -> Iterator[Group]:
    made = Group(disk)
    for sidecar in made.sidecars:
        sidecar.start()
    yield made
    made.stop()


def _text(truth: Truth, prompt: list[int]) -> str:
    return " ".join(f"w{token}" if token > 2 else "?" for token in truth(prompt))


def test_nodes_with_a_pipeline_stage_each_agree(group: Group, truth: Truth) -> None:
    prompt = token_ids(_PROMPT, 902)
    group.start(*_TWO_STAGES)
    for cached in (0, _HIT):
        reply = group.complete(prompt)
        assert (reply.text.strip(), reply.sources["external"]) == (_text(truth, prompt), cached)
    assert group.stored() == [_CHUNKS + _FIRST, _CHUNKS + _FIRST]


@pytest.mark.parametrize("volumes", [(True, False), (False, True)], ids=["leader", "follower"])
def test_an_engine_of_which_only_one_pod_was_injected_serves_without_a_cache(
    group: Group, truth: Truth, volumes: tuple[bool, bool]
) -> None:
    prompt = token_ids(1000, 903)
    group.start(*_TWO_PARTS, volumes=volumes)
    for _ in range(2):
        reply = group.complete(prompt)
        assert (reply.text.strip(), reply.sources["external"]) == (_text(truth, prompt), 0)
    injected = group.sidecars[volumes.index(True)]
    wait_for(lambda: "NodeWithoutConnector" in str(injected.status()["sessions"]), 20, "the reason in the status")


def test_nodes_agree_on_every_hit(group: Group, truth: Truth) -> None:
    group.start(*_TWO_PARTS)
    prompt = token_ids(_PROMPT, 901)
    expected = _text(truth, prompt)

    def answer() -> int:
        """Tokens that came from the cache."""
        reply = group.complete(prompt)
        assert reply.text.strip() == expected
        return reply.sources["external"]

    assert answer() == 0
    assert answer() == _HIT
    assert group.stored() == [_CHUNKS + _FIRST, _CHUNKS + _FIRST]

    # What one node has lost is a hit of neither, and only that node stores it again.
    group.sidecars[1].clear()
    assert answer() == 0
    assert group.stored() == [_CHUNKS + _FIRST, 2 * _CHUNKS + _FIRST]
    assert answer() == _HIT

    wait_for(lambda: group.written() == group.stored(), 30, "every chunk on disk")

    # A sidecar that does not answer delays a request.
    group.sidecars[1].freeze()
    group.leader.reset_prefix_cache()
    frozen = group.leader.complete(prompt, _PROMPT, max_tokens=8)
    group.sidecars[1].thaw()
    assert (frozen.text.strip(), frozen.sources["external"]) == (expected, 0)
    assert answer() == _HIT

    # Without one of the sidecars the engine computes. Its memory is used again once it is back.
    group.sidecars[1].kill_tree()
    assert answer() == 0
    group.sidecars[1].start()
    group.attach()
    assert answer() == _HIT

    # Both nodes load their parts from their disks.
    group.stop_engine()
    for sidecar in group.sidecars:
        sidecar.stop()
        sidecar.start()
    group.start(*_TWO_PARTS)
    assert answer() == _HIT
    for sidecar in group.sidecars:
        assert sidecar.metrics().total("kvcachepool_tier_fetch_chunks_total", tier="disk") > 0
