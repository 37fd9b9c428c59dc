"""The shares, counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_core import IGNORE_INDEX, ModelOutput, registry
from twinkle_focal.metric import HardTokensMetric

P = [[0.9, 0.5, 0.1], [0.25, 1.0, 0.49]]
LABELS = torch.tensor([[1, 2, IGNORE_INDEX], [3, 4, 5]])


def taken(metric, rows):
    logps = torch.tensor([P[r] for r in rows], dtype=torch.float64).log()
    metric.accumulate({"labels": LABELS[list(rows)]}, ModelOutput(logps=logps))


def test_the_shares():
    metric = HardTokensMetric(threshold=0.5, gamma=2.0)
    taken(metric, (0, 1))
    counted = [0.9, 0.5, 0.25, 1.0, 0.49]
    got = metric.calculate()
    assert got["hard_tokens"] == 2 / 5  # 0.5 is not below 0.5
    assert got["focus"] == pytest.approx(sum((1 - p) ** 2 for p in counted) / 5, abs=1e-12)


def test_ranks_with_different_numbers_of_tokens_merge_to_the_whole():
    whole, one, two = HardTokensMetric(), HardTokensMetric(), HardTokensMetric()
    taken(whole, (0, 1))
    taken(one, (0,))
    taken(two, (1,))
    one.merge(two.state())
    assert one.calculate() == pytest.approx(whole.calculate())
    one.reset()
    assert one.calculate() == {}


@pytest.mark.parametrize("wrong", [{"threshold": 0.0}, {"threshold": 1.5}, {"threshold": math.nan}, {"gamma": -1.0}])
def test_values_out_of_range_are_told(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        HardTokensMetric(**wrong)


def test_it_answers_by_its_name():
    assert registry.resolve("metric", "hard_tokens") is registry.resolve("metric", "HardTokens") is HardTokensMetric
