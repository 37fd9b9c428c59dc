"""What fails on one rank fails on all, where others would wait for it. Losses: once all are through the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.errors import FailedElsewhere
from twinkle_core.isolation import attempt, describe
from twinkle_core.types import ModelOutput
from twinkle_megatron.parallel import GROUPS

T = TypeVar("T")


class Guarded:
    """Core's loss callback as Megatron's schedule calls it.

    Where there are other ranks, what it raises is kept: stages, tensor ranks and ranks of experts go forward and back together,
    and would wait for a rank that has left. Until the schedule's end it then gives zeros, whose gradient goes the way of a
    loss's.

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
        if self.several:
            _tell("a loss or metric", self.error)


def all_or_none(what: str, call: Callable[[], T]) -> T:
    """What ``call`` gives, once it is done on all ranks.

    Args:
        what: in words.
        call: needs no other rank.

    Raises:
        FailedElsewhere: it failed on another rank; and what ``call`` raises.
    """
    done = attempt(call)
    if dist.get_world_size() > 1:
        _tell(what, done.error)
    elif done.error is not None:
        raise done.error
    return cast(T, done.value)


def _tell(what: str, error: BaseException | None) -> None:
    failed = torch.tensor(float(error is not None))
    dist.all_reduce(failed, group=GROUPS.hosts)
    if not failed:
        return
    told: list[str | None] = [None] * dist.get_world_size(GROUPS.hosts)
    dist.all_gather_object(told, None if error is None else describe(error), group=GROUPS.hosts)
    if error is not None:
        raise error
    rank, why = next((rank, why) for rank, why in enumerate(told) if why is not None)
    raise FailedElsewhere(what, rank, why)


def _nothing(output: ModelOutput) -> torch.Tensor:
    """Zero, whose gradient goes the way of a loss's: by logits where there are some, else by all that there is."""
    found = {key: x for key, x in output.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if "logits" in found:
        found = {"logits": found["logits"]}
    total = torch.zeros((), device=next((x.device for x in found.values()), None))
    for x in found.values():
        total = total + x.float().sum() * 0.0
    return total
