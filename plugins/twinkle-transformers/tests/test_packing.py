"""Packed rows keep apart, or packing is refused with the reason."""

from __future__ import annotations

import pytest
import torch

from twinkle_core.errors import PackingLeaks
from twinkle_core.processors.input import InputProcessor
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config


def rows(*lengths):
    g = torch.Generator().manual_seed(2)
    made = [torch.randint(3, 250, (n,), generator=g).tolist() for n in lengths]
    return [{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in made]


def packed(module_config=None, **kwargs):
    m = TransformersModel(config=module_config or tiny_config(), mixed_precision="no", **kwargs)
    m.set_processor(InputProcessor(padding_free=True))
    return m


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_B28_packed_rows_do_not_see_each_other(attention):
    """Other tokens in a do not move b's logits at all, and b's are what they are alone."""
    m = packed(attn_implementation=attention)
    a, other, b = rows(5, 5, 4)
    together = m.forward_only([a, b]).logits[0, 5:]
    assert torch.equal(m.forward_only([other, b]).logits[0, 5:], together)
    torch.testing.assert_close(m.forward_only([b]).logits[0], together, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_padded_give_one_loss_and_one_gradient(attention):
    batch, found = rows(9, 1, 4, 6), []
    m = packed(attn_implementation=attention)
    m.set_optimizer("sgd", lr=0.0)
    for free in (True, False):
        m.set_processor(InputProcessor(padding_free=free))
        loss = m.forward_backward(batch)
        m.clip_grad_norm(float("inf"))
        found.append((float(loss), torch.cat([p.grad.flatten() for p in m.module.parameters()])))
        m.zero_grad(drop=True)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert (found[0][1] - found[1][1]).norm() / found[1][1].norm() < 1e-5


def test_rows_are_told_apart_by_their_lengths():
    """Whatever their positions: ones that go on from row to row, or none at all."""
    m = packed()
    a, other, b = rows(12, 12, 9)
    after = {**b, "position_ids": list(range(12, 21))}
    alone = m.forward_only([after]).logps[0]
    for first in (a, other):
        both = m.forward_only([{**first, "position_ids": list(range(12))}, after]).logps[0, 12:]
        torch.testing.assert_close(both, alone, rtol=0, atol=1e-5)
    own = InputProcessor(padding_free=True).collate([a, b])
    torch.testing.assert_close(
        m.forward_only({k: v for k, v in own.items() if k != "position_ids"}).logps, m.forward_only(own).logps, rtol=0, atol=0
    )
    with pytest.raises(PackingLeaks, match="go on from one packed row to the next"):
        packed(attn_implementation="eager").forward_only([{**a, "position_ids": list(range(12))}, after])


def mistral():
    from transformers import MistralConfig

    return MistralConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=3,
    )  # fmt: skip


@pytest.mark.parametrize("config", [tiny_config, mistral], ids=["all before", "a window"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_of_packed_rows_is_computed_row_by_row(monkeypatch, config, checkpointing):
    """Only pairs of tokens within a row are computed; what comes out, and back, is what the masked whole gives."""
    from twinkle_transformers import attention

    seen, real = [], attention.sdpa_attention_forward
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *a, **k: seen.append(a[1].shape[2]) or real(*a, **k))
    times = 4 if checkpointing else 2  # layers, each once more in backward
    m, batch = packed(config(), attn_implementation="sdpa", gradient_checkpointing=checkpointing), rows(6, 1, 4)
    m.set_optimizer("sgd", lr=0.0)

    def run():
        loss = float(m.forward_backward(batch))
        found = torch.cat([p.grad.flatten() for p in m.module.parameters()])
        m.zero_grad(drop=True)
        return loss, found

    run()  # asks the model some questions first
    seen.clear()
    loss, got = run()
    assert seen == [6, 1, 4] * times and m.module.config._attn_implementation == "sdpa"
    monkeypatch.setattr(attention, "BY_ROW", "sdpa")  # the switch leads nowhere
    expected, want = run()
    assert seen == [6, 1, 4] * times
    assert loss == pytest.approx(expected, rel=1e-6) and (got - want).norm() / want.norm() < 1e-5


def test_attention_row_by_row_ends_with_the_forward(monkeypatch):
    m = packed(attn_implementation="sdpa")
    m.set_optimizer("sgd", lr=0.0)
    monkeypatch.setattr(m.module.model.norm, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        m.forward_backward(rows(3, 2))
    assert m.module.config._attn_implementation == "sdpa"


def mamba():
    from transformers import MambaConfig

    return MambaConfig(vocab_size=264, hidden_size=32, state_size=8, num_hidden_layers=2, intermediate_size=64)


def bert():
    from transformers import BertConfig

    return BertConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


@pytest.mark.parametrize(("config", "told"), [(mamba, "state along the sequence"), (bert, "attention")])
def test_a_model_whose_rows_leak_is_refused_with_the_reason(config, told):
    cls = {"mamba": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM"}[config().model_type]
    m = packed(config(), model_cls=cls)
    m.set_optimizer("sgd")
    before = {k: v.clone() for k, v in m.module.state_dict().items()}
    with pytest.raises(PackingLeaks, match=rf"(?s){told}.*padding_free=False"):
        m.forward_backward(rows(4, 4))
    assert all(p.grad is None for p in m.module.parameters())
    assert all(torch.equal(v, before[k]) for k, v in m.module.state_dict().items())
    m.set_processor(InputProcessor(padding_free=False))
    assert float(m.forward_backward(rows(4, 4))) > 0


def test_linear_attention_is_refused():
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    config = configuration_qwen3_5.Qwen3_5TextConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    m = packed(config, model_cls=modeling_qwen3_5.Qwen3_5ForCausalLM)
    with pytest.raises(PackingLeaks, match="state along the sequence"):
        m.forward_only(rows(4, 4))


def test_one_row_needs_no_probe():
    m = packed(mamba(), model_cls="AutoModelForCausalLM")
    assert m.forward_only(rows(4)).logits.shape == (1, 4, 264)
