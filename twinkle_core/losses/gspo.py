"""GSPO (L2)."""

from __future__ import annotations

from torch import Tensor

from twinkle_core.losses import settings
from twinkle_core.losses.policy import SEQUENCE, PolicyLoss, Surrogate, clipped
from twinkle_core.ops.rows import labelled, row_numbers, row_sums
from twinkle_core.types import InputFeature


class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation: one ratio for a whole completion (Zheng et al. 2025, eqs. 5 and 7).

        s = exp(1/|o| sum_t log r_t)
        L = - 1/G sum_rows min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    Needs logps; scope ``row``, the weight is the rows that have a label. Advantages are one number a row; of numbers for each
    token a row's mean is taken. Other arguments of a call: :class:`PolicyLoss`.

    Args:
        clip_low, clip_high: how far s may leave 1; the defaults are the paper's (section 5.1), as s moves far less than r.
        beta, entropy_coef: as for GRPO, with the mean over a row's tokens.
    """

    def __init__(
        self, clip_low: float = 3e-4, clip_high: float | None = 4e-4, beta: float = 0.0, entropy_coef: float = 0.0
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, aggregation=SEQUENCE)
        self.clip_low = settings.number(self, "clip_low", clip_low, least=0)
        self.clip_high = self.clip_low if clip_high is None else settings.number(self, "clip_high", clip_high, least=0)

    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """A row's bound, given to each of its tokens: their mean is the bound again."""
        counts = row_sums(inputs, labelled(type(self).__name__, inputs).long()).clamp(min=1)
        bound, shares = clipped(
            row_sums(inputs, log_ratio) / counts, row_sums(inputs, advantages) / counts, self.clip_low, self.clip_high
        )
        at = row_numbers(inputs)
        return Surrogate(bound[at], {key: value[at] for key, value in shares.items()})
