"""What twinkle asks of every loss and metric."""

from __future__ import annotations

from twinkle_core.testing import LossSuite, MetricSuite
from twinkle_focal.loss import FocalLoss
from twinkle_focal.metric import HardTokensMetric


class TestFocalLoss(LossSuite):
    component = FocalLoss


class TestFocalLossBelowOne(LossSuite):
    """A gamma whose power has no derivative at p = 1."""

    component = FocalLoss
    arguments = {"gamma": 0.5, "alpha": 0.25}


class TestHardTokensMetric(MetricSuite):
    component = HardTokensMetric
