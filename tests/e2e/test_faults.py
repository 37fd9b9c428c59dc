"""Faults met in the field, through TransformersModel: small inputs whose right values were worked out by hand."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.errors import BadAdapter, CheckpointMismatch, NonFiniteGradients
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import ToyL, ToyLConfig, tiny_config

ONE = LoraConfig(r=1, lora_alpha=1, target_modules=["lin"])


class ToyTwoConfig(PretrainedConfig):
    model_type = "twinkle_toy_two"


class ToyTwo(PreTrainedModel):
    """Vocabulary 2, one trainable vector: the logits at every position are w."""

    config_class = ToyTwoConfig

    def __init__(self, config):
        super().__init__(config)
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.post_init()

    def _init_weights(self, module):
        """w starts at 0."""

    def forward(self, input_ids):
        return CausalLMOutput(logits=self.w.expand(*input_ids.shape, 2))


def squared(inputs, outputs):
    return (outputs.logits.squeeze(-1) - inputs["labels"]).pow(2).mean()


def at(x, y=None):
    return [{"input_ids": [x], "labels": [float(y)]} if y is not None else {"input_ids": [x]}]


def toy_l(*adapters, weight=2.0):
    m = TransformersModel(ToyL, config=ToyLConfig(weight), mixed_precision="no")
    m.set_loss(squared, adapter_name="")
    for name, b in adapters:
        m.add_adapter_to_model(name, ONE)
        put(m, name, b)
    return m


def put(m, name, b, a=1.0):
    m.adapters.load_state_dict(name, {k: torch.tensor([[a if "lora_A" in k else b]]) for k in m.adapters.state_dict(name)})


def lora_b(m, name):
    return next(v for k, v in m.adapters.state_dict(name).items() if "lora_B" in k)


def grad_of(m, name, part):
    return next(p.grad for k, p in m.adapters.parameters(name).items() if part in k)


def answer(m, name, x=1, **kwargs):
    return m.forward_only(at(x), adapter_name=name, **kwargs).logits.item()


def toy_two(**kwargs):
    return TransformersModel(ToyTwo, config=ToyTwoConfig(), **{"mixed_precision": "no", **kwargs})


def tokens(target, count):
    return [{"input_ids": [0] * count, "labels": [target] * count}]


# ---------------------------------------------------------------------------------------------------- adapters


def test_B06_the_second_adapter_trains_and_the_first_stays():
    m = toy_l(("a", 0.0), ("b", 0.0))
    for name in ("a", "b"):
        m.set_optimizer("sgd", adapter_name=name, lr=0.1, weight_decay=0.0)
    m.forward_backward(at(1, 5), adapter_name="a")
    assert grad_of(m, "a", "lora_B").item() == pytest.approx(-6)
    assert grad_of(m, "a", "lora_A").item() == 0
    m.clip_grad_norm(float("inf"), adapter_name="a")
    m.step(adapter_name="a")
    m.zero_grad(adapter_name="a")
    first = lora_b(m, "a").clone()
    assert first.item() == pytest.approx(0.6)
    m.forward_backward(at(1, -1), adapter_name="b")
    assert grad_of(m, "b", "lora_B").item() == pytest.approx(6)
    assert grad_of(m, "a", "lora_B") is None or grad_of(m, "a", "lora_B").item() == 0
    m.step(adapter_name="b")
    assert lora_b(m, "b").item() == pytest.approx(-0.6)
    assert torch.equal(lora_b(m, "a"), first)
    found = [answer(m, "a"), answer(m, "b"), answer(m, "a", disable_lora=True), answer(m, "")]
    assert found == pytest.approx([2.6, 1.4, 2.0, 2.0])


def test_B08_disabling_for_one_call_puts_all_back():
    m = toy_l(("a", 3.0))
    flags = {n: (p.requires_grad, p.dtype) for n, p in m.module.named_parameters()}
    modes = [x.training for x in m.module.modules()]
    assert answer(m, "a") == 5.0
    assert answer(m, "a", disable_lora=True) == 2.0
    with m.adapters.activate(""):
        assert answer(m, "a", disable_lora=True) == 2.0
        assert m.module(input_ids=torch.tensor([[1]])).logits.item() == 2.0
    with pytest.raises(ZeroDivisionError):
        m.set_loss(lambda inputs, outputs: 1 / 0, adapter_name="a")
        m.forward_backward(at(1, 5), adapter_name="a")
    assert answer(m, "a") == 5.0
    assert {n: (p.requires_grad, p.dtype) for n, p in m.module.named_parameters()} == flags
    assert [x.training for x in m.module.modules()] == modes


def test_B10_saved_adapter_loads_under_another_name(tmp_path):
    m = toy_l(("a", 0.0))
    m.set_optimizer("sgd", adapter_name="a", lr=0.1, weight_decay=0.0)
    m.forward_backward(at(1, 5), adapter_name="a")
    m.step(adapter_name="a")
    folder = m.save("trained", tmp_path, adapter_name="a")
    file = f"{folder}/adapter_model.safetensors"
    stored = load_file(file)
    assert sorted(stored) == ["base_model.model.lin.lora_A.weight", "base_model.model.lin.lora_B.weight"]
    assert stored["base_model.model.lin.lora_B.weight"].item() == pytest.approx(0.6)
    m.remove_adapter("a")
    m.add_adapter_to_model("b", ONE)
    m.add_adapter_to_model("z", folder)
    assert answer(m, "z") == pytest.approx(2.6)
    m.add_adapter_to_model("y", ONE)
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
def test_B12_scale_belongs_to_the_adapter(rslora, right, tmp_path):
    from peft import PeftModel

    m = TransformersModel(ToyL, config=ToyLConfig(0.0), mixed_precision="no")
    m.add_adapter_to_model("a", LoraConfig(r=4, lora_alpha=8, use_rslora=rslora, target_modules="all-linear"))
    m.adapters.load_state_dict("a", {k: torch.ones_like(v) for k, v in m.get_state_dict().items()})
    assert answer(m, "a") == right
    folder = m.save("a", tmp_path)
    assert PeftModel.from_pretrained(ToyL(ToyLConfig(0.0)), folder)(input_ids=torch.tensor([[1]])).logits.item() == right


def test_B58_outputs_belong_to_one_adapter_and_one_mode():
    m = toy_l(("a", 3.0), ("b", -1.0))
    m.forward(at(1, 5), adapter_name="a")
    m.forward(at(1, -1), adapter_name="b")
    assert m.calculate_loss(adapter_name="a") == 0.0
    m.backward(adapter_name="a")
    assert grad_of(m, "a", "lora_B").item() == 0.0
    assert grad_of(m, "b", "lora_B") is None
    assert m.calculate_loss(adapter_name="b") == 4.0
    m.backward(adapter_name="b")
    assert grad_of(m, "b", "lora_B").item() == 4.0
    assert grad_of(m, "a", "lora_B").item() == 0.0
    m.forward(at(1, 5), adapter_name="a")
    m.forward_only(at(2, 5), adapter_name="a")
    assert m.calculate_loss(adapter_name="a") == 0.0


# ---------------------------------------------------------------------------------------------------- resume


def linear_decay():
    m = toy_l(("a", 0.0))
    m.set_optimizer("sgd", adapter_name="a", lr=1.0, weight_decay=0.0)
    m.set_lr_scheduler("linear_lr", adapter_name="a", start_factor=1.0, end_factor=0.0, total_iters=10)
    return m


def rate(m):
    return m.sessions["a"].optimizer.param_groups[0]["lr"]


def test_B14_schedule_counts_updates_and_loading_sets(tmp_path):
    m = linear_decay()
    for _ in range(8):
        m.forward_backward(at(1, 2), adapter_name="a", gradient_accumulation_steps=2)
        m.clip_grad_and_step(adapter_name="a")
    assert rate(m) == pytest.approx(0.6)
    folder = m.save("four", tmp_path, adapter_name="a", save_optimizer=True)
    fresh = linear_decay()
    for _ in range(2):
        assert fresh.resume_from_checkpoint(folder, adapter_name="a")["cur_step"] == 4
        assert rate(fresh) == pytest.approx(0.6)
    for one in (m, fresh):
        for _ in range(2):
            one.forward_backward(at(1, 2), adapter_name="a")
            one.clip_grad_and_step(adapter_name="a")
        assert rate(one) == pytest.approx(0.5)


DRAW = """
import random, sys, numpy, torch
torch.manual_seed(99); random.seed(99); numpy.random.seed(99)
from test_faults import linear_decay
from twinkle_core.data.dataloader import DataLoader
m = linear_decay()
loader = DataLoader(list(range(6)), batch_size=2, shuffle=True, seed=1)
loader.resume_from_checkpoint(m.resume_from_checkpoint(sys.argv[1], adapter_name="a")["consumed_train_samples"])
next(iter(loader))
print(torch.rand(1).item(), random.random(), numpy.random.rand())
"""


def save_with_random_state(folder):
    m = linear_decay()
    torch.manual_seed(1234)
    [torch.rand(1) for _ in range(3)]
    random.seed(7)
    random.random()
    np.random.seed(7)
    np.random.rand()
    return m.save("r", folder, adapter_name="a", save_optimizer=True, consumed_train_samples=2)


RIGHT = [0.366641, 0.150849, 0.779919]


def test_B19_random_state_goes_on_where_it_was(tmp_path):
    """Building model and loader after another seed draws nothing once the state is restored."""
    folder = save_with_random_state(tmp_path)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    m, loader = linear_decay(), DataLoader(list(range(6)), batch_size=2, shuffle=True, seed=1)
    loader.resume_from_checkpoint(m.resume_from_checkpoint(folder, adapter_name="a")["consumed_train_samples"])
    next(iter(loader))
    assert [torch.rand(1).item(), random.random(), np.random.rand()] == pytest.approx(RIGHT, abs=1e-6)


@pytest.mark.slow
def test_B19_in_a_new_process(tmp_path):
    folder = save_with_random_state(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRAW, folder],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [float(x) for x in done.stdout.split()] == pytest.approx(RIGHT, abs=1e-6)


def test_B19_a_step_with_dropout_is_the_same_after_resuming(tmp_path):
    def make():
        m = TransformersModel(config=tiny_config(), mixed_precision="no")
        m.add_adapter_to_model("a", LoraConfig(target_modules="all-linear", lora_dropout=0.5))
        m.set_optimizer("adamw", lr=1e-2)
        return m

    rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}]
    torch.manual_seed(0)
    m = make()
    base = m.adapters.state_dict("")
    m.forward_backward(rows)
    m.clip_grad_and_step()
    folder = m.save("s", tmp_path, save_optimizer=True)
    torch.manual_seed(77)
    fresh = make()
    fresh.adapters.load_state_dict("", base)
    fresh.resume_from_checkpoint(folder)
    found = []
    torch.manual_seed(1)
    m.resume_from_checkpoint(folder)
    for one in (m, fresh):
        one.resume_from_checkpoint(folder)
        loss = one.forward_backward(rows).item()
        one.clip_grad_and_step()
        found.append((loss, one.get_state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(v, found[1][1][k]) for k, v in found[0][1].items())


# ---------------------------------------------------------------------------------------------------- numbers


def three_four(inputs, outputs):
    return (outputs.logits[0, 0] * torch.tensor([3.0, 4.0])).sum()


@pytest.mark.parametrize("how", ["apart", "together", "twice"])
def test_B30_clipping_acts_on_true_gradients(how):
    """Gradients (3, 4) under a scale of 1024: norm 5, and a step of (-0.6, -0.8)."""
    m = toy_two(mixed_precision="fp16", grad_scaler_config={"init_scale": 1024.0})
    m.set_loss(three_four)
    m.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    m.forward_backward(tokens(0, 1))
    assert m.module.w.grad.tolist() == [3072.0, 4096.0]
    if how == "together":
        norm = m.clip_grad_and_step(1.0)
    else:
        norm = m.clip_grad_norm(1.0)
        if how == "twice":
            m.clip_grad_norm(1.0)
        m.step()
        m.zero_grad()
    assert norm == pytest.approx(5.0)
    assert m.module.w.tolist() == pytest.approx([-0.6, -0.8], abs=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_B32_a_batch_without_labels_gives_no_nan_and_no_step(optimizer, caplog):
    m = toy_two()
    m.set_optimizer(optimizer, lr=1.0, weight_decay=0.0)
    loss = m.forward_backward(tokens(-100, 3))
    m.clip_grad_and_step()
    assert loss.item() == 0.0
    assert m.module.w.tolist() == [0.0, 0.0]
    assert any(record.levelname == "WARNING" for record in caplog.records)


@pytest.mark.parametrize("order", [1, -1])
def test_B32_beside_labelled_ones_it_weighs_nothing(order):
    m = toy_two()
    m.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
    for rows in [tokens(-100, 3), tokens(1, 2)][::order]:
        m.forward_backward(rows, gradient_accumulation_steps=2)
    m.clip_grad_norm(float("inf"))
    assert m.module.w.grad.tolist() == pytest.approx([0.5, -0.5])


def test_B32_through_a_language_model():
    """A real model with hidden states and an adapter: the graph is there, the weights stay."""
    for adapter in (False, True):
        m = TransformersModel(config=tiny_config(), mixed_precision="no")
        if adapter:
            m.add_adapter_to_model("a", LoraConfig(target_modules="all-linear"))
        m.set_optimizer("adamw", lr=1.0)
        before = {k: v.clone() for k, v in m.get_state_dict().items()}
        assert m.forward_backward([{"input_ids": [5, 6], "labels": [-100, -100]}]).item() == 0.0
        m.clip_grad_and_step()
        assert all(torch.equal(v, before[k]) for k, v in m.get_state_dict().items())


def test_B01_short_micro_batches_do_not_weigh_more():
    m = toy_two()
    m.set_optimizer("sgd", lr=0.0)
    losses = [m.forward_backward(rows, gradient_accumulation_steps=2) for rows in (tokens(0, 1), tokens(1, 3))]
    m.clip_grad_norm(float("inf"))
    assert m.module.w.grad.tolist() == pytest.approx([0.25, -0.25])
    assert [x.item() for x in losses] == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("adapter", ["", "a"])
def test_nan_gradients_never_reach_the_weights(adapter):
    m = TransformersModel(config=tiny_config(), mixed_precision="no")
    if adapter:
        m.add_adapter_to_model(adapter, LoraConfig(target_modules="all-linear"))
    m.set_optimizer("adamw", lr=1e-2)
    rows = [{"input_ids": [5, 6, 7], "labels": [6, 7, 8]}]
    m.forward_backward(rows)
    m.clip_grad_and_step()
    optimizer = m.sessions[adapter].optimizer
    before = {k: v.clone() for k, v in m.get_state_dict().items()}
    moments = [v.clone() for state in optimizer.state.values() for v in state.values()]
    m.set_loss(lambda inputs, outputs: outputs.logits.sum() * float("nan"))
    m.forward_backward(rows)
    with pytest.raises(NonFiniteGradients):
        m.clip_grad_and_step()
    assert all(torch.equal(v, before[k]) for k, v in m.get_state_dict().items())
    now = [v for state in optimizer.state.values() for v in state.values()]
    assert all(torch.equal(v, w) for v, w in zip(now, moments, strict=True))
    m.set_loss("cross_entropy")
    assert m.forward_backward(rows).item() > 0
    assert m.clip_grad_and_step() > 0


# ---------------------------------------------------------------------------------------------------- tied weights


def small(tie):
    return tiny_config(vocab_size=8, hidden_size=4, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
                       tie_word_embeddings=tie, eos_token_id=None, pad_token_id=None)  # fmt: skip


def one_step(m):
    m.set_optimizer("sgd", lr=0.5, weight_decay=0.0)
    m.forward_backward([{"input_ids": [1, 2, 3], "labels": [2, 3, 4]}])
    m.clip_grad_and_step()


def ends(m):
    return m.module.get_input_embeddings().weight, m.module.get_output_embeddings().weight


def test_B47_tied_stays_tied(tmp_path):
    torch.manual_seed(0)
    m = TransformersModel(config=small(True), mixed_precision="no")
    one_step(m)
    folder = m.save("tied", tmp_path)
    assert "lm_head.weight" not in load_file(f"{folder}/model.safetensors")
    for source in ({"model_id": folder}, {"config": small(True)}):
        again = TransformersModel(**source, mixed_precision="no")
        again.load("tied", tmp_path)
        assert all(torch.equal(v, again.get_state_dict()[k]) for k, v in m.get_state_dict().items())
        one_step(again)
        first, last = ends(again)
        assert first is last


def test_B47_untied_on_purpose_is_stored_and_restored(tmp_path):
    torch.manual_seed(0)
    m = TransformersModel(config=small(True), mixed_precision="no")
    m.module.lm_head.weight = torch.nn.Parameter(m.module.lm_head.weight.detach().clone())
    one_step(m)
    first, last = ends(m)
    assert not torch.equal(first, last)
    folder = m.save("untied", tmp_path)
    again = TransformersModel(model_id=folder, mixed_precision="no")
    assert torch.equal(ends(again)[0], first)
    assert torch.equal(ends(again)[1], last)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.config.tie_word_embeddings is False
    assert torch.equal(plain.lm_head.weight, last)
    one_step(again)
    assert not torch.equal(*ends(again))
    tied = TransformersModel(config=small(True), mixed_precision="no")
    before = {k: v.clone() for k, v in tied.get_state_dict().items()}
    with pytest.raises(CheckpointMismatch, match="tied"):
        tied.load("untied", tmp_path)
    assert all(torch.equal(v, before[k]) for k, v in tied.get_state_dict().items())
    TransformersModel(config=small(True), mixed_precision="no").save("tied", tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"lm_head\.weight"):
        again.load("tied", tmp_path)


def test_B47_an_adapter_keeps_the_tie_or_is_refused():
    m = TransformersModel(LlamaForCausalLM, config=small(True), mixed_precision="no")
    with pytest.raises(BadAdapter, match="ensure_weight_tying"):
        m.add_adapter_to_model("a", LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    kept = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    m.add_adapter_to_model("a", kept)
    for _ in range(2):
        one_step(m)
    with m.adapters.activate("a"):
        assert torch.equal(*ends(m))
    assert torch.equal(*(layer.original_module.weight for layer in (m.module.model.embed_tokens, m.module.lm_head)))
