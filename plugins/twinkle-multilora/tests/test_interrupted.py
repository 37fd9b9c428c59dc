"""Ctrl-C in the middle of a pass that tenants share: nothing of anyone is lost, and nothing counts by half."""

from __future__ import annotations

import contextlib

import pytest
import torch
from peft import LoraConfig

from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import tiny_config

CONFIG = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)


def rows_of(start, count=6):
    return [{"input_ids": [*range(start, start + count)], "labels": [*range(start + 1, start + count + 1)]}]


def build():
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(config=tiny_config(), mixed_precision="no", max_loras=3, max_r=4)
    for name in "abc":
        torch.manual_seed(ord(name))
        model.add_adapter_to_model(name, CONFIG, gradient_accumulation_steps=3)
        model.set_optimizer("adamw", lr=1e-2, adapter_name=name)
    for name in "ab":  # c's window is not open
        model.forward_backward(rows_of(10), adapter_name=name)
    return model


def state(model):
    """All that a window is, of each tenant."""
    found = {}
    for name in "abc":
        own = model.adapters.parameters(name).values()
        tensors = [t.clone() for p in own for t in (p.detach(), p.grad) if t is not None]
        found[name] = (tensors, model.sessions[name].window.state_dict(), model.adapters.training_state(name))
    return found


def same(a, b):
    return all(
        a[name][1:] == b[name][1:] and len(a[name][0]) == len(b[name][0]) and all(map(torch.equal, a[name][0], b[name][0]))
        for name in "abc"
    )


def _stops(*args, **kwargs):
    raise KeyboardInterrupt


def _in_a_loss(model, patched):
    model.set_loss(_stops, adapter_name="b")


def _in_a_losses_backward(model, patched):
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        backward = staticmethod(_stops)

    def loss(inputs, outputs):
        return Stops.apply(outputs.logps).sum()

    loss.needs = {"logps"}
    model.set_loss(loss, adapter_name="b")


def _in_the_middle_of_backward(model, patched):
    """When some layers have their gradients, and others don't."""
    first = next(iter(model.adapters.parameters("b").values()))
    patched.callback(first.register_hook(_stops).remove)


def _in_the_forward(model, patched):
    patched.callback(list(model.module.modules())[-1].register_forward_hook(_stops).remove)


def _when_calls_are_counted(model, patched):
    """One is counted, the next one is not."""
    counts, count = [], model._count

    def counted(*args):
        counts.append(1)
        return count(*args) if len(counts) == 1 else _stops()

    model._count = counted
    patched.callback(lambda: delattr(model, "_count"))


@pytest.mark.parametrize(
    "where", [_in_a_loss, _in_a_losses_backward, _in_the_middle_of_backward, _in_the_forward, _when_calls_are_counted]
)
def test_every_window_is_what_it_was(where):
    """And each tenant goes on as if the call had not been."""
    model, undisturbed = build(), build()
    before = state(model)
    rows = {"a": rows_of(20), "b": rows_of(30), "c": rows_of(40, 3)}
    with contextlib.ExitStack() as patched:
        where(model, patched)
        with pytest.raises(KeyboardInterrupt):
            model.forward_backward_many(rows)
    assert same(state(model), before)
    model.set_loss("cross_entropy", adapter_name="b")
    for each in (model, undisturbed):
        for _ in range(3):
            each.forward_backward_many(rows)
        for name in "abc":
            each.flush(adapter_name=name)
    assert same(state(model), state(undisturbed))


def test_a_pass_that_fails_on_its_way_back_costs_no_window():
    """Memory that ends there, say: it is told to all whose call it was, and each may call again."""
    model = build()
    before = state(model)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    hook = next(iter(model.adapters.parameters("b").values())).register_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        model.forward_backward_many({"a": rows_of(20), "b": rows_of(30)})
    hook.remove()
    assert same(state(model), before)
