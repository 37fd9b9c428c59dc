"""Advantages of completions from their rewards (L2): ``twinkle.advantage``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from twinkle_core.errors import BadArgument
from twinkle_core.train.limits import is_number

#: a deviation below this share of the rewards' size is rounding, not spread
ROUNDING = 1e-6


def grpo_advantages(rewards: Any, groups: int | Sequence[int], *, scale: bool = True) -> Tensor:
    """Rewards less the mean of their group, divided by its deviation (Shao et al. 2024, DeepSeekMath, section 4.1.2).

        A_i = (r_i - mean(r)) / std(r)          std with G - 1; the completions of one prompt are a group

    A group whose rewards are all alike, or that has one completion, has nothing to compare: 0. Each group is by itself.

    Args:
        rewards: ``[B]``, groups one after the other.
        groups: the size of each group, or of all.
        scale: whether to divide (Dr. GRPO does not: Liu et al. 2025).

    Returns:
        ``[B]``, of the rewards' dtype where that is float32 or float64, else float32; computed in float64.

    Raises:
        BadArgument
    """
    values, cuts = _rewards(rewards, groups)
    found = torch.empty_like(values)
    for cut in cuts:
        r = values[cut]
        centred = r - r.mean()
        std = float(r.std()) if len(r) > 1 else 0.0
        if std <= ROUNDING * float(r.abs().max()):
            centred = torch.zeros_like(r)
        found[cut] = centred / std if scale and std > 0 else centred
    return _as(found, rewards)


def rloo_advantages(rewards: Any, groups: int | Sequence[int]) -> Tensor:
    """Rewards less the mean of the others of their group (Kool et al. 2019; Ahmadian et al. 2024, Back to Basics, eq. 8).

        A_i = r_i - 1 / (G - 1) sum_{j != i} r_j

    A group of one has nothing to compare: 0. Arguments, result and errors are those of ``grpo_advantages``.
    """
    values, cuts = _rewards(rewards, groups)
    found = torch.empty_like(values)
    for cut in cuts:
        r = values[cut]
        found[cut] = (r - (r.sum() - r) / (len(r) - 1)) if len(r) > 1 else 0.0
    return _as(found, rewards)


def gae(rewards: Any, values: Any, mask: Any, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the labelled tokens of each row (Schulman et al. 2016, eq. 16).

        d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lam A_{t+1},   R_t = A_t + V_t

    t + 1 is the next labelled token; after the last one V and A are 0.

    Args:
        rewards, values: ``[B, T]``.
        mask: ``[B, T]``, where there is a label.
        gamma, lam: 0 to 1.

    Returns:
        advantages and returns ``[B, T]``, 0 where the mask is; in float64 for such values, else float32.

    Raises:
        BadArgument
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not is_number(value) or not 0 <= value <= 1:
            raise BadArgument(name, value, "a number from 0 to 1")
    r, v, keep = torch.as_tensor(rewards).double(), torch.as_tensor(values).double(), torch.as_tensor(mask).bool()
    if r.dim() != 2 or not r.shape == v.shape == keep.shape:
        raise BadArgument("rewards", list(r.shape), f"[B, T] like values {list(v.shape)} and mask {list(keep.shape)}")
    advantages = torch.zeros_like(v)
    ahead = next_value = torch.zeros(len(v), dtype=v.dtype, device=v.device)
    for t in range(v.shape[1] - 1, -1, -1):
        here = keep[:, t]
        step = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * ahead
        advantages[:, t] = torch.where(here, step, 0.0)
        ahead, next_value = torch.where(here, step, ahead), torch.where(here, v[:, t], next_value)
    return _as(advantages, values), _as(torch.where(keep, advantages + v, 0.0), values)


def _rewards(rewards: Any, groups: int | Sequence[int]) -> tuple[Tensor, list[slice]]:
    values = torch.as_tensor(rewards).detach().double()
    if values.dim() != 1 or not bool(values.isfinite().all()):
        raise BadArgument("rewards", rewards, "finite numbers, one for each completion")
    if isinstance(groups, int) and not isinstance(groups, bool):
        sizes = [groups] * (len(values) // groups) if groups > 0 else []
    else:
        sizes = list(groups) if isinstance(groups, (list, tuple)) else []
    if sum(sizes) != len(values) or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise BadArgument("groups", groups, f"the size of each group, or of all, adding up to {len(values)} rewards")
    return values, [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _as(found: Tensor, like: Any) -> Tensor:
    wide = isinstance(like, Tensor) and like.dtype == torch.float64
    return found if wide else found.float()
