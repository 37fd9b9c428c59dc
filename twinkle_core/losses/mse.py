"""Mean squared error (L2)."""

from __future__ import annotations

import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadLabels, LabelsMissing
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput, ModelOutput


class MSELoss(Loss):
    """Squared error of a value for each token, a sum over the tokens that count and their number.

        L = sum_t (v_t - y_t)^2

    Args (of a call):
        values: what the model's value head gives, ``[B, T]``.
        targets: y, of the shape of the values; default the ``labels``, as numbers. A token counts unless its
            target is -100 or NaN.

    Raises (of a call):
        LabelsMissing, BadLabels.
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
        try:
            goal = torch.as_tensor(goal).to(values.device, values.dtype)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise BadLabels(
                f"the targets can't be made a tensor ({cause})", "one number for each value of the model"
            ) from cause
        if goal.shape != values.shape:  # broadcast, each value would be compared with the targets of others
            why = f"the targets' shape is {list(goal.shape)}, and the model's values have {list(values.shape)}"
            raise BadLabels(why, "one number for each value of the model")
        mask = (goal != IGNORE_INDEX) & ~goal.isnan()
        error = torch.where(mask, values - goal, torch.zeros_like(values))
        return LossOutput(error.square().sum(), mask.sum())
