"""GRPO (L2)."""

from __future__ import annotations

from torch import Tensor

from twinkle_core.losses import settings
from twinkle_core.losses.policy import SEQUENCE, PolicyLoss, Surrogate, clipped
from twinkle_core.types import InputFeature


class GRPOLoss(PolicyLoss):
    """Group relative policy optimisation.

        l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    ``aggregation="sequence"`` is the mean over completions of the mean over their tokens (Shao et al. 2024, DeepSeekMath, eq.
    3); ``"token"`` the mean over all tokens, in which long completions weigh more (Yu et al. 2025, DAPO, eq. 8). DAPO also
    clips higher than lower (``clip_high`` over ``clip_low``). Advantages come from ``twinkle.advantage``.

    The KL term, the entropy bonus and the arguments of a call are told in :class:`PolicyLoss`. Needs logps (and entropies where
    ``entropy_coef`` is not 0). Scope ``row`` or ``token``, by the aggregation.

    Args:
        clip_low, clip_high: how far the ratio may leave 1 (``clip_high`` None: as ``clip_low``).
        beta: of the KL to the reference; 0 leaves it out.
        aggregation: ``sequence`` or ``token``.
        entropy_coef: of the entropy bonus.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float | None = None,
        beta: float = 0.0,
        aggregation: str = SEQUENCE,
        entropy_coef: float = 0.0,
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, aggregation=aggregation)
        self.clip_low = settings.number(self, "clip_low", clip_low, least=0)
        self.clip_high = self.clip_low if clip_high is None else settings.number(self, "clip_high", clip_high, least=0)

    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """The clipped bound."""
        return clipped(log_ratio, advantages, self.clip_low, self.clip_high)
