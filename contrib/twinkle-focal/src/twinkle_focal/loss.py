"""Focal loss over tokens."""

from __future__ import annotations

import math

import torch

from twinkle_core import IGNORE_INDEX, InputFeature, Loss, LossOutput, ModelOutput


class FocalLoss(Loss):
    """Cross entropy that counts a token the less, the better it is predicted (Lin et al. 2017, Focal Loss for Dense Object
    Detection, equation 5; there over two classes, here over the vocabulary):

        L = - alpha sum_t (1 - p_t)^gamma log p_t,   p_t = p(y_t),   over t with y_t != -100

    The weight is the number of labelled tokens, not the sum of the factors: easy batches then have small gradients.

    Args:
        gamma: how much easy tokens fade, at least 0; 0 is cross entropy. The paper's choice is 2.
        alpha: a factor on everything, above 0.

    Raises:
        ValueError: a gamma or alpha out of its range.
    """

    needs = frozenset({"logps"})
    scope = "token"
    token_local = True

    def __init__(self, gamma: float = 2.0, alpha: float = 1.0) -> None:
        if not (math.isfinite(gamma) and gamma >= 0):
            raise ValueError(f"gamma={gamma!r}: it must be a number of at least 0")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha={alpha!r}: it must be a number above 0")
        self.gamma, self.alpha = gamma, alpha

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """Args: ``labels`` ``[B, T]`` aligned; ``logps`` ``[B, T]``. Returns: the sum, and the number of labelled tokens."""
        trained: torch.Tensor = inputs["labels"] != IGNORE_INDEX
        logps = outputs.logps
        if self.gamma:
            logps = hardness(logps, self.gamma) * logps
        return LossOutput(-self.alpha * torch.where(trained, logps, 0.0).sum(), trained.sum())


def hardness(logps: torch.Tensor, gamma: float) -> torch.Tensor:
    """``(1 - p)^gamma`` of log-probabilities, ``[...]``.

    1 - p by expm1, exact for p next to 1. There the power has no derivative for gamma < 1, so p stops one float short of 1.
    """
    rest = -torch.expm1(logps)
    return rest.clamp_min(torch.finfo(logps.dtype).eps) ** gamma
