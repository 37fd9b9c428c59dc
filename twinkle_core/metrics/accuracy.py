"""Token accuracy (L2)."""

from __future__ import annotations

from typing import Any

from twinkle_core.contracts.metric import Metric
from twinkle_core.types import IGNORE_INDEX, InputFeature, ModelOutput


class AccuracyMetric(Metric):
    """Share of labelled tokens whose label is the argmax of the logits. Labels are aligned, so nothing is shifted here.

    All calls that succeeded count, those of a window that was dropped or skipped later too.
    """

    needs = frozenset({"predictions"})

    def __init__(self) -> None:
        self._right: Any = 0
        self._all: Any = 0

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        labels = inputs["labels"]
        mask = labels != IGNORE_INDEX
        self._right = self._right + ((outputs.predictions == labels) & mask).sum()
        self._all = self._all + mask.sum()

    def state(self) -> dict[str, Any]:
        return {"right": int(self._right), "all": int(self._all)}

    def merge(self, state: dict[str, Any]) -> None:
        self._right, self._all = self._right + state["right"], self._all + state["all"]

    def calculate(self) -> dict[str, float]:
        state = self.state()
        return {"accuracy": state["right"] / state["all"]} if state["all"] else {}

    def reset(self) -> None:
        self._right = self._all = 0
