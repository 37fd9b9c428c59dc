"""What losses of policy gradients share: ratios, the KL term, the entropy bonus, what is divided by (L2)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from twinkle_core.contracts.loss import Loss
from twinkle_core.losses import settings
from twinkle_core.ops.rows import floats, labelled, per_token, row_numbers, row_sums
from twinkle_core.types import InputFeature, LossOutput, ModelOutput

#: differences of logps are kept within it before exp(): e^20 is far beyond every clip, and no overflow
LOG_RATIO = 20.0
TOKEN, SEQUENCE, CONSTANT = "token", "sequence", "constant"


class Surrogate(NamedTuple):
    """What a policy loss makes of ratios and advantages.

    ``terms``: to be minimised, one for each token ``[B, T]``. ``shares``: numbers of its own, the same shape.
    """

    terms: Tensor
    shares: dict[str, Tensor]


class PolicyLoss(Loss):
    """A policy gradient on completions whose advantages are known.

    With ``r_t = exp(logp_t - old_logp_t)`` and a term ``l_t`` of its own for each labelled token, the total of a token is

        l_t + beta k_t - entropy_coef H_t
        k_t = exp(ref_logp_t - logp_t) - (ref_logp_t - logp_t) - 1

    k is the estimator k3 of KL(policy || reference) (Schulman 2020, Approximating KL Divergence; Shao et al. 2024, eq. 4).

    What it is divided by, as the sum and weight of ``aggregation``:

    * ``token``: sum over all labelled tokens; weight: their number. Scope ``token``.
    * ``sequence``: sum over rows of the mean over a row's labelled tokens; weight: rows that have any. Scope ``row``.
    * ``constant``: sum over all labelled tokens; weight: rows that have any, times a fixed length. Scope ``row``.

    Each is exact under micro-batches and ranks.

    Args (of a call):
        advantages: one number for each row ``[B]`` or token ``[B, T]``.
        old_logps: logps of the policy that sampled, ``[B, T]`` or lists; default: the present ones (r = 1).
        ref_logps: logps of the reference, the same; needed when ``beta`` is not 0.
    """

    needs = frozenset({"logps"})
    #: the ``aggregation`` that there may be
    aggregations: ClassVar[tuple[str, ...]] = (SEQUENCE, TOKEN)

    def __init__(
        self, *, beta: float = 0.0, entropy_coef: float = 0.0, aggregation: str = TOKEN, max_completion_length: int = 1
    ) -> None:
        self.beta = settings.number(self, "beta", beta, least=0)
        self.entropy_coef = settings.number(self, "entropy_coef", entropy_coef)
        self.aggregation = settings.choice(self, "aggregation", aggregation, self.aggregations)
        self.max_completion_length = settings.count(self, "max_completion_length", max_completion_length)
        self.scope = "token" if aggregation == TOKEN else "row"  # type: ignore[misc]
        self.required_args = frozenset({"ref_logps"} if beta else ())  # type: ignore[misc]
        if entropy_coef:
            self.needs = self.needs | {"entropies"}  # type: ignore[misc]

    @abstractmethod
    def surrogate(self, inputs: InputFeature, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
        """The terms of the labelled tokens.

        Args:
            logps, log_ratio (log r), advantages: ``[B, T]``; 0 where there is no label.
        """

    def __call__(
        self,
        inputs: InputFeature,
        outputs: ModelOutput,
        *,
        advantages: Any,
        old_logps: Any = None,
        ref_logps: Any = None,
    ) -> LossOutput:
        """See the class."""
        name = type(self).__name__
        mask, logps = labelled(name, inputs), floats(outputs.logps)
        gain = per_token(name, "advantages", advantages, inputs, logps, of_rows=True)
        old = logps.detach() if old_logps is None else per_token(name, "old_logps", old_logps, inputs, logps)
        log_ratio = torch.where(mask, logps - old, 0.0).clamp(-LOG_RATIO, LOG_RATIO)
        terms, shares = self.surrogate(inputs, logps, log_ratio, gain)
        shares = {**shares, "ratio": log_ratio.exp()}
        if ref_logps is not None:
            kl = k3(torch.where(mask, logps - per_token(name, "ref_logps", ref_logps, inputs, logps), 0.0))
            shares["kl"] = kl
            terms = terms + self.beta * kl if self.beta else terms
        if self.entropy_coef:
            terms = terms - self.entropy_coef * floats(outputs.entropies)
        total, weight = self._divided(inputs, torch.where(mask, terms, 0.0), mask)
        numbers = {key: (torch.where(mask, value.detach(), 0.0).sum(), mask.sum()) for key, value in shares.items()}
        return LossOutput(total, weight, numbers)

    def _divided(self, inputs: InputFeature, terms: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.aggregation == TOKEN:
            return terms.sum(), mask.sum()
        counts = row_sums(inputs, mask.long())
        rows = (counts > 0).sum()
        if self.aggregation == CONSTANT:
            return terms.sum(), rows * self.max_completion_length
        return (terms / counts.clamp(min=1)[row_numbers(inputs)]).sum(), rows


def k3(log_ratio: Tensor) -> Tensor:
    """An estimate of KL(p || q) for samples of p: e^-x + x - 1 with x = log p - log q. Never negative, and unbiased."""
    x = -log_ratio.clamp(-LOG_RATIO, LOG_RATIO)
    return x.exp() - x - 1


def clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """The pessimistic bound ``-min(r A, clip(r, 1 - low, 1 + high) A)`` (Schulman et al. 2017, eq. 7), and where it binds.

    The minimum is taken after multiplying by the advantage: so a bad token may always be made less likely again, and a good
    one more likely.
    """
    ratio = log_ratio.exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    below = (ratio < 1 - low) & (advantages < 0)
    over = (ratio > 1 + high) & (advantages > 0)
    return Surrogate(terms, {"clip_low": below.to(terms.dtype), "clip_high": over.to(terms.dtype)})
