"""Dr. GRPO (L2)."""

from __future__ import annotations

from torch import Tensor

from twinkle_core.losses import settings
from twinkle_core.losses.policy import CONSTANT, PolicyLoss, Surrogate, clipped
from twinkle_core.types import InputFeature


class DrGRPOLoss(PolicyLoss):
    """GRPO without its bias towards long wrong answers.

        L = 1 / (G M) sum_rows sum_t l_t,   l_t as in GRPO

    The sum over a completion's tokens is divided by a constant M and not by its own length, which would make each token of a
    long wrong answer count less (Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2). Take advantages without
    division by the deviation: ``grpo_advantages(..., scale=False)``.

    Needs logps; scope ``row``: the weight is the rows that have a label, times M. Arguments of a call: :class:`PolicyLoss`.

    Args:
        max_completion_length: M, tokens: the budget of a completion. It scales the loss and nothing else.
        clip_low, clip_high, beta, entropy_coef: as for GRPO.
    """

    aggregations = (CONSTANT,)

    def __init__(
        self,
        max_completion_length: int = 1024,
        clip_low: float = 0.2,
        clip_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
    ) -> None:
        super().__init__(
            beta=beta, entropy_coef=entropy_coef, aggregation=CONSTANT, max_completion_length=max_completion_length
        )
        self.clip_low = settings.number(self, "clip_low", clip_low, least=0)
        self.clip_high = self.clip_low if clip_high is None else settings.number(self, "clip_high", clip_high, least=0)

    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """The clipped bound."""
        return clipped(log_ratio, advantages, self.clip_low, self.clip_high)
