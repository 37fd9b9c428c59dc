"""16 bits beside transformers, a loss scale that overflows, and activations that are computed again."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from twinkle.model import TransformersModel
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.ranks import run
from twinkle_megatron.model import MegatronModel
from twinkle_megatron.testing import built, steps, windows


def ten(model):
    losses, norms = [], []
    for rows in windows():
        losses.append(float(model.forward_backward(rows, micro_batch_size=2)))
        norms.append(float(model.clip_grad_and_step(1.0) or 0.0))
    return losses, norms


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_train_as_transformers_does_in_them(llama, precision):
    """Within what 8 bits of mantissa leave, of each other and of fp32: what is trained are fp32 weights on both sides."""
    mesh = DeviceMesh.from_sizes(device_type="cpu")
    exact, megatron = built(llama, {}), None
    exact.set_optimizer("default", lr=5e-3)
    expected = ten(exact)
    del exact
    megatron = MegatronModel(llama, device_mesh=mesh, mixed_precision=precision)
    megatron.set_optimizer("default", lr=5e-3, initial_loss_scale=1024.0)
    found = ten(megatron)
    other = TransformersModel(model_id=llama, mixed_precision=precision, device_mesh=mesh)
    other.set_optimizer("adamw", lr=5e-3)
    theirs = ten(other)
    assert {p.dtype for p in megatron.module.parameters()} == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert found != expected
    assert expected[0][-1] < expected[0][0] - 0.3
    near = 1e-2 if precision == "bf16" else 2e-3
    for i in range(2):
        assert found[i] == pytest.approx(expected[i], rel=near * (1 + 4 * i))
        assert found[i] == pytest.approx(theirs[i], rel=near * (1 + 4 * i))


def test_a_loss_scale_that_overflows_backs_off_and_goes_on(llama):
    model = MegatronModel(llama, device_mesh=DeviceMesh.from_sizes(device_type="cpu"), mixed_precision="fp16")
    model.set_optimizer("default", lr=1e-2, initial_loss_scale=2.0**15, hysteresis=1)
    before = {key: value.clone() for key, value in model.get_state_dict().items()}
    scales, moved = [], []
    for rows in windows(6):
        model.forward_backward(rows)
        model.clip_grad_and_step()
        scales.append(float(model.sessions[""].optimizer.inner.get_loss_scale()))
        moved.append(any(not torch.equal(before[key], value) for key, value in model.get_state_dict().items()))
    assert scales[0] == 2.0**14 and not moved[0]
    assert moved[-1] and scales[-1] < 2.0**15
    assert model.sessions[""].skipped_steps == sum(1 for a, b in zip([2.0**15, *scales], scales, strict=False) if a != b)


RECOMPUTED = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
]


def calls(model, kind):
    """How often modules of a kind run in one step."""
    seen = []
    handles = [m.register_forward_hook(lambda *_: seen.append(1)) for m in model.module.modules() if type(m).__name__ == kind]
    steps(model, windows(1), *model.adapters.names())
    for handle in handles:
        handle.remove()
    return len(seen) / len(handles) / 4


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_what_is_computed_again_changes_no_loss(llama, adapter):
    """With dropout, whose masks are drawn again as they were; and it is computed again indeed."""
    numbers, again = [], []
    for settings in [{}, *RECOMPUTED]:
        torch.manual_seed(0)
        dropout = {} if adapter else {"hidden_dropout": 0.1}
        model = built(llama, {}, **dropout, **settings)
        if adapter:
            model.add_adapter_to_model("a", LoraConfig(r=4, lora_dropout=0.2))
        model.set_optimizer("default", lr=1e-2)
        numbers.append(steps(model, windows(3), *model.adapters.names()))
        again.append([calls(model, "TEDotProductAttention"), calls(model, "MLP")])
        del model
    assert again == [[1, 1], [2, 2], [1.5, 1.5], [2, 1], [1, 2]]
    for found in numbers[1:]:
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(numbers[0][what], rel=1e-6)


class Again:
    """Run in processes of its own."""

    def train(self, rank, world_size, folder, sizes):
        found = []
        for settings in [{}, RECOMPUTED[0]]:
            torch.manual_seed(0)
            model = built(folder, sizes, hidden_dropout=0.1, **settings)
            model.set_optimizer("default", lr=1e-2)
            found.append(steps(model, windows(3)))
            del model
        return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2, "vpp_size": 2}])
def test_what_is_computed_again_over_ranks_changes_no_loss(llama, sizes):
    for plain, again in run(Again, "train", 2, {"folder": llama, "sizes": sizes}, timeout=200):
        for what in ("losses", "norms"):
            assert again[what] == pytest.approx(plain[what], rel=1e-6)
