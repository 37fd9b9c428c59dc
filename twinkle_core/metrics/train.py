"""How training goes: learning rate, gradient norm, step, speed (L2)."""

from __future__ import annotations

import time
from typing import Any

from twinkle_core.contracts.metric import Metric, StepResult
from twinkle_core.types import InputFeature, ModelOutput


class TrainMetric(Metric):
    """``step``, ``lr`` (of the last update), ``grad_norm`` (mean before clipping), ``skipped`` updates, ``tokens_per_second``
    (of all data ranks, padding left out) and ``seconds_per_step``.

    Speed runs from one closed window to the next. The first window is not measured: it holds the warm-up, and where it began is
    not known.
    """

    def __init__(self) -> None:
        self._last: float | None = None  # when the last window closed; outlives reset()
        self._pending: Any = 0  # tokens of the open window
        self._step = self._windows = self._normed = self._skipped = self._timed = 0
        self._lr = self._norms = self._seconds = 0.0
        self._tokens: Any = 0

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        mask = inputs.get("attention_mask")
        if mask is not None:
            self._pending = self._pending + mask.sum()
        elif inputs.get("input_ids") is not None:
            self._pending = self._pending + inputs["input_ids"].numel()

    def on_step(self, result: StepResult) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._tokens = self._tokens + self._pending
            self._seconds += now - self._last
            self._timed += 1
        self._last, self._pending = now, 0
        self._step, self._lr = result.cur_step, result.lr
        self._skipped += not result.acted
        if result.acted and result.grad_norm is not None:
            self._norms += result.grad_norm
            self._normed += 1
        self._windows += 1

    def state(self) -> dict[str, Any]:
        return {
            "step": self._step, "lr": self._lr, "norms": self._norms, "normed": self._normed, "skipped": self._skipped,
            "windows": self._windows, "tokens": int(self._tokens), "seconds": self._seconds, "timed": self._timed,
        }  # fmt: skip

    def merge(self, state: dict[str, Any]) -> None:
        """Ranks take the same steps in the same time: these are not added, tokens are."""
        self._step, self._lr = max(self._step, state["step"]), max(self._lr, state["lr"])
        self._norms, self._normed = self._norms + state["norms"], self._normed + state["normed"]
        self._skipped, self._windows = max(self._skipped, state["skipped"]), max(self._windows, state["windows"])
        self._tokens = self._tokens + state["tokens"]
        self._seconds, self._timed = max(self._seconds, state["seconds"]), max(self._timed, state["timed"])

    def calculate(self) -> dict[str, float]:
        if not self._windows:
            return {}
        numbers: dict[str, float] = {"step": self._step, "lr": self._lr}
        if self._normed:
            numbers["grad_norm"] = self._norms / self._normed
        if self._skipped:
            numbers["skipped"] = self._skipped
        if self._timed and self._seconds > 0:
            numbers["tokens_per_second"] = int(self._tokens) / self._seconds
            numbers["seconds_per_step"] = self._seconds / self._timed
        return numbers

    def reset(self) -> None:
        self._step = self._windows = self._normed = self._skipped = self._timed = 0
        self._lr = self._norms = self._seconds = 0.0
        self._tokens = 0
