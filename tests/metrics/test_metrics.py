"""Metrics: merged, then computed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.contracts.metric import StepResult
from twinkle_core.errors import NonFiniteGradients
from twinkle_core.metrics.accuracy import AccuracyMetric
from twinkle_core.metrics.loss import LossMetric
from twinkle_core.metrics.train import TrainMetric
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows
from twinkle_core.types import ModelOutput


class Says(TinyLM):
    """A model that predicts a given word at each position."""

    def __init__(self, words):
        super().__init__(vocabulary=4, width=4)
        self.words = words
        with torch.no_grad():
            self.output_layer.weight.copy_(torch.eye(4))
            self.output_layer.bias.zero_()

    def forward(self, inputs):
        return torch.nn.functional.one_hot(torch.tensor([self.words]), 4).float() + 0 * self.output_layer.weight.sum()


@pytest.mark.parametrize("training", [True, False])
def test_B45_accuracy_compares_with_the_aligned_label(training):
    """ids 2 1 2 1, predictions 1 2 0 1: two of the three labels are met, through the whole path."""
    model = session_model(Says([1, 2, 0, 1]))
    model.add_metric("accuracy")
    rows = [{"input_ids": [2, 1, 2, 1], "labels": [1, 2, 1, -100]}]
    if training:
        model.forward_backward(rows)
    else:
        model.forward_only(rows)
    assert model.calculate_metric(training) == {"accuracy": pytest.approx(2 / 3)}


batches = st.lists(st.tuples(st.floats(0, 9), st.integers(0, 50)), max_size=8)


@given(left=batches, right=batches)
def test_loss_of_two_ranks_is_the_loss_of_all_their_items(left, right):
    def of(pairs):
        metric = LossMetric()
        for mean, items in pairs:
            metric.accumulate({}, ModelOutput(loss=torch.tensor(mean, dtype=torch.float64), num_items=items))
        return metric

    merged = of(left)
    merged.merge(of(right).state())
    items = sum(n for _, n in left + right)
    if not items:
        assert merged.calculate() == {}
    else:
        want = sum(m * n for m, n in left + right) / items
        assert merged.calculate() == {"loss": pytest.approx(want)} == of(left + right).calculate()


def test_metrics_are_numbers_and_an_empty_window_has_none():
    model = session_model(TinyLM())
    model.set_optimizer("adamw", lr=0.125)
    for name in ("loss", "accuracy", "train"):
        model.add_metric(name, True)
    assert model.calculate_metric() == {}
    for _ in range(3):
        model.forward_backward(random_rows([3, 4]))
        model.clip_grad_and_step(gradient_accumulation_steps=1)
    numbers = model.calculate_metric()
    assert set(numbers) == {"loss", "accuracy", "step", "lr", "grad_norm", "tokens_per_second", "seconds_per_step"}
    assert all(type(v) in (int, float) and math.isfinite(v) for v in numbers.values())
    assert (numbers["step"], numbers["lr"]) == (3, 0.125)
    assert model.calculate_metric() == {}


def steps(metric, count, tokens, acted=True, norm=2.0):
    for i in range(count):
        metric.accumulate({"attention_mask": torch.ones(1, tokens)}, ModelOutput())
        metric.on_step(StepResult(acted, i + 1, norm, 0.1, 5.0))


def test_speed_counts_real_tokens_from_the_second_window_on(monkeypatch):
    clock = iter([10.0, 12.0, 16.0, 20.0, 21.0])
    monkeypatch.setattr("twinkle_core.metrics.speed.time.perf_counter", lambda: next(clock))
    metric = TrainMetric()
    steps(metric, 1, 100)
    assert "tokens_per_second" not in metric.calculate()
    steps(metric, 2, 30)
    numbers = metric.calculate()
    assert numbers["tokens_per_second"] == 60 / 6 and numbers["seconds_per_step"] == 3
    metric.reset()
    assert metric.calculate() == {}
    metric.accumulate({"attention_mask": torch.tensor([[1] * 10, [1] * 2 + [0] * 8])}, ModelOutput())
    metric.on_step(StepResult(True, 4, None, 0.1, 5.0))
    numbers = metric.calculate()
    assert numbers["tokens_per_second"] == 12 / 4 and "grad_norm" not in numbers


def test_ranks_add_tokens_and_share_steps(monkeypatch):
    clock = iter([0.0, 0.0, 2.0, 4.0])
    monkeypatch.setattr("twinkle_core.metrics.speed.time.perf_counter", lambda: next(clock))
    a, b = TrainMetric(), TrainMetric()
    steps(a, 1, 1)
    steps(b, 1, 1)
    steps(a, 1, 40)
    steps(b, 1, 60)
    a.merge(b.state())
    numbers = a.calculate()
    assert numbers["tokens_per_second"] == 100 / 4 and numbers["seconds_per_step"] == 4 and numbers["grad_norm"] == 2.0


def test_skipped_updates_are_counted_and_their_norm_is_not():
    metric = TrainMetric()
    steps(metric, 2, 3, acted=False, norm=math.inf)
    steps(metric, 1, 3, norm=4.0)
    assert metric.calculate()["skipped"] == 2 and metric.calculate()["grad_norm"] == 4.0


def test_accuracy_of_padding_and_masks():
    metric = AccuracyMetric()
    labels = torch.tensor([[1, -100, 2], [3, -100, -100]])
    metric.accumulate({"labels": labels}, ModelOutput(predictions=torch.tensor([[1, -100, 0], [3, -100, -100]])))
    assert metric.calculate() == {"accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize("how", ["dropped", "not finite", "skipped"])
def test_metrics_count_what_was_computed_whatever_becomes_of_the_window(how):
    """A call that succeeded stays counted when its window leads to no update; one that fails counts nothing."""
    model = session_model(TinyLM(), on_nonfinite="skip" if how == "skipped" else "raise")
    model.set_optimizer("sgd", lr=0.0)
    model.add_metric("loss", is_training=True)
    model.add_metric("accuracy", is_training=True)
    model.add_metric("train", is_training=True)
    first, second = random_rows([3, 5]), random_rows([7], seed=1)
    losses = [float(model.forward_backward(first)) for _ in range(2)]
    if how == "dropped":
        assert model.zero_grad(drop=True)
    else:
        model.engine.module.mix.weight.grad[0, 0] = math.nan
        if how == "skipped":
            assert not model.step()
        else:
            with pytest.raises(NonFiniteGradients):
                model.step()
    model.set_loss(lambda inputs, outputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(first)
    model.set_loss("cross_entropy")
    losses.append(float(model.forward_backward(second)))
    model.clip_grad_and_step()
    counts = [sum(label != -100 for row in rows for label in row["labels"]) for rows in (first, first, second)]
    states = {type(metric).__name__: metric.state() for metric in model.sessions[""].metrics[True]}
    numbers = model.calculate_metric()
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert numbers["loss"] == pytest.approx(mean, rel=1e-6)
    assert states["AccuracyMetric"]["all"] == sum(counts)
    assert numbers["step"] == 1 and numbers.get("skipped", 0) == (how == "skipped")
    assert states["TrainMetric"]["windows"] == (2 if how == "skipped" else 1), "a dropped window is no window of training"
