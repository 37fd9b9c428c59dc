"""CPO (L2)."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from twinkle_core.losses import settings
from twinkle_core.losses.preference import PreferenceLoss, added
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


class CPOLoss(PreferenceLoss):
    """Contrastive preference optimisation: DPO with a uniform reference, and the likelihood of what is preferred.

        L = - (1 - e) log sigmoid(beta d) - e log sigmoid(-beta d) - alpha log p(w),   d = log p(w) - log p(l)

    (Xu et al. 2024, eqs. 3 to 5, where alpha is 1 and e, the label smoothing, 0.) The paper's likelihood is that of the whole
    answer; its code and TRL take the mean over tokens, which is ``average_nll``.

    Rows come in pairs, chosen first. Needs logps; scope ``group``, the weight is the number of pairs.

    Args:
        beta: scale of the difference.
        alpha: of the likelihood.
        label_smoothing: e, as for DPO.
        average_nll: log p(w) of the last term is divided by the number of its tokens.
    """

    def __init__(self, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, average_nll: bool = False) -> None:
        self.beta = settings.number(self, "beta", beta, above=0)
        self.alpha = settings.number(self, "alpha", alpha, least=0)
        self.label_smoothing = settings.number(self, "label_smoothing", label_smoothing, least=0, below=0.5)
        self.average_nll = settings.flag(self, "average_nll", average_nll)

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """See the class."""
        pairs = self.pairs(inputs, outputs)
        better, worse, e = self.beta * pairs.chosen, self.beta * pairs.rejected, self.label_smoothing
        preference = -(1 - e) * logsigmoid(better - worse) - (e * logsigmoid(worse - better) if e else 0.0)
        nll = -pairs.chosen / (pairs.chosen_tokens if self.average_nll else 1)
        return added(preference + self.alpha * nll, pairs, better, worse)
