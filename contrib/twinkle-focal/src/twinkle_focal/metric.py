"""How much of a batch is still hard."""

from __future__ import annotations

import math
from typing import Any

from twinkle_core import IGNORE_INDEX, InputFeature, Metric, ModelOutput
from twinkle_focal.loss import hardness


class HardTokensMetric(Metric):
    """Two shares over labelled tokens, with p = p(label):

    * ``hard_tokens``: those with p below ``threshold``;
    * ``focus``: the mean of (1 - p)^gamma, what focal loss leaves of cross entropy's weight. Near 0 there is little left to
      learn, and little gradient.

    Args:
        threshold: a probability, above 0 and at most 1.
        gamma: as the loss has it.

    Raises:
        ValueError: a threshold or gamma out of its range.
    """

    needs = frozenset({"logps"})

    def __init__(self, threshold: float = 0.5, gamma: float = 2.0) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold!r}: it must be a probability above 0 and at most 1")
        if not (math.isfinite(gamma) and gamma >= 0):
            raise ValueError(f"gamma={gamma!r}: it must be a number of at least 0")
        self.threshold, self.gamma = threshold, gamma
        self._hard: Any = 0
        self._focus: Any = 0.0
        self._count: Any = 0

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        trained = inputs["labels"] != IGNORE_INDEX
        logps = outputs.logps.detach().double()
        self._hard = self._hard + ((logps < math.log(self.threshold)) & trained).sum()
        self._focus = self._focus + (hardness(logps, self.gamma) * trained).sum()
        self._count = self._count + trained.sum()

    def state(self) -> dict[str, Any]:
        return {"hard": int(self._hard), "focus": float(self._focus), "count": int(self._count)}

    def merge(self, state: dict[str, Any]) -> None:
        self._hard, self._focus = self._hard + state["hard"], self._focus + state["focus"]
        self._count = self._count + state["count"]

    def calculate(self) -> dict[str, float]:
        state = self.state()
        if not state["count"]:
            return {}
        return {"hard_tokens": state["hard"] / state["count"], "focus": state["focus"] / state["count"]}

    def reset(self) -> None:
        self._hard, self._focus, self._count = 0, 0.0, 0
