"""Focal loss against the plain formula."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

from twinkle_core import IGNORE_INDEX, ModelOutput, registry
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_focal.loss import FocalLoss


def plain(logits, labels, gamma, alpha):
    """-alpha (1 - p)^gamma log p, token by token, with Python's numbers."""
    total = 0.0
    for row, row_labels in zip(logits.tolist(), labels.tolist(), strict=True):
        for scores, label in zip(row, row_labels, strict=True):
            if label != IGNORE_INDEX:
                p = math.exp(scores[label]) / sum(map(math.exp, scores))
                total -= alpha * (1 - p) ** gamma * math.log(p)
    return total


@pytest.fixture
def batch():
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5))
    labels[0, :3] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    return logits, labels


def logps_of(logits, labels):
    taken = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return torch.where(labels != IGNORE_INDEX, taken, 0.0)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_it_is_the_formula(batch, gamma, alpha):
    logits, labels = batch
    got = FocalLoss(gamma, alpha)({"labels": labels}, ModelOutput(logps=logps_of(logits, labels)))
    assert got.sum.item() == pytest.approx(plain(logits, labels, gamma, alpha), rel=1e-12)
    assert int(got.weight) == 7


def test_without_gamma_it_is_cross_entropy_and_so_are_its_gradients(batch):
    logits, labels = batch
    (ours,) = torch.autograd.grad(FocalLoss(0.0)({"labels": labels}, ModelOutput(logps=logps_of(logits, labels))).sum, logits)
    theirs = cross_entropy(logits.reshape(-1, 7), labels.reshape(-1), reduction="sum", ignore_index=IGNORE_INDEX)
    assert torch.allclose(ours, *torch.autograd.grad(theirs, logits), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_gradients(batch, gamma):
    logits, labels = batch
    loss = FocalLoss(gamma)
    assert torch.autograd.gradcheck(lambda x: loss({"labels": labels}, ModelOutput(logps=logps_of(x, labels))).sum, logits)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_that_is_known_for_certain_has_finite_gradients(gamma, dtype):
    """p = 1: the power's own derivative is infinite there for gamma below 1; masked tokens have logps of 0 too."""
    logps = torch.tensor([[0.0, -1e-12, -1.0, 0.0]], dtype=dtype, requires_grad=True)
    got = FocalLoss(gamma)({"labels": torch.tensor([[1, 2, 3, IGNORE_INDEX]])}, ModelOutput(logps=logps))
    got.sum.backward()
    assert torch.isfinite(got.sum) and torch.isfinite(logps.grad).all()
    assert logps.grad[0, 3] == 0 and logps.grad[0, 2] < 0


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"gamma": -0.1}, "gamma"), ({"gamma": math.nan}, "gamma"), ({"gamma": math.inf}, "gamma"),
     ({"alpha": 0.0}, "alpha"), ({"alpha": math.nan}, "alpha")],
)  # fmt: skip
def test_values_out_of_range_are_told(wrong, what):
    with pytest.raises(ValueError, match=f"{what}="):
        FocalLoss(**wrong)


def test_it_answers_by_its_name():
    assert registry.resolve("loss", "focal") is registry.resolve("loss", "FocalLoss") is FocalLoss
    assert pickle.loads(pickle.dumps(FocalLoss(1.5))).gamma == 1.5


def test_micro_batches_are_one_batch():
    rows = random_rows([4, 7, 3, 6])

    def gradients(pieces):
        torch.manual_seed(0)
        model = session_model(TinyLM())
        model.set_loss("focal", gamma=2.0)
        model.set_optimizer("sgd", lr=1.0, weight_decay=0.0)
        for piece in pieces:
            model.forward_backward(inputs=piece, gradient_accumulation_steps=len(pieces))
        model.clip_grad_and_step(max_grad_norm=1e9)
        return torch.cat([p.detach().flatten() for p in model.engine.module.parameters()])

    whole, parts = gradients([rows]), gradients([rows[:1], rows[1:3], rows[3:]])
    torch.manual_seed(0)
    before = torch.cat([p.detach().flatten() for p in TinyLM().parameters()])
    assert not torch.equal(whole, before)
    assert torch.allclose(whole, parts, rtol=0, atol=1e-6)
