"""A router's auxiliary loss: what transformers' own loss adds, for any loss, and told where it is no sum."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig

from twinkle_core.errors import NotComputed
from twinkle_core.processors.input import InputProcessor
from twinkle_core.types import LossOutput
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config


def config(**changes):
    return Qwen3MoeConfig(
        **{
            "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
            "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "output_router_logits": True, "router_aux_loss_coef": 0.5, "initializer_range": 0.2, "pad_token_id": 0, **changes,
        }
    )  # fmt: skip


def rows(*lengths):
    g = torch.Generator().manual_seed(2)
    made = [torch.randint(3, 250, (n,), generator=g).tolist() for n in lengths]
    return [{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in made]


def model(**changes):
    torch.manual_seed(0)
    m = TransformersModel(config=config(**changes), mixed_precision="no")
    m.set_optimizer("sgd", lr=0.0)
    return m


def step(m, batch, **kwargs):
    loss = float(m.forward_backward(batch, **kwargs))
    m.clip_grad_norm(float("inf"))
    found = {k: p.grad.clone() for k, p in m.module.named_parameters() if p.grad is not None}
    m.zero_grad(drop=True)
    return loss, found


def theirs(m, batch):
    """transformers' own loss of a padded batch, and its gradients."""
    collated = InputProcessor().collate(batch)
    own = torch.where(collated["attention_mask"] == 1, collated["input_ids"], -100)
    m.module.zero_grad()
    result = m.module(input_ids=collated["input_ids"], attention_mask=collated["attention_mask"], labels=own, use_cache=False)
    result.loss.backward()
    found = {k: p.grad.clone() for k, p in m.module.named_parameters() if p.grad is not None}
    m.module.zero_grad()
    return result.loss.item(), found, result.aux_loss.item()


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "fused_linear_cross_entropy", "by logits"])
@pytest.mark.parametrize("free", [False, True])
def test_a_step_is_that_of_transformers_own_loss(loss, free):
    """Padded, packed, from hidden states, from logits: mean cross entropy + coefficient x auxiliary loss, router included."""
    m, batch = model(), rows(7, 4)
    if loss == "by logits":
        m.set_loss("cross_entropy", label_smoothing=1e-12)
    else:
        m.set_loss(loss)
    want, expected, aux = theirs(m, batch)
    m.set_processor(InputProcessor(padding_free=free))
    got, found = step(m, batch)
    assert got == pytest.approx(want, rel=1e-5)
    same(found, expected)
    router = "model.layers.0.mlp.gate.weight"
    bare = step(model(output_router_logits=False), batch)
    assert got == pytest.approx(bare[0] + 0.5 * aux, rel=1e-5)
    assert not torch.allclose(found[router], bare[1][router], rtol=1e-2)
    assert m.engine.aux_loss_coef == 0.5 and "0.5 x the routers' auxiliary loss (scope batch)" in m.get_train_configs()


def test_a_window_is_the_weighted_mean_of_its_micro_batches():
    m, batch = model(), rows(7, 4, 5)
    weights, parts = [6, 3, 4], [step(m, [row]) for row in batch]
    loss, found = step(m, batch, micro_batch_size=1)
    assert loss == pytest.approx(sum(w * part[0] for w, part in zip(weights, parts, strict=True)) / 13, rel=1e-5)
    same(found, {k: sum(w * part[1][k] for w, part in zip(weights, parts, strict=True)) / 13 for k in found})


def test_split_verbs_and_metrics_agree_and_evaluation_is_without_it():
    m, batch = model(), rows(7, 4)
    m.add_metric("loss", is_training=True)
    whole, found = step(m, batch)
    m.calculate_metric(is_training=True)
    m.forward(batch, return_logits=False)
    assert m.calculate_loss() == pytest.approx(whole, rel=1e-6)
    m.backward()
    m.clip_grad_norm(float("inf"))
    same({k: p.grad for k, p in m.module.named_parameters()}, found)
    m.zero_grad(drop=True)
    told = m.calculate_metric(is_training=True)
    m.forward_only(batch)
    plain = m.calculate_loss()
    assert told["loss"] == pytest.approx(whole, rel=1e-6)
    assert told["loss"] == pytest.approx(plain + 0.5 * told["aux_loss"], rel=1e-5)


def test_a_loss_that_reads_it_adds_it_itself():
    def own(inputs, outputs):
        return LossOutput(-outputs.logps.sum() + outputs.aux_loss * 11, (inputs["labels"] != -100).sum())

    own.needs = frozenset({"logps", "aux_loss"})
    m, batch = model(), rows(7, 4)
    aux = theirs(m, batch)[2]
    m.set_loss(own)
    loss = step(m, batch)[0]
    assert loss == pytest.approx(step(model(output_router_logits=False), batch)[0] + aux * 11 / 9, rel=1e-5)


def test_without_whole_logits_one_column_is_made():
    m, batch = model(), rows(7, 4)
    step(m, batch)
    shapes = []
    m.module.lm_head.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape)))
    hidden = m.engine.forward(
        *m.engine.prepare(m._resolved(m.sessions[""]), batch), frozenset({"hidden", "aux_loss"}), train=True
    )
    assert hidden.hidden.shape == (2, 7, 32) and shapes == [(2, 1, 264)]


def test_asked_of_a_router_without_one_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    """DeepSeek V3's is balanced by a bias: the option would be without effect."""
    asked = DeepseekV3Config(vocab_size=264, hidden_size=32, num_hidden_layers=1)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(NotComputed, match="no router_aux_loss_coef"):
        TransformersModel(config=asked, output_router_logits=True)
    asked.save_pretrained(tmp_path)
    with pytest.raises(NotComputed, match="DeepseekV3Config gives no aux_loss"):
        TransformersModel(model_id=tmp_path, output_router_logits=True)


def test_a_dense_model_has_none():
    m = TransformersModel(config=tiny_config(), mixed_precision="no")
    (batch,) = m.engine.prepare(m._resolved(m.sessions[""]), rows(4))
    with pytest.raises(NotComputed, match="no router with such a loss"):
        m.engine.forward(batch, frozenset({"aux_loss"}), train=True)
    assert m.engine.aux_loss_coef == 0
