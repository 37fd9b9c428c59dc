"""One vector a row: pooled as by hand, padded and packed alike, trained and kept."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModel, BertConfig, MambaConfig, MistralConfig, Qwen3Config, RobertaConfig, T5Config

from twinkle_core.errors import BadInputs, BadLabels, NotComputed, PackingLeaks, PatchRefused
from twinkle_core.testing.toys import contrast_rows
from twinkle_transformers.model import TransformersModel

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
#: large weights, so that what a token sees shows
CONFIGS = {
    "bert": BertConfig(**SIZES, max_position_embeddings=64, pad_token_id=0, initializer_range=0.3),
    "roberta": RobertaConfig(**SIZES, max_position_embeddings=64, pad_token_id=1, initializer_range=0.3),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, pad_token_id=0, initializer_range=0.3),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, initializer_range=0.3),
}
POOLINGS = {"last_token": lambda x: x[-1], "cls": lambda x: x[0], "mean": lambda x: x.mean(0)}


def make(config, cls="AutoModel", seed=0, **options):
    torch.manual_seed(seed)
    model = CONFIGS[config] if isinstance(config, str) else config
    return TransformersModel(cls, config=model, **{"mixed_precision": "no"} | options)


def groups(sizes=(2, 3, 2)):
    """Rows of 2 to 6 tokens, none of which is a padding token."""
    return [{**row, "input_ids": [token + 2 for token in row["input_ids"]]} for row in contrast_rows(sizes)]


def texts():
    return [{k: v for k, v in row.items() if k != "labels"} for row in groups()]


def by_hand(model, rows, pooling, normalize=True):
    """Each row alone through transformers' own body, pooled in the plainest way."""
    body = model.module.base_model.eval()
    with torch.no_grad():
        pooled = [POOLINGS[pooling](body(torch.tensor([row["input_ids"]])).last_hidden_state[0]) for row in rows]
    model.module.train()
    found = torch.stack(pooled)
    return found / found.norm(dim=1, keepdim=True) if normalize else found


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("config", "cls", "packs"),
    [
        ("bert", "AutoModel", False),
        ("roberta", "AutoModel", False),
        ("qwen3", "AutoModel", True),
        ("qwen3", "AutoModelForCausalLM", True),
        ("mistral", "AutoModelForCausalLM", True),
    ],
)
def test_rows_are_pooled_as_by_hand_padded_on_either_side_and_packed(config, cls, packs, pooling):
    model = make(config, cls)
    model.apply_patch("embedding", pooling=pooling)
    wanted = by_hand(model, texts(), pooling)
    for how in ({}, {"padding_side": "left"}, {"pad_to_multiple_of": 8}, *([{"padding_free": True}] if packs else [])):
        model.set_processor("input", **how)
        for size in (None, 3):
            got = model.forward_only(texts(), task="embedding", micro_batch_size=size)
            assert list(got) == ["embeddings"]
            torch.testing.assert_close(got.embeddings, wanted, rtol=0, atol=2e-6)


def test_positions_of_models_that_do_not_count_from_zero_are_their_own():
    """RoBERTa's begin after its padding token; given from 0, a padded row would not be what it is alone."""
    model = make("roberta")
    model.apply_patch("embedding", pooling="mean")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    with torch.no_grad():
        alone, moved = model.module(**inputs), model.module(**inputs, position_ids=torch.arange(3)[None])
    assert (alone.last_hidden_state - moved.last_hidden_state).abs().max() > 0.01
    wanted = by_hand(model, texts(), "mean")
    torch.testing.assert_close(model.forward_only(texts(), task="embedding").embeddings, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("config", "why"),
    [("bert", "other tokens in one row change the next row's outputs"), ("roberta", "change the next row's outputs"),
     (MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1), "outputs")],
    ids=["bert", "roberta", "mamba"],
)  # fmt: skip
def test_packing_is_refused_where_rows_see_one_another(config, why):
    model = make(config)
    model.apply_patch("embedding", pooling="mean")
    model.set_processor("input", padding_free=True)
    with pytest.raises(PackingLeaks, match=why):
        model.forward_only(texts(), task="embedding")


