"""SAPO (L2)."""

from __future__ import annotations

import torch
from torch import Tensor

from twinkle_core.losses import settings
from twinkle_core.losses.policy import SEQUENCE, PolicyLoss, Surrogate
from twinkle_core.types import InputFeature


class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation: a smooth gate in place of the clip (Gao et al. 2025, eqs. 5 and 6).

        l_t = - f(r_t) A_t,   f(r) = 4 / tau * sigmoid(tau (r - 1)),   tau = tau_pos where A_t > 0, else tau_neg

    At r = 1 its gradient is the plain policy gradient; away from it the gate closes, sooner for negative advantages, whose
    gradients spread over the vocabulary.

    Needs logps; scope ``row`` or ``token``, by the aggregation. Arguments of a call: :class:`PolicyLoss`.

    Args:
        tau_pos, tau_neg: temperatures of the gate.
        beta, entropy_coef: as for GRPO.
        aggregation: ``sequence`` (the paper's) or ``token``.
    """

    def __init__(
        self,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        beta: float = 0.0,
        aggregation: str = SEQUENCE,
        entropy_coef: float = 0.0,
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, aggregation=aggregation)
        self.tau_pos = settings.number(self, "tau_pos", tau_pos, above=0)
        self.tau_neg = settings.number(self, "tau_neg", tau_neg, above=0)

    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """The gated objective."""
        # written so that it has the advantages' dtype: two plain numbers would give float32
        tau = torch.where(advantages > 0, self.tau_pos, torch.full_like(advantages, self.tau_neg))
        gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
        return Surrogate(-gate * advantages, {})
