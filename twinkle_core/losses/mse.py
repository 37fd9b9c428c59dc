"""Mean squared error (L2)."""

from __future__ import annotations

import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import LabelsMissing
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput, ModelOutput


class MSELoss(Loss):
    """Squared error of a value for each token, a sum over the tokens that count and their number.

        L = sum_t (v_t - y_t)^2

    Args (of a call):
        values: what the model's value head gives, ``[B, T]``.
        targets: y, ``[B, T]``; default the ``labels``, as numbers. A token counts unless its
            target is -100 or NaN.
    """

    needs = frozenset({"values"})
    scope = "token"
    token_local = True

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, *, targets: torch.Tensor | None = None) -> LossOutput:
        """Weight: tokens that count."""
        goal = targets if targets is not None else inputs.get("labels")
        if goal is None:
            raise LabelsMissing("MSELoss", sorted(inputs))
        values: torch.Tensor = outputs["values"]
        values = values if values.dtype == torch.float64 else values.float()
        goal = goal.to(values.device, values.dtype)
        mask = (goal != IGNORE_INDEX) & ~goal.isnan()
        error = torch.where(mask, values - goal, torch.zeros_like(values))
        return LossOutput(error.square().sum(), mask.sum())
