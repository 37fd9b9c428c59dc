"""A loss with a batch and a tiny model, as the compliance suite of losses tries it (L2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinkle_core.contracts.engine import Batch
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.suites.outputs import outputs_of, tiny_lm
from twinkle_core.testing.toys import TinyLM
from twinkle_core.train import losses, micro
from twinkle_core.types import InputFeature, LossOutput


class Case:
    """A loss with a batch and a model."""

    def __init__(
        self,
        loss: Any,
        rows: Sequence[InputFeature],
        loss_args: Mapping[str, Any],
        dtype: torch.dtype = torch.float64,
        **processor: Any,
    ) -> None:
        self.loss, self.rows, self.loss_args, self.processor = loss, rows, loss_args, processor
        self.model: TinyLM = tiny_lm(dtype)
        self.inputs = InputProcessor(**processor).collate(rows)
        self.args = {k: _in(v, dtype) for k, v in loss_args.items()}
        self.needs = losses.engine_needs(loss, [])

    def rows_from(self, rows: range) -> Case:
        """The same with some of the rows."""
        args = micro.cut_args(self.loss_args, rows, len(self.rows), "cpu")
        return Case(self.loss, [self.rows[i] for i in rows], args, **self.processor)

    def call(self, module: Any = None, *, train: bool = False) -> LossOutput:
        """The loss, checked as in training."""
        outputs = outputs_of(module or self.model, self.inputs, self.needs)
        return losses.call(self.loss, Batch(self.inputs, range(len(self.rows)), self.args), outputs, train=train)

    def gradient(self, total: torch.Tensor) -> torch.Tensor:
        """Of all weights of the model, one after the other."""
        weights = list(self.model.parameters())
        gradients = torch.autograd.grad(total, weights, allow_unused=True, retain_graph=True)
        return torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in zip(weights, gradients, strict=True)])


def _in(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def number(value: Any) -> float:
    """Of a tensor or a number."""
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def assert_finite(case: Case, where: str) -> None:
    """The sum and its gradient."""
    result = case.call()
    assert bool(result.sum.isfinite()), f"the sum is {number(result.sum)} {where}"
    assert bool(case.gradient(result.sum).isfinite().all()), f"a gradient is not finite {where}"
