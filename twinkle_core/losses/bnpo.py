"""GRPO normalised over the batch's tokens (L2)."""

from __future__ import annotations

from twinkle_core.losses.grpo import GRPOLoss
from twinkle_core.losses.policy import TOKEN


class BNPOLoss(GRPOLoss):
    """The GRPO objective divided by the labelled tokens of the batch: what TRL calls the loss type ``bnpo``.

        L = sum_rows sum_t l_t / sum_rows |o|,   l_t as in GRPO

    The batch here is the whole accumulation window of all ranks, so the result does not depend on how it is cut (TRL divides by
    the tokens of a device's micro-batch, and says that its result depends on it). It equals ``grpo`` with
    ``aggregation="token"``; the Beta-normalised advantages of Xiao et al. (2025, BNPO) may be given as ``advantages``.

    Needs logps; scope ``token``. Arguments of a call: :class:`PolicyLoss`.

    Args:
        clip_low, clip_high, beta, entropy_coef: as for GRPO.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float | None = None, beta: float = 0.0, entropy_coef: float = 0.0
    ) -> None:
        super().__init__(clip_low, clip_high, beta, TOKEN, entropy_coef)
