"""Calling one after the other, tenants don't feel one another: everything of a tenant is, to the bit, what it is alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import LoraConfig

from twinkle_core.errors import NonFiniteGradients
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import tiny_config

TENANTS = {
    "a": (LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.2), "adamw", 2),
    "b": (LoraConfig(r=8, target_modules=["q_proj", "down_proj"], use_rslora=True, lora_dropout=0.5), "sgd", 1),
    "c": (LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights="gaussian"), "adafactor", 3),
}
STEPS = 6


def rows_of(name, i):
    made = torch.Generator().manual_seed(ord(name) * 100 + i)
    rows = []
    for length in torch.randint(2, 9, (3,), generator=made).tolist():
        ids = torch.randint(3, 250, (length + 1,), generator=made).tolist()
        rows.append({"input_ids": ids[:-1], "labels": ids[1:]})
    return rows


def build(**options):
    torch.manual_seed(0)
    return MultiLoraTransformersModel(config=tiny_config(), mixed_precision="no", max_loras=3, max_r=8, **options)


def join(model, name):
    config, optimizer, size = TENANTS[name]
    torch.manual_seed(ord(name))
    model.add_adapter_to_model(name, config, gradient_accumulation_steps=size)
    model.set_optimizer(optimizer, lr=1e-2, adapter_name=name)
    model.set_lr_scheduler("linear_warmup", num_warmup_steps=2, num_training_steps=9, adapter_name=name)


def turn(model, name, i, found):
    loss = float(model.forward_backward(rows_of(name, i), adapter_name=name, micro_batch_size=2))
    found.setdefault(name, []).append((loss, model.clip_grad_and_step(0.5, adapter_name=name)))


def state(model, name):
    """All numbers of a tenant: weights, gradients, the optimizer's, the schedule, the window."""
    session = model.sessions[name]
    tensors = [v.clone() for v in model.get_state_dict(adapter_name=name).values()]
    tensors += [p.grad.clone() for p in model.adapters.parameters(name).values() if p.grad is not None]
    for held in session.optimizer.state.values():
        tensors += [v.clone() for v in held.values() if isinstance(v, torch.Tensor)]
    rates = [group["lr"] for group in session.optimizer.param_groups]
    return tensors, (rates, session.window.count, session.cur_step, len(session.optimizer.state))


def same(a, b):
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


@pytest.fixture(scope="module")
def alone():
    """Losses and norms, and everything at the end, of each tenant in a model of its own."""
    torch.set_num_threads(1)
    found, states = {}, {}
    for name in TENANTS:
        model = build()
        join(model, name)
        for i in range(STEPS):
            turn(model, name, i, found)
        states[name] = state(model, name)
    return found, states


@pytest.mark.parametrize("order", list(itertools.permutations(TENANTS)), ids="".join)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_in_any_company_and_order(order, checkpointing, alone):
    model, found = build(gradient_checkpointing=checkpointing), {}
    for name in order:
        join(model, name)
    for i in range(STEPS):
        for name in order:
            turn(model, name, i, found)
        model.forward_only(rows_of("x", i), adapter_name=order[0])
    assert found == alone[0]
    for name in order:
        assert same(state(model, name), alone[1][name]), name


def test_with_split_verbs_that_overlap(alone):
    """forward of all, then the losses, then backward of all; dropout is that of each tenant's own forward."""
    whole, split = build(gradient_checkpointing=True), build(gradient_checkpointing=True)
    for model in (whole, split):
        for name in TENANTS:
            join(model, name)
    for i in range(3):
        for name in TENANTS:
            whole.forward_backward(rows_of(name, i), adapter_name=name)
            split.forward(rows_of(name, i), adapter_name=name, return_logits=False)
        for name in reversed(TENANTS):
            split.calculate_loss(adapter_name=name)
        for name in TENANTS:
            split.backward(adapter_name=name)
        for name in TENANTS:
            assert split.clip_grad_and_step(adapter_name=name) == whole.clip_grad_and_step(adapter_name=name)
    assert all(same(state(split, name), state(whole, name)) for name in TENANTS)


