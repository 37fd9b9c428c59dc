"""Suites of twinkle's own components that take more than building (L2). Named in the metadata, as third parties do."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim.lr_scheduler import ChainedScheduler, ReduceLROnPlateau

from twinkle_core.metrics.train import TrainMetric
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.suites.metric import MetricSuite
from twinkle_core.testing.suites.processor import ProcessorSuite
from twinkle_core.testing.suites.simple import SchedulerSuite


class TrainMetricSuite(MetricSuite):
    """Speeds depend on the clock."""

    component = TrainMetric
    by_the_clock = frozenset({"tokens_per_second", "seconds_per_step"})


class PlateauSuite(SchedulerSuite):
    """A name of torch's that ``set_lr_scheduler`` knows in order to say why it can't be used."""

    component = ReduceLROnPlateau
    expected_failures = {"test_follows_an_optimizer": "its step() needs a number that is measured"}


class ChainedSuite(SchedulerSuite):
    """One that ``set_lr_scheduler`` takes as an object alone."""

    component = ChainedScheduler
    expected_failures = {"test_follows_an_optimizer": "its first parameter is a list of schedulers, which know the optimizer"}


class InputProcessorSuite(ProcessorSuite):
    """Padded on either side, to a multiple, with the padding id of a real token, and packed."""

    component = InputProcessor

    @pytest.fixture(
        params=[{}, {"padding_side": "left"}, {"pad_to_multiple_of": 8, "pad_id": 3}, {"padding_free": True}],
        ids=["right", "left", "multiple", "packed"],
    )
    def processor(self, request: pytest.FixtureRequest) -> Any:
        """The processor to check."""
        return self.build(**request.param)
