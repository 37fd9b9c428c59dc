"""A pass through the model that fails on one rank fails on all, in the same call (L2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from twinkle_core.contracts.engine import Batch, Engine, LossFn
from twinkle_core.isolation import attempt
from twinkle_core.train import losses
from twinkle_core.train.together import in_pass, together
from twinkle_core.types import LossOutput, ModelOutput


class Guarded:
    """A loss callback whose error is kept: ranks that run the model together go forward and back together, and would wait for a
    rank that has left. Until the schedule's end it then gives zeros, whose gradient goes the way of a loss's.

    Args:
        loss_fn: core's.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        self.error: BaseException | None = None

    def __call__(self, batch: Batch, output: ModelOutput) -> LossOutput:
        if self.error is None:
            done = attempt(lambda: self.loss_fn(batch, output))
            self.error = done.error
            if done.error is None:
                return cast(LossOutput, done.value)
        return LossOutput(losses.zero(output), 0.0)


@contextlib.contextmanager
def as_one(engine: Engine, loss_fn: LossFn) -> Iterator[LossFn]:
    """Around ``run_schedule``: what a loss or metric raises on one rank is raised there, and FailedElsewhere on all others,
    once all are through. One message.

    Where ranks don't run the model together, the same goes for all that is raised inside. Where they do, others wait within the
    pass for a rank on which the model itself fails: see ``leaving``.

    Args:
        loss_fn: core's. Gives the one to be called in its place.
    """
    if not engine.in_step or engine.mesh.world_size == 1:
        with together(engine, None):
            yield loss_fn
        return
    guarded = Guarded(loss_fn)
    with in_pass(engine):
        yield guarded
    with together(engine, None):
        if guarded.error is not None:
            raise guarded.error
