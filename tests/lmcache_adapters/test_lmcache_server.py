"""A vLLM whose KV goes through LMCache's server into the sidecar: the same tokens from every place, and none hangs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("lmcache")

from servers import lmcache, paths
from servers.lmcache import LmcacheServer
from servers.models import model, words
from servers.pod import BLOCK
from servers.sidecar import Sidecar
from servers.vllm_server import Reply, VllmServer
from servers.waiting import wait_for

TOKENS = 4 * BLOCK + 40
#: Tokens of a prompt that whole chunks hold.
HELD = 4 * BLOCK
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ARGUMENTS = ("--dtype", "bfloat16", "--max-model-len", "4096")


class Stack:
    """vLLM, LMCache's server beside it, and the sidecar as that server's L2."""

    def __init__(self) -> None:
        self.folder = paths.short_folder()
        disk = self.folder / "disk"
        disk.mkdir()
        tiers = {"disk": {"path": str(disk), "size": "1Gi"}}
        self.sidecar = Sidecar(self.folder, memory="256Mi", config=tiers)
        self.starts = 0

    def start(self) -> None:
        """Starts what does not run."""
        self.starts += 1
        if not self.sidecar.running():
            self.sidecar.start()
            wait_for(self.sidecar.tiers_ready, 20, "the disk tier")
        adapter = {
            "type": "plugin",
            "module_path": "kvcachepool.lmcache_l2",
            "class_name": "KVCachePoolL2Adapter",
            "adapter_params": {"socket": str(self.sidecar.socket), "timeout_s": 2},
        }
        log = self.folder / f"lmcache-{self.starts}.log"
        self.lmcache = LmcacheServer(log, gigabytes=0.25, chunk_tokens=BLOCK, l2_adapters=[adapter])
        self.lmcache.wait_ready()
        log = self.folder / f"vllm-{self.starts}.log"
        arguments = (*ARGUMENTS, *self.lmcache.arguments())
        self.vllm = VllmServer(None, model("tiny"), log, *arguments, env=ENV, python=str(lmcache.PYTHON)).wait_ready()

    def stop(self, *, sidecar: bool = True) -> None:
        """Ends all processes."""
        self.vllm.stop()
        self.lmcache.stop()
        if sidecar:
            self.sidecar.stop()

    def ask(self, seed: int) -> Reply:
        """A prompt, without vLLM's own prefix cache. Returns when LMCache has stored what was computed."""
        self.vllm.reset_prefix_cache()
        reply = self.vllm.complete(words(TOKENS, seed), TOKENS, max_tokens=8)
        self.lmcache.settle()
        return reply

    def written(self) -> bool:
        """Whether the disk tier has all that memory holds."""
        return self.sidecar.status()["memory"]["chunks"] > 0 and self.sidecar.written_to("disk")


def external(reply: Reply) -> int:
    """Tokens that came from LMCache."""
    return reply.sources["external"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack()
    made.start()
    yield made
    made.stop()
    shutil.rmtree(made.folder, ignore_errors=True)


def test_tokens_are_the_same_from_every_place(stack: Stack) -> None:
    cold = stack.ask(1)
    assert external(cold) == 0
    memory = stack.ask(1)
    assert (memory.text, external(memory)) == (cold.text, HELD), "LMCache's own memory"
    wait_for(stack.written, 20, "the objects on disk")
    stack.lmcache.clear()
    below = stack.ask(1)
    assert (below.text, external(below)) == (cold.text, HELD), "the sidecar's memory"
    stack.stop()
    stack.start()
    disk = stack.ask(1)
    assert (disk.text, external(disk)) == (cold.text, HELD), "the sidecar's disk, after a restart of all three"


def test_tokens_are_the_same_while_the_sidecar_dies(stack: Stack) -> None:
    known = stack.ask(2)
    stack.lmcache.clear()

    stack.sidecar.freeze()
    frozen = stack.ask(2)
    assert (frozen.text, external(frozen)) == (known.text, 0), "a lookup that nobody answers is a miss"
    first = stack.ask(3)
    stack.lmcache.clear()

    replies: list[Reply] = []
    asking = threading.Thread(target=lambda: replies.append(stack.ask(2)))
    asking.start()
    stack.sidecar.kill_tree()
    asking.join(60)
    assert not asking.is_alive(), "the request hangs"
    assert replies[0].text == known.text
    assert not stack.lmcache.storage()["is_healthy"], "/status says that L2 is gone"

    stack.sidecar.start()
    wait_for(lambda: stack.lmcache.storage()["is_healthy"], 30, "the adapter to reconnect")
    stack.lmcache.clear()
    again = stack.ask(3)
    assert again.text == first.text
    stack.lmcache.settle()
    wait_for(lambda: stack.sidecar.status()["memory"]["chunks"] > 0, 20, "the stores to go on")
    stack.lmcache.clear()
    assert stack.ask(2).text == known.text


def test_no_task_of_the_adapter_raised(stack: Stack) -> None:
    for log in sorted(stack.folder.glob("lmcache-*.log")):
        text = log.read_text(errors="replace")
        assert "/kvcachepool/lmcache" not in text, f"a traceback in {log}: {text[-4000:]}"
