"""Numbers that a loss itself gives, by their names (L2)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from twinkle_core.contracts.metric import Metric
from twinkle_core.types import InputFeature, ModelOutput


class LossNumbers(Metric):
    """Means of what the loss says in ``LossOutput.metrics``, of the names listed in ``names``: sums and weights are added over
    batches and ranks, and divided once.

    A loss that doesn't give a name, or a batch whose loss was not computed (``forward_only`` with a loss that takes arguments),
    adds nothing.
    """

    names: ClassVar[tuple[str, ...]] = ()
    needs = frozenset({"loss"})

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        given = outputs.get("loss_metrics") or {}
        for name in self.names:
            if name in given:
                self.add(name, *given[name])

    def add(self, name: str, total: Any, weight: Any) -> None:
        """Take in one sum and its weight."""
        total = total.detach() if isinstance(total, torch.Tensor) else total
        before = self._sums.get(name, (0, 0))
        self._sums[name] = before[0] + total, before[1] + weight

    def state(self) -> dict[str, Any]:
        return {name: [float(total), float(weight)] for name, (total, weight) in self._sums.items()}

    def merge(self, state: dict[str, Any]) -> None:
        for name, (total, weight) in state.items():
            self.add(name, total, weight)

    def calculate(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.state().items() if weight}

    def reset(self) -> None:
        self._sums = {}
