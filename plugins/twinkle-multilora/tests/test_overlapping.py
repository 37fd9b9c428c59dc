"""Forwards that wait for their backward while others run: each is gone back through as the forward that it was."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import tiny_config

WAYS = {"packed": {}, "turns": {"attn_implementation": "eager"}, "beside the head": {"target_modules": ["q_proj", "lm_head"]}}


def rows_of(start, count=6):
    return [{"input_ids": [*range(start, start + count)], "labels": [-100, *range(start + 2, start + count + 1)]}]


def build(checkpointing, **options):
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(
        config=tiny_config(), mixed_precision="no", max_loras=2, max_r=4, gradient_checkpointing=checkpointing, **options
    )
    targets = options.get("target_modules", "all-linear")
    for name in "ab":
        torch.manual_seed(ord(name))
        config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.5, init_lora_weights=False)
        model.add_adapter_to_model(name, config, gradient_accumulation_steps=9)
        if "lm_head" in targets:
            model.set_loss("fused_linear_cross_entropy", adapter_name=name)
    return model


def gradients(model, name="a"):
    return [p.grad.clone() for p in model.adapters.parameters(name).values()]


def _a_whole_step_of_its_own(model):
    model.forward(rows_of(10), adapter_name="a", return_logits=False)
    model.forward_backward(rows_of(50, 9), adapter_name="a")
    model.backward(adapter_name="a")


def _after_its_loss(model):
    model.forward(rows_of(10), adapter_name="a", return_logits=False)
    model.calculate_loss(adapter_name="a")
    model.forward_backward(rows_of(50, 9), adapter_name="a")
    model.backward(adapter_name="a")


def _a_pass_with_another(model):
    model.forward(rows_of(10), adapter_name="a", return_logits=False)
    model.forward_backward_many({"b": rows_of(40), "a": rows_of(50, 9)})
    model.backward(adapter_name="a")


def _a_forward_instead(model):
    model.forward(rows_of(10), adapter_name="a")
    model.forward(rows_of(30, 8), adapter_name="a")
    model.forward_only(rows_of(10), adapter_name="a")
    model.backward(adapter_name="a")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("between", [_a_whole_step_of_its_own, _after_its_loss, _a_pass_with_another, _a_forward_instead])
def test_a_forward_that_waits_keeps_its_masks(between, way):
    """With checkpointing backward computes activations again: to the numbers that a graph has which kept them."""
    found = []
    for checkpointing in (False, True):
        model = build(checkpointing, **WAYS[way])
        between(model)
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("way", ["packed", "turns"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_of_two_forwards_may_be_gone_back_through(order, way):
    """By whoever holds their outputs, in either order, and what was chosen before is chosen afterwards."""
    found = []
    for checkpointing in (False, True):
        model = build(checkpointing, **WAYS[way])
        sums = [model.forward(rows_of(start, 8), adapter_name="a").logits.sum() for start in (10, 60)]
        for i in order:
            before = model.adapters.selection.now
            model.engine.backward(sums[i])
            assert model.adapters.selection.now is before
            found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(found[0] + found[1], found[2] + found[3], strict=True))


def test_both_may_be_in_one_sum():
    found = []
    for checkpointing in (False, True):
        model = build(checkpointing)
        sums = [model.forward(rows_of(start, 8), adapter_name=name).logits.sum() for start, name in ((10, "a"), (60, "b"))]
        model.engine.backward(sums[0] + sums[1])
        found.append(gradients(model, "a") + gradients(model, "b"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("loss", [None, "fused_linear_cross_entropy", "logits"])
def test_slots_beside_the_output_layer(loss):
    """It sees other rows than the pass: tenants take turns, and each is what it is in a plain model of its own."""
    from twinkle_transformers.model import TransformersModel

    def from_logits(inputs, outputs):
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100)

    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    shared = MultiLoraTransformersModel(
        config=tiny_config(), mixed_precision="no", max_loras=2, max_r=4, target_modules=["q_proj", "lm_head"]
    )
    torch.manual_seed(0)
    plain = TransformersModel(config=tiny_config(), mixed_precision="no")
    rows = {"a": rows_of(10) + rows_of(40, 9), "b": rows_of(90, 4)}
    for model, names in ((shared, "ab"), (plain, "a")):
        for name in names:
            torch.manual_seed(ord(name))
            model.add_adapter_to_model(name, config)
            model.set_optimizer("sgd", lr=0.1, adapter_name=name)
            if loss is not None:
                model.set_loss(from_logits if loss == "logits" else loss, adapter_name=name)
    for _ in range(2):
        found = float(shared.forward_backward_many(rows)["a"])
        assert found == pytest.approx(float(plain.forward_backward(rows["a"], adapter_name="a")), rel=1e-5)
        norms = [model.clip_grad_and_step(adapter_name="a") for model in (shared, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        shared.clip_grad_and_step(adapter_name="b")
    assert "beside its output layer" in shared.get_train_configs(adapter_name="a")
