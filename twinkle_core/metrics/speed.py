"""Tokens and seconds from one closed window to the next (L2)."""

from __future__ import annotations

import time
from typing import Any

from twinkle_core.types import InputFeature


class Speed:
    """Counts real tokens of windows, and the time that they took.

    The first window is not measured: it holds the warm-up, and where it began is not known.
    """

    def __init__(self) -> None:
        self._last: float | None = None  # when the last window closed; outlives reset()
        self._pending: Any = 0  # tokens of the open window
        self.tokens: Any = 0
        self.seconds, self.windows = 0.0, 0

    def add(self, inputs: InputFeature) -> None:
        """Tokens of a batch, padding left out."""
        mask = inputs.get("attention_mask")
        if mask is not None:
            self._pending = self._pending + mask.sum()
        elif inputs.get("input_ids") is not None:
            self._pending = self._pending + inputs["input_ids"].numel()

    def close(self) -> None:
        """A window has closed."""
        now = time.perf_counter()
        if self._last is not None:
            self.tokens = self.tokens + self._pending
            self.seconds += now - self._last
            self.windows += 1
        self._last, self._pending = now, 0

    def state(self) -> dict[str, Any]:
        """Tokens, seconds and windows that were measured."""
        return {"tokens": int(self.tokens), "seconds": self.seconds, "timed": self.windows}

    def merge(self, state: dict[str, Any]) -> None:
        """Ranks take the same steps in the same time: these are not added, tokens are."""
        self.tokens = self.tokens + state["tokens"]
        self.seconds, self.windows = max(self.seconds, state["seconds"]), max(self.windows, state["timed"])

    def reset(self) -> None:
        """Nothing measured; the clock goes on."""
        self.tokens = 0
        self.seconds, self.windows = 0.0, 0