def test_kinds_of_tokens_reach_the_model():
    model = make("bert")
    model.apply_patch("embedding", pooling="mean")
    row = {"input_ids": [5, 6, 7, 8], "token_type_ids": [0, 0, 1, 1], "length": 4}
    short = {"input_ids": [5, 6], "token_type_ids": [0, 1], "length": 2}
    got = model.forward_only([row, short], task="embedding").embeddings
    with torch.no_grad():
        body = model.module.eval()
        wanted = body(torch.tensor([[5, 6, 7, 8]]), token_type_ids=torch.tensor([[0, 0, 1, 1]])).last_hidden_state.mean(1)
    torch.testing.assert_close(got[:1], wanted / wanted.norm(dim=1), rtol=0, atol=2e-6)
    plain = model.forward_only([{"input_ids": [5, 6, 7, 8]}], task="embedding").embeddings
    assert (plain - got[:1]).abs().max() > 1e-3


def test_needs_imply_the_task_and_nothing_else_is_computed():
    """The output layer of a model that has one rests, and no logits are given, though they are asked for."""
    model = make("qwen3", "AutoModelForCausalLM")
    model.apply_patch("embedding")
    model.set_loss("infonce")
    model.module.lm_head.register_forward_hook(lambda *_: pytest.fail("the output layer ran"))
    implied = model.forward_only(groups(), return_logits=True)
    assert list(implied) == ["embeddings"] and implied.embeddings.shape == (7, 32)
    torch.testing.assert_close(model.forward_only(texts(), task="embedding").embeddings, implied.embeddings)
    assert list(model.forward(groups())) == ["embeddings"]
    assert model.calculate_loss() > 0
    model.backward()


def test_what_is_trained_is_the_plain_formula():
    """Cross entropy of each anchor against all documents, written out over transformers' own model."""
    model, how = make("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), {"temperature": 0.5}
    model.apply_patch("embedding", pooling="mean")
    model.set_loss("infonce", **how)
    model.set_optimizer("sgd", lr=0.1)
    value = float(model.forward_backward(groups((2, 2, 2))))
    got = {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}

    plain = AutoModel.from_config(model.module.config)
    plain.load_state_dict(model.module.state_dict())
    pooled = torch.stack([plain(torch.tensor([r["input_ids"]])).last_hidden_state[0].mean(0) for r in groups((2, 2, 2))])
    pooled = torch.nn.functional.normalize(pooled, dim=1)
    total = torch.nn.functional.cross_entropy(pooled[0::2] @ pooled[1::2].T / 0.5, torch.arange(3), reduction="sum")
    total.backward()
    assert value == pytest.approx(float(total.detach()) / 3, rel=1e-5)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_groups_are_never_cut():
    model = make("qwen3")
    model.apply_patch("embedding")
    model.set_loss("infonce", in_batch=False)
    model.set_optimizer("sgd", lr=0.1)
    seen = []
    model.module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    whole = float(model.forward_backward(groups((2, 3, 2))))
    model.zero_grad(drop=True)
    for size, parts in ((1, [2, 3, 2]), (4, [2, 3, 2]), (5, [5, 2])):
        seen.clear()
        assert float(model.forward_backward(groups((2, 3, 2)), micro_batch_size=size)) == pytest.approx(whole, rel=1e-5)
        assert seen == parts
        model.zero_grad(drop=True)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]]), "position_ids": torch.arange(2).repeat(4)[None]}
    packed = {**batch, "seq_lens": [2, 2, 2, 2], "labels": torch.tensor([1, 0, 1, 0])}
    whole, cut = (float(model.forward_backward(packed, micro_batch_size=size)) for size in (None, 2))
    assert cut == pytest.approx(whole, rel=1e-5)


def test_embeddings_are_float32_whatever_the_model_computes_in():
    model = make("qwen3", mixed_precision="bf16")
    model.apply_patch("embedding", pooling="mean")
    got = model.forward_only(texts(), task="embedding").embeddings
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.norm(dim=1), torch.ones(7))
    torch.testing.assert_close(got, by_hand(make("qwen3"), texts(), "mean"), rtol=0, atol=0.05)


def test_without_normalising_they_are_as_pooled():
    model = make("bert")
    model.apply_patch("embedding", pooling="cls", normalize=False)
    wanted = by_hand(model, texts(), "cls", normalize=False)
    assert wanted.norm(dim=1).max() > 1.1
    torch.testing.assert_close(model.forward_only(texts(), task="embedding").embeddings, wanted, rtol=0, atol=5e-6)


