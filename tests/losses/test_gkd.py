"""Distillation against its formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_core.errors import BadLossArgument, BadLossSetting, MissingArgument
from twinkle_core.losses.gkd import GKDLoss
from twinkle_core.processors.input import InputProcessor, unpack
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_core.types import ModelOutput

ROWS = random_rows([5, 3, 7, 2])
_generator = torch.Generator().manual_seed(3)
TEACHER = [torch.randn(len(row["input_ids"]), 11, generator=_generator, dtype=torch.float64) for row in ROWS]


def kl(p, q):
    return (p * (p / q).log()).sum()


def jsd(t, s, beta):
    if beta in (0, 1):
        return kl(t, s) if beta == 0 else kl(s, t)
    m = beta * t + (1 - beta) * s
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def few(t, s, k, tail):
    at = t.topk(k).indices
    t, s = t[at], s[at]
    if tail:
        return torch.cat([t, 1 - t.sum()[None]]), torch.cat([s, 1 - s.sum()[None]])
    return t / t.sum(), s / s.sum()


@pytest.mark.parametrize("beta", [0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("k", "tail"), [(None, True), (4, True), (4, False), (10, True)])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_divergence(formulas, beta, temperature, k, tail, packed):
    module = formulas.tiny()
    loss = GKDLoss(beta, temperature, k, tail)
    got = formulas.evaluate(module, loss, ROWS, processor=InputProcessor(padding_free=packed), teacher_logits=TEACHER)
    inputs = InputProcessor().collate(ROWS)
    want, full, count = 0.0, 0.0, 0
    for row, logits, teacher in zip(ROWS, unpack(inputs, module.output_layer(module(inputs))), TEACHER, strict=True):
        for t, label in enumerate(row["labels"]):
            if label != -100:
                p, q = torch.softmax(teacher[t] / temperature, -1), torch.softmax(logits[t] / temperature, -1)
                want = want + jsd(*(few(p, q, k, tail) if k else (p, q)), beta)
                full, count = full + jsd(p, q, beta), count + 1
    formulas.assert_is(module, got, want, count)
    if tail:
        assert float(want.detach()) <= float(full.detach()) + 1e-12
    if k == 10:  # all but one: the bucket is that one
        torch.testing.assert_close(want, full)


@pytest.mark.parametrize("beta", [0.0, 0.4])
@pytest.mark.parametrize("tail", [True, False])
def test_a_servers_logps_are_as_good_as_its_logits(formulas, beta, tail):
    module = formulas.tiny()
    local = formulas.evaluate(module, GKDLoss(beta, top_k=4, add_tail=tail), ROWS, teacher_logits=TEACHER)
    top = [torch.log_softmax(t, -1).topk(4) for t in TEACHER]
    for labels_only in (False, True):
        ids, logps = [], []
        for row, found in zip(ROWS, top, strict=True):
            keep = [not labels_only or label != -100 for label in row["labels"]]
            ids.append(found.indices[keep].tolist())
            logps.append(found.values[keep].tolist())
        got = formulas.evaluate(module, GKDLoss(beta, add_tail=tail), ROWS, teacher_topk_ids=ids, teacher_topk_logps=logps)
        torch.testing.assert_close(got.sum, local.sum, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("beta", "right"), [(0.0, 0.510826), (0.5, 0.101749), (1.0, 0.368064), (0.9, 0.033603)])
def test_B43_ends_and_mixture(beta, right):
    teacher, student = (torch.tensor([[[a, b]]]).log() for a, b in ((0.5, 0.5), (0.9, 0.1)))
    inputs = {"labels": torch.zeros(1, 1, dtype=torch.long)}
    got = GKDLoss(beta)(inputs, ModelOutput(logits=student), teacher_logits=teacher)
    assert float(got.sum) == pytest.approx(right, abs=1e-6)
    same = GKDLoss(beta)(inputs, ModelOutput(logits=student), teacher_logits=student)
    assert float(same.sum) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
    ("logps", "told"), [(lambda x: x.exp(), "no probability is above 1"), (lambda x: x * 0, "add up to more than 1")]
)
def test_what_can_be_no_log_probabilities(logps, told):
    """Probabilities, or one word several times."""
    model = session_model(TinyLM())
    model.set_loss(GKDLoss())
    top = [torch.log_softmax(each, -1).topk(3) for each in TEACHER]
    with pytest.raises(BadLossArgument, match=told):
        model.forward_backward(
            ROWS, teacher_topk_ids=[t.indices for t in top], teacher_topk_logps=[logps(t.values) for t in top]
        )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", ["tensor", "lists"])
def test_micro_batches_are_one_batch(side, form):
    """With a teacher's logits as ``forward`` gives them over all rows."""
    rows = [ROWS[i] for i in (1, 3, 0, 2)]

    def train(size):
        torch.manual_seed(0)
        model = session_model(TinyLM())
        model.set_processor(InputProcessor(padding_side=side))
        model.set_loss("gkd", beta=0.3)
        teacher = model.forward_only(rows).logits.sin() * 3 if form == "tensor" else [TEACHER[i] for i in (1, 3, 0, 2)]
        value = model.forward_backward(rows, micro_batch_size=size, teacher_logits=teacher)
        return float(value), [p.grad.clone() for p in model.engine.module.parameters() if p.grad is not None]

    whole, cut = train(None), train(2)
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    for a, b in zip(cut[1], whole[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_words_that_the_teacher_masks_out_give_no_nan(beta):
    student = torch.randn(1, 2, 5, requires_grad=True)
    teacher = torch.randn(1, 2, 5)
    teacher[..., 3] = -math.inf
    got = GKDLoss(beta, top_k=None)({"labels": torch.ones(1, 2, dtype=torch.long)}, ModelOutput(logits=student),
                                    teacher_logits=teacher)  # fmt: skip
    (slope,) = torch.autograd.grad(got.sum, student)
    assert not bool(got.sum.isnan()) and not bool(slope.isnan().any())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"teacher_logits": torch.zeros(4, 7, 12)}, "it has 12 words, and the student 11"),
        ({"teacher_logits": torch.zeros(4, 6, 11)}, r"its shape is \[4, 6, 11\], the labels have \[4, 7\]"),
        ({"teacher_logits": TEACHER[:2]}, "it has 2 entries, and the batch 4 rows"),
        ({"teacher_logits": [TEACHER[2], *TEACHER[1:]]}, r"for row 0 it has shape \[7, 11\]; the row has 5 tokens"),
        ({"teacher_topk_ids": torch.zeros(4, 7, 3), "teacher_topk_logps": torch.zeros(4, 7, 2)}, "the ids"),
        (
            {"teacher_topk_ids": torch.full((4, 7, 1), 11), "teacher_topk_logps": torch.full((4, 7, 1), -1.0)},
            "it holds 11 to 11",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_told(formulas, given, told):
    with pytest.raises(BadLossArgument, match=told):
        formulas.evaluate(formulas.tiny(), GKDLoss(), ROWS, **given)


def test_without_a_teacher_and_with_a_tail_that_nobody_knows(formulas):
    with pytest.raises(MissingArgument, match="GKDLoss needs 'teacher_logits'"):
        formulas.evaluate(formulas.tiny(), GKDLoss(), ROWS)
    top = {"teacher_topk_ids": torch.zeros(4, 7, 1), "teacher_topk_logps": torch.full((4, 7, 1), -1.0)}
    with pytest.raises(BadLossArgument, match="what lies outside of them is not known"):
        formulas.evaluate(formulas.tiny(), GKDLoss(temperature=2.0), ROWS, **top)


@pytest.mark.parametrize(
    "given", [{"beta": 1.1}, {"temperature": 0}, {"top_k": 0}, {"top_k": 1, "add_tail": False}, {"add_tail": 1}], ids=str
)
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(BadLossSetting, match=r"GKDLoss\("):
        GKDLoss(**given)
