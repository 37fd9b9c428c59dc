"""The one place where gradients are divided (L2).

Losses are sums, so gradients accumulate as sums over tokens, micro-batches and ranks. When a window closes they are divided
once, by the weight that the window really held on all data ranks. This makes N micro-batches equal one batch, and N ranks
equal one rank, whatever lies where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import BadLossWeight
from twinkle_core.train.together import meet

if TYPE_CHECKING:
    from twinkle_core.contracts.engine import Engine
    from twinkle_core.types import LossOutput


def exact_dtype(device: torch.device | str | None) -> torch.dtype:
    """The dtype for sums of losses and weights: float64, which counts beyond 2**24 exactly, where the device has it."""
    return torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64


def as_scalar(x: Any, device: torch.device | str | None) -> torch.Tensor:
    """A number or 0-d tensor as a detached 0-d tensor of the exact dtype. Does not synchronise."""
    dtype = exact_dtype(device)
    if isinstance(x, torch.Tensor):
        return x.detach().to(device=device, dtype=dtype)
    return torch.tensor(x, dtype=dtype, device=device)


def mean(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum / weight without synchronising; 0 items give the sum itself, which is 0 (and a NaN stays a NaN)."""
    return total / torch.where(weight == 0, torch.ones_like(weight), weight)


def mean_of(loss: LossOutput) -> torch.Tensor:
    """The mean per item of one loss, detached."""
    total = loss.sum.detach()
    return mean(as_scalar(total, total.device), as_scalar(loss.weight, total.device))


def window_weight(engine: Engine, weight: Any, about: str = "") -> float:
    """The weight of a window over all data ranks. Ranks meet; synchronises: once a window.

    Args:
        about: what of the coming update must be the same on all ranks, in words.

    Raises:
        BadLossWeight: it is negative or no number. RanksApart, RankLeft.
    """
    total = sum(meet(engine, weight if engine.mesh.leads else 0.0, about=about))
    if not total >= 0 or total == float("inf"):
        raise BadLossWeight(total)
    return total


def gradient_scale(engine: Engine, weight: float) -> float:
    """What sums of gradients are multiplied by: 1 / weight, times the ranks that the backend has averaged over."""
    return engine.grad_divisor / weight
