"""The mean loss (L2)."""

from __future__ import annotations

from typing import Any

from twinkle_core.contracts.metric import Metric
from twinkle_core.types import InputFeature, ModelOutput


class LossMetric(Metric):
    """Mean loss per item over all that was accumulated, and the loss's own numbers beside it.

    Items are weighted alike, whatever batch or rank they came in. Without any item there is no number. All calls that succeeded
    count, those of a window that was dropped or skipped later too: it is the loss of what was computed.
    """

    needs = frozenset({"loss"})

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        if outputs.loss is None:
            return
        self._add("loss", outputs.loss * outputs.num_items, outputs.num_items)
        for name, (total, weight) in outputs.get("loss_metrics", {}).items():
            self._add(name, total, weight)

    def _add(self, name: str, total: Any, weight: Any) -> None:
        sums = self._sums.setdefault(name, [0, 0])
        sums[0], sums[1] = sums[0] + total, sums[1] + weight

    def state(self) -> dict[str, Any]:
        return {name: [float(total), float(weight)] for name, (total, weight) in self._sums.items()}

    def merge(self, state: dict[str, Any]) -> None:
        for name, (total, weight) in state.items():
            self._add(name, total, weight)

    def calculate(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.state().items() if weight}

    def reset(self) -> None:
        self._sums = {}
