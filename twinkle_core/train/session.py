"""The training state of one adapter (L2). Whose call it is travels as an argument, never through shared state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle_core.train.window import AccumulationWindow

if TYPE_CHECKING:
    import torch

    from twinkle_core.contracts.engine import Batch
    from twinkle_core.contracts.loss import Loss
    from twinkle_core.contracts.metric import Metric
    from twinkle_core.contracts.processor import Processor
    from twinkle_core.contracts.template import Template
    from twinkle_core.types import LossOutput, ModelOutput


@dataclass(slots=True)
class Pending:
    """One batch of the last forward of one adapter in one mode, for the split verbs.

    ``active``: whose weights took part. ``train``: whether with dropout and graph. A loss that runs the output layer itself is
    computed under both.
    """

    batch: Batch
    output: ModelOutput
    active: str
    train: bool
    loss: LossOutput | None = None


@dataclass(slots=True)
class Session:
    """Everything that belongs to one adapter's training, and nothing that belongs to another's.

    A loss, template or processor that is None falls back to the base session's; an optimizer never does.
    """

    name: str
    loss: Loss | None = None
    template: Template | None = None
    processor: Processor | None = None
    optimizer: torch.optim.Optimizer | None = None
    named: dict[str, torch.nn.Parameter] = field(default_factory=dict)  # what was trainable when the optimizer was set
    scheduler: Any = None
    metrics: dict[bool, list[Metric]] = field(default_factory=lambda: {True: [], False: []})
    window: AccumulationWindow = field(default_factory=AccumulationWindow)
    pending: dict[bool, list[Pending]] = field(default_factory=dict)  # by mode: True training, False forward_only
    cur_step: int = 0
    optimizer_age: int = 0  # updates that the optimizer has made, which ranks compare: one that was set anew has forgotten them
    consumed_train_samples: int = 0
    skipped_steps: int = 0  # windows without an update: no labelled item, or gradients that were not finite
    last_loss: Any = None  # mean of the last backward, detached; for error texts
    last_sums: tuple[Any, Any] = (0.0, 0.0)  # sum and weight of the loss that was last given to the caller
