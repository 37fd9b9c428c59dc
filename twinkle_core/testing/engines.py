"""Engines over tiny modules: one that loops, one shaped like a pipeline schedule, one that stands for two data ranks (L2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.errors import NotComputed
from twinkle_core.ops.from_hidden import from_hidden
from twinkle_core.patches.heads import NO_POOLING, pooling_of, values_of
from twinkle_core.train.loop_engine import LoopEngine, evaluating
from twinkle_core.train.single import SingleAdapter
from twinkle_core.train.verbs import SessionModel
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


def compute(module: Any, inputs: InputFeature, needs: frozenset[str], temperature: float = 1.0) -> ModelOutput:
    """The fields in ``needs``, and nothing else, of a module whose ``forward`` gives hidden states."""
    hidden = module(inputs)
    output = from_hidden(hidden, module.output_layer, inputs, needs, temperature)
    if "values" in needs:
        output["values"] = values_of(module, hidden)
    if "embeddings" in needs:
        head = pooling_of(module)
        if head is None:
            raise NotComputed(type(module).__name__, "embeddings", NO_POOLING)
        output.embeddings = head(hidden, inputs)
    return output


class ToyEngine(LoopEngine):
    """LoopEngine over a module whose ``forward(inputs)`` gives hidden states and which has ``output_layer``.

    ``calls`` records what was asked: (needs, train, temperature, task), for tests.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.calls: list[tuple[frozenset[str], bool, float, str]] = []

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        self.calls.append((needs, train, temperature, task))
        return compute(self.module, batch.inputs, needs, temperature)


#: what a pipeline schedule asks of its caller: take the next micro-batch, give its output and a function that makes a loss
ForwardStep = Callable[[Iterator[Batch], Any], tuple[ModelOutput, Callable[[ModelOutput], LossOutput]]]


def pipeline_schedule(
    forward_step: ForwardStep, iterator: Iterator[Batch], module: Any, count: int, *, forward_only: bool, warmup: int = 2
) -> None:
    """One forward, one backward, after ``warmup`` forwards: the order of a pipeline stage. Nobody outside sees its tensors."""
    waiting: list[torch.Tensor] = []
    for i in range(count):
        output, loss_of = forward_step(iterator, module)
        waiting.append(loss_of(output).sum)
        if not forward_only and i >= warmup:
            torch.autograd.backward(waiting.pop(0))
    for loss in [] if forward_only else waiting:
        torch.autograd.backward(loss)


class CallbackEngine(LoopEngine):
    """An engine that can't split a step: forward and backward happen inside a schedule, which calls back for the loss."""

    capabilities = frozenset()

    def run_schedule(
        self,
        batches: Sequence[Batch],
        needs: frozenset[str],
        loss_fn: LossFn,
        *,
        train: bool = True,
        sync: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
    ) -> None:
        def forward_step(iterator: Iterator[Batch], module: Any) -> tuple[ModelOutput, Callable[[ModelOutput], LossOutput]]:
            batch = next(iterator)
            return compute(module, batch.inputs, needs, temperature), lambda output: loss_fn(batch, output)

        def run() -> None:
            pipeline_schedule(forward_step, iter(batches), self.module, len(batches), forward_only=not train)

        if train:
            run()
        else:
            with evaluating(self.module):
                run()


class OneOfTwoRanks(ToyEngine):
    """One data rank of two, whose peer is played by numbers: what it adds to each sum, in order of the calls.

    Args:
        peer: the weights of the other rank's windows.
        peer_gradients: the other rank's gradients (sums), added when a window closes as a backend that sums would.
    """

    def __init__(self, module: torch.nn.Module, peer: Sequence[float], peer_gradients: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(module)
        self.peer, self.peer_gradients = list(peer), list(peer_gradients)

    def most(self, count: int, given: int) -> int:
        return count

    def gather_numbers(self, numbers: Sequence[float | torch.Tensor]) -> list[list[float]]:
        call, number, failed = map(float, numbers)
        return [[call, number, failed], [call, self.peer.pop(0), 0.0]]

    def finish_grads(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | float) -> bool:
        for parameter, more in zip(self.module.parameters(), self.peer_gradients, strict=False):
            parameter.grad = more.clone() if parameter.grad is None else parameter.grad + more
        return super().finish_grads(optimizer, scale)


def session_model(module: torch.nn.Module, engine: type[LoopEngine] = ToyEngine, **kwargs: Any) -> SessionModel:
    """All verbs over a tiny module that is trained as a whole.

    Args:
        engine: its class; ``kwargs`` are for it.
    """
    return SessionModel(engine(module, **kwargs), SingleAdapter(module))
