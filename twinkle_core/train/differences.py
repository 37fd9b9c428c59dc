"""What a resumed run sets otherwise than its checkpoint, and which of the two counts (L2)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.train.optim import HOW
from twinkle_core.train.plain import to_plain


def told(part: str, key: str, saved: Any, here: Any, *, ours: bool) -> str:
    """One line: which value counts, and which does not."""
    if ours:
        return f"resume: {part}{key} is {here!r} as set here, not {saved!r} as in the checkpoint"
    return f"resume: {part}{key} is {saved!r} as in the checkpoint, not {here!r} as set here"


def of_optimizer(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hyperparameters of groups; the checkpoint's count. A learning rate that a schedule moves is compared where it began."""
    found: dict[str, tuple[Any, Any]] = {}
    for live, group in zip(optimizer.param_groups, saved, strict=True):
        moved = {"params", "initial_lr", *HOW}
        if "max_momentum" in live:  # a schedule that moves momenta too
            moved |= {"momentum", "betas"}
        for key in (live.keys() & group.keys()) - moved:
            at = "initial_lr" if key == "lr" and "initial_lr" in live and "initial_lr" in group else key
            here, there = to_plain(live[at], f"'{key}' of the optimizer"), group[at]
            if here != there:
                found.setdefault(key, (there, here))
    return [told("optimizer ", key, there, here, ours=False) for key, (there, here) in sorted(found.items())]


def of_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Arguments of its constructor; the checkpoint's count, except a plan that the scheduler keeps (``plan``)."""
    live = scheduler.state_dict()
    arguments = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
    plain = (bool, int, float, str, list, tuple, type(None))
    kept = getattr(scheduler, "plan", ())
    return [
        told("scheduler ", key, saved[key], live[key], ours=key in kept)
        for key in sorted(arguments & live.keys() & saved.keys())
        if isinstance(live[key], plain) and live[key] != saved[key]
    ]


def of_window(size: int | None, saved: int | None, is_open: bool) -> list[str]:
    """The window's size; the checkpoint's counts while its window is open, since it was begun for that size (if any)."""
    if size is None or saved is None or size == saved:
        return []
    return [told("", "gradient_accumulation_steps", saved, size, ours=not is_open)]
