"""What a thread has set for itself (autocast, no gradients, hooks, a context) reaches the calls of no other thread."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch
from peft import LoraConfig

from twinkle_core.errors import BadLossResult
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.scheduler import TenantScheduler
from twinkle_transformers.testing import tiny_config

ROWS = {"a": [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}], "b": [{"input_ids": [30, 20, 10], "labels": [20, 10, 3]}]}


def build():
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(config=tiny_config(), mixed_precision="no", max_loras=2, max_r=4)
    for name in ROWS:
        torch.manual_seed(ord(name))
        model.add_adapter_to_model(name, LoraConfig(r=4, target_modules="all-linear"))
        model.set_optimizer("sgd", lr=0.1, adapter_name=name)
    return model


def narrow():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def rounded():
    def packed(t):
        return t.bfloat16() if t.dtype == torch.float32 else t

    return torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t.float() if t.dtype == torch.bfloat16 else t)


@contextlib.contextmanager
def threads():
    """Of this thread alone: torch's number of threads is each thread's own."""
    found = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(found)


SETTINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": narrow,
    "hooks": rounded,
    "threads": threads,
    "meta": lambda: torch.device("meta"),
    "nothing": contextlib.nullcontext,
}


def call(model, name, found, around):
    torch.set_num_threads(1)  # a new thread begins with what was set last, wherever
    assert torch.get_num_threads() == 1
    with around():
        try:
            found[name] = float(model.forward_backward(ROWS[name], adapter_name=name))
        except (BadLossResult, RuntimeError) as error:
            found[name] = type(error)
    if not isinstance(found[name], type):
        found[name] = (found[name], model.clip_grad_and_step(adapter_name=name))


@functools.cache
def alone(name, kind):
    model, found = build(), {}
    model.engine.sharing  # noqa: B018  tried now
    call(model, name, found, SETTINGS[kind])
    return found[name]


def at_once(model, arounds):
    """Both tenants call while the model is busy, ``arounds`` in this order: the first one's thread serves both, if it may."""
    found = {}
    threads = [threading.Thread(target=call, args=(model, name, found, around)) for name, around in arounds.items()]
    with model.turns:
        for number, thread in enumerate(threads, 1):
            thread.start()
            while len(model.scheduler._waiting) < number or model.turns.waiting < number:
                thread.join(0.005)
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_what_a_thread_has_set_for_itself_reaches_nobody_else(kind, order, monkeypatch):
    groups, whole = [], TenantScheduler._gather
    monkeypatch.setattr(TenantScheduler, "_gather", lambda self, mine: groups.append(found := whole(self, mine)) or found)
    model, arounds = build(), {"a": SETTINGS[kind], "b": contextlib.nullcontext}
    model.engine.sharing  # noqa: B018
    groups.clear()
    assert at_once(model, {name: arounds[name] for name in order}) == {"a": alone("a", kind), "b": alone("b", "nothing")}
    assert len(groups[0]) == (2 if kind == "nothing" else 1)


def test_a_loss_runs_in_the_context_of_the_thread_that_called():
    """A loss that calls the model without a name means its own thread's adapter, whoever serves the call."""
    model, meant = build(), {}

    def spying(name):
        def loss(inputs, outputs):
            meant[name] = model.forward_only(ROWS["a"], return_logits=False).logps
            return outputs.logps.sum()

        loss.needs = {"logps"}
        return loss

    def run(name):
        with model.adapter(name):
            model.forward_backward(ROWS[name])

    model.engine.sharing  # noqa: B018
    with torch.no_grad():
        for p in model.adapters.parameters("b").values():
            p.add_(0.3)
    for name in ROWS:
        model.set_loss(spying(name), adapter_name=name)
    threads = [threading.Thread(target=run, args=(name,)) for name in ROWS]
    with model.turns:
        for thread in threads:
            thread.start()
        while len(model.scheduler._waiting) < 2:
            threads[0].join(0.005)
    for thread in threads:
        thread.join(60)
    expected = {name: model.forward_only(ROWS["a"], adapter_name=name, return_logits=False).logps for name in ROWS}
    assert all(torch.equal(meant[name], expected[name]) for name in ROWS)
    assert not torch.equal(expected["a"], expected["b"])


def test_what_a_pass_was_tried_under_holds_for_no_other(monkeypatch):
    """A model that is first asked under autocast or in an evaluation is asked again, as it trains."""
    from twinkle_multilora import engine

    asked, whole = [], engine.sharing_of
    monkeypatch.setattr(engine, "sharing_of", lambda *a, **k: asked.append(1) or whole(*a, **k))
    model = build()
    with torch.inference_mode():
        model.forward_only(ROWS["a"], adapter_name="a")
    assert model.engine.sharing.way == "shared" and len(asked) == 1
    with narrow():
        assert model.engine.sharing.way == "shared" and len(asked) == 2
    assert model.engine.sharing.way == "shared" and len(asked) == 2
