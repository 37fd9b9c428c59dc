"""SimPO (L2)."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from twinkle_core.losses import settings
from twinkle_core.losses.preference import PreferenceLoss, added
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


class SimPOLoss(PreferenceLoss):
    """Simple preference optimisation: no reference, means over tokens, a margin (Meng et al. 2024, eq. 6).

        L = - log sigmoid(beta / |w| log p(w) - beta / |l| log p(l) - gamma)

    Rows come in pairs, chosen first. Needs logps; scope ``group``, the weight is the number of pairs.

    Args:
        beta: scale of the rewards, which are means over tokens: larger than DPO's.
        gamma: by how much the chosen answer's reward is to be ahead.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        self.beta = settings.number(self, "beta", beta, above=0)
        self.gamma = settings.number(self, "gamma", gamma, least=0)

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """See the class."""
        pairs = self.pairs(inputs, outputs)
        better = self.beta * pairs.chosen / pairs.chosen_tokens
        worse = self.beta * pairs.rejected / pairs.rejected_tokens
        return added(-logsigmoid(better - worse - self.gamma), pairs, better, worse)
