"""Families of models: what the tests run of each, and the record of what they proved.

The record is a committed file, from which `tools/compatibility.py` makes tables of docs/reference/compatibility.md.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from servers.models import model
from servers.paths import ROOT
from servers.sidecar import sizes
from servers.versions import OLDEST, at_least

RECORD = ROOT / "tests" / "vllm" / "families.json"
#: Environment variable: a file to which proved facts are appended, instead of a comparison with the record.
PROVED = "KVCACHEPOOL_PROVED"

#: How a family runs. The first one proves hits from memory, after a restart of vLLM, and from disk. The others prove
#: hits from memory.
ONE_RANK, TWO_RANKS, TWO_STAGES, TWO_REPLICAS = "one rank", "two ranks", "two stages", "two replicas"
N_GRAMS, DRAFT_MODEL = "n-grams", "a draft model"


class Family(NamedTuple):
    """A kind of attention, and the model with random weights that stands for it."""

    name: str
    kind: str
    like: str
    model: str
    dtype: str
    #: Tokens of vLLM's blocks.
    block: int
    #: Ways of running it that are tested.
    modes: tuple[str, ...]
    #: Ways in which vLLM for CPUs does not run it, also without the cache, each with a part of vLLM's error.
    refused: dict[str, str] = {}
    #: Flag of /proc/cpuinfo without which vLLM for CPUs does not run the family.
    cpu_flag: str | None = None
    #: First version of vLLM that runs the family on CPUs.
    since: tuple[int, int] = OLDEST
    #: Arguments of vLLM besides `dtype`.
    more: dict[str, Any] = {}
    #: Model whose stages both have every kind of layer, if the other one has too few.
    staged: str | None = None
    #: Bytes of a token and of a state, for a model that `kvcachepool-sidecar size` does not know.
    theory: tuple[int, int] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM."""
        return {"dtype": self.dtype, **self.more}

    def needed_bytes(self, tokens: int) -> tuple[int, int]:
        """(bytes of a chunk, bytes that a hit of this many tokens needs) with one rank, from the model's config."""
        if self.theory:
            token, state = self.theory
            return self.block * token + state, tokens * token + state
        size = sizes(model(self.model), "--dtype", self.dtype, f"--block-size={self.block}", f"--tokens={tokens}")
        return size["chunk_bytes"], size["prompt"]["loaded_bytes"]

    def runs_here(self) -> bool:
        """Whether this vLLM runs the family on this machine's CPU."""
        return at_least(self.since) and (self.cpu_flag is None or _cpu_has(self.cpu_flag))


class Untested(NamedTuple):
    """A kind of attention that vLLM for CPUs does not run, also without the cache."""

    kind: str
    like: str
    model: str
    #: In vLLM's error.
    error: str
    #: In its error on CPUs without AVX512-BF16, if that differs.
    error_of_older_cpus: str | None = None
    #: Flag of /proc/cpuinfo with which vLLM for CPUs may run it.
    cpu_flag: str | None = None

    def errors(self) -> list[str]:
        """Parts of vLLM's error on any CPU, of which it has one."""
        return [error for error in (self.error, self.error_of_older_cpus) if error]

    def fails_here(self) -> bool:
        """Whether the vLLM of the record fails on this machine's CPU."""
        return self.cpu_flag is None or not _cpu_has(self.cpu_flag)


def _cpu_has(flag: str) -> bool:
    return flag in Path("/proc/cpuinfo").read_text().split()


_DRAFTS_IN_ONE_GROUP = "All drafting layers should belong to the same kv cache group"
#: A kernel of Triton, which vLLM for CPUs does not have.
_STATES_NEED_TRITON = "precopy_mamba_align_fused_kernel"

