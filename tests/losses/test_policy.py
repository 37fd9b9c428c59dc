"""Policy losses against their formulas, written token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_core.errors import BadLossArgument, BadLossSetting, MissingArgument
from twinkle_core.losses.bnpo import BNPOLoss
from twinkle_core.losses.cispo import CISPOLoss
from twinkle_core.losses.dr_grpo import DrGRPOLoss
from twinkle_core.losses.grpo import GRPOLoss
from twinkle_core.losses.gspo import GSPOLoss
from twinkle_core.losses.ppo import PPOLoss
from twinkle_core.losses.sapo import SAPOLoss
from twinkle_core.metrics.loss import LossMetric
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.engines import CallbackEngine, compute, session_model
from twinkle_core.testing.toys import TinyLM, logps_like, random_rows
from twinkle_core.types import ModelOutput

ROWS = random_rows([5, 3, 7, 2, 4, 6])
ADVANTAGES = [1.0, -0.5, 0.25, -1.5, 0.75, 0.5]
OLD, REF = logps_like(ROWS, seed=1), logps_like(ROWS, seed=2)


def clipped(r, a, low=0.2, high=0.2):
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def sapo(r, a):
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + torch.exp(-tau * (r - 1))) * a


def token_terms(formulas, module, term, beta=0.0, coef=0.0):
    """For each row the list of its tokens' terms."""
    rows = []
    for number, (logps, at, everything) in enumerate(formulas.labelled_logps(module, ROWS)):
        terms = []
        for logp, t in zip(logps, at, strict=True):
            value = term(logp, torch.exp(logp - OLD[number][t]), ADVANTAGES[number])
            delta = REF[number][t] - logp
            value = value + beta * (torch.exp(delta) - delta - 1)
            terms.append(value + coef * (everything[t].exp() * everything[t]).sum())
        rows.append(terms)
    return rows


@pytest.mark.parametrize("name", ["old_logps", "ref_logps"])
@pytest.mark.parametrize("form", [torch.tensor, list])
def test_sums_of_rows_are_no_logps_of_tokens(name, form):
    """Each token would get its row's sum."""
    model = session_model(TinyLM())
    model.set_loss(GRPOLoss(beta=0.1))
    given = {"ref_logps": REF, name: form([float(sum(one)) for one in REF])}
    with pytest.raises(BadLossArgument, match=rf"{name}[\s\S]*one number for each token"):
        model.forward_backward(ROWS, advantages=ADVANTAGES, **given)


TOKENS = sum(label != -100 for row in ROWS for label in row["labels"])


