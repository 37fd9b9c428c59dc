"""Batches that the model has no place for are refused before anything is changed, and name what is wrong."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForSequenceClassification

from twinkle_core.errors import BadInputs, BadLabels, BadLossResult, BadRow, NoTemplate, PackingLeaks, UnknownOption
from twinkle_core.processors.input import InputProcessor
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

IDS = torch.tensor([[5, 6, 7, 8], [20, 30, 40, 50], [9, 8, 7, 6]])
ALIGNED = torch.cat([IDS[:, 1:], torch.full((3, 1), -100)], 1)


@pytest.fixture
def m(tiny):
    made = TransformersModel(model_id=tiny, mixed_precision="no")
    made.set_optimizer("sgd")
    return made


def batch(ids=IDS, labels=ALIGNED, **more):
    return {"input_ids": ids, "labels": labels, **more}


def row(ids, labels):
    return {"input_ids": ids, "labels": labels}


REFUSED = {
    "labels one short": (batch(labels=IDS[:, 1:]), BadLabels, r"\[3, 3\].*\[3, 4\]"),
    "labels transposed": (batch(labels=ALIGNED.T.contiguous()), BadLabels, r"\[4, 3\].*\[3, 4\]"),
    "one label a row": ([row([5, 6, 7], 1), row([9, 8, 7], 2)], BadLabels, r"\[2\]"),
    "float labels": (batch(labels=ALIGNED.float()), BadLabels, "float32.*mse"),
    "labels of words": ([row([5, 6], ["a", "b"])], BadLabels, "list"),
    "label beyond": (batch(labels=ALIGNED.masked_fill(IDS == 40, 264)), BadRow, r"row 1: 'labels' holds 264 at position 2"),
    "label -1": (batch(labels=ALIGNED.masked_fill(IDS == 9, -1)), BadRow, r"row 2: 'labels' holds -1 at position 0.*-100"),
    "id beyond": (batch(ids=IDS.masked_fill(IDS == 50, 264)), BadRow, r"row 1: 'input_ids' holds 264 at position 3.*0 to 263"),
    "id of a row": ([row([5, 6], [6, -100]), row([5, 300], [7, -100])], BadRow, r"row 1: 'input_ids' holds 300 at position 1"),
    "negative id": (batch(ids=IDS - 6), BadRow, "holds -1"),
    "float ids": (batch(ids=IDS.float()), BadInputs, "float32"),
    "three axes": (batch(ids=IDS[..., None], labels=ALIGNED[..., None]), BadInputs, r"\[3, 4, 1\]"),
    "no column": (batch(ids=IDS[:, :0], labels=IDS[:, :0]), BadInputs, r"\[3, 0\]"),
}


@pytest.mark.parametrize(
    "loss", [("cross_entropy", {}), ("chunked_cross_entropy", {}), ("cross_entropy", {"label_smoothing": 0.1})]
)
@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_looked_up_is_refused(m, case, loss):
    inputs, error, told = REFUSED[case]
    m.set_loss(loss[0], **loss[1])
    m.forward_backward(batch(), gradient_accumulation_steps=3)
    before = {n: p.grad.clone() for n, p in m.module.named_parameters()}
    with pytest.raises(error, match=told):
        m.forward_backward(inputs)
    with pytest.raises(error, match=told):  # a loss of hidden states or logits reads the labels when it is called
        m.forward(inputs)
        m.backward()
    assert all(torch.equal(p.grad, before[n]) for n, p in m.module.named_parameters())
    assert m.sessions[""].window.count == 1


def test_rows_are_numbered_through_micro_batches_and_packed_sequences(m):
    many = [row([5, 6], [6, -100])] * 3 + [row([7, 300], [8, -100])]
    with pytest.raises(BadRow, match="row 3: 'input_ids' holds 300 at position 1"):
        m.forward_backward(many, micro_batch_size=2)
    m.set_processor(InputProcessor(padding_free=True))
    for size in (None, 2):
        with pytest.raises(BadRow, match="row 3: 'input_ids' holds 300 at position 1"):
            m.forward_backward(many, micro_batch_size=size)


def test_labels_of_a_regression_are_not_taken_for_tokens():
    made = TransformersModel(LlamaForSequenceClassification, config=tiny_config(num_labels=1), mixed_precision="no")
    made.set_loss("mse")
    made.set_optimizer("sgd")
    value = made.forward_backward([row([5, 6, 7], 500), row([9, 8, 7], -3)], task="seq_cls")
    assert float(value) > 1e4
    with pytest.raises(BadLabels, match=r"\[2, 2\].*\[2\]"):  # not broadcast: each value would be compared with all targets
        made.forward_backward([row([5, 6, 7], [0.5, 1.5]), row([9, 8, 7], [0.1, 0.2])], task="seq_cls")


def test_classes_of_a_head_are_counted():
    made = TransformersModel(LlamaForSequenceClassification, config=tiny_config(num_labels=3), mixed_precision="no")
    made.set_optimizer("sgd")
    assert float(made.forward_backward([row([5, 6], 2), row([9, 8], 0)], task="seq_cls")) > 0
    with pytest.raises(BadRow, match="row 1: 'labels' holds 3 at position 0; a label of this model is 0 to 2"):
        made.forward_backward([row([5, 6], 2), row([9, 8], 3)], task="seq_cls")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad", [0, 250])
def test_pooled_value_of_a_padded_row_is_that_of_the_row_alone(pad, side):
    """A model that pools looks for its own padding token, whatever the processor has put there."""
    config = tiny_config(num_labels=1, pad_token_id=pad)
    made = TransformersModel(LlamaForSequenceClassification, config=config, mixed_precision="no")
    made.set_processor(InputProcessor(padding_side=side, pad_id=7))
    many = [{"input_ids": ids} for ids in ([5, 6, 7], [9, 8], [9, 8, 4, 4])]
    alone = [made.forward_only([one], task="seq_cls").logits for one in many]
    torch.testing.assert_close(made.forward_only(many, task="seq_cls").logits, torch.cat(alone), rtol=0, atol=1e-5)
    filled = InputProcessor(padding_side=side, pad_id=7).collate(many)
    kept = filled["input_ids"].clone()
    torch.testing.assert_close(made.forward_only(filled, task="seq_cls").logits, torch.cat(alone), rtol=0, atol=1e-5)
    assert torch.equal(filled["input_ids"], kept)


def test_a_model_that_pools_takes_no_packed_rows():
    made = TransformersModel(LlamaForSequenceClassification, config=tiny_config(num_labels=1), mixed_precision="no")
    made.set_processor(InputProcessor(padding_free=True))
    made.set_loss("mse")
    made.set_optimizer("sgd")
    with pytest.raises(PackingLeaks, match="one result for a whole sequence"):
        made.forward_backward([row([5, 6, 7], 1.0), row([9, 8], 2.0)], task="seq_cls")


def packed(**more):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    labels = torch.tensor([[6, 7, -100, 9, 10, -100]])
    return {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), **more}


def test_rows_that_positions_part_stay_apart_under_a_mask_of_ones(m):
    alone = [m.forward_only({"input_ids": packed()["input_ids"][:, cut]}).logits for cut in (slice(0, 3), slice(3, 6))]
    given = packed(attention_mask=torch.ones(1, 6, dtype=torch.long))
    torch.testing.assert_close(m.forward_only(given).logits, torch.cat(alone, 1), rtol=0, atol=1e-5)
    assert "attention_mask" in given


def test_rows_that_positions_part_are_refused_where_nothing_keeps_them_apart(m):
    with pytest.raises(PackingLeaks, match=r"padded row[\s\S]*padding_free=True"):
        m.forward_only(packed(attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]])))
    with pytest.raises(PackingLeaks, match=r"batch of 2[\s\S]*padding_free=True"):
        m.forward_only({k: v.repeat(2, 1) for k, v in packed().items()})


def test_the_way_out_of_positions_that_begin_anew_is_one(m):
    """Rows whose positions restart, with the default processor and with the one that the error names."""
    two = [{name: value[0].tolist() for name, value in packed().items()} for _ in range(2)]
    m.set_loss("cross_entropy")
    with pytest.raises(PackingLeaks, match="padding_free=True"):
        m.forward_only(two)
    m.set_processor(InputProcessor(padding_free=True))
    m.forward_only(two)
    packed_loss = m.calculate_loss()
    m.set_processor(InputProcessor())
    apart = [{name: values[cut] for name, values in row.items()} for row in two for cut in (slice(0, 3), slice(3, 6))]
    m.forward_only(apart)
    assert packed_loss == pytest.approx(m.calculate_loss(), abs=1e-5)


def test_positions_that_begin_anew_are_probed_like_packed_rows():
    from transformers import BertConfig

    config = BertConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    made = TransformersModel("AutoModelForMaskedLM", config=config, mixed_precision="no")
    with pytest.raises(PackingLeaks, match="attention"):
        made.forward_only(packed())


def test_unknown_task_is_named(m):
    with pytest.raises(UnknownOption, match=r"task='causl_lm'.*Did you mean 'causal_lm'"):
        m.forward_backward(batch(), task="causl_lm")


def test_a_loss_without_a_graph_is_told(m):
    def cut(inputs, outputs):
        return outputs.logits.detach().mean()

    m.set_loss(cut)
    with pytest.raises(BadLossResult, match="no graph"):
        m.forward_backward(batch())


def completions(model, **prompt):
    return model.engine.generate([prompt], max_new_tokens=6, do_sample=False)


def test_padding_of_a_prompt_is_left_out(m):
    expected = completions(m, input_ids=[5, 6, 7])
    ids, mask = [0, 0, 5, 6, 7], [0, 0, 1, 1, 1]
    assert completions(m, input_ids=ids, attention_mask=mask) == expected
    assert completions(m, input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask])) == expected
    assert completions(m, input_ids=torch.tensor(ids), attention_mask=mask) == expected
    assert completions(m, input_ids=ids) != expected


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"input_ids": []}, "row 0: 'input_ids' is empty"),
        ({"input_ids": [5], "attention_mask": [0]}, "is empty where 'attention_mask'"),
        ({"input_ids": [0.5]}, "holds torch.float32"),
        ({"input_ids": ["a"]}, "can't be made a tensor"),
        ({"input_ids": [5, 264]}, "holds 264; a token id of this model is 0 to 263"),
        ({"input_ids": [-1]}, "holds -1"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "1 values"),
        ({}, "has no 'input_ids'"),
    ],
)
def test_prompts_that_are_none_are_told(m, prompt, told):
    with pytest.raises(BadRow, match=told):
        completions(m, **prompt)


def test_plain_texts_go_through_a_template_of_plain_texts(tiny):
    """As conversations do: the same step as of the rows that the template makes of them."""
    losses = []
    for encoded in (False, True):
        model = TransformersModel(model_id=tiny, mixed_precision="no")
        model.set_optimizer("sgd")
        texts = [{"text": "one two"}, {"text": "three"}]
        with pytest.raises(NoTemplate, match="conversations or texts"):
            model.forward_backward(texts)
        model.set_template("chat", model_id=tiny, use_chat_template=False)
        template = model.sessions[""].template
        losses.append(float(model.forward_backward(template.batch_encode(texts) if encoded else texts)))
        assert model.generate(texts, max_new_tokens=2, do_sample=False) != []
        with pytest.raises(BadInputs, match="row 0 is a conversation or a text, row 1 is not"):
            model.forward_backward([texts[0], row([5, 6], [6, -100])])
    assert losses[0] == losses[1] > 0
