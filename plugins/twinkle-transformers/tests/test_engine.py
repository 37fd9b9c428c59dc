"""What the engine computes: the same as transformers, whatever road it takes, and nothing that nobody asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from twinkle_core.errors import BadLabels, BadLossArgument, NotComputed
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.toys import random_rows
from twinkle_transformers import engine as engine_module
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

LORA = {"target_modules": "all-linear", "r": 4}


def rows(*lengths, seed=3):
    g = torch.Generator().manual_seed(seed)
    made = []
    for n in lengths:
        ids = torch.randint(3, 250, (n + 1,), generator=g).tolist()
        made.append({"input_ids": ids[:-1], "labels": [-100, *ids[2:]], "length": n})
    return made


def model(folder, **kwargs):
    return TransformersModel(model_id=folder, **{"mixed_precision": "no", **kwargs})


def by_hand(module, batch):
    """Mean loss over labelled tokens, each row alone through plain transformers."""
    total, count = 0.0, 0
    for row in batch:
        logits = module(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        labels = torch.tensor(row["labels"])
        total = total + cross_entropy(logits.float(), labels, reduction="sum")
        count += int((labels != -100).sum())
    return total / count


def gradients(module):
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "chunked_cross_entropy"])
def test_loss_and_gradients_are_those_of_plain_transformers(tiny, adapter, loss):
    batch = rows(9, 4, 6)
    m = model(tiny)
    if adapter:
        m.add_adapter_to_model("a", LoraConfig(**LORA))
        state = {k: torch.randn_like(v) * 0.1 for k, v in m.get_state_dict().items()}
        m.adapters.load_state_dict("a", state)
    m.set_loss(loss)
    with m.adapters.activate("a" if adapter else ""):
        expected = by_hand(m.module, batch)
        expected.backward()
        reference = gradients(m.module)
        m.module.zero_grad()
    m.set_optimizer("sgd", lr=0.0)
    value = m.forward_backward(batch)
    assert float(value) == pytest.approx(expected.item(), rel=1e-6)
    m.clip_grad_norm(float("inf"))
    for name, grad in gradients(m.module).items():
        torch.testing.assert_close(grad, reference[name], rtol=1e-4, atol=1e-7)
    assert set(gradients(m.module)) == set(reference)


@pytest.mark.parametrize("loss", ["cross_entropy", "chunked_cross_entropy"])
@pytest.mark.parametrize("adapter", [False, True])
def test_micro_batches_are_one_batch(tiny, adapter, loss):
    """N calls of unequal token counts, N pieces of one call, and one whole call: one gradient."""
    batch = rows(12, 3, 7, 1, 9)
    found = []
    for how in ("whole", "calls", "pieces"):
        m = model(tiny)
        if adapter:
            m.add_adapter_to_model("a", LoraConfig(**LORA))
            g = torch.Generator().manual_seed(5)
            m.adapters.load_state_dict("a", {k: torch.randn(v.shape, generator=g) * 0.1 for k, v in m.get_state_dict().items()})
        m.set_loss(loss)
        m.set_optimizer("sgd", lr=0.0)
        if how == "calls":
            for row in batch:
                m.forward_backward([row], gradient_accumulation_steps=len(batch))
        else:
            m.forward_backward(batch, micro_batch_size=2 if how == "pieces" else None)
        m.clip_grad_norm(float("inf"))
        found.append(torch.cat([g.flatten().double() for g in gradients(m.module).values()]))
    for other in found[1:]:
        assert (other - found[0]).norm() / found[0].norm() < 1e-6


def test_only_what_is_needed_is_computed(tiny, monkeypatch):
    m = model(tiny)
    heads = []
    m.module.lm_head.register_forward_hook(lambda *a: heads.append(1))
    monkeypatch.setattr(engine_module, "output_layer_of", lambda *a: True)
    m.set_optimizer("sgd")
    out = m.forward(rows(5), return_logits=False)
    assert set(out) == {"logps"}
    assert out.logps.shape == (1, 5)
    assert m.forward(rows(5)).logits.shape == (1, 5, 264)
    m.add_metric("accuracy", True)
    assert set(m.forward(rows(5), return_logits=False)) == {"logps", "predictions"}


def test_labels_and_caches_stay_outside(tiny):
    m = model(tiny)
    seen = []
    m.module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    m.module.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    m.forward_only(rows(5, 3))
    m.forward_only(rows(5, 5), return_logits=True)
    assert seen
    assert not any("labels" in kwargs or kwargs.get("use_cache") for kwargs in seen)
    assert all(kwargs.get("attention_mask") is None for kwargs in seen[-1:])


def test_positions_of_ones_own_are_kept(tiny):
    """A mask that hides nothing is left out, but not together with positions that don't count from 0."""
    m = model(tiny)
    ids = torch.tensor([[5, 6, 7, 8]])
    places = torch.tensor([[0, 2, 4, 6]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": places}
    expected = m.module.eval()(**batch).logits
    assert torch.equal(m.forward_only(batch).logits, expected)
    assert not torch.allclose(expected, m.module(input_ids=ids).logits, atol=1e-3)


def gemma2(**changes):
    from transformers import Gemma2Config

    return Gemma2Config(**{
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5, "attn_implementation": "eager", **changes,
    })  # fmt: skip


@pytest.mark.parametrize("told", [True, False], ids=["by its config", "by asking the model"])
@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16"])
def test_a_cap_that_todays_logits_do_not_reach_is_seen(told, mixed, monkeypatch):
    """Small logits pass a cap unchanged; the answer must hold when they have grown."""
    from transformers import Gemma2ForCausalLM

    if not told:
        monkeypatch.setattr("twinkle_transformers.probes._says_more", lambda config: False)
    config = gemma2(final_logit_softcapping=30.0, initializer_range=0.02)
    m = TransformersModel(Gemma2ForCausalLM, config=config, mixed_precision=mixed)
    m.set_loss("chunked_cross_entropy")
    m.set_optimizer("sgd")
    with pytest.raises(NotComputed, match="Gemma2ForCausalLM"):
        m.forward_backward(rows(6))
    plain = TransformersModel(config=tiny_config(initializer_range=0.02), mixed_precision=mixed)
    plain.set_loss("chunked_cross_entropy")
    plain.set_optimizer("sgd")
    assert float(plain.forward_backward(rows(6))) > 0
    assert not plain.module.lm_head._forward_pre_hooks


def test_models_that_cap_their_logits_go_by_their_logits():
    from transformers import Gemma2ForCausalLM

    m = TransformersModel(Gemma2ForCausalLM, config=gemma2(), mixed_precision="no")
    batch = rows(6)
    expected = by_hand(m.module, batch).item()
    m.set_optimizer("sgd")
    assert float(m.forward_backward(batch)) == pytest.approx(expected, rel=1e-6)
    layer = m.module.get_output_embeddings()
    hidden = m.module.model(input_ids=torch.tensor([batch[0]["input_ids"]])).last_hidden_state
    wrong = cross_entropy(layer(hidden)[0], torch.tensor(batch[0]["labels"]))
    assert abs(wrong.item() - expected) > 1e-4
    m.set_loss("chunked_cross_entropy")
    with pytest.raises(NotComputed, match="Gemma2ForCausalLM"):
        m.forward_backward(batch)


def test_temperature(tiny):
    m = model(tiny)
    batch = rows(6)
    logits = m.module(input_ids=torch.tensor([batch[0]["input_ids"]])).logits[0] / 0.5
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(batch[0]["labels"]).clamp_min(0)[:, None])[1:, 0]
    for logits_too in (True, False):
        out = m.forward_only(batch, temperature=0.5, return_logits=logits_too)
        torch.testing.assert_close(out.logps[0, 1:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_every_loss_sees_the_temperature(model_class):
    """Cross entropy from logps, hidden states and logits, on both roads: one value, also when it is computed afterwards."""
    import transformers

    config = tiny_config() if model_class.startswith("Llama") else gemma2()
    m = TransformersModel(model_class, config=config, mixed_precision="no")
    m.set_optimizer("sgd", lr=0.0)
    assert hasattr(transformers, model_class)
    batch, found = rows(6, 4), {}
    losses = [("cross_entropy", {}), ("cross_entropy", {"label_smoothing": 1e-9})]
    for loss, options in [*losses, ("chunked_cross_entropy", {})][: 3 if model_class.startswith("Llama") else 2]:
        m.set_loss(loss, **options)
        for temperature in (1.0, 0.5):
            value = float(m.forward_backward(batch, temperature=temperature))
            m.zero_grad(drop=True)
            m.forward_only(batch, temperature=temperature)
            assert m.calculate_loss() == pytest.approx(value, rel=1e-5)
            assert found.setdefault(temperature, value) == pytest.approx(value, rel=1e-5)
    assert abs(found[1.0] - found[0.5]) > 1e-3


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_changes_nothing_but_memory(tiny, on):
    """Also with dropout, whose recomputation runs in backward: its flags and random numbers must be those of the forward."""
    found = []
    for flag in (on, False):
        torch.manual_seed(0)
        m = model(tiny, gradient_checkpointing=flag, attention_dropout=0.3, attn_implementation="eager")
        m.add_adapter_to_model("a", LoraConfig(**LORA, lora_dropout=0.4))
        m.adapters.load_state_dict("a", {k: torch.full_like(v, 0.05) for k, v in m.get_state_dict().items()})
        m.set_optimizer("sgd")
        torch.manual_seed(7)
        m.forward_backward(rows(8, 5))
        found.append(gradients(m.module))
        m.zero_grad(drop=True)
        torch.manual_seed(7)
        m.forward(rows(8, 5))
        m.backward()
        found.append(gradients(m.module))
    for other in found[1:]:
        assert all(torch.equal(g, found[0][n]) for n, g in other.items())


def test_dropout_in_training_alone_and_flags_put_back(tiny):
    m = model(tiny)
    m.add_adapter_to_model("a", LoraConfig(**LORA, lora_dropout=0.5))
    m.adapters.load_state_dict("a", {k: torch.full_like(v, 0.05) for k, v in m.get_state_dict().items()})
    m.set_optimizer("sgd")
    batch = rows(6, 6)
    for start in (True, False):
        m.module.train(start)
        m.module.model.norm.training = not start
        flags = [x.training for x in m.module.modules()]
        assert not torch.equal(m.forward(batch).logits, m.forward(batch).logits)
        assert torch.equal(m.forward_only(batch).logits, m.forward_only(batch).logits)
        m.forward_backward(batch)
        m.zero_grad(drop=True)
        with pytest.raises(ValueError, match="rude"):
            m.set_loss(rude)
            m.forward_backward(batch)
        m.set_loss("cross_entropy")
        assert [x.training for x in m.module.modules()] == flags


def rude(inputs, outputs):
    raise ValueError("rude")


def test_sequence_classification_forwards_and_trains():
    torch.manual_seed(0)
    config = tiny_config(num_labels=1)
    m = TransformersModel(LlamaForSequenceClassification, config=config, mixed_precision="no")
    batch = [{"input_ids": [5, 6, 7], "labels": 1.0}, {"input_ids": [9, 8, 7], "labels": -1.0}]
    with pytest.raises(BadLabels, match="mse"):  # cross entropy is the default, and these are no classes
        m.forward_only(batch, task="seq_cls")
    m.set_loss("mse")
    assert m.forward_only(batch, task="seq_cls").logits.shape == (2, 1)
    m.set_optimizer("adamw", lr=1e-2)
    losses = {}
    for name, loss in (("named", "mse"), ("function", squared)):
        m.set_loss(loss)
        values = []
        for _ in range(15):
            values.append(float(m.forward_backward(batch, task="seq_cls")))
            m.clip_grad_and_step()
        losses[name] = values
    assert losses["named"][-1] < 0.5 * losses["named"][0]
    assert losses["function"][-1] < losses["named"][0]


def squared(inputs, outputs):
    return (outputs.logits.squeeze(-1) - inputs["labels"]).pow(2).mean()


def test_encoder_without_output_layer_forwards(ids):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3
    )
    m = TransformersModel(BertForSequenceClassification, config=config, mixed_precision="no")
    batch = [{"input_ids": row.tolist()} for row in ids]
    expected = m.module.eval()(input_ids=ids).logits
    torch.testing.assert_close(m.forward_only(batch, task="seq_cls").logits, expected)
    with pytest.raises(NotComputed, match="values"):
        m.set_loss("mse")
        m.set_optimizer("sgd")
        m.forward_backward([{**row, "labels": 1.0} for row in batch], task="seq_cls")
    with pytest.raises(NotComputed, match="BertForSequenceClassification"):
        m.engine.generate(batch)


@pytest.mark.parametrize(
    "processor", [{}, {"padding_side": "left"}, {"pad_to_multiple_of": 8}, {"padding_free": True}], ids=str
)
@pytest.mark.parametrize("loss", ["dpo", "grpo"])
def test_micro_batches_cut_logps_with_their_rows(tiny, loss, processor):
    """What a forward over all rows gave, or over more rows than these, comes back beside micro-batches that are narrower."""
    rows = random_rows([5, 9, 12, 6], seed=3)
    args = {"advantages": [1.0, -0.5, 0.25, -1.5]} if loss == "grpo" else {}
    beyond = (0, 0) if processor.get("padding_free") else (3, 0) if processor.get("padding_side") else (0, 3)
    got = []
    for size, more in ((None, (0, 0)), (2, (0, 0)), (2, beyond)):
        model = TransformersModel(model_id=tiny, mixed_precision="no")
        model.add_adapter_to_model("default", LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian"))
        with torch.no_grad():
            for i, p in enumerate(model.adapters.parameters("default").values()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 5)
        model.set_processor("input", **processor)
        model.set_loss(loss, beta=0.3)
        model.set_optimizer("sgd", lr=1.0)
        ref = model.forward_only(rows, disable_lora=True).logps
        value = model.forward_backward(rows, ref_logps=torch.nn.functional.pad(ref, more), micro_batch_size=size, **args)
        got.append((float(value), model.clip_grad_and_step(max_grad_norm=float("inf"))))
        for wrong in (torch.cat([ref, ref], 1), ref[:, :-1]):
            with pytest.raises(BadLossArgument, match="ref_logps"):
                model.forward_backward(rows, ref_logps=wrong, micro_batch_size=size, **args)
    assert got[1] == pytest.approx(got[0], rel=1e-5)
    assert got[2] == got[1]


def test_B27_left_padding_does_not_shift_positions():
    """The real tokens of a short row stand at 0, 1, 2, and all ways of padding give one loss and the same logps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    m = TransformersModel(GPT2LMHeadModel, config=config, mixed_precision="no")
    seen = []
    m.module.transformer.register_forward_pre_hook(lambda _, a, kwargs: seen.append(kwargs), with_kwargs=True)
    batch = rows(3, 5)
    m.set_optimizer("sgd", lr=0.0)
    expected = by_hand(m.module, batch).item()
    seen.clear()
    alone = [m.forward_only([row], return_logits=False).logps[0] for row in batch]
    for side in ("right", "left"):
        m.set_processor(InputProcessor(padding_side=side))
        seen.clear()
        logps = m.forward_only(batch, return_logits=False).logps
        short = logps[0, :3] if side == "right" else logps[0, 2:]
        torch.testing.assert_close(short, alone[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(logps[1], alone[1], rtol=0, atol=1e-5)
        places = seen[-1]["position_ids"][0]
        assert (places[:3] if side == "right" else places[2:]).tolist() == [0, 1, 2]
        assert float(m.forward_backward(batch)) == pytest.approx(expected, abs=1e-5)
        m.zero_grad(drop=True)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning:peft")  # plain peft
def test_experts_train_save_and_load_in_both_layouts(tmp_path, ids):
    """transformers computes with experts fused and stores them one by one; what is saved is what it stores."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    m = TransformersModel(config=config, mixed_precision="no")
    m.set_optimizer("adamw", lr=1e-2)
    m.forward_backward(rows(7, 4))
    m.clip_grad_and_step()
    (batch,) = m.engine.prepare(m._resolved(m.sessions[""]), rows(7))
    assert m.engine.forward(batch, frozenset({"aux_loss"}), train=True).aux_loss.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # patterns that peft adds for experts by itself, and misses, are no user's concern
        m.add_adapter_to_model("a", LoraConfig(**LORA))
    m.set_optimizer("adamw", lr=1e-2, adapter_name="a")
    m.forward_backward(rows(7, 4))
    m.clip_grad_and_step()
    folder, adapter = m.save("base", tmp_path, adapter_name=""), m.save("a", tmp_path)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in load_file(f"{folder}/model.safetensors")
    again = TransformersModel(config=config, mixed_precision="no")
    again.load("base", tmp_path)
    whole = m.get_state_dict(adapter_name="")
    assert all(torch.equal(v, whole[k]) for k, v in again.get_state_dict().items())
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = [{"input_ids": row.tolist()} for row in ids]
    assert torch.equal(plain(input_ids=ids).logits, m.forward_only(batch, disable_lora=True).logits)
    torch.testing.assert_close(PeftModel.from_pretrained(plain, adapter)(input_ids=ids).logits, m.forward_only(batch).logits)


def test_saved_full_model_is_plain_transformers(tiny, ids, tmp_path):
    m = model(tiny)
    m.set_optimizer("adamw", lr=1e-2)
    m.forward_backward(rows(9, 5))
    m.clip_grad_and_step()
    m.add_adapter_to_model("a", LoraConfig(**LORA))  # adapters are no part of it
    folder = m.save("full", tmp_path, adapter_name="")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ours = m.forward_only([{"input_ids": row.tolist()} for row in ids], disable_lora=True).logits
    assert torch.equal(plain(input_ids=ids).logits, ours)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