def test_embeddings_and_logps_of_one_forward():
    """A function may read both: the body runs once for them."""
    model = make("qwen3", "AutoModelForCausalLM")
    model.apply_patch("embedding")
    calls = []
    model.module.model.register_forward_hook(lambda *_: calls.append(1))

    def both(inputs, outputs):
        return outputs.embeddings.square().sum() - outputs.logps.sum()

    both.needs = {"embeddings", "logps"}
    model.set_loss(both)
    rows = [{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, {"input_ids": [8, 9], "labels": [9, -100]}]
    model.forward_only(rows)  # the model is asked what it is like
    calls.clear()
    got = model.forward(rows, return_logits=False)
    assert got.keys() == {"embeddings", "logps"} and len(calls) == 1
    torch.testing.assert_close(got.embeddings.detach(), by_hand(model, rows, "last_token"), rtol=0, atol=2e-6)


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, target_modules="all-linear", task_type="FEATURE_EXTRACTION")])
@pytest.mark.parametrize("config", ["bert", "qwen3"])
def test_saved_and_loaded_it_gives_the_same_vectors(config, adapter, tmp_path):
    def fresh(**source):
        model = TransformersModel("AutoModel", mixed_precision="no", **source) if source else make(config, seed=7)
        model.apply_patch("embedding", pooling="mean")
        return model

    make(config, seed=7).save("base", tmp_path)
    model = fresh(model_id=tmp_path / "base")
    if adapter is not None:
        model.add_adapter_to_model("a", adapter)
    model.set_loss("infonce")
    model.set_optimizer("adamw", lr=1e-2)
    before = model.forward_only(texts()).embeddings
    for _ in range(2):
        model.forward_backward(groups())
        model.clip_grad_and_step()
    trained = model.forward_only(texts()).embeddings
    assert (trained - before).abs().max() > 1e-3
    path = model.save("trained", tmp_path, save_optimizer=True)
    if adapter is None:
        again = fresh(model_id=path)
    else:
        again = fresh(model_id=tmp_path / "base")
        again.add_adapter_to_model("a", path)
        assert torch.equal(again.forward_only(texts(), task="embedding", disable_lora=True).embeddings, before)
    again.set_loss("infonce")
    again.set_optimizer("adamw", lr=1e-2)
    again.resume_from_checkpoint(path)
    assert torch.equal(again.forward_only(texts()).embeddings, trained)
    for one in (model, again):
        torch.manual_seed(3)
        one.forward_backward(groups())
        one.clip_grad_and_step()
    assert torch.equal(again.forward_only(texts()).embeddings, model.forward_only(texts()).embeddings)


def test_what_gives_no_embeddings_says_why():
    model = make("bert")
    with pytest.raises(NotComputed, match=r"BertModel gives no embeddings: .*apply_patch\('embedding'"):
        model.forward_only(texts(), task="embedding")
    model.apply_patch("embedding", pooling="cls")
    with pytest.raises(PatchRefused, match="it has a PoolingHead under the name 'embedding_pooling' already"):
        model.apply_patch("embedding", pooling="mean")
    with pytest.raises(PatchRefused, match=r"EmbeddingPatch\(pooling='max'\): it must be one of 'last_token', 'mean', 'cls'"):
        model.apply_patch("embedding", pooling="max")
    model.patches[-1].undo(model)
    model.apply_patch("embedding", pooling="mean")
    odd = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 1, 2, 2)}
    with pytest.raises(BadInputs, match=r"'attention_mask' is \[1, 1, 2, 2\]; to pool \[1, 2\] tokens"):
        model.forward_only(odd, task="embedding")
    model.set_loss("infonce")
    model.set_optimizer("sgd", lr=0.1)
    with pytest.raises(BadLabels, match="row 0 begins no group"):
        model.forward_backward([{**row, "labels": 0} for row in groups()])


def test_an_encoder_of_another_family():
    """One without positions of its own in its forward."""
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, pad_token_id=0)
    model = make(config, "T5EncoderModel")
    model.apply_patch("embedding", pooling="mean")
    wanted = by_hand(model, texts(), "mean")
    torch.testing.assert_close(model.forward_only(texts(), task="embedding").embeddings, wanted, rtol=0, atol=2e-6)


def test_labelled_rows_without_a_loss_of_embeddings_are_embedded_too():
    """Measuring takes no loss."""
    model = make("qwen3", "AutoModelForCausalLM")
    model.apply_patch("embedding")
    model.add_metric("embedding", is_training=False)
    model.forward_only(groups(), task="embedding")
    numbers = model.calculate_metric(is_training=False)
    assert numbers.keys() == {"recall_at_1", "positive_similarity", "negative_similarity"}
