"""InfoNCE against its formula, over ranks and beside the faults that contrastive training is known for."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_core.errors import BadLabels, BadLossSetting, LabelsMissing, ReservedArgument
from twinkle_core.losses.infonce import InfoNCELoss
from twinkle_core.metrics.embedding import EmbeddingMetric
from twinkle_core.ops.gather import Ranks
from twinkle_core.testing import ranks
from twinkle_core.testing.engines import ToyEngine, session_model
from twinkle_core.testing.suites.outputs import outputs_of
from twinkle_core.testing.toys import TinyLM, contrast_rows
from twinkle_core.types import ModelOutput

SIZES = [2, 4, 3, 2]


def plain(embeddings, sizes, t, in_batch=True, hard=None, margin=None, qq=False, dd=False):
    """Group by group, term by term."""
    groups, row = [], 0
    for size in sizes:
        kept = size if hard is None else min(size, 2 + hard)
        groups.append([embeddings[row + i] for i in range(kept)])
        row += size
    total = 0.0
    for i, (q, p, *negatives) in enumerate(groups):
        right = q @ p
        others = [d for j, g in enumerate(groups) if j != i for d in g[1:]]
        found = [q @ d for d in negatives] + ([q @ d for d in others] if in_batch else [])
        found += [q @ g[0] for j, g in enumerate(groups) if j != i] if qq else []
        found += [p @ d for d in others] if dd else []
        found = [s for s in found if margin is None or float(s.detach()) <= float(right.detach()) + margin]
        total = total - right / t + torch.log(sum(torch.exp(s / t) for s in [right, *found]))
    return total


@pytest.mark.parametrize(
    "how",
    [
        {}, {"in_batch": False}, {"hard_negatives": 1}, {"hard_negatives": 0}, {"margin": 0.1}, {"query_query": True},
        {"document_document": True}, {"query_query": True, "document_document": True, "margin": -0.2, "hard_negatives": 2},
        {"in_batch": False, "margin": 0.0, "document_document": True},
    ],
    ids=str,
)  # fmt: skip
def test_blocks(how):
    torch.manual_seed(1)
    x = torch.nn.functional.normalize(torch.randn(sum(SIZES), 5, dtype=torch.float64), dim=1).requires_grad_()
    labels = torch.tensor([row["labels"] for row in contrast_rows(SIZES)])
    loss = InfoNCELoss(temperature=0.3, **how)
    got = loss({"labels": labels}, ModelOutput(embeddings=x))
    names = {
        "in_batch": "in_batch",
        "hard_negatives": "hard",
        "margin": "margin",
        "query_query": "qq",
        "document_document": "dd",
    }
    want = plain(x, SIZES, 0.3, **{names[k]: v for k, v in how.items()})
    torch.testing.assert_close(got.sum, want)
    torch.testing.assert_close(*(torch.autograd.grad(total, x)[0] for total in (got.sum, want)))
    assert got.weight == len(SIZES)
    alone = not (how.get("in_batch", True) or how.get("query_query") or how.get("document_document"))
    assert loss.scope == ("group" if alone else "batch") and loss.collective is not alone


@pytest.mark.parametrize("seed", range(20))
def test_B35_a_group_is_not_filled_up(seed):
    """One negative where three may be: the two documents, whatever the seed."""
    torch.manual_seed(seed)
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    loss = InfoNCELoss(temperature=1.0, in_batch=False, hard_negatives=3)
    got = loss({"labels": torch.tensor([1, 0, 0])}, ModelOutput(embeddings=x))
    assert float(got.sum) == pytest.approx(0.313262, abs=1e-6)


class Encoder:
    """theta times fixed vectors; two groups in one process, or one on each of two ranks."""

    VECTORS = [[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]]]
    component, arguments = None, {}

    def both(self):
        return self.loss_of([x for group in self.VECTORS for x in group], None)

    def loss_of(self, vectors, over, **how):
        theta = torch.ones((), dtype=torch.float64, requires_grad=True)
        x = theta * torch.tensor(vectors, dtype=torch.float64).reshape(len(vectors), 2)
        labels = torch.tensor([1 - i % 2 for i in range(len(vectors))]) if vectors else torch.full((1, 2), -100)
        x = x if vectors else theta * torch.ones(1, 2, dtype=torch.float64)
        got = InfoNCELoss(temperature=1.0, **how)({"labels": labels}, ModelOutput(embeddings=x), ranks=over)
        got.sum.backward()
        return [float(got.sum.detach()), float(theta.grad), float(got.weight)]

    def one_group(self, rank, world_size):
        return self.loss_of(self.VECTORS[rank], Ranks(), query_query=False)

    def uneven(self, rank, world_size):
        """Three ranks: two groups, one, and none at all."""
        shares = [self.VECTORS[0] + self.VECTORS[1], self.VECTORS[1], []]
        return self.loss_of(shares[rank], Ranks(), query_query=True, document_document=True)


def test_B34_the_gather_has_the_gradient_of_one_process():
    total, slope, weight = Encoder().both()
    assert (total / weight, slope / weight) == pytest.approx((0.503204, -0.268941), abs=1e-6)
    parts = ranks.run(Encoder, "one_group", 2, {})
    total, slope, weight = (sum(part[i] for part in parts) for i in range(3))
    assert weight == 2
    assert (total / weight, slope / weight) == pytest.approx((0.503204, -0.268941), abs=1e-6)


@pytest.mark.slow
def test_ranks_with_other_numbers_of_groups_or_none():
    one, two = Encoder.VECTORS
    whole = Encoder().loss_of([*one, *two, *two], None, query_query=True, document_document=True)
    parts = ranks.run(Encoder, "uneven", 3, {})
    assert [sum(part[i] for part in parts) for i in range(3)] == pytest.approx(whole)
    assert parts[2][2] == 0


class Embedding(ToyEngine):
    """An engine that pools: ``embeddings`` are the mean over a row."""

    def forward(self, batch, needs, *, train, temperature=1.0, task="causal_lm"):
        self.calls.append((needs, train, temperature, task))
        return outputs_of(self.module, batch.inputs, needs)


def train(rows, micro_batch_size=None, **how):
    torch.manual_seed(0)
    model = session_model(TinyLM(), engine=Embedding)
    model.set_loss("infonce", **how)
    model.set_optimizer("sgd", lr=0.1)
    model.add_metric("embedding", is_training=True)
    value = model.forward_backward(rows, micro_batch_size=micro_batch_size, task="embedding")
    model.clip_grad_and_step()
    assert {needs for needs, *_ in model.engine.calls} == {frozenset({"embeddings"})}
    return float(value), {k: v.clone() for k, v in model.get_state_dict().items()}, model.calculate_metric(True)


def test_groups_with_their_own_negatives_alone_may_be_cut():
    rows = contrast_rows(SIZES)
    whole, cut = train(rows, in_batch=False), train(rows, 3, in_batch=False)
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    assert cut[2] == pytest.approx(whole[2], rel=1e-5)
    for name, value in whole[1].items():
        torch.testing.assert_close(cut[1][name], value, rtol=1e-5, atol=1e-6)


def test_in_batch_negatives_are_those_of_the_micro_batch():
    """And a micro-batch is the mean of its groups, weighted by their number."""
    rows = contrast_rows([2, 2, 2, 2])
    whole, cut = train(rows), train(rows, 4)
    assert abs(whole[0] - cut[0]) > 1e-3
    halves = [train(rows[:4])[0], train(rows[4:])[0]]
    assert cut[0] == pytest.approx(sum(halves) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([0, 1, 0], "row 0 begins no group"), ([1, 0, 1], "the group at row 2 is an anchor without a positive"),
        ([1, 0, 2], "row 2 has 2"), ([[1, 0], [0, 0], [0, 0]], r"a row's labels are \[2\] values"),
        ([1, 0], "there are 2, and 3"),
    ],
)  # fmt: skip
def test_labels_that_make_no_groups_are_told(labels, told):
    with pytest.raises(BadLabels, match=told):
        InfoNCELoss()({"labels": torch.tensor(labels)}, ModelOutput(embeddings=torch.eye(3)))


def test_rows_without_labels_and_arguments_of_twinkles_own_are_told():
    with pytest.raises(LabelsMissing):
        InfoNCELoss()({}, ModelOutput(embeddings=torch.eye(3)))
    with pytest.raises(LabelsMissing):
        InfoNCELoss().groups([{"input_ids": [1]}])
    model = session_model(TinyLM(), engine=Embedding)
    model.set_loss("infonce")
    with pytest.raises(ReservedArgument, match="InfoNCELoss gets its 'ranks' from twinkle"):
        model.forward_backward(contrast_rows([2, 2]), ranks=None)


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0}, {"in_batch": 1}, {"hard_negatives": -1}, {"margin": math.inf}, {"query_query": None},
     {"document_document": "x"}, {"gather": 2}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(given):
    (name,) = given
    with pytest.raises(BadLossSetting, match=rf"InfoNCELoss\({name}="):
        InfoNCELoss(**given)


def test_the_metric_ranks_among_all_documents_since_its_reset():
    metric = EmbeddingMetric()
    batch = {"labels": torch.tensor([1, 0])}
    metric.accumulate(batch, ModelOutput(embeddings=torch.tensor([[1.0, 0.0], [0.8, 0.0]])))
    assert metric.calculate() == {"recall_at_1": 1.0, "positive_similarity": pytest.approx(0.8)}
    metric.accumulate(batch, ModelOutput(embeddings=torch.tensor([[0.0, 1.0], [0.9, 0.5]])))  # found first by both
    found = metric.calculate()
    assert found == pytest.approx({"recall_at_1": 0.5, "positive_similarity": 0.65, "negative_similarity": 0.45})
    metric.reset()
    metric.accumulate({"labels": torch.tensor([1, 0, 0, 0])}, ModelOutput(embeddings=torch.ones(4, 2)))
    assert metric.calculate()["recall_at_1"] == pytest.approx(1 / 3)
