"""Preference losses against their formulas, written pair by pair in float64."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_core.errors import BadGroups, BadLossArgument, BadLossSetting, LabelsMissing, MissingArgument
from twinkle_core.losses.cpo import CPOLoss
from twinkle_core.losses.dpo import DPOLoss
from twinkle_core.losses.orpo import ORPOLoss
from twinkle_core.losses.simpo import SimPOLoss
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, logps_like, random_rows
from twinkle_core.types import ModelOutput

ROWS = random_rows([5, 3, 7, 2, 4, 6])
REF = logps_like(ROWS, seed=2)


def log_sigmoid(x):
    return -torch.log(1 + torch.exp(-x))


def answers(formulas, module, ref=True):
    """For each pair: (sum of logps, sum of the reference's, tokens) of the chosen and of the rejected answer."""
    found = []
    for number, (logps, at, _) in enumerate(formulas.labelled_logps(module, ROWS)):
        found.append((logps.sum(), sum(REF[number][t] for t in at) if ref else 0.0, len(at)))
    return list(zip(found[0::2], found[1::2], strict=True))


def d_of(pair, mean=False):
    (w, rw, nw), (x, rx, nx) = pair
    return (w - rw) / (nw if mean else 1) - (x - rx) / (nx if mean else 1)


FORMULAS = {
    "sigmoid": (DPOLoss(0.3), lambda p: -log_sigmoid(0.3 * d_of(p))),
    "smoothed": (
        DPOLoss(0.3, label_smoothing=0.2),
        lambda p: -0.8 * log_sigmoid(0.3 * d_of(p)) - 0.2 * log_sigmoid(-0.3 * d_of(p)),
    ),
    "average": (DPOLoss(0.3, average=True), lambda p: -log_sigmoid(0.3 * d_of(p, True))),
    "hinge": (DPOLoss(0.3, "hinge"), lambda p: max(1 - 0.3 * d_of(p), 0 * d_of(p))),
    "ipo": (DPOLoss(0.3, "ipo"), lambda p: (d_of(p, True) - 1 / 0.6) ** 2),
    "ipo-sums": (DPOLoss(0.3, "ipo", average=False), lambda p: (d_of(p) - 1 / 0.6) ** 2),
    "simpo": (
        SimPOLoss(2.5, 0.4),
        lambda p: -log_sigmoid(2.5 * p[0][0] / p[0][2] - 2.5 * p[1][0] / p[1][2] - 0.4),
    ),
    "cpo": (CPOLoss(0.2, 0.5), lambda p: -log_sigmoid(0.2 * (p[0][0] - p[1][0])) - 0.5 * p[0][0]),
    "cpo-mean": (
        CPOLoss(0.2, average_nll=True, label_smoothing=0.1),
        lambda p: -0.9 * log_sigmoid(0.2 * (p[0][0] - p[1][0])) - 0.1 * log_sigmoid(-0.2 * (p[0][0] - p[1][0]))
        - p[0][0] / p[0][2],
    ),
    "orpo": (
        ORPOLoss(0.6),
        lambda p: -p[0][0] / p[0][2] - 0.6 * log_sigmoid(torch.log(odds(p[0][0] / p[0][2]) / odds(p[1][0] / p[1][2]))),
    ),
}  # fmt: skip


def odds(m):
    return m.exp() / (1 - m.exp())


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_pairs(formulas, name, packed):
    loss, formula = FORMULAS[name]
    module = formulas.tiny()
    given = {"ref_logps": REF} if type(loss) is DPOLoss else {}
    got = formulas.evaluate(module, loss, ROWS, processor=InputProcessor(padding_free=packed), **given)
    formulas.assert_is(module, got, sum(formula(pair) for pair in answers(formulas, module)), 3)
    assert loss.scope == "group" and loss.groups(ROWS) == [2, 2, 2]


def test_without_a_reference_its_logps_are_zero(formulas):
    module = formulas.tiny()
    got = formulas.evaluate(module, DPOLoss(0.3, reference_free=True), ROWS)
    formulas.assert_is(module, got, sum(-log_sigmoid(0.3 * d_of(pair)) for pair in answers(formulas, module, ref=False)), 3)


def test_kto_pair_compares_with_the_mean_of_the_others(formulas):
    module = formulas.tiny()
    loss = DPOLoss(0.3, "kto_pair")
    got = formulas.evaluate(module, loss, ROWS, ref_logps=REF)
    chosen, rejected = ([a[i][0] - a[i][1] for a in answers(formulas, module)] for i in (0, 1))
    z_w, z_l = (max(float(sum(h).detach()) / 3, 0.0) for h in (chosen, rejected))
    want = sum(1 - torch.sigmoid(0.3 * (h - z_l)) for h in chosen) + sum(1 - torch.sigmoid(0.3 * (z_w - h)) for h in rejected)
    formulas.assert_is(module, got, want, 6)
    assert loss.scope == "batch"
    assert (z_w, z_l) != (0.0, 0.0)


@pytest.mark.parametrize("form", ["padded", "right", "left", "packed"])
def test_B37_the_sum_is_over_the_answer_and_nothing_else(form):
    """Tokens 0 and 1 are the prompt; logps of tokens 1 to 4 are -0.5, -0.25, -1, -2: the answer's is -3.25."""
    labels, logps = [-100, 7, 7, 7, -100], [-0.5, -0.25, -1.0, -2.0, 0.0]  # aligned: position t predicts token t + 1
    row = {"input_ids": [1, 2, 3, 4, 5], "labels": labels}
    long = {"input_ids": [1] * 7, "labels": [*labels, -100, -100]}
    rows = [row, row] if form in ("padded", "packed") else [row, long]
    processor = InputProcessor(padding_free=form == "packed", padding_side="left" if form == "left" else "right")
    inputs = processor.collate(rows)
    given = torch.full(inputs["labels"].shape, -9.0, dtype=torch.float64)
    starts = {"packed": [(0, 0), (0, 5)], "left": [(0, 2), (1, 0)]}.get(form, [(0, 0), (1, 0)])
    for row_at, column in starts:
        given[row_at, column : column + 5] = torch.tensor(logps)
    pairs = DPOLoss().pairs(inputs, ModelOutput(logps=given), given)
    assert [float(x) for x in (pairs.chosen, pairs.rejected, pairs.ref_chosen, pairs.ref_rejected)] == [-3.25] * 4
    assert int(pairs.chosen_tokens) == 3


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, 0.644397),
        ({"average": True}, 0.668460),
        ({"loss_type": "ipo"}, 20.25),
        ({"loss_type": "ipo", "average": False}, 16.0),
    ],
)
@pytest.mark.parametrize("width", [4, 6])
def test_B39_sums_and_means_are_over_the_answers_own_tokens(settings, right, width):
    """Chosen: 2 tokens, -2 against -3; rejected: 4 tokens, both -4; whatever the padding."""
    labels = torch.full((2, width), -100)
    labels[0, :2], labels[1, :4] = 1, 1
    mask = labels != -100
    logps = torch.where(mask, -1.0, 0.0).double()
    ref = logps.clone()
    ref[0, :2] = -1.5
    got = DPOLoss(beta=0.1, **settings)({"labels": labels}, ModelOutput(logps=logps), ref_logps=ref)
    assert float(got.sum / got.weight) == pytest.approx(right, abs=1e-6)
    by_sums = DPOLoss(beta=0.1, **settings)({"labels": labels}, ModelOutput(logps=logps), ref_logps=[-3.0, -4.0])
    assert float(by_sums.sum) == pytest.approx(float(got.sum))