def test_an_update_between_forward_and_backward_of_another(alone):
    """One tenant's update changes no number that another's graph holds."""
    model, found = build(), {}
    for name in TENANTS:
        join(model, name)
    for i in range(STEPS):
        for name, other in (("a", "b"), ("b", "a")):
            model.forward(rows_of(name, i), adapter_name=name, return_logits=False)
            turn(model, "c", i, {})
            model.forward_only(rows_of(other, i), adapter_name=other)
            model.backward(adapter_name=name)
            found.setdefault(name, []).append(model.clip_grad_and_step(0.5, adapter_name=name))
    plain, expected = build(), {}
    for name in "ab":
        join(plain, name)
        for i in range(STEPS):
            plain.forward_backward(rows_of(name, i), adapter_name=name)
            expected.setdefault(name, []).append(plain.clip_grad_and_step(0.5, adapter_name=name))
        assert same(state(model, name), state(plain, name))
    assert found == expected


def test_one_that_comes_and_goes_is_not_felt(alone):
    model, found = build(), {}
    join(model, "a")
    for i in range(STEPS):
        join(model, "b")
        turn(model, "b", i, {})
        turn(model, "a", i, found)
        model.multi_lora.release_lora("b")
    assert found["a"] == alone[0]["a"] and same(state(model, "a"), alone[1]["a"])


def _nan(model):
    model.set_loss(lambda inputs, outputs: outputs.logits.sum() * float("nan"), adapter_name="b")
    model.forward_backward(rows_of("b", 0), adapter_name="b")
    with pytest.raises(NonFiniteGradients):
        model.clip_grad_and_step(adapter_name="b")


def _raises(model):
    model.set_loss(lambda inputs, outputs: 1 / 0, adapter_name="b")
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(rows_of("b", 0), adapter_name="b")


def _backward_raises(model):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError

    model.set_loss(lambda inputs, outputs: Bad.apply(outputs.logits), adapter_name="b")
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(rows_of("b", 0), adapter_name="b")


def _diverges(model):
    for p in model.adapters.parameters("b").values():
        p.data.fill_(float("inf"))
    model.forward_only(rows_of("b", 0), adapter_name="b")


def _out_of_vocabulary(model):
    with pytest.raises(ValueError):
        model.forward_backward([{"input_ids": [10**6], "labels": [1]}], adapter_name="b")


@pytest.mark.parametrize("fault", [_nan, _raises, _backward_raises, _diverges, _out_of_vocabulary])
def test_a_failure_is_nobody_elses(fault, alone):
    model, found = build(), {}
    for name in TENANTS:
        join(model, name)
    for i in range(STEPS):
        turn(model, "a", i, found)
        before = state(model, "a"), state(model, "c")
        fault(model)
        assert same(state(model, "a"), before[0]) and same(state(model, "c"), before[1])
        model.set_loss("cross_entropy", adapter_name="b")
        turn(model, "c", i, found)
    for name in "ac":
        assert found[name] == alone[0][name] and same(state(model, name), alone[1][name])


def test_dropout_differs_between_passes_micro_batches_layers_and_tenants():
    """A mask is drawn anew wherever it should be, and about as many numbers are left out as are to be."""
    model = build()
    seen = []
    layers = [*model.adapters.layers.values()]
    for name in ("one", "two"):
        torch.manual_seed(1)  # of one seed, and yet not the same
        model.add_adapter_to_model(name, LoraConfig(r=8, target_modules=["q_proj"], lora_dropout=0.25))
    layers = [layer for layer in layers if layer.parts]
    for layer in layers:
        part = layer.parts
        for p in part.values():
            p.A.data.copy_(torch.eye(8, 32))
            p.B.data.copy_(torch.eye(32, 8) / p.scaling)
    x = torch.ones(50, 32)
    with torch.no_grad():
        for name in ("one", "two", "one"):
            with model.adapters.activate(name), model.adapters.begun():
                for layer in layers:
                    mask = (layer(x) - layer.base_layer(x))[:, :8]
                    assert torch.equal(mask, (layer(x) - layer.base_layer(x))[:, :8])  # the same pass: the same mask
                    assert set(mask.mul(3).round().unique().tolist()) == {0.0, 4.0}
                    assert 0.15 < (mask.abs() < 0.5).float().mean() < 0.35
                    seen.append(mask.round())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
