"""Learning-rate schedules with warm-up (L2). Steps are optimizer updates, never micro-batches.

Each is a closed form of the number of updates, so its state is a few numbers: setting it twice changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle_core.errors import BadScheduler


class _Factor(LRScheduler):
    """lr = base lr × factor(updates so far)."""

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch)

    def factor(self, updates: int) -> float:
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


def _check(owner: str, warmup: int, total: int | None = None) -> None:
    if warmup < 0:
        raise BadScheduler(owner, f"num_warmup_steps={warmup} is negative")
    if total is not None and total < max(1, warmup):
        raise BadScheduler(owner, f"num_training_steps={total} is less than num_warmup_steps={warmup}, or than 1")


class CosineWarmup(_Factor):
    """Linear warm-up from 0, then half a cosine down to ``min_lr_ratio`` (Loshchilov & Hutter 2017, SGDR, without restarts).

    After s updates, w = num_warmup_steps, n = num_training_steps, m = min_lr_ratio:
    s / w up to w; then m + (1 - m) (1 + cos(pi (s - w) / (n - w))) / 2; m from n on.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        num_warmup_steps: updates of warm-up.
        num_training_steps: updates in all.
        min_lr_ratio: the end, as a share of the base learning rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int = 0,
        *,
        num_training_steps: int,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _check("CosineWarmup", num_warmup_steps, num_training_steps)
        self.num_warmup_steps, self.num_training_steps = num_warmup_steps, num_training_steps
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer, last_epoch)

    def factor(self, updates: int) -> float:
        if updates < self.num_warmup_steps:
            return updates / self.num_warmup_steps
        done = (updates - self.num_warmup_steps) / max(1, self.num_training_steps - self.num_warmup_steps)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class LinearWarmup(_Factor):
    """Linear warm-up from 0, then linear decay to 0 at ``num_training_steps``.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        num_warmup_steps: updates of warm-up.
        num_training_steps: updates in all.
    """

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int = 0, *, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        _check("LinearWarmup", num_warmup_steps, num_training_steps)
        self.num_warmup_steps, self.num_training_steps = num_warmup_steps, num_training_steps
        super().__init__(optimizer, last_epoch)

    def factor(self, updates: int) -> float:
        if updates < self.num_warmup_steps:
            return updates / self.num_warmup_steps
        left = self.num_training_steps - updates
        return max(0.0, left / max(1, self.num_training_steps - self.num_warmup_steps))


class Constant(_Factor):
    """Linear warm-up from 0, then the base learning rate.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        num_warmup_steps: updates of warm-up.
    """

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int = 0, *, last_epoch: int = -1) -> None:
        _check("Constant", num_warmup_steps)
        self.num_warmup_steps = num_warmup_steps
        super().__init__(optimizer, last_epoch)

    def factor(self, updates: int) -> float:
        return updates / self.num_warmup_steps if updates < self.num_warmup_steps else 1.0
