"""What each of several processes does: the same training over one mesh or another, and what it shows."""

from __future__ import annotations

import torch
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3MoeConfig

from twinkle_core.data.sampler import share
from twinkle_core.errors import NonFiniteGradients
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.sharded import whole
from twinkle_core.testing.toys import contrast_rows, random_rows
from twinkle_core.types import LossOutput
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


def normed_config():
    """With norms over each head, whose weights all heads share."""
    return Qwen3Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        max_position_embeddings=256,
    )


CONFIGS = {
    "normed": normed_config,
    "llama": tiny_config,
    "untied": lambda: tiny_config(tie_word_embeddings=False),
    "biased": lambda: tiny_config(attention_bias=True, mlp_bias=True),
    "moe": moe_config,
}


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
    dropout, targets = options.pop("dropout", 0.0), options.pop("targets", "all-linear")
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    built = TransformersModel(config=config, mixed_precision="no", device_mesh=mesh, **options)
    if adapter:
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, lora_dropout=dropout)
        built.add_adapter_to_model(adapter, config)
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
    if spec.get("packed"):
        built.set_processor("input", padding_free=True, adapter_name=adapter)
    return built


def by_hand(inputs, outputs):
    """Cross entropy of a loss that runs the output layer itself."""
    logps = outputs.output_layer(outputs.hidden).log_softmax(-1)
    labels = inputs["labels"]
    taken = logps.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)
    return LossOutput(-taken.sum(), (labels != -100).sum())


