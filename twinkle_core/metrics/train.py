"""How training goes: learning rate, gradient norm, step, speed (L2)."""

from __future__ import annotations

from typing import Any

from twinkle_core.contracts.metric import Metric, StepResult
from twinkle_core.metrics.speed import Speed
from twinkle_core.types import InputFeature, ModelOutput


class TrainMetric(Metric):
    """``step``, ``lr`` (of the last update), ``grad_norm`` (mean before clipping), ``skipped`` updates, ``tokens_per_second``
    (of all data ranks, padding left out) and ``seconds_per_step``.

    Speed runs from one closed window to the next. The first window is not measured: it holds the warm-up, and where it began is
    not known.
    """

    def __init__(self) -> None:
        self._speed = Speed()
        self._step = self._windows = self._normed = self._skipped = 0
        self._lr = self._norms = 0.0

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        self._speed.add(inputs)

    def on_step(self, result: StepResult) -> None:
        self._speed.close()
        self._step, self._lr = result.cur_step, result.lr
        self._skipped += not result.acted
        if result.acted and result.grad_norm is not None:
            self._norms += result.grad_norm
            self._normed += 1
        self._windows += 1

    def state(self) -> dict[str, Any]:
        return {
            "step": self._step, "lr": self._lr, "norms": self._norms, "normed": self._normed, "skipped": self._skipped,
            "windows": self._windows, **self._speed.state(),
        }  # fmt: skip

    def merge(self, state: dict[str, Any]) -> None:
        """Ranks take the same steps in the same time: these are not added, tokens are."""
        self._step, self._lr = max(self._step, state["step"]), max(self._lr, state["lr"])
        self._norms, self._normed = self._norms + state["norms"], self._normed + state["normed"]
        self._skipped, self._windows = max(self._skipped, state["skipped"]), max(self._windows, state["windows"])
        self._speed.merge(state)

    def calculate(self) -> dict[str, float]:
        if not self._windows:
            return {}
        numbers: dict[str, float] = {"step": self._step, "lr": self._lr}
        if self._normed:
            numbers["grad_norm"] = self._norms / self._normed
        if self._skipped:
            numbers["skipped"] = self._skipped
        if self._speed.windows and self._speed.seconds > 0:
            numbers["tokens_per_second"] = int(self._speed.tokens) / self._speed.seconds
            numbers["seconds_per_step"] = self._speed.seconds / self._speed.windows
        return numbers

    def reset(self) -> None:
        self._speed.reset()
        self._step = self._windows = self._normed = self._skipped = 0
        self._lr = self._norms = 0.0