@pytest.mark.parametrize("loss", ["dpo", "simpo", "cpo", "orpo"])
@pytest.mark.parametrize("side", ["right", "left", "packed"])
def test_micro_batches_are_one_batch(loss, side):
    rows = [ROWS[i] for i in (2, 5, 0, 4, 1, 3)]

    def train(size):
        torch.manual_seed(0)
        model = session_model(TinyLM())
        model.set_processor(InputProcessor(padding_free=side == "packed", padding_side="right" if side == "packed" else side))
        model.set_loss(loss)
        model.set_optimizer("sgd", lr=0.1)
        model.add_metric("dpo", is_training=True)
        given = {"ref_logps": model.forward_only(rows, return_logits=False).logps - 0.1} if loss == "dpo" else {}
        value = model.forward_backward(rows, micro_batch_size=size, **given)
        model.clip_grad_and_step()
        return float(value), {k: v.clone() for k, v in model.get_state_dict().items()}, model.calculate_metric(True)

    whole, cut = train(None), train(2)
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    assert set(whole[2]) == {"reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"}
    assert cut[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)
    for name, value in whole[1].items():
        torch.testing.assert_close(cut[1][name], value, rtol=1e-5, atol=1e-6)


def test_a_pair_with_an_answer_without_labels_counts_nothing(formulas):
    module = formulas.tiny()
    silent = {**ROWS[0], "labels": [-100] * 5}
    alone = formulas.evaluate(module, DPOLoss(), ROWS[:2], ref_logps=REF[:2])
    both = formulas.evaluate(module, DPOLoss(), [*ROWS[:2], silent, ROWS[1]], ref_logps=[*REF[:2], REF[0], REF[1]])
    torch.testing.assert_close(both.sum, alone.sum)
    assert float(both.weight) == 1 and {k: w for k, (_, w) in both.metrics.items()} == dict.fromkeys(alone.metrics, 1)


