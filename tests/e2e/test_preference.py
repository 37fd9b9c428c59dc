"""Training without labels that someone wrote: completions as rows, references, teachers, through the public names alone."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from twinkle.advantage import grpo_advantages
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel
from twinkle.template import Template
from twinkle_core.errors import MissingArgument, WrongArgument

QUESTIONS = ("2+3?", "a longer question, with more words", "hi")
HOW = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}


def ask(question):
    return {"messages": [{"role": "user", "content": question}]}


PROMPTS = [ask(question) for question in QUESTIONS]


@pytest.fixture
def model(tiny):
    """A LoRA that has been pushed away from its beginning, so that it differs from the base."""
    torch.manual_seed(0)
    made = TransformersModel(model_id=tiny, mixed_precision="no")
    made.add_adapter_to_model("default", LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2))
    made.set_template("chat", model_id=tiny)
    made.set_optimizer("sgd", lr=0.5)
    rows = [{"messages": [*ask(q)["messages"], {"role": "assistant", "content": "no"}]} for q in QUESTIONS]
    for _ in range(2):
        made.forward_backward(rows)
        made.clip_grad_and_step()
    return made


# ------------------------------------------------------------------------------------------------ completions as rows


def test_rows_are_prompt_and_completion_with_labels_on_the_completion_alone(model, tiny):
    """Of different lengths, padded on the left to be generated and on the right to be trained; the end token is a label."""
    template = Template(model_id=tiny)
    end = template.tokenizer.eos_token_id
    rows = model.generate(PROMPTS * 8, return_rows=True, generator=torch.Generator().manual_seed(0), **HOW)
    ended = 0
    for row, prompt in zip(rows, template.batch_encode(PROMPTS * 8, add_generation_prompt=True), strict=True):
        begin = prompt["length"]
        assert row["input_ids"][:begin] == prompt["input_ids"]
        completion = row["input_ids"][begin:]
        assert row["labels"] == [-100] * (begin - 1) + completion + [-100]
        assert row["length"] == len(row["input_ids"]) == len(row["labels"])
        assert end not in completion[:-1] and (completion[-1] == end or len(completion) == HOW["max_new_tokens"])
        ended += completion[-1] == end
    assert 0 < ended < len(rows)  # both kinds were there


def test_a_row_holds_the_text_that_is_given_without_rows(model, tiny):
    template = Template(model_id=tiny)
    greedy = {"max_new_tokens": 12, "do_sample": False}
    texts = model.generate(PROMPTS, **greedy)
    rows = model.generate(PROMPTS, return_rows=True, **greedy)
    assert [template.decode(row["labels"], skip_special_tokens=True) for row in rows] == texts
    encoded = template.batch_encode(PROMPTS, add_generation_prompt=True)
    assert model.generate(encoded, return_rows=True, **greedy) == rows
    base = model.generate(PROMPTS, return_rows=True, disable_lora=True, **greedy)
    assert [row["input_ids"] for row in base] != [row["input_ids"] for row in rows]


def test_a_generators_state_says_what_is_sampled_and_the_global_state_stays(model):
    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return [model.generate(PROMPTS * 3, return_rows=True, generator=generator, **HOW) for _ in range(2)]

    before = torch.get_rng_state()
    first, second = sample(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert sample(5) == [first, second] and first != second and sample(6)[0] != first
    torch.manual_seed(1)
    free = model.generate(PROMPTS * 3, **HOW)
    torch.manual_seed(1)
    assert model.generate(PROMPTS * 3, **HOW) == free


def test_logps_of_sampling_are_those_of_a_forward(model):
    """What transformers itself says of the tokens that it drew, against ``forward_only`` over the rows; to rounding, as it
    goes token by token with a cache and padding on the other side."""
    rows = model.generate(PROMPTS, return_rows=True, generator=torch.Generator().manual_seed(2), **HOW)
    logps = model.forward_only(rows, return_logits=False).logps
    model.module.eval()
    for row, found in zip(rows, logps, strict=True):
        spots = [t for t, label in enumerate(row["labels"]) if label != -100]
        ids = torch.tensor([row["input_ids"][: spots[0] + 1]])
        with model.adapters.activate("default"), torch.no_grad():
            mask = torch.ones_like(ids)
            drawn = []
            for t in spots:  # the model's own step by step logits at the tokens that were drawn
                out = model.module(input_ids=ids, attention_mask=mask).logits[0, -1]
                drawn.append(torch.log_softmax(out, -1)[row["labels"][t]])
                ids = torch.cat([ids, torch.tensor([[row["labels"][t]]])], 1)
                mask = torch.ones_like(ids)
        torch.testing.assert_close(found[spots], torch.stack(drawn), rtol=0, atol=2e-5)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_first_step_on_samples_of_the_same_weights_has_a_ratio_of_exactly_one(model, micro_batch_size, packed):
    """Old logps from ``forward_only`` are the training forward's, bit for bit, however the batch is cut; not any more after an
    update. Without dropout: a policy that drops out is another one at each forward."""
    for part in model.module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.set_processor("input", padding_free=packed)
    model.set_loss("grpo", clip_low=0.2)
    model.add_metric("grpo", is_training=True)
    rows = model.generate(PROMPTS * 2, return_rows=True, generator=torch.Generator().manual_seed(3), **HOW)
    advantages = grpo_advantages([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], 6)
    old = model.forward_only(rows, return_logits=False, micro_batch_size=micro_batch_size).logps
    ratios = []
    for _ in range(2):
        model.forward_backward(rows, advantages=advantages, old_logps=old, micro_batch_size=micro_batch_size)
        model.clip_grad_and_step()
        ratios.append(model.calculate_metric(is_training=True)["ratio"])
    assert ratios[0] == 1.0 and abs(ratios[1] - 1) > 1e-4


# ------------------------------------------------------------------------------------------------ pairs and their reference


def pairs(tiny):
    """Answers of different lengths."""
    rows = [{"prompt": q, "chosen": "yes" * (k + 1), "rejected": "no" * (5 - k)} for k, q in enumerate((*QUESTIONS, "why?"))]
    dataset = Dataset(rows)
    dataset.map("preference")
    dataset.set_template("chat", model_id=tiny, train_on="last")
    dataset.encode()
    return next(iter(DataLoader(dataset, batch_size=4)))


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.adapters.parameters("default").values()])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_reference_logps_are_cut_as_the_rows_are(model, tiny, packed):
    """Pairs in micro-batches of other widths than the whole give its loss and gradients, and those of the plain formula."""
    for part in model.module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.set_processor("input", padding_free=packed)
    model.set_loss("dpo", beta=0.3)
    batch = pairs(tiny)
    found = []
    for size in (None, 4, 2):
        ref = model.forward_only(batch, disable_lora=True, return_logits=False, micro_batch_size=size).logps
        loss = float(model.forward_backward(batch, ref_logps=ref, micro_batch_size=size))
        found.append((loss, gradients(model).clone()))
        model.zero_grad(drop=True)
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        assert (grads - found[0][1]).norm() <= 1e-5 * found[0][1].norm()
    assert found[0][0] == pytest.approx(_by_hand(model, batch, 0.3), abs=1e-5)


def _by_hand(model, batch, beta):
    """- log sigmoid(beta (difference of differences)), from the module's logits of each row alone, with the adapter and
    without."""
    sums = []
    model.module.eval()
    for row in batch:
        labels = torch.tensor(row["labels"])
        keep = labels != -100
        for name in ("default", ""):
            with model.adapters.activate(name), torch.no_grad():
                logits = model.module(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            logps = torch.log_softmax(logits.double(), -1)[torch.arange(len(labels)), labels.clamp(min=0)]
            sums.append(float(logps[keep].sum()))
    h = [policy - ref for policy, ref in zip(sums[::2], sums[1::2], strict=True)]
    terms = [-torch.nn.functional.logsigmoid(torch.tensor(beta * (h[k] - h[k + 1]))) for k in range(0, len(h), 2)]
    return float(sum(terms) / len(terms))


def test_evaluation_knows_the_loss_that_takes_arguments(model, tiny):
    """Metrics of evaluation are those of training on the same rows, given the same reference, in micro-batches too."""
    for part in model.module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.set_loss("dpo")
    for metric in ("loss", "dpo"):
        model.add_metric(metric)
    batch = pairs(tiny)
    ref = model.forward_only(batch, disable_lora=True, return_logits=False).logps
    model.forward_only(batch, return_logits=False, ref_logps=ref, micro_batch_size=2)
    loss = model.calculate_loss(ref_logps=ref)
    held_out = model.calculate_metric(is_training=False)
    model.forward_backward(batch, ref_logps=ref)
    trained = model.calculate_metric(is_training=True)
    assert held_out == pytest.approx({k: v for k, v in trained.items() if k in held_out}, abs=1e-6)
    assert held_out["loss"] == pytest.approx(loss) and "reward_margin" in held_out
    model.forward_only(batch, return_logits=False)  # without: what needs no loss is measured, and nothing is said wrongly
    assert "reward_margin" not in model.calculate_metric(is_training=False)
    with pytest.raises(WrongArgument, match=r"'ref_logp'. Did you mean 'ref_logps'"):
        model.forward_only(batch, ref_logp=ref)
    with pytest.raises(MissingArgument, match="ref_logps"):
        model.forward_only(batch, ref_logps=None)
