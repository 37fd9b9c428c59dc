"""Tiny Hugging Face models with random weights, and training on them under one layout after the other."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from twinkle_core.data.sampler import share
from twinkle_core.mesh import DeviceMesh
from twinkle_megatron.model import MegatronModel

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


#: layers of linear attention and of attention in turn, of a model that sees
RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
#: one dense layer, then experts in two groups and a shared one; attention over a narrow state
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 2.5,
}
#: by family: the name of its class, what its config has beside ``SIZES``, and what it has not
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {}, ()),
    "mistral": ("Mistral", {"sliding_window": None}, ()),
    "qwen2": ("Qwen2", {}, ("head_dim",)),
    "qwen3": ("Qwen3", {}, ()),
    "qwen3_moe": ("Qwen3Moe", EXPERTS, ()),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}, ()),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK, ("head_dim",)),
    "qwen3_5": ("Qwen3_5", RECURRENT, ()),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 32},
        ("intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    ),
}


def write_tiny(folder: str | Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model's folder. In several processes transformers writes in the first alone: call it before they meet.

    Args:
        family: one of ``FAMILIES``.
        changes: values of its config.
    """
    import transformers

    name, more, without = FAMILIES[family]
    sizes = {key: value for key, value in {**SIZES, **more, **changes}.items() if key not in without}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family.startswith("qwen3_5"):
            tied = sizes["tie_word_embeddings"]
            ids = dict(zip(("image", "video", "vision_start", "vision_end"), range(245, 249), strict=True))
            sizes = {"text_config": sizes, "vision_config": TOWER, "tie_word_embeddings": tied}
            sizes |= {f"{key}_token_id": value for key, value in ids.items()}
        kind = "ForConditionalGeneration" if family.startswith("qwen3_5") else "ForCausalLM"
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}{kind}")(config).float()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.data += 0.05 * torch.randn_like(buffer)
        model.save_pretrained(str(folder))
    return Path(folder)


#: windows of four rows, which come again after five; token counts differ from row to row and between the halves of a window
LENGTHS = ([6, 3, 9, 2], [5, 12, 3, 7], [2, 2, 16, 4], [11, 1, 8, 3], [7, 7, 7, 7])


def windows(count: int = 10, vocabulary: int = 250) -> list[list[dict[str, Any]]]:
    """Rows with aligned labels, of which the first are not trained."""
    random = torch.Generator().manual_seed(5)
    found = []
    for step in range(min(count, len(LENGTHS))):
        rows = []
        for length in LENGTHS[step % len(LENGTHS)]:
            ids = torch.randint(1, vocabulary, (length + 1,), generator=random).tolist()
            labels = [-100 if i < length // 3 else token for i, token in enumerate(ids[1:])]
            rows.append({"input_ids": ids[:-1], "labels": labels, "length": length})
        found.append(rows)
    return [found[step % len(LENGTHS)] for step in range(count)]


def built(folder: str, sizes: dict[str, Any], **options: Any) -> MegatronModel:
    """A model in fp32; the one before must be out of use."""
    gc.collect()
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    return MegatronModel(folder, device_mesh=mesh, mixed_precision="no", **options)


def steps(model: MegatronModel, batches: list[Any], name: str = "") -> dict[str, list[float]]:
    """Losses over all data ranks, and gradient norms."""
    mesh, losses, norms = model.engine.mesh, [], []
    for rows in batches:
        mine = share(rows, mesh.data_rank, mesh.data_world_size)
        loss = model.forward_backward(mine, adapter_name=name, micro_batch_size=1)
        held = sum(label != -100 for row in mine for label in row["labels"])
        total = model.engine.all_reduce(torch.tensor([float(loss) * held, float(held)], dtype=torch.float64))
        norms.append(model.clip_grad_and_step(1.0, adapter_name=name) or 0.0)
        losses.append(float(total[0] / total[1]))
    return {"losses": losses, "norms": norms}


class Layouts:
    """Methods for ``twinkle_core.testing.ranks.run``."""

    def train(self, rank: int, world_size: int, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
        """Ten updates under each layout."""
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            model.set_optimizer("default", lr=2e-3)
            found.append(steps(model, windows()))
            del model
        return found

    def resume(
        self, rank: int, world_size: int, folder: str, layouts: list[dict[str, Any]], home: str, adapter: bool
    ) -> list[dict[str, list[float]]]:
        """Under each layout, go on from ``home``/half; where there is none, train five updates first and save."""
        found = []
        for sizes in layouts:
            model, name = built(folder, sizes), "a" if adapter else ""
            if adapter:
                model.add_adapter_to_model(name, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
            model.set_optimizer("default", lr=5e-3, weight_decay=0.1, adapter_name=name)
            model.set_lr_scheduler("default", lr_warmup_steps=2, lr_decay_steps=12, adapter_name=name)
            if (Path(home) / "half").is_dir():
                steps(model, windows(2), name)  # so that what was there before is replaced
                assert model.resume_from_checkpoint(Path(home) / "half", adapter_name=name)["cur_step"] == 5
            else:
                steps(model, windows(5), name)
                model.save("half", home, adapter_name=name, save_optimizer=True, consumed_train_samples=20)
            found.append(steps(model, windows(10)[5:], name))
            del model
        return found
