"""The arms of a comparison: one vLLM with the same model and arguments, and a different cache in each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from demo.progress import at_work
from servers import lmcache, paths
from servers.lmcache import LmcacheServer
from servers.models import model, words
from servers.pod import BLOCK, settle, wait_attached
from servers.sidecar import Sidecar
from servers.vllm_server import VllmServer
from workload.driver import Unusable
from workload.plan import Part, Plan, Text

ARMS = {
    "off": "no prefix caching at all",
    "local": "vLLM's own prefix cache",
    "ours": "vLLM's own prefix cache, and kvcachepool's sidecar with memory alone",
    "lmcache": f"vLLM's own prefix cache, and {lmcache.NAME}'s server (MP mode) with shared memory alone",
}
_WARM_TOKENS = 600
#: The default of both caches.
_CHUNK_TOKENS = 256


class Setup(NamedTuple):
    """What all arms have in common."""

    model: Path
    dtype: str
    #: `--max-model-len`.
    context: int
    #: Tokens that fit vLLM's own KV cache.
    kv_tokens: int
    #: Memory of the cache beside vLLM, in GiB.
    cache_gib: int

    @classmethod
    def for_plan(cls, plan: Plan, model: Path, dtype: str, concurrency: int, kv_tokens: int, cache_gib: int) -> Setup:
        """By default vLLM's own cache holds half of the plan's tokens, but all requests in flight."""
        context = round_up(max(plan.longest * 21 // 20, _WARM_TOKENS + BLOCK))
        positions = _positions(model)
        if context > positions:
            raise Unusable(
                f"the longest prompt has about {plan.longest} tokens with its answer, and {model} accepts {positions}; "
                "choose shorter prompts (--help lists the options)"
            )
        least = (concurrency or 4) * context
        if kv_tokens and kv_tokens < context:
            raise Unusable(f"--kv-tokens {kv_tokens}: the longest request needs {context}")
        return cls(model, dtype, context, kv_tokens or max(least, round_up(plan.distinct_tokens // 2)), cache_gib)

    def arguments(self) -> list[str]:
        """Arguments of `vllm serve`."""
        # One block of vLLM's is never used.
        blocks = self.kv_tokens // BLOCK + 1
        arguments = ["--dtype", self.dtype, "--max-model-len", str(self.context), "--max-num-batched-tokens", "2048"]
        return [*arguments, "--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details"]


def round_up(tokens: int) -> int:
    """To whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


def chosen_model(name: str) -> Path:
    """A folder with a model, or the name of one with random weights, which is created."""
    folder = Path(name).expanduser().resolve()
    if (folder / "config.json").is_file():
        return folder
    if "/" in name or name not in ("tiny", "mid"):
        raise Unusable(f"--model {name}: expected tiny, mid (random weights) or a folder with a config.json")
    with at_work(f"the model {name} with random weights"):
        return model(name)


def tokens_per_word(folder: Path) -> float:
    """Tokens of a word of the workloads' texts."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        raise Unusable(f"{folder}/tokenizer.json cannot be read: {error}") from None
    sample = Text(0).part(Part("sample", 300))
    return len(tokenizer.encode(sample, add_special_tokens=False)) / 300


def _positions(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config).get("max_position_embeddings") or 1 << 30)


class Arm(NamedTuple):
    """A running arm."""

    name: str
    server: VllmServer
    #: Waits until everything that was computed is stored.
    settle: Callable[[], object]


def check_arms(names: list[str]) -> None:
    """Names an arm that cannot run, before one is started."""
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise Unusable(f"--compare {','.join(names)}: expected some of {', '.join(ARMS)} with commas between them")
    if "ours" in names:
        try:
            paths.sidecar_binary()
        except FileNotFoundError as error:
            raise Unusable(str(error)) from None
    if "lmcache" in names and not lmcache.PYTHON.exists():
        raise Unusable(f"{lmcache.PYTHON} is missing: tools/setup.sh lmcache installs {lmcache.NAME}")


@contextmanager
def started(name: str, setup: Setup) -> Iterator[Arm]:
    """Starts an arm, and ends all of it. What is only paid once is paid before it is returned."""
    with ExitStack() as ends:
        folder = paths.short_folder()
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        arguments = setup.arguments()
        arguments.append("--no-enable-prefix-caching" if name == "off" else "--enable-prefix-caching")
        options: dict[str, Any] = {"env": {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": _cores()}}
        connector, settled, attach = None, _nothing, _nothing
        if name == "ours":
            sidecar = Sidecar(folder, memory=f"{setup.cache_gib}Gi")
            ends.callback(sidecar.stop)
            with at_work("ours: the sidecar starts"):
                sidecar.start(ready_seconds=120)
            connector = folder
            settled, attach = (lambda: settle(sidecar)), (lambda: wait_attached(sidecar))
        elif name == "lmcache":
            beside = LmcacheServer(folder / "lmcache.log", gigabytes=setup.cache_gib, chunk_tokens=_CHUNK_TOKENS)
            ends.callback(beside.stop)
            with at_work(f"lmcache: {lmcache.NAME} starts"):
                arguments += beside.wait_ready(300).arguments()
            options["python"] = str(lmcache.PYTHON)
            settled = beside.settle
        server = VllmServer(connector, setup.model, folder / "vllm.log", *arguments, **options)
        ends.callback(server.stop)
        with at_work(f"{name}: vLLM starts"):
            server.wait_ready(900)
        with at_work(f"{name}: first requests"):
            _warm(server, attach, settled)
        yield Arm(name, server, settled)


def _nothing() -> None:
    pass


def _cores() -> str:
    """Cores of the forward pass: all but one. vLLM's own choice depends on whether there is a connector."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[:-1] or cores))


def _warm(server: VllmServer, attach: Callable[[], object], settled: Callable[[], object]) -> None:
    """Two prompts computed and hit, and an empty prefix cache of vLLM."""
    prompts = [words(_WARM_TOKENS, 9_000_000 + number) for number in range(2)]
    for again in range(2):
        for prompt in prompts:
            server.complete(prompt, 1, max_tokens=2)
            if not again:
                attach()
        settled()
        server.reset_prefix_cache()
