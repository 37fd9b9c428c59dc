"""Losses that fail on one rank while others compute on: all go through the schedule to its end, and then all are told."""

from __future__ import annotations

import torch
import torch.distributed as dist

from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.errors import FailedElsewhere
from twinkle_core.isolation import attempt, describe
from twinkle_core.types import ModelOutput
from twinkle_megatron.parallel import GROUPS


class Guarded:
    """Core's loss callback as Megatron's schedule calls it.

    Where there are other ranks, what it raises is kept: stages, tensor ranks and ranks of experts go forward and back together,
    and would wait for a rank that has left. Until the schedule's end it then gives zeros, through which one goes back as through
    a loss.

    Args:
        loss_fn: of core.
        several: whether there are other ranks.
    """

    def __init__(self, loss_fn: LossFn, several: bool) -> None:
        self.loss_fn, self.several = loss_fn, several
        self.error: BaseException | None = None

    def __call__(self, batch: Batch, output: ModelOutput) -> torch.Tensor:
        if self.error is None:
            done = attempt(lambda: self.loss_fn(batch, output))
            if done.value is not None:
                # the schedule frees what it sends on, so the loss must be no view of anything
                return done.value.sum * 1.0
            assert done.error is not None
            if not self.several:
                raise done.error
            self.error = done.error
        return _nothing(output)

    def tell(self) -> None:
        """Raise what was kept, on the ranks where it failed; on all others that it has.

        Raises:
            FailedElsewhere, and what a loss or metric has raised.
        """
        if not self.several:
            return
        failed = torch.tensor(float(self.error is not None))
        dist.all_reduce(failed, group=GROUPS.hosts)
        if not failed:
            return
        told: list[str | None] = [None] * dist.get_world_size(GROUPS.hosts)
        dist.all_gather_object(told, None if self.error is None else describe(self.error), group=GROUPS.hosts)
        if self.error is not None:
            raise self.error
        rank, why = next((rank, why) for rank, why in enumerate(told) if why is not None)
        raise FailedElsewhere("a loss or metric", rank, why)


def _nothing(output: ModelOutput) -> torch.Tensor:
    """Zero, whose gradient goes the way of a loss's: by logits where there are some, else by all that there is."""
    found = {key: x for key, x in output.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if "logits" in found:
        found = {"logits": found["logits"]}
    total = torch.zeros((), device=next((x.device for x in found.values()), None))
    for x in found.values():
        total = total + x.float().sum() * 0.0
    return total
