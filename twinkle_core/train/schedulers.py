"""Learning-rate schedules with warm-up (L2). Steps are optimizer updates, never micro-batches.

Each is a closed form of the number of updates, so its state is a few numbers: setting it twice changes nothing.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from twinkle_core.errors import BadScheduler
from twinkle_core.train.limits import A_TEXT, is_number, number_texts
from twinkle_core.train.optim import described

#: what a scheduler raises for arguments that it can't count with
_REFUSALS = (TypeError, ValueError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError)


#: schedulers that are made of others over one optimizer, so that neither a name nor a class with arguments is enough
_OF_OTHERS = (lr_scheduler.ChainedScheduler, lr_scheduler.SequentialLR)


def check_usable(spec: Any) -> None:
    """Raise BadScheduler for one that a window can't step, whatever it is made of; ``spec``: a class, function or object."""
    cls = spec if inspect.isclass(spec) else type(spec)
    name = cls.__name__
    step = inspect.signature(cls.step) if hasattr(cls, "step") else inspect.Signature()
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    asked = [p.name for p in list(step.parameters.values())[1:] if p.default is p.empty and p.kind in positional]
    if asked:
        why = f"its step() needs {', '.join(map(repr, asked))}, and a schedule here is stepped by the count of updates alone"
        way = "take 'cosine_warmup' or 'linear_warmup', or make it over your optimizer, don't set it, and step it yourself"
        raise BadScheduler(name, f"{why}; {way}")


def check_makeable(spec: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise BadScheduler for a class that is made of other schedulers, unless they are given."""
    if spec in _OF_OTHERS and (spec is lr_scheduler.ChainedScheduler or not kwargs.get("schedulers")):
        raise BadScheduler(
            spec.__name__,
            "it is made of other schedulers over one optimizer, which a name or class can't give; make the optimizer and it, "
            f"then set_optimizer(optimizer) and set_lr_scheduler({spec.__name__}(...))",
        )


def rehearse(spec: Callable[..., Any], optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
    """Make a scheduler and step it once over a copy of the optimizer's groups: some find their arguments wrong only then, and
    one that fails while it is made has changed learning rates already.

    Raises:
        BadScheduler.
    """
    name = getattr(spec, "__name__", repr(spec))
    for key in number_texts(kwargs):
        raise BadScheduler(name, f"{key}={kwargs[key]!r}: it must be {A_TEXT}")
    if "schedulers" in kwargs:  # they hold the optimizer itself, so what is made of them can't be tried elsewhere
        return
    stand_in = copy.copy(optimizer)
    stand_in.param_groups = [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no update comes between its making and its step
            spec(stand_in, **kwargs).step()
    except BadScheduler:
        raise
    except _REFUSALS as error:
        raise BadScheduler(name, f"of {described(kwargs)} it says: {error or type(error).__name__}") from error


class _Factor(LRScheduler, ABC):
    """lr = base lr × factor(updates so far).

    Loading a state takes its count of updates and its base learning rates; the plan (``num_training_steps``, ...) stays that of
    the constructor. So a run can be prolonged: the same plan goes on as it was, another one is entered at that count.
    """

    plan: tuple[str, ...] = ("num_warmup_steps",)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        same = all(state_dict.get(key) == getattr(self, key) for key in self.plan)
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in self.plan})
        if same:
            return
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def factor(self, updates: int) -> float:
        """What the base learning rate is multiplied by after that many updates."""

    def get_lr(self) -> list[Any]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


def _check_whole(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadScheduler(owner, f"{name}={value!r} is not a whole number")
    if value < 0:
        raise BadScheduler(owner, f"{name}={value!r} is negative")


def _check_plan(owner: str, warmup: int, total: int) -> None:
    _check_whole(owner, "num_warmup_steps", warmup)
    _check_whole(owner, "num_training_steps", total)
    if total < max(1, warmup):
        raise BadScheduler(owner, f"num_training_steps={total} is less than num_warmup_steps={warmup}, or than 1")


class CosineWarmup(_Factor):
    """Linear warm-up from 0, then half a cosine down to ``min_lr_ratio`` (Loshchilov & Hutter 2017, SGDR, without restarts).

    After s updates, w = num_warmup_steps, n = num_training_steps, m = min_lr_ratio:
    s / w up to w; then m + (1 - m) (1 + cos(pi (s - w) / (n - w))) / 2; m from n on. The k-th update uses the rate after
    s = k - 1: as in transformers, with a warm-up the first update has learning rate 0 and changes no weight.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        num_warmup_steps: updates of warm-up.
        num_training_steps: updates in all.
        min_lr_ratio: the end, as a share of the base learning rate.
    """

    plan = ("num_warmup_steps", "num_training_steps", "min_lr_ratio")

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int = 0,
        *,
        num_training_steps: int,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _check_plan("CosineWarmup", num_warmup_steps, num_training_steps)
        if not is_number(min_lr_ratio) or not 0 <= min_lr_ratio <= 1:
            raise BadScheduler("CosineWarmup", f"min_lr_ratio={min_lr_ratio!r} is not a number from 0 to 1")
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

    As in transformers, with a warm-up the first update has learning rate 0 and changes no weight.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        num_warmup_steps: updates of warm-up.
        num_training_steps: updates in all.
    """

    plan = ("num_warmup_steps", "num_training_steps")

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int = 0, *, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        _check_plan("LinearWarmup", num_warmup_steps, num_training_steps)
        self.num_warmup_steps, self.num_training_steps = num_warmup_steps, num_training_steps
        super().__init__(optimizer, last_epoch)

    def factor(self, updates: int) -> float:
        if updates < self.num_warmup_steps:
            return updates / self.num_warmup_steps
        left = self.num_training_steps - updates
        return max(0.0, left / max(1, self.num_training_steps - self.num_warmup_steps))


class Constant(_Factor):
    """Linear warm-up from 0, then the base learning rate.

    As in transformers, with a warm-up the first update has learning rate 0 and changes no weight.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        num_warmup_steps: updates of warm-up.
    """

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int = 0, *, last_epoch: int = -1) -> None:
        _check_whole("Constant", "num_warmup_steps", num_warmup_steps)
        self.num_warmup_steps = num_warmup_steps
        super().__init__(optimizer, last_epoch)

    def factor(self, updates: int) -> float:
        return updates / self.num_warmup_steps if updates < self.num_warmup_steps else 1.0
