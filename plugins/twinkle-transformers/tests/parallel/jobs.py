"""What each of several processes does: the same training over one mesh or another, and what it shows."""

from __future__ import annotations

import torch
from peft import LoraConfig
from transformers import LlamaConfig, Qwen3MoeConfig

from twinkle_core.data.sampler import share
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.sharded import whole
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

STEPS = 10


def moe_config():
    return Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        max_position_embeddings=256,
    )


CONFIGS = {"llama": tiny_config, "untied": lambda: tiny_config(tie_word_embeddings=False), "moe": moe_config}


def batches():
    """10 global batches of rows of unequal lengths; of some rows few or no tokens are labelled, and one batch is one row."""
    found = []
    for step in range(STEPS):
        rows = random_rows([3 + (5 * step + 7 * i) % 11 for i in range(5)], vocabulary=250)
        rows = [{**row, "input_ids": [(t + step) % 250 for t in row["input_ids"]]} for row in rows]
        for row in rows[-2:]:
            row["labels"] = [-100] * (len(row["labels"]) - 1) + row["labels"][-1:] if step % 2 else [-100] * len(row["labels"])
        found.append(rows[:1] if step == 3 else rows)
    return found


def model(sizes, kind="llama", adapter="", **options):
    torch.manual_seed(5)
    config = CONFIGS[kind]()
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    built = TransformersModel(config=config, mixed_precision="no", device_mesh=mesh, **options)
    if adapter:
        built.add_adapter_to_model(adapter, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    return built


def state(built, adapter=""):
    return {k: whole(v).clone() for k, v in built.get_state_dict(adapter_name=adapter).items()}


def train(built, adapter, rows, window=1):
    """(loss over all ranks, gradient norm) of each window."""
    mesh = built.engine.mesh
    found = []
    for i in range(0, len(rows), window):
        for batch in rows[i : i + window]:
            mine = list(share(batch, mesh.data_rank, mesh.data_world_size))
            built.forward_backward(mine, adapter_name=adapter, gradient_accumulation_steps=window)
        norm = built.clip_grad_and_step(0.5, adapter_name=adapter)
        found.append([built.calculate_metric(adapter_name=adapter)["loss"], norm])
    return found


def ready(spec):
    adapter = spec.get("adapter", "")
    built = model(spec["sizes"], spec.get("kind", "llama"), adapter, **spec.get("options", {}))
    lr = {"sgd": 0.1, "adamw": 1e-3}[spec["optimizer"]]
    built.set_optimizer(spec["optimizer"], lr=lr, adapter_name=adapter)
    built.add_metric("loss", is_training=True, adapter_name=adapter)
    return built


class Jobs:
    """Called in a process of its own; several jobs share one group of processes."""

    def train(self, rank, world_size, jobs):
        found = {}
        for name, spec in jobs.items():
            adapter, built = spec.get("adapter", ""), ready(spec)
            start = state(built, adapter)
            seen = train(built, adapter, batches(), spec.get("window", 1))
            found[name] = {"start": start, "seen": seen, "weights": state(built, adapter)}
            logits = built.forward_only(batches()[0][:1], adapter_name=adapter).logits
            found[name]["logits"] = logits.detach().clone()
        return found
