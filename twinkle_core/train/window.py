"""The accumulation window (L0 in spirit: pure Python, no torch).

A window counts backwards. It is *due* when it holds at least its size, and stays due until the next backward; on a due window
each verb acts once. It is *finished* once its gradients have been used (``step``) or dropped (``zero_grad``); the next backward
then begins a new one. What it held, not what it was meant to hold, is what its gradients are divided by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinkle_core.errors import BadWindowSize, WindowNotStepped, WindowSizeChanged

#: the verbs that act on a window, each once
CLIP, STEP, ZERO, LR = "clip_grad_norm", "step", "zero_grad", "lr_step"


@dataclass(slots=True)
class AccumulationWindow:
    """How many backwards were counted, with what weight, and which verbs have acted on the window that is due.

    ``size`` None: not yet known; it acts as 1, and the first size that a verb brings becomes it. ``weight`` is a number or a
    0-d tensor: adding to it must not wait for a device. ``normalised``: the gradients have been divided (``finish_grads``).
    ``updated``: the optimizer stepped. ``finite`` and ``grad_norm``: what was found while normalising and clipping.
    """

    size: int | None = None
    count: int = 0
    weight: Any = 0
    acted: set[str] = field(default_factory=set)
    closing: bool = False  # latched by the first verb that acts, so that a new size can't take the window back
    normalised: bool = False
    updated: bool = False
    finite: bool = True
    grad_norm: float | None = None

    @property
    def due(self) -> bool:
        """Whether verbs act."""
        return self.closing or (self.count > 0 and self.count >= (self.size or 1))

    @property
    def finished(self) -> bool:
        """Whether its gradients have been used or dropped."""
        return STEP in self.acted or ZERO in self.acted

    @property
    def open(self) -> bool:
        """Whether it holds gradients that are still to be used."""
        return self.count > 0 and not self.finished

    def due_after_next(self) -> bool:
        """Whether the next backward makes it due: then gradients must be synchronised over ranks."""
        count = 0 if self.finished else self.count
        return count + 1 >= (self.size or 1)

    def check_size(self, size: int | None) -> None:
        """Raise if ``size`` may not become the size now."""
        if size is None or size == self.size:
            return
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadWindowSize(size)
        touched = bool(self.acted) or self.closing
        if self.open and (self.size is not None or touched):
            raise WindowSizeChanged(self.size or 1, size, self.count)

    def resize(self, size: int | None) -> None:
        """Take a size that a verb brought.

        Raises:
            WindowSizeChanged: another size while the window is open. BadWindowSize: no positive whole number.
        """
        self.check_size(size)
        if size is not None:
            self.size = size

    def check_backward(self) -> None:
        """Raise if a backward may not come now: its gradients would mix with normalised ones."""
        if self.normalised and not self.finished:
            raise WindowNotStepped(self.count)

    def begin(self) -> bool:
        """Before a backward: begin a new window if the last one is finished.

        Returns:
            Whether gradients of the last window are still there and must be cleared first.
        """
        self.check_backward()
        if not self.finished:
            return False
        stale = ZERO not in self.acted
        self.reset()
        return stale

    def add(self, weight: Any) -> None:
        """Count one backward."""
        self.count += 1
        self.weight = self.weight + weight

    def acts(self, verb: str) -> bool:
        """Whether ``verb`` acts now. ``step`` and ``clip_grad_norm`` need gradients; ``lr_step`` needs an update."""
        if not self.due or verb in self.acted:
            return False
        if verb == LR:
            return self.updated
        return verb == ZERO or not self.finished

    def mark(self, verb: str) -> None:
        """``verb`` has acted."""
        self.closing = True
        self.acted.add(verb)

    def close(self) -> None:
        """Make a short window due (``flush``)."""
        self.closing = True

    def reset(self) -> None:
        """Back to the empty window; its size stays."""
        self.count, self.weight, self.closing = 0, 0, False
        self.acted = set()
        self.normalised = self.updated = False
        self.finite, self.grad_norm = True, None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and words, for a checkpoint."""
        return {
            "size": self.size,
            "count": self.count,
            "weight": float(self.weight),
            "acted": sorted(self.acted),
            "closing": self.closing,
            "normalised": self.normalised,
            "updated": self.updated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back ``state_dict()``."""
        self.reset()
        self.size, self.count, self.weight = state["size"], state["count"], state["weight"]
        self.acted, self.closing = set(state["acted"]), state["closing"]
        self.normalised, self.updated = state["normalised"], state["updated"]
