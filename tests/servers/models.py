"""Models with random weights, made on the spot and kept outside of the checkout under a name with a version.

Run as a program it makes one model: `python -m servers.models NAME FOLDER`.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 4096
# Changed when a model of the same name changes.
VERSION = 1

_SHAPES: dict[str, dict[str, Any]] = {
    # A model of four layers for correctness tests.
    "tiny": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # The same with other weights, which must never share KV with the first.
    "tiny-other": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # About 210 M parameters, 32 KiB of KV per token in bfloat16, so that prefill is slow enough to measure.
    "mid": dict(hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8, head_dim=64),
    # One latent vector per token instead of heads.
    "mla": dict(hidden_size=256, num_hidden_layers=3, num_attention_heads=4),
    # Alternating layers with full attention and with a window: two KV groups.
    "window": dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # The same with fewer layers, and a window of few blocks.
    "window-short": dict(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    ),
    # Gated delta nets beside full attention, three to one: states of 128 KiB per layer, and few experts.
    "gdn": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # The same with states of 17 KiB and more KV per token, for blocks of 32 tokens.
    "gdn-short": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=64),
    # The same with full attention in each half.
    "gdn-deep": dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # The same with 16 layers and about 130 M parameters.
    "gdn-mid": dict(hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4, head_dim=64),
    # Attention sinks, windows in every other layer, and experts.
    "sinks": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # Attention within chunks of tokens in three of four layers.
    "chunked": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # The same with chunks of few blocks.
    "chunked-short": dict(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    ),
    # Short convolutions beside full attention, three to one.
    "conv": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    # Kinds that vLLM for CPUs does not run. Mamba beside full attention, in each layer and in three of four layers:
    "mamba2": dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    "mamba1": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
    # MLA with an indexer, and KDA beside MLA.
    "indexer": dict(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4),
    "kda": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
}
_WINDOW_TOKENS = {"window": 512, "window-short": 96}


def model(name: str) -> Path:
    """Folder of a model, created once if it does not exist (a few seconds)."""
    from servers.paths import cache

    folder = cache() / "models" / f"{name}-v{VERSION}"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            command = [sys.executable, "-m", "servers.models", name, str(scratch)]
            subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
            if not folder.exists():
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def words(count: int, seed: int) -> str:
    """A text with this many tokens of the models' vocabulary."""
    return " ".join(f"w{n}" for n in token_ids(count, seed))


def token_ids(count: int, seed: int) -> list[int]:
    """Token ids of `words`."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(count)]


def _save_tokenizer(folder: str) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def _config(name: str) -> Any:
    import transformers

    shape = dict(
        vocab_size=VOCABULARY,
        intermediate_size=_SHAPES[name]["hidden_size"] * 3,
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.08,
        **_SHAPES[name],
    )
    experts = dict(num_experts_per_tok=1, moe_intermediate_size=256)
    latent = dict(
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=3,
        n_routed_experts=2,
        n_shared_experts=1,
        **experts,
    )
    if name == "mla":
        return transformers.DeepseekV2Config(**shape, num_key_value_heads=4, q_lora_rank=None, **latent)
    if name == "indexer":
        indexer = dict(index_n_heads=4, index_head_dim=128, index_topk=512)
        return transformers.DeepseekV32Config(**shape, q_lora_rank=128, **latent, **indexer)
    if name == "kda":
        return transformers.KimiLinearConfig(**shape, pad_token_id=0)
    if name == "conv":
        # The last names are those of the files on the hub, which vLLM reads.
        last = dict(
            conv_dim=256,
            block_dim=256,
            block_ff_dim=768,
            block_multiple_of=256,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
        )
        return transformers.Lfm2Config(**shape, layer_types=["conv"] * 3 + ["full_attention"], **last)
    if name == "mamba1":
        return transformers.JambaConfig(
            **shape, attn_layer_period=4, attn_layer_offset=3, num_experts=2, num_experts_per_tok=1
        )
    if name == "mamba2":
        return transformers.FalconH1Config(
            **shape, mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=64
        )
    if name.startswith("gdn"):
        heads = 1 if name == "gdn-short" else shape["num_attention_heads"]
        return transformers.Qwen3NextConfig(
            **shape | experts,
            num_experts=2,
            shared_expert_intermediate_size=256,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            mamba_ssm_dtype="float32",  # vLLM for CPUs has no other one
        )
    if name == "sinks":
        return transformers.GptOssConfig(
            **shape | dict(intermediate_size=256),
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    if name.startswith("chunked"):
        return transformers.Llama4TextConfig(
            **shape,
            intermediate_size_mlp=512,
            num_local_experts=2,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=1024 if name == "chunked" else 128,
            layer_types=["chunked_attention"] * 3 + ["full_attention"],
            no_rope_layers=[1, 1, 1, 0],
            architectures=["Llama4ForCausalLM"],
        )
    if window := _WINDOW_TOKENS.get(name):
        return transformers.Gemma3TextConfig(
            **shape,
            sliding_window=window,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"]
            * (shape["num_hidden_layers"] // 3),
            query_pre_attn_scalar=64,
            pad_token_id=0,
        )
    return transformers.LlamaConfig(**shape)


def _make(name: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    _save_tokenizer(folder)
    torch.manual_seed(sorted(_SHAPES).index(name))
    made = AutoModelForCausalLM.from_config(_config(name)).to(torch.bfloat16)
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)


if __name__ == "__main__":
    _make(sys.argv[1], sys.argv[2])
