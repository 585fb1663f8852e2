"""LoRA adapters with random weights for the tiny models."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

_RANK, _HIDDEN, _LAYERS = 8, 256, 4
#: Outputs of the projections that decide the content of a KV block.
_OUTPUTS = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


def write(folder: Path, content: int) -> None:
    """Writes the adapter with this content, replacing the folder's files."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(content)
    tensors = {}
    for layer in range(_LAYERS):
        for name, outputs in _OUTPUTS.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = chance.normal(0, 0.12, (_RANK, _HIDDEN)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = chance.normal(0, 0.12, (outputs, _RANK)).astype(np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": list(_OUTPUTS),
        "bias": "none",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    new = folder / "adapter_model.new"
    save_file(tensors, new)
    os.replace(new, folder / "adapter_model.safetensors")
