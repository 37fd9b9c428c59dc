"""Cross entropy (L2)."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadLossSetting
from twinkle_core.ops.token_logps import check_labels
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput, ModelOutput


class CrossEntropyLoss(Loss):
    """Negative log-likelihood of the labels, a sum over labelled tokens and their number.

        L = - sum_t log p(y_t)                                           over t with y_t != -100

    With label smoothing e (Szegedy et al. 2016, Rethinking the Inception Architecture, section 7) over V classes:

        L = - sum_t [(1 - e) log p(y_t) + e / V sum_v log p_t(v)]

    which reads all logits, ``[B, T, V]``.

    Args:
        label_smoothing: e, 0 up to but not including 1.
    """

    needs = frozenset({"logps"})
    scope = "token"
    token_local = True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        number = isinstance(label_smoothing, (int, float)) and not isinstance(label_smoothing, bool)
        if not number or not 0.0 <= label_smoothing < 1.0:
            raise BadLossSetting("CrossEntropyLoss", "label_smoothing", label_smoothing, "a number, at least 0 and less than 1")
        self.label_smoothing = label_smoothing
        if label_smoothing:
            self.needs = frozenset({"logits", "labels"})  # type: ignore[misc]

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """Args: ``labels`` ``[B, T]`` aligned; ``logps`` ``[B, T]`` (or ``logits`` ``[B, T, V]``). Weight: labelled tokens."""
        labels: torch.Tensor = inputs["labels"]
        mask = labels != IGNORE_INDEX
        if not self.label_smoothing:
            # logps are 0 where nothing is trained
            return LossOutput(-outputs.logps.sum(), mask.sum())
        check_labels(labels, outputs.logits.shape[:-1])
        logits = outputs.logits[mask]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = cross_entropy(logits, labels[mask], reduction="sum", label_smoothing=self.label_smoothing)
        return LossOutput(total, mask.sum())