@pytest.mark.parametrize(
    ("loss", "term", "how"),
    [
        (GRPOLoss(), lambda p, r, a: clipped(r, a), "sequence"),
        (GRPOLoss(0.1, 0.3, beta=0.2), lambda p, r, a: clipped(r, a, 0.1, 0.3), "sequence"),
        (GRPOLoss(aggregation="token", beta=0.2, entropy_coef=0.3), lambda p, r, a: clipped(r, a), "token"),
        (BNPOLoss(beta=0.1), lambda p, r, a: clipped(r, a), "token"),
        (DrGRPOLoss(max_completion_length=50, entropy_coef=0.1), lambda p, r, a: clipped(r, a), "constant"),
        (SAPOLoss(beta=0.1), lambda p, r, a: sapo(r, a), "sequence"),
        (SAPOLoss(aggregation="token"), lambda p, r, a: sapo(r, a), "token"),
        (CISPOLoss(clip_high=0.2), lambda p, r, a: -min(r.detach(), 1.2) * a * p, "token"),
        (CISPOLoss(0.1, 0.1, aggregation="sequence"), lambda p, r, a: -min(max(r.detach(), 0.9), 1.1) * a * p, "sequence"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "beta") else "",
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_token_ratios(formulas, loss, term, how, packed):
    module = formulas.tiny()
    processor = InputProcessor(padding_free=packed)
    got = formulas.evaluate(module, loss, ROWS, processor=processor, advantages=ADVANTAGES, old_logps=OLD, ref_logps=REF)
    rows = token_terms(formulas, module, term, loss.beta, loss.entropy_coef)
    if how == "sequence":
        want, weight = sum(sum(row) / len(row) for row in rows), len(ROWS)
    else:
        want, weight = sum(sum(row) for row in rows), TOKENS if how == "token" else 50 * len(ROWS)
    formulas.assert_is(module, got, want, weight)
    assert loss.scope == ("token" if how == "token" else "row")


def test_gspo_has_one_ratio_a_row(formulas):
    module = formulas.tiny()
    got = formulas.evaluate(module, GSPOLoss(0.1, 0.2, beta=0.1), ROWS, advantages=ADVANTAGES, old_logps=OLD, ref_logps=REF)
    want = 0.0
    for number, (logps, at, _) in enumerate(formulas.labelled_logps(module, ROWS)):
        old, ref = (torch.tensor([given[number][t] for t in at], dtype=torch.float64) for given in (OLD, REF))
        s = torch.exp((logps - old).mean())
        delta = ref - logps
        want = want + clipped(s, ADVANTAGES[number], 0.1, 0.2) + 0.1 * (delta.exp() - delta - 1).mean()
    formulas.assert_is(module, got, want, len(ROWS))


@pytest.mark.parametrize("clip", [0.2, None])
def test_ppo_adds_the_value_loss(formulas, clip):
    module = formulas.tiny()
    returns, values = logps_like(ROWS, seed=5), logps_like(ROWS, seed=6)
    loss = PPOLoss(value_coef=0.7, value_clip=clip)
    got = formulas.evaluate(module, loss, ROWS, advantages=ADVANTAGES, old_logps=OLD, returns=returns, old_values=values)
    inputs = InputProcessor().collate(ROWS)
    now = module.value_head(module(inputs)).squeeze(-1)
    want = sum(sum(row) for row in token_terms(formulas, module, lambda p, r, a: clipped(r, a)))
    for number, row in enumerate(ROWS):
        for t, label in enumerate(row["labels"]):
            if label == -100:
                continue
            v, goal, old = now[number, t], returns[number][t], values[number][t]
            error = (v - goal) ** 2
            if clip is not None:
                error = max(error, (min(max(v, old - clip), old + clip) - goal) ** 2)
            want = want + 0.7 * error / 2
    formulas.assert_is(module, got, want, TOKENS)


def test_B42_the_minimum_is_taken_after_multiplying_by_the_advantage():
    """Ratios 1.5, 0.5, 1.5, 0.5 with advantages +1, +1, -1, -1: losses -1.2, -0.5, 1.5, 0.8, half of them clipped."""
    ratios = torch.tensor([[1.5], [0.5], [1.5], [0.5]], dtype=torch.float64)
    logps = ratios.log().requires_grad_()
    inputs = {"labels": torch.zeros(4, 1, dtype=torch.long)}
    given = {"advantages": [1.0, 1.0, -1.0, -1.0], "old_logps": torch.zeros(4, 1, dtype=torch.float64)}
    got = GRPOLoss(0.2)(inputs, ModelOutput(logps=logps), **given)
    each = []
    for i in range(4):
        one = {"advantages": given["advantages"][i : i + 1], "old_logps": given["old_logps"][:1]}
        each.append(GRPOLoss(0.2)({"labels": inputs["labels"][:1]}, ModelOutput(logps=logps[i : i + 1].detach()), **one))
    assert [round(float(one.sum), 6) for one in each] == [-1.2, -0.5, 1.5, 0.8]
    mean = got.sum / got.weight
    assert float(mean.detach()) == pytest.approx(0.15)
    (slope,) = torch.autograd.grad(mean, logps)
    torch.testing.assert_close(slope.flatten(), torch.tensor([0, -0.125, 0.375, 0], dtype=torch.float64))
    assert {k: float(s / w) for k, (s, w) in got.metrics.items()} == pytest.approx(
        {"clip_low": 0.25, "clip_high": 0.25, "ratio": 1.0}
    )


@pytest.mark.parametrize(
    "loss",
    [GRPOLoss(beta=0.1), GRPOLoss(aggregation="token"), DrGRPOLoss(), GSPOLoss(), SAPOLoss(), CISPOLoss(), BNPOLoss(),
     PPOLoss()],
    ids=lambda loss: f"{type(loss).__name__}-{loss.aggregation}",
)  # fmt: skip
@pytest.mark.parametrize(
    ("side", "engine"), [("right", None), ("left", None), ("packed", None), ("right", CallbackEngine)],
    ids=["right", "left", "packed", "callback"],
)  # fmt: skip
def test_micro_batches_are_one_batch_with_logps_of_a_forward(loss, side, engine):
    """logps of ``forward_only`` over all rows, as a tensor, go in: each micro-batch takes the part that is its own."""
    rows = random_rows([7, 4, 4, 2, 6, 3], seed=4)
    moved = {"returns": 0.5} if type(loss) is PPOLoss else {}

    def train(micro_batch_size):
        torch.manual_seed(0)
        model = session_model(TinyLM(), **({"engine": engine} if engine else {}))
        model.set_processor(InputProcessor(padding_free=side == "packed", padding_side="right" if side == "packed" else side))
        model.set_loss(loss)
        model.set_optimizer("sgd", lr=0.1)
        model.add_metric(LossMetric, is_training=True)
        with torch.no_grad():
            known = model.forward_only(rows).logps
        old = known + 0.1 * torch.sin(torch.arange(known.numel())).view_as(known)
        given = {
            "advantages": ADVANTAGES,
            "old_logps": old,
            "ref_logps": known.numpy(),
            **{k: old * v for k, v in moved.items()},
        }
        value = model.forward_backward(rows, micro_batch_size=micro_batch_size, **given)
        model.clip_grad_and_step()
        state = {k: v.clone() for k, v in model.get_state_dict().items()}
        return float(value), state, model.calculate_metric(True)

    whole, cut = train(None), train(2)
    assert cut[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-7)
    assert cut[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-7)
    for name, value in whole[1].items():
        torch.testing.assert_close(cut[1][name], value, rtol=1e-5, atol=1e-6)


def test_without_old_logps_the_gradient_is_the_plain_policy_gradient(formulas):
    module = formulas.tiny()
    got = formulas.evaluate(module, GRPOLoss(aggregation="token"), ROWS, advantages=ADVANTAGES)
    plain = -sum((logps * a).sum() for (logps, _, _), a in zip(formulas.labelled_logps(module, ROWS), ADVANTAGES, strict=True))
    torch.testing.assert_close(formulas.gradient(module, got.sum), formulas.gradient(module, plain))
    on_policy = formulas.evaluate(module, SAPOLoss(aggregation="token"), ROWS, advantages=ADVANTAGES)
    torch.testing.assert_close(formulas.gradient(module, on_policy.sum), formulas.gradient(module, plain))


def test_forms_of_arguments_mean_the_same(formulas):
    """A number a row, one a token as tensor or lists, and lists with one a label, as samplers give completions."""
    module, loss = formulas.tiny(), GRPOLoss()
    inputs = InputProcessor().collate(ROWS)
    mask = inputs["labels"] != -100
    wide = torch.zeros(mask.shape, dtype=torch.float64)
    for number, one in enumerate(OLD):
        wide[number, : len(one)] = torch.tensor(one)
    labels_only = [
        [x for x, label in zip(o, r["labels"], strict=True) if label != -100] for o, r in zip(OLD, ROWS, strict=True)
    ]
    gains = torch.tensor(ADVANTAGES)[:, None].expand(mask.shape)
    forms = [(ADVANTAGES, OLD), (torch.tensor(ADVANTAGES), wide), (gains, labels_only), (gains.tolist(), wide.numpy())]
    wide_with_rubbish = wide.masked_fill(~mask, math.nan)
    sums = [
        float(formulas.evaluate(module, loss, ROWS, advantages=a, old_logps=o).sum.detach())
        for a, o in [*forms, (ADVANTAGES, wide_with_rubbish)]
    ]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"advantages": [1.0, 2.0]}, r"GRPOLoss can't use 'advantages': its shape is \[2\], the batch has 6 rows"),
        ({"advantages": "x"}, "can't be made a tensor"),
        ({"advantages": ADVANTAGES, "old_logps": torch.zeros(6, 3)}, r"'old_logps': its shape is \[6, 3\]"),
        ({"advantages": ADVANTAGES, "old_logps": OLD[:4]}, "it has 4 lists, and the batch 6 rows"),
        (
            {"advantages": ADVANTAGES, "old_logps": [[0.0] * 99, *OLD[1:]]},
            r"for row 0 it has shape \[99\]; the row has 5",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_told(formulas, given, told):
    with pytest.raises(BadLossArgument, match=told):
        formulas.evaluate(formulas.tiny(), GRPOLoss(), ROWS, **given)


def test_what_the_settings_need_is_asked_for_before_anything_runs(formulas):
    model = session_model(TinyLM())
    model.set_loss("grpo", beta=0.1)
    with pytest.raises(MissingArgument, match="GRPOLoss needs 'ref_logps'"):
        model.forward_backward(ROWS, advantages=ADVANTAGES)
    with pytest.raises(MissingArgument, match="'advantages'"):
        model.forward_backward(ROWS, ref_logps=REF)
    model.set_loss("ppo")
    with pytest.raises(MissingArgument, match="PPOLoss needs 'returns'"):
        model.forward_backward(ROWS, advantages=ADVANTAGES)
    assert model.engine.calls == []
    module = formulas.tiny()
    for loss, given in ((GRPOLoss(), {"advantages": None}), (PPOLoss(), {"advantages": ADVANTAGES})):
        with pytest.raises(MissingArgument):
            formulas.evaluate(module, loss, ROWS, **given)


@pytest.mark.parametrize("loss", [GRPOLoss(beta=0.5), GSPOLoss(), SAPOLoss(), CISPOLoss(), DrGRPOLoss()],
                         ids=lambda loss: type(loss).__name__)  # fmt: skip
@pytest.mark.parametrize("gap", [-700.0, 700.0])
def test_logps_far_from_the_old_ones_stay_finite(loss, gap):
    logps = torch.full((2, 3), -350.0 + gap / 2, requires_grad=True)
    other = torch.full((2, 3), -350.0 - gap / 2)
    inputs = {"labels": torch.zeros(2, 3, dtype=torch.long)}
    got = loss(inputs, ModelOutput(logps=logps), advantages=[1.0, -1.0], old_logps=other, ref_logps=other)
    (slope,) = torch.autograd.grad(got.sum, logps)
    assert bool(got.sum.isfinite()) and bool(slope.isfinite().all())


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (GRPOLoss, "clip_low", -0.1), (GRPOLoss, "clip_high", "x"), (GRPOLoss, "beta", -1), (GRPOLoss, "aggregation", "mean"),
        (GRPOLoss, "aggregation", "constant"), (GRPOLoss, "entropy_coef", math.nan), (GSPOLoss, "clip_low", None),
        (SAPOLoss, "tau_pos", 0), (SAPOLoss, "tau_neg", -1.0), (CISPOLoss, "clip_high", True), (BNPOLoss, "beta", "0.1"),
        (DrGRPOLoss, "max_completion_length", 0), (PPOLoss, "value_coef", -1), (PPOLoss, "value_clip", -0.5),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(cls, name, value):
    with pytest.raises(BadLossSetting, match=rf"{cls.__name__}\({name}={value!r}\): {name} must be"):
        cls(**{name: value})


def test_entropies_are_computed_only_for_a_bonus(formulas):
    assert GRPOLoss().needs == {"logps"}
    assert GRPOLoss(entropy_coef=0.1).needs == {"logps", "entropies"}
    assert PPOLoss(entropy_coef=0.1).needs == {"logps", "entropies", "values"}
    assert compute(formulas.tiny(), InputProcessor().collate(ROWS), GRPOLoss().needs).entropies is None
