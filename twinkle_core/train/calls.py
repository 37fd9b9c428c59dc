"""One call of ``forward_backward``, from what was asked to what came out (L2).

So that calls of several adapters can be checked one by one, run together, and counted one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.log import get_logger
from twinkle_core.train import losses, normalise
from twinkle_core.types import ModelOutput

if TYPE_CHECKING:
    from twinkle_core.contracts.engine import Batch
    from twinkle_core.contracts.loss import Loss
    from twinkle_core.contracts.metric import Metric
    from twinkle_core.contracts.model import Inputs
    from twinkle_core.train.session import Session
    from twinkle_core.types import LossOutput

#: outputs that are too large to be kept for each micro-batch
LARGE = frozenset({"logits", "hidden"})


@dataclass(slots=True)
class Asked:
    """The arguments of a call. ``session``: whose call it is, as found in the thread that calls; ``context``: that thread's."""

    session: Session
    inputs: Inputs
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    temperature: float = 1.0
    task: str = "causal_lm"
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    context: Context = field(default_factory=copy_context)


@dataclass(slots=True)
class Call:
    """A call that was checked and whose batches are on the device. Nothing of the session has changed yet.

    ``at_once``: metrics that read large tensors, which can't be kept until all micro-batches are through; ``later``: all
    others. ``sums`` and ``measured`` fill while it runs.
    """

    asked: Asked
    loss: Loss
    batches: Sequence[Batch]
    needs: frozenset[str]
    at_once: list[Metric]
    later: list[Metric]
    sums: list[LossOutput] = field(default_factory=list)
    measured: list[tuple[Batch, ModelOutput, LossOutput]] = field(default_factory=list)

    @property
    def session(self) -> Session:
        """Whose call it is."""
        return self.asked.session


def by_size(metrics: Sequence[Metric]) -> tuple[list[Metric], list[Metric]]:
    """Metrics that read large tensors, and all others."""
    return [m for m in metrics if m.needs & LARGE], [m for m in metrics if not m.needs & LARGE]


def read_by(metrics: list[Metric], output: ModelOutput) -> ModelOutput:
    """The part of an output that metrics read, without its graph."""
    wanted = frozenset[str]().union(*(m.needs for m in metrics))
    return ModelOutput({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in output.items() if k in wanted})


def measure(metrics: Sequence[Metric], batch: Batch, output: ModelOutput, loss: LossOutput | None) -> None:
    """Hand one micro-batch to metrics."""
    if not metrics:
        return
    seen = ModelOutput({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in output.items()})
    if loss is not None:
        seen["loss"], seen["num_items"] = normalise.mean_of(loss), loss.weight
        seen["loss_metrics"] = loss.metrics or {}
    for metric in metrics:
        missing = metric.needs - losses.OF_CORE - seen.keys()
        if missing:
            name, fields = type(metric).__name__, ", ".join(sorted(missing))
            get_logger().warning("%s leaves out a batch: its forward did not compute %s", name, fields)
            continue
        metric.accumulate(batch.inputs, seen)
