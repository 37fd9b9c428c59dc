"""Tiny Hugging Face models with random weights, to try layouts on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: two query heads for each of two key heads; what every layout of four ranks can be laid over
SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_tiny(folder: str | Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model's folder.

    Args:
        family: ``llama``, ``qwen2``, ``qwen3``, ``qwen3_moe`` or ``glm4``.
        changes: values of its config.
    """
    import transformers

    sizes = {**SIZES, **(EXPERTS if family == "qwen3_moe" else {}), **changes}
    if family == "qwen2":
        sizes.pop("head_dim")
    if family == "glm4":
        sizes |= {"partial_rotary_factor": 0.5, "attention_bias": True}
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "glm4": "Glm4"}[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(str(folder))
    return Path(folder)