FAMILIES = (
    Family(
        "full",
        "full attention",
        "a Llama",
        "tiny",
        "float32",
        128,
        (ONE_RANK, TWO_RANKS, TWO_STAGES, TWO_REPLICAS, N_GRAMS, DRAFT_MODEL),
    ),
    Family(
        "window",
        "sliding windows beside full attention",
        "a Gemma 3",
        "window",
        "float32",
        128,
        (ONE_RANK, TWO_RANKS, N_GRAMS),
        {DRAFT_MODEL: _DRAFTS_IN_ONE_GROUP},
    ),
    Family(
        "sinks",
        "attention sinks, and sliding windows beside full attention",
        "a gpt-oss",
        "sinks",
        "bfloat16",
        128,
        (ONE_RANK, TWO_RANKS, N_GRAMS),
        {DRAFT_MODEL: _DRAFTS_IN_ONE_GROUP},
    ),
    Family(
        "chunked",
        "attention within chunks beside full attention",
        "a Llama 4",
        "chunked",
        "bfloat16",
        128,
        (ONE_RANK, TWO_RANKS, N_GRAMS),
        {DRAFT_MODEL: _DRAFTS_IN_ONE_GROUP},
    ),
    Family(
        "gdn",
        "gated delta nets beside full attention",
        "a Qwen3-Next",
        "gdn",
        "bfloat16",
        256,
        (ONE_RANK, TWO_RANKS, TWO_STAGES),
        {N_GRAMS: _STATES_NEED_TRITON, DRAFT_MODEL: _DRAFTS_IN_ONE_GROUP},
        # What vLLM chooses on CPUs with AVX512-BF16.
        more={"mamba_ssm_cache_dtype": "float32"},
        staged="gdn-deep",
    ),
    Family(
        "conv",
        "short convolutions beside full attention",
        "an LFM2",
        "conv",
        "bfloat16",
        128,
        (ONE_RANK, TWO_RANKS),
        {N_GRAMS: _STATES_NEED_TRITON, DRAFT_MODEL: _DRAFTS_IN_ONE_GROUP},
        since=(0, 32),
        # One layer with two KV heads of 64 numbers, and three with two earlier inputs of 256.
        theory=(2 * 2 * 64 * 2, 3 * 2 * 256 * 2),
    ),
    # Without AMX no backend of vLLM for CPUs supports prefixes with MLA.
    Family("mla", "MLA", "a DeepSeek V2", "mla", "bfloat16", 16, (ONE_RANK,), cpu_flag="amx_tile"),
)

UNTESTED = (
    Untested("Mamba 2 beside full attention", "a Falcon-H1", "mamba2", "out of bounds for dimension 0 with size 1"),
    Untested("Mamba 1 beside full attention", "a Jamba", "mamba1", "Dimension out of range", "selective_scan_fwd"),
    Untested("MLA with an indexer", "a DeepSeek V3.2", "indexer", "Sparse Attention is not supported on CPU"),
    Untested(
        "KDA beside MLA",
        "a Kimi Linear",
        "kda",
        "--mamba-block-size can only be set with --enable-prefix-caching",
        cpu_flag="amx_tile",
    ),
)


def family(name: str) -> Family:
    """The family of this name."""
    return next(each for each in FAMILIES if each.name == name)


def those_with(mode: str) -> list[Family]:
    """Families that are tested in this way, and that run here."""
    return [each for each in FAMILIES if mode in each.modes and each.runs_here()]


def recorded_vllm() -> bool:
    """Whether the record is of this environment's vLLM."""
    return bool(record()["vllm"] == vllm_version())


def record() -> dict[str, Any]:
    """The committed record: the version of vLLM, and facts by family and mode."""
    recorded: dict[str, Any] = json.loads(RECORD.read_text())
    return recorded


def prove(name: str, mode: str, **facts: int) -> None:
    """Compares what a test proved with the record, or appends it to the file that `PROVED` names.

    Raises AssertionError if the compatibility page, which is made from the record, says something else. A vLLM of
    another version, and a family that the machine of the record could not run, are not compared.
    """
    assert mode in family(name).modes, f"{name} is not declared to run with {mode}"
    if file := os.environ.get(PROVED):
        with Path(file).open("a") as proved:
            proved.write(json.dumps([name, mode, facts]) + "\n")
        return
    recorded = record()["families"]
    if not recorded_vllm() or (family(name).cpu_flag and name not in recorded):
        return
    found = recorded.get(name, {}).get(mode)
    assert found == facts, f"the compatibility page says {found} of {name} with {mode}: run make compatibility"


def vllm_version() -> str:
    """The version of this environment's vLLM."""
    return version("vllm").split("+")[0]
