"""What a metric is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from twinkle_core.types import InputFeature, ModelOutput


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened when a window closed. Given to ``Metric.on_step`` and to the hook ``twinkle_after_step``."""

    acted: bool  # False: the update was skipped (no labelled item, or the fp16 scaler found an overflow)
    cur_step: int  # optimizer updates so far, this one included
    grad_norm: float | None  # before clipping; None when nobody asked for it
    lr: float  # of the first parameter group, as used by this update
    weight: float  # items of the window, all ranks


class Metric(ABC):
    """A quantity gathered over calls, reduced over ranks, read once. State is merged, then computed: never a mean of means."""

    #: fields of ModelOutput that it reads, besides ``loss`` and ``num_items``, which are always there in training. It is given
    #: no others, and no batch whose forward did not compute them
    needs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        """Take in one collated batch. Keep tensors on their device; do not synchronise here.

        In training: of a call that succeeded, whatever becomes of its window later (one that is dropped has no ``on_step``).
        """

    def on_step(self, result: StepResult) -> None:  # noqa: B027  (optional)
        """Called once for each closed window of a training session; not for one that was dropped."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Plain numbers or tensors from which ``calculate`` computes; what ranks exchange."""

    @abstractmethod
    def merge(self, state: dict[str, Any]) -> None:
        """Take in another rank's ``state()``. Associative."""

    @abstractmethod
    def calculate(self) -> dict[str, float]:
        """The numbers. An empty window gives ``{}``."""

    @abstractmethod
    def reset(self) -> None:
        """Back to the empty window."""
