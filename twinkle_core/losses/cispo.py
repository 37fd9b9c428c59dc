"""CISPO (L2)."""

from __future__ import annotations

from torch import Tensor

from twinkle_core.losses import settings
from twinkle_core.losses.policy import TOKEN, PolicyLoss, Surrogate
from twinkle_core.types import InputFeature


class CISPOLoss(PolicyLoss):
    """Clipped importance sampling: the weight is clipped, never the token dropped (MiniMax 2025, MiniMax-M1, eqs. 4 and 5).

        l_t = - stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logp_t

    divided by the labelled tokens. ``ratio`` among its numbers is the one before clipping.

    Needs logps; scope ``token`` (``row`` for the sequence aggregation). Arguments of a call: :class:`PolicyLoss`.

    Args:
        clip_low: None: no lower bound, as in the paper's experiments.
        clip_high: how far the weight may go over 1. The paper tunes it and names no number; 4 is the range of Khatri et al.
            (2025, The Art of Scaling Reinforcement Learning Compute).
        beta, entropy_coef: as for GRPO.
        aggregation: ``token`` (the paper's) or ``sequence``.
    """

    def __init__(
        self,
        clip_low: float | None = None,
        clip_high: float = 4.0,
        beta: float = 0.0,
        aggregation: str = TOKEN,
        entropy_coef: float = 0.0,
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, aggregation=aggregation)
        self.clip_low = None if clip_low is None else settings.number(self, "clip_low", clip_low, least=0)
        self.clip_high = settings.number(self, "clip_high", clip_high, least=0)

    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """The weighted log-likelihood."""
        ratio = log_ratio.detach().exp()
        least = None if self.clip_low is None else 1 - self.clip_low
        weight = ratio.clamp(min=least, max=1 + self.clip_high)
        shares = {"clip_high": (ratio > 1 + self.clip_high).to(ratio.dtype)}
        if least is not None:
            shares["clip_low"] = (ratio < least).to(ratio.dtype)
        return Surrogate(-weight * advantages * logps, shares)
