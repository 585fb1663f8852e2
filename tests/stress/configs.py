"""The engines under stress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Tokens of a block, and of a chunk of the cache.
BLOCK, CHUNK = 32, 64
#: Sequences per step.
SEQUENCES = 6
#: Few blocks for several sequences, so that vLLM preempts, and steps that split most prompts.
_PRESSURE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 28,
    "max_num_batched_tokens": 96,
    "max_num_seqs": SEQUENCES,
    "max_model_len": 416,
}
#: Adapters share the only place for one.
_LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
_TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

#: Kinds of events that every configuration must see.
_ALWAYS = frozenset(
    {
        "finished",
        "aborted",
        "preempted",
        "salted",
        "tagged",
        "hits_memory",
        "hits_partly_local",
        "containers_killed",
        "engines_killed",
        "frozen",
        "restarted",
        "restarted_cold",
        "resets",
        "resets_of_both",
        "resets_while_running",
    }
)
#: Kinds that need the engine in this process.
_IN_PROCESS = frozenset({"loads_failed", "vllm_killed"})


@dataclass(frozen=True)
class Config:
    """One engine with its sidecar, and the kinds of events that must occur."""

    name: str
    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    #: A checkpoint of the same shape, whose weights alternate with the model's.
    other: str | None = None
    lora: bool = False
    disk: bool = False
    #: Least lead of a token's log probability that proves something: less is within what the order of additions makes
    #: of the numbers of the model.
    margin: float = 1e-3
    #: Share of the answers that may have a token with a smaller lead.
    undecided: float = 0.2
    #: Requests that run or wait at once.
    at_once: int = 8
    #: Reason for which the cache is off in this vLLM; then no token may come from it.
    off: str | None = None

    @property
    def ranks(self) -> int:
        """Worker processes. One rank runs in the engine's process."""
        return int(self.arguments.get("tensor_parallel_size", 1))

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of the engine under stress."""
        return _PRESSURE | self.arguments

    @property
    def oracle_arguments(self) -> dict[str, Any]:
        """The same on one rank, without a cache."""
        mine = {name: value for name, value in self.engine_arguments.items() if name not in _TWO_RANKS}
        return mine | {"enable_prefix_caching": False}

    @property
    def oracle_name(self) -> str:
        """Configurations with the same name share an oracle."""
        return f"{self.model}-lora" if self.lora else self.model

    @property
    def kinds(self) -> frozenset[str]:
        """Events that must occur in the configuration."""
        if self.off:
            return frozenset({"finished", "aborted", "off_by_name"})
        kinds = _ALWAYS if self.ranks > 1 else _ALWAYS | _IN_PROCESS
        if self.other:
            kinds |= {"reloads"}
        if self.lora:
            kinds |= {"adapter_swaps", "adapters_replaced_in_place"}
        if self.disk:
            kinds |= {"hits_disk"}
        return kinds


#: Families of models. A short run has one of them. Short convolutions are not among them: vLLM for CPUs gives such a
#: model other answers with prefix caching than without it, also without a cache behind it.
FAMILIES = (
    Config("window", "window-short", disk=True),
    Config("sinks", "sinks", disk=True),
    Config("chunked", "chunked-short", {"num_gpu_blocks_override": 100}, disk=True),
    Config(
        "gdn",
        "gdn-short",
        {"dtype": "bfloat16", "num_gpu_blocks_override": 40},
        disk=True,
        margin=0.05,
        undecided=0.6,
    ),
)
CONFIGS = (
    Config("llama", "tiny", _LORA, other="tiny-other", lora=True),
    Config("llama-disk", "tiny", other="tiny-other", disk=True),
    *FAMILIES,
    Config("mla", "mla", {"attention_backend": "CPU_MLA"}, at_once=1, off="PrefixUnsupported"),
    Config("llama-two-ranks", "tiny", _TWO_RANKS, other="tiny-other", disk=True),
)


def short_run(day: int) -> tuple[Config, ...]:
    """Configurations of a run of two minutes: one family, another one each day."""
    family = FAMILIES[day % len(FAMILIES)]
    return tuple(config for config in CONFIGS if config is family or config not in FAMILIES)
