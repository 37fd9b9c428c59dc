"""ORPO (L2)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from twinkle_core.losses import settings
from twinkle_core.losses.preference import PreferenceLoss, added
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


class ORPOLoss(PreferenceLoss):
    """Odds ratio preference optimisation: supervised training and a push between the odds (Hong et al. 2024, eqs. 2 to 7).

        L = - m(w) - beta log sigmoid(log odds(w) - log odds(l))
        m(y) = 1/|y| log p(y),   odds(y) = exp m(y) / (1 - exp m(y))

    Rows come in pairs, chosen first. Needs logps; scope ``group``, the weight is the number of pairs.

    Args:
        beta: the paper's lambda.
    """

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = settings.number(self, "beta", beta, least=0)

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """See the class."""
        pairs = self.pairs(inputs, outputs)
        better, worse = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
        terms = -better - self.beta * logsigmoid(_log_odds(better) - _log_odds(worse))
        return added(terms, pairs, self.beta * better, self.beta * worse)


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p. A probability of 1 as far as the dtype goes has finite odds."""
    mean = mean.clamp(max=-torch.finfo(mean.dtype).eps)
    return mean - (-torch.expm1(mean)).log()