by_hand.needs = {"hidden"}


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

    def gradients(self, rank, world_size, jobs):
        """Whole gradients of each window as the optimizer sees them."""
        found = {}
        for name, spec in jobs.items():
            built = ready(spec)
            optimizer, seen = built.sessions[""].optimizer, []
            step = optimizer.step

            def watched(*args, built=built, step=step, seen=seen, **kwargs):
                seen.append({k: whole(p.grad).clone() for k, p in built.adapters.parameters("").items()})
                return step(*args, **kwargs)

            optimizer.step = watched
            train(built, "", batches(), spec.get("window", 1))
            found[name] = {"gradients": seen}
        return found

    def checkpoints(self, rank, world_size, folder, jobs):
        """Train, save, train on; then the same from the checkpoint, in another model that was trained before."""
        found = {}
        for name, spec in jobs.items():
            adapter, rows = spec.get("adapter", ""), batches()
            first, second = ready(spec), ready(spec)
            train(first, adapter, rows[:4])
            path = first.save(name, folder, adapter_name=adapter, save_optimizer=True, **spec.get("save", {}))
            unbroken = train(first, adapter, rows[4:7])
            train(second, adapter, rows[7:9])
            second.resume_from_checkpoint(path, adapter_name=adapter)
            second.calculate_metric(adapter_name=adapter)
            resumed = train(second, adapter, rows[4:7])
            found[name] = {"unbroken": unbroken, "resumed": resumed, "path": path}
            found[name] |= {"first": state(first, adapter), "second": state(second, adapter)}
        return found

    def resume(self, rank, world_size, paths, jobs, folder):
        """Train on from checkpoints of other meshes, and save anew."""
        found = {}
        for name, spec in jobs.items():
            adapter, built = spec.get("adapter", ""), ready(spec)
            built.resume_from_checkpoint(paths[name], adapter_name=adapter)
            saved = built.save(f"{name}-again", folder, adapter_name=adapter, save_optimizer=True, **spec.get("save", {}))
            seen = train(built, adapter, batches()[4:7])
            found[name] = {"seen": seen, "weights": state(built, adapter), "path": saved}
        return found

    def tenants(self, rank, world_size, meshes):
        """Two adapters of one model, whose windows of different sizes interleave."""
        found = {}
        for name, sizes in meshes.items():
            built = model(sizes, "llama", "a")
            built.add_adapter_to_model("b", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
            for adapter in "ab":
                built.set_optimizer("adamw", lr=1e-3, adapter_name=adapter)
            start = {adapter: state(built, adapter) for adapter in "ab"}
            mesh, norms = built.engine.mesh, []
            for rows in batches()[:6]:
                mine = list(share(rows, mesh.data_rank, mesh.data_world_size))
                for adapter, window in (("a", 2), ("b", 3)):
                    built.forward_backward(mine, adapter_name=adapter, gradient_accumulation_steps=window)
                    norm = built.clip_grad_and_step(adapter_name=adapter)
                    norms += [norm] if norm is not None else []
            found[name] = {"start": start, "norms": norms, "weights": {adapter: state(built, adapter) for adapter in "ab"}}
        return found

    def faults(self, rank, world_size):
        """Small questions of two data ranks."""
        found = {}
        built = model({"dp_size": world_size}, "llama")
        built.set_optimizer("sgd", lr=0.1)
        rows = random_rows([5, 3, 8, 2], vocabulary=250)
        before = state(built)
        if world_size > 1:
            with torch.no_grad():
                hook = built.module.lm_head.register_forward_hook(lambda m, a, y: y * float("nan") if rank == 1 else y)
            try:
                built.set_loss(lambda inputs, outputs: outputs.logits.float().sum() * 1e-3)
                built.forward_backward(rows[rank : rank + 1])
                built.clip_grad_and_step()
                found["nonfinite"] = "none"
            except NonFiniteGradients as error:
                found["nonfinite"] = type(error).__name__
            hook.remove()
        found["kept"] = all(torch.equal(before[k], v) for k, v in state(built).items())
        built.set_loss("cross_entropy")
        few = [{**row, "labels": [-100] * len(row["labels"])} for row in rows[:2]] if rank == 0 else rows[2:]
        built.forward_backward(few if world_size > 1 else rows[2:])
        found["one rank without labels"] = built.clip_grad_and_step()
        built.forward_backward([{**row, "labels": [-100] * len(row["labels"])} for row in rows])
        found["no labels at all"] = built.clip_grad_and_step()
        return found

    def beside(self, rank, world_size, sizes):
        """Half precision that overflows on one rank's parts; a loss that runs the output layer itself; a value head."""
        found = {}
        torch.manual_seed(5)
        mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
        half = TransformersModel(config=tiny_config(), mixed_precision="fp16", device_mesh=mesh)
        half.set_optimizer("sgd", lr=0.1)
        rows = random_rows([5, 3, 8, 2], vocabulary=250)
        mine = list(share(rows, mesh.data_rank, mesh.data_world_size))
        found["fp16"] = []
        for step in range(3):
            if step:
                half.engine.scaler._scale.fill_(2.0**40 if step == 1 else 2.0**6)
            half.forward_backward(mine)
            half.clip_grad_and_step()
            found["fp16"].append([half.engine.loss_scale(), half.sessions[""].cur_step])
        built = model(sizes)
        built.set_loss(by_hand)
        built.set_optimizer("sgd", lr=0.1)
        norms = []
        for _ in range(2):
            built.forward_backward(mine)
            norms.append(built.clip_grad_and_step())
        found["hidden"] = norms
        valued = model(sizes)
        valued.apply_patch("value_head")

        def distance(inputs, outputs):
            labelled = inputs["labels"] != -100
            return LossOutput((outputs["values"] - 0.5).square().masked_fill(~labelled, 0).sum(), labelled.sum())

        distance.needs = {"values"}
        valued.set_loss(distance)
        valued.set_optimizer("sgd", lr=0.01)
        norms = []
        for _ in range(2):
            valued.forward_backward(mine)
            norms.append(valued.clip_grad_and_step())
        found["values"] = norms
        return found

    def uneven_tokens(self, rank, world_size):
        """Two classes, weights 0, one token of class 0 on rank 0 and three of class 1 on rank 1."""
        built = model({"dp_size": world_size})
        with torch.no_grad():
            for p in built.module.parameters():
                p.zero_()
        bias = torch.nn.Parameter(torch.zeros(2))
        built.module.lm_head = Bias(bias)
        built.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
        rows = [{"input_ids": [1], "labels": [0]}, {"input_ids": [1, 1, 1], "labels": [1, 1, 1]}]
        built.forward_backward(rows[rank : rank + 1] if world_size > 1 else rows)
        built.clip_grad_and_step(float("inf"))
        return bias.detach()

    def embeddings(self, rank, world_size):
        """Contrast over the rows of all ranks."""
        built = model({"dp_size": world_size})
        built.apply_patch("embedding", pooling="mean")
        built.set_loss("infonce")
        built.set_optimizer("sgd", lr=0.1)
        groups = [contrast_rows([2, 2, 2, 2])[i : i + 2] for i in range(0, 8, 2)]
        mine = groups[2 * rank : 2 * rank + 2] if world_size > 1 else groups
        norms = []
        for _ in range(3):
            built.forward_backward([row for group in mine for row in group])
            norms.append(built.clip_grad_and_step())
        return {"norms": norms, "weights": state(built)}

    def sharded(self, rank, world_size, folder):
        """What only weights that lie apart could get wrong."""
        found = {}
        sizes = {"fsdp_size": world_size}
        plain = TransformersModel(model_id=folder, mixed_precision="no", device_mesh=DeviceMesh.from_sizes(**sizes))
        broadcast = TransformersModel(
            model_id=folder, mixed_precision="no", device_mesh=DeviceMesh.from_sizes(**sizes), memory_efficient_init=True
        )
        a, b = state(plain), state(broadcast)
        found["read by one"] = a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        rows = random_rows([5, 3, 8, 2], vocabulary=250)[2 * rank : 2 * rank + 2] if world_size > 1 else []
        logits = [m.forward_only(rows).logits for m in (plain, broadcast)]
        found["same logits"] = torch.equal(*logits)
        found["texts"] = plain.generate(rows[: 1 + rank], return_rows=True, max_new_tokens=3 + rank)[0]["input_ids"]
        mixed = TransformersModel(model_id=folder, device_mesh=DeviceMesh.from_sizes(**sizes))
        mixed.set_optimizer("adamw", lr=1e-3)
        losses = []
        for _ in range(4):
            losses.append(float(mixed.forward_backward(rows)))
            mixed.clip_grad_and_step()
        found["bf16"] = losses
        found["dtype"] = str(next(iter(mixed.module.parameters())).dtype)
        found["tied"] = mixed.module.lm_head.weight is mixed.module.model.embed_tokens.weight
        return found


class Bias(torch.nn.Module):
    """Logits that are a parameter and nothing else."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, hidden):
        return self.bias.expand(*hidden.shape[:-1], 2)
