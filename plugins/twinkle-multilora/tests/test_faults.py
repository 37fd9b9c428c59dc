"""Faults met in the field, through MultiLoraTransformersModel: small inputs whose right values were worked out by hand."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from twinkle_core.contracts.metric import Metric
from twinkle_core.errors import BadAdapter, CheckpointMismatch, NoOptimizer, RankTooLarge, SlotsFull
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.testing import ToyL, ToyLConfig

ONE = LoraConfig(r=1, lora_alpha=1, target_modules=["lin"])


def squared(inputs, outputs):
    return (outputs.logits.squeeze(-1) - inputs["labels"]).pow(2).mean()


def at(x, y=None):
    return [{"input_ids": [x], "labels": [float(y)]} if y is not None else {"input_ids": [x]}]


def toy(*tenants, weight=2.0, **sizes):
    m = MultiLoraTransformersModel(ToyL, config=ToyLConfig(weight), mixed_precision="no", **{"max_r": 8, **sizes})
    m.set_loss(squared, adapter_name="")
    for name, b in tenants:
        m.add_adapter_to_model(name, ONE)
        put(m, name, b)
    return m


def put(m, name, b, a=1.0):
    """All numbers of A and of B."""
    live = m.get_state_dict(adapter_name=name)
    m.adapters.load_state_dict(name, {k: torch.full_like(v, a if "lora_A" in k else b) for k, v in live.items()})


def part(m, name, which):
    return next(p for k, p in m.adapters.parameters(name).items() if which in k)


def answer(m, name, x=1, **kwargs):
    return m.forward_only(at(x), adapter_name=name, **kwargs).logits.item()


def sgd(m, *names):
    for name in names:
        m.set_optimizer("sgd", adapter_name=name, lr=0.1, weight_decay=0.0)


def flags(m):
    found = {name: (p.requires_grad, p.dtype) for name, p in m.module.named_parameters()}
    return found, {name: module.training for name, module in m.module.named_modules()}


def test_B06_the_second_tenant_trains_and_the_first_stays():
    m = toy(("a", 0.0), ("b", 0.0))
    sgd(m, "a", "b")
    m.forward_backward(at(1, 5), adapter_name="a")
    assert part(m, "a", "lora_B").grad.item() == pytest.approx(-6)
    assert part(m, "a", "lora_A").grad.item() == 0
    m.clip_grad_norm(float("inf"), adapter_name="a")
    m.step(adapter_name="a")
    m.zero_grad(adapter_name="a")
    first = part(m, "a", "lora_B").detach().clone()
    assert first.item() == pytest.approx(0.6)
    m.forward_backward(at(1, -1), adapter_name="b")
    assert part(m, "b", "lora_B").grad.item() == pytest.approx(6)
    assert part(m, "a", "lora_B").grad is None
    m.step(adapter_name="b")
    assert part(m, "b", "lora_B").item() == pytest.approx(-0.6)
    assert torch.equal(part(m, "a", "lora_B"), first)
    found = [answer(m, "a"), answer(m, "b"), answer(m, "a", disable_lora=True), answer(m, "")]
    assert found == pytest.approx([2.6, 1.4, 2.0, 2.0])


def test_B08_disabling_puts_all_back():
    """For one call, in a context, nested, and after an exception inside."""
    m = toy(("a", 3.0))
    before = flags(m)
    assert answer(m, "a") == 5.0
    assert answer(m, "a", disable_lora=True) == 2.0
    with m.multi_lora.adapter("a", disable_lora=True):
        assert answer(m, None) == 2.0
        with m.multi_lora.adapter("a", disable_lora=True):
            assert answer(m, None) == 2.0
        assert answer(m, None) == 2.0
        with m.multi_lora.adapter("a"):
            assert answer(m, None) == 5.0
        assert answer(m, "a") == 2.0
        assert m.module(input_ids=torch.tensor([[1]])).logits.item() == 2.0
    assert answer(m, "a") == 5.0
    with pytest.raises(ZeroDivisionError), m.multi_lora.adapter("a", disable_lora=True):
        raise ZeroDivisionError
    m.set_loss(lambda inputs, outputs: 1 / 0, adapter_name="a")
    with pytest.raises(ZeroDivisionError):
        m.forward_backward(at(1, 5), adapter_name="a")
    assert answer(m, "a") == 5.0
    assert flags(m) == before


def test_B08_frozen_stays_frozen():
    m = toy()
    m.add_adapter_to_model("ref", LoraConfig(r=1, target_modules=["lin"], inference_mode=True))
    m.add_adapter_to_model("pol", ONE)
    for name in ("ref", "pol"):
        answer(m, name)
    trainable = {name for name, p in m.module.named_parameters() if p.requires_grad}
    assert trainable == {"lin.lora_A.lora_1", "lin.lora_B.lora_1"}
    assert m.adapters.parameters("ref") == {}
    assert len(m.adapters.parameters("pol")) == 2


def test_B08_a_tenant_does_not_start_dropout_in_evaluation():
    m = toy()
    m.module.eval()
    m.add_adapter_to_model("a", LoraConfig(r=8, target_modules=["lin"], lora_dropout=0.5))
    put(m, "a", 1.0)
    assert answer(m, "a") == answer(m, "a")
    assert not any(module.training for module in m.module.modules())
    assert m.module(input_ids=torch.tensor([[1]])).logits.item() == 2.0  # at rest nobody takes part


def test_B10_saved_by_one_tenant_loaded_by_another_in_another_slot(tmp_path):
    m = toy(("a", 0.0))
    sgd(m, "a")
    m.forward_backward(at(1, 5), adapter_name="a")
    m.step(adapter_name="a")
    folder = m.save("trained", tmp_path, adapter_name="a")
    stored = load_file(f"{folder}/adapter_model.safetensors")
    assert sorted(stored) == ["base_model.model.lin.lora_A.weight", "base_model.model.lin.lora_B.weight"]
    assert stored["base_model.model.lin.lora_B.weight"].item() == pytest.approx(0.6)
    m.multi_lora.release_lora("a")
    assert m.multi_lora.acquire_lora("first", ONE) == "lora_0"
    assert m.multi_lora.acquire_lora("z", folder) == "lora_1"
    assert answer(m, "z") == pytest.approx(2.6)
    assert m.multi_lora.acquire_lora("y", ONE) == "lora_2"
    m.load("trained", tmp_path, adapter_name="y")
    assert answer(m, "y") == pytest.approx(2.6)
    plain = tmp_path / "plain"
    plain.mkdir()
    for state, key in ((dict(list(stored.items())[:1]), "lora_B"), ({**stored, "x.lora_A.weight": torch.ones(1)}, "x.lora_A")):
        save_file(state, plain / "adapter_model.safetensors")
        with pytest.raises(CheckpointMismatch, match=key):
            m.load("plain", tmp_path, adapter_name="y")
    assert answer(m, "y") == pytest.approx(2.6)


@pytest.mark.parametrize(("rslora", "right"), [(False, 8.0), (True, 16.0)])
def test_B12_rank_alpha_and_scale_are_the_tenants(rslora, right, tmp_path):
    m = toy(weight=0.0)
    m.add_adapter_to_model("a", LoraConfig(r=4, lora_alpha=8, use_rslora=rslora, target_modules="all-linear"))
    put(m, "a", 1.0)
    assert answer(m, "a") == right
    folder = m.save("a", tmp_path, adapter_name="a")
    shapes = {k.split(".")[-2]: list(v.shape) for k, v in load_file(f"{folder}/adapter_model.safetensors").items()}
    assert shapes == {"lora_A": [4, 1], "lora_B": [1, 4]}
    config = LoraConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha, config.use_rslora, set(config.target_modules)) == (4, 8, rslora, {"lin"})
    assert PeftModel.from_pretrained(ToyL(ToyLConfig(0.0)), folder)(input_ids=torch.tensor([[1]])).logits.item() == right


BAD = {
    "r=16": (lambda: LoraConfig(r=16, target_modules=["lin"]), RankTooLarge),
    "r=0": (lambda: LoraConfig(r=0, target_modules=["lin"]), BadAdapter),
    "r=-1": (lambda: LoraConfig(r=-1, target_modules=["lin"]), BadAdapter),
    "r='8'": (lambda: LoraConfig(r="8", target_modules=["lin"]), BadAdapter),
    "nope": (lambda: LoraConfig(r=8, target_modules=["nope"]), BadAdapter),
}


def test_B54_what_fails_takes_no_slot():
    m = toy(max_loras=2)
    for name, (config, error) in BAD.items():
        try:
            made = config()
        except (TypeError, ValueError):  # some versions of peft look themselves
            continue
        with pytest.raises(error, match=name if name != "nope" else "nope") as caught:
            m.multi_lora.acquire_lora("x", made)
        if name == "r=16":
            assert "max_r=8" in str(caught.value) and isinstance(caught.value, RuntimeError)
        assert m.multi_lora.free == 2 and list(m.sessions) == [""]
    for name in ("a", "b"):
        m.multi_lora.acquire_lora(name, ONE)
        put(m, name, 3.0)
    before = {name: {k: v.clone() for k, v in m.get_state_dict(adapter_name=name).items()} for name in "ab"}
    with pytest.raises(SlotsFull, match=r"pool of 2 is full.*a, b") as full:
        m.multi_lora.acquire_lora("c", ONE)
    assert isinstance(full.value, RuntimeError)
    for _, (config, error) in BAD.items():
        with pytest.raises((error, SlotsFull)):
            m.add_adapter_to_model("x", config())
    for name, state in before.items():
        assert all(torch.equal(v, state[k]) for k, v in m.get_state_dict(adapter_name=name).items())


class Noting(Metric):
    needs = frozenset({"loss"})

    def __init__(self):
        self.count = 0

    def accumulate(self, inputs, outputs):
        self.count += 1

    def state(self):
        return self.count

    def merge(self, state):
        self.count += state

    def calculate(self):
        return {"count": self.count}

    def reset(self):
        self.count = 0


def test_B56_a_new_tenant_inherits_nothing():
    m = toy(max_loras=1)
    m.add_adapter_to_model("a", LoraConfig(r=2, lora_alpha=2, target_modules=["lin"]))
    m.set_optimizer("adam", adapter_name="a", lr=0.1, weight_decay=0.0)
    m.set_lr_scheduler("linear_lr", adapter_name="a", start_factor=1.0, end_factor=0.0, total_iters=10)
    m.set_loss(lambda inputs, outputs: 7 * squared(inputs, outputs), adapter_name="a")
    m.add_metric(Noting, adapter_name="a")
    m.set_processor("input", padding_side="left", adapter_name="a")
    m.sessions["a"].template = object()
    for _ in range(3):
        m.forward_backward(at(1, 5), adapter_name="a")
        m.clip_grad_and_step(adapter_name="a")
    m.forward_backward(at(1, 5), adapter_name="a", gradient_accumulation_steps=4)
    m.forward_only(at(1, 5), adapter_name="a")
    m.multi_lora.release_lora("a")
    layer = m.module.lin
    assert not layer.flat_A.any() and not layer.flat_B.any() and not layer.parts and not len(layer.lora_A)
    m.multi_lora.acquire_lora("b", LoraConfig(r=4, lora_alpha=4, target_modules=["lin"]))
    assert answer(m, "b") == 2.0
    assert all(p.grad is None for p in m.adapters.parameters("b").values())
    assert m.calculate_metric(adapter_name="b") == {}
    fresh = m.sessions["b"]
    assert (fresh.loss, fresh.template, fresh.processor) == (None, None, None)
    with pytest.raises(NoOptimizer):
        m.step(adapter_name="b")
    loss = m.forward_backward(at(1, -1), adapter_name="b")
    assert loss.item() == pytest.approx(9.0)  # not seven times that
    m.zero_grad(adapter_name="b", drop=True)

    m.set_optimizer("adam", adapter_name="b", lr=0.1, weight_decay=0.0)
    part(m, "b", "lora_A").data.fill_(1.0)
    m.forward_backward(at(1, -1), adapter_name="b")
    assert m.clip_grad_and_step(adapter_name="b") is not None  # no window of four was left
    assert part(m, "b", "lora_B").flatten().tolist() == pytest.approx([-0.1] * 4)
    session = m.sessions["b"]
    assert session.cur_step == 1 and session.optimizer.param_groups[0]["lr"] == 0.1 and session.scheduler is None


def test_B58_outputs_belong_to_one_tenant_and_one_mode():
    m = toy(("a", 3.0), ("b", -1.0))
    m.forward(at(1, 5), adapter_name="a")
    m.forward(at(1, -1), adapter_name="b")
    assert m.calculate_loss(adapter_name="a") == 0.0
    m.backward(adapter_name="a")
    assert part(m, "a", "lora_B").grad.item() == 0.0
    assert part(m, "b", "lora_B").grad is None
    assert m.calculate_loss(adapter_name="b") == 4.0
    m.backward(adapter_name="b")
    assert part(m, "b", "lora_B").grad.item() == 4.0
    assert part(m, "a", "lora_B").grad.item() == 0.0
    m.forward(at(1, 5), adapter_name="a")
    m.forward_only(at(2, 5), adapter_name="a")
    assert m.calculate_loss(adapter_name="a") == 0.0