def test_numbers_of_a_pair():
    labels = torch.ones(4, 1, dtype=torch.long)
    logps = torch.tensor([[-1.0], [-3.0], [-2.0], [-1.0]])
    got = DPOLoss(0.5)({"labels": labels}, ModelOutput(logps=logps), ref_logps=torch.full((4, 1), -2.0))
    assert {k: float(s / w) for k, (s, w) in got.metrics.items()} == {
        "reward_chosen": 0.25, "reward_rejected": 0.0, "reward_margin": 0.25, "reward_accuracy": 0.5
    }  # fmt: skip


def test_odd_rows_and_bad_references_are_told(formulas):
    module = formulas.tiny()
    with pytest.raises(BadGroups, match=r"DPOLoss cuts 3 rows into groups of \[2\]"):
        formulas.evaluate(module, DPOLoss(), ROWS[:3], ref_logps=REF[:3])
    model = session_model(TinyLM())
    model.set_loss("dpo")
    with pytest.raises(BadGroups):
        model.forward_backward(ROWS[:3], ref_logps=REF[:3])
    with pytest.raises(MissingArgument, match="DPOLoss needs 'ref_logps'"):
        model.forward_backward(ROWS)
    assert model.engine.calls == []
    with pytest.raises(MissingArgument):
        formulas.evaluate(module, DPOLoss(), ROWS)
    with pytest.raises(BadLossArgument, match=r"'ref_logps': its shape is \[4\], the batch has 6 rows"):
        formulas.evaluate(module, DPOLoss(), ROWS, ref_logps=[1.0] * 4)
    with pytest.raises(LabelsMissing):
        DPOLoss()({}, ModelOutput(logps=torch.zeros(2, 2)), ref_logps=[0.0, 0.0])


@pytest.mark.parametrize(
    ("cls", "given", "name"),
    [
        (DPOLoss, {"beta": 0}, "beta"), (DPOLoss, {"loss_type": "kto"}, "loss_type"),
        (DPOLoss, {"reference_free": 1}, "reference_free"),
        (DPOLoss, {"label_smoothing": 0.5}, "label_smoothing"), (DPOLoss, {"average": "yes"}, "average"),
        (DPOLoss, {"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing"), (SimPOLoss, {"beta": math.inf}, "beta"),
        (SimPOLoss, {"gamma": -1}, "gamma"), (CPOLoss, {"alpha": None}, "alpha"), (CPOLoss, {"average_nll": 1}, "average_nll"),
        (ORPOLoss, {"beta": "x"}, "beta"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(cls, given, name):
    with pytest.raises(BadLossSetting, match=rf"{cls.__name__}\({name}="):
        cls(**given)
