"""The verbs that compute: forward, loss, backward (L2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from twinkle_core.contracts.engine import Batch
from twinkle_core.contracts.model import Inputs
from twinkle_core.errors import (
    LoraDisabled,
    NoForward,
)
from twinkle_core.train import limits, losses, micro, normalise
from twinkle_core.train.calls import Asked, measure
from twinkle_core.train.failing import as_one
from twinkle_core.train.generation import GenerateVerb
from twinkle_core.train.running import Running
from twinkle_core.train.session import Pending
from twinkle_core.train.sessions import one_at_a_time
from twinkle_core.train.together import in_pass, until_met
from twinkle_core.types import LossOutput, ModelOutput


class ForwardVerbs(Running, GenerateVerb):
    """forward, forward_only, calculate_loss, backward, forward_backward, and generate."""

    @one_at_a_time
    def forward(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        return_logits: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
    ) -> ModelOutput:
        """Forward with gradients; kept for ``calculate_loss`` and ``backward`` of the same adapter.

        Args:
            inputs: encoded rows, one collated batch, or conversations.
            return_logits: whether the ``[B, T, V]`` logits are wanted; without them long rows cost far less memory.
            temperature: logits are divided by it before logps and entropies are taken.
            task: what the model is asked for (``causal_lm``, ``embedding``, …), as far as the backend knows it. A loss or
                metric that needs embeddings implies ``embedding``, which gives ``embeddings`` ``[B, D]`` and no logits.

        Raises:
            Unsupported: the backend cannot split a step. EmptyBatch, NoTemplate, BadInputs, BadArgument.
        """
        with until_met(self.engine):
            limits.check_temperature(temperature)
            session = self._session(adapter_name)
            self._must_split("forward")
            loss = self._loss(session)
            rows = self._encode(session, inputs)
            labelled = losses.has_labels(rows)
            asked, metrics = losses.of_task(loss, task), session.metrics[True]
            aux = self.engine.aux_loss_coef != 0
            needs = losses.engine_needs(asked, metrics, task=task, logits=return_logits, labelled=labelled, aux=aux)
            task = losses.task_of(task, needs)
            (batch,) = self.engine.prepare(self._resolved(session, grouped=labelled or task != losses.EMBEDDING), rows)
        active = self._active(session)
        with self.adapters.activate(active), in_pass(self.engine):
            output = self.engine.forward(batch, needs, train=True, temperature=temperature, task=task)
        session.pending.pop(False, None)  # calculate_loss means the last forward there is
        session.pending[True] = [Pending(batch, output, active, train=True)]
        return _shown(output, return_logits)

    @one_at_a_time
    def forward_only(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        disable_lora: bool = False,
        return_logits: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        **loss_args: Any,
    ) -> ModelOutput:
        """Forward without graph and dropout; training flags are put back, also after an exception.

        Metrics for evaluation take it in where labels are there, except with ``disable_lora``, whose outputs are the base
        model's. Those that read the loss do so where it can be computed: it takes no arguments, or they are given here. A
        training forward that waits for its backward is not touched.

        Args:
            inputs: encoded rows, one collated batch, or conversations.
            disable_lora: the base model without any adapter.
            return_logits, temperature, task: as for ``forward``.
            micro_batch_size: rows at a time; the outputs are joined in row order.
            loss_args: for the loss, cut with the rows as in ``forward_backward``.

        Raises:
            EmptyBatch, NoTemplate, BadInputs, BadArgument; with ``loss_args`` also WrongArgument and LabelsMissing.
        """
        with until_met(self.engine):
            limits.check_temperature(temperature)
            session = self._session(adapter_name)
            loss = self._loss(session)
            if loss_args:
                losses.check_args(loss, loss_args)
            rows = self._encode(session, inputs, loss_args)
            if loss_args:
                losses.check_labels(loss, rows)
            labelled = losses.has_labels(rows)
            active = self._active(session, disable_lora)
            metrics = [] if active != session.name else [m for m in session.metrics[False] if labelled or not m.needs]
            asked = losses.of_task(loss, task)
            needs = losses.engine_needs(asked, metrics, task=task, logits=return_logits, labelled=labelled)
            task = losses.task_of(task, needs)
            view = self._resolved(session, grouped=labelled or task != losses.EMBEDDING)
            batches = self.engine.prepare(view, rows, micro_batch_size=micro_batch_size, loss_args=loss_args)
        whole = asked is not None and (bool(loss_args) or losses.complete_without_args(loss))
        wants_loss = whole and any("loss" in m.needs for m in metrics)
        parts: list[tuple[Mapping[str, Any], ModelOutput]] = []
        pending: list[Pending] = []

        def keep(batch: Batch, output: ModelOutput) -> LossOutput:
            """Not a loss: takes the output, gives back nothing to go back through."""
            value = losses.call(loss, batch, output, ranks=self.engine.ranks()) if wants_loss else None
            if batch.dummy:
                return LossOutput(torch.zeros(()), 0.0)
            measure(metrics, batch, output, value)
            parts.append((batch.inputs, output))
            kept = ModelOutput({k: v for k, v in output.items() if k in loss.needs or k == "output_layer"})
            pending.append(Pending(batch, kept, active, train=False, loss=value))
            return value or LossOutput(torch.zeros(()), 0.0)

        with self.adapters.activate(active), as_one(self.engine, keep) as loss_fn:
            self.engine.run_schedule(batches, needs, loss_fn, train=False, temperature=temperature, task=task)
        session.pending[False] = pending
        if not parts:
            return ModelOutput()
        return _shown(ModelOutput(micro.join(parts, pad_left=self._pads_left(session))), return_logits)

    @one_at_a_time
    def calculate_loss(self, *, adapter_name: str | None = None, **loss_args: Any) -> float:
        """The loss (mean per item) of this adapter's training forward that waits for its backward, else of its last
        ``forward_only``, if no training came after that. Waits for the device.

        Args:
            loss_args: for the loss; a training forward that has its loss is computed anew only when some are given.

        Raises:
            NoForward, NotInForward, LabelsMissing, WrongArgument, what the loss raises; FailedElsewhere: on another rank with
            which this one runs the model together.
        """
        session = self._session(adapter_name)
        with until_met(self.engine, self.engine.in_step):
            waiting = session.pending.get(True) or session.pending.get(False)
            if not waiting:
                raise NoForward("calculate_loss", session.name)
        with self._on_all():
            self._losses_of(session, waiting, loss_args)
        total = weight = 0.0
        for part in waiting:
            assert part.loss is not None
            total, weight = total + float(part.loss.sum.detach()), weight + float(part.loss.weight)
        session.last_sums = total, weight
        return total / weight if weight else total

    @one_at_a_time
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Gradients of the last training forward; its loss is computed if ``calculate_loss`` was not called. Counts one.

        Raises:
            NoForward: there is none, or its backward is done. LoraDisabled: it was one of the base model. NotInForward,
            WindowNotStepped, NoTrainableParameters, NotInOptimizer, BadLossResult, FailedElsewhere. The window is as it was.
        """
        with until_met(self.engine, self.engine.in_step):
            session = self._session(adapter_name)
            self._must_split("backward")
            waiting = session.pending.get(True)
            if not waiting:
                raise NoForward("backward", session.name)
            (part,) = waiting
            if part.active != session.name:
                raise LoraDisabled("backward", session.name)
            session.window.check_backward()
            self._check_trained(session)
        with self._on_all():
            self._losses_of(session, waiting, {})
        assert part.loss is not None
        with self.adapters.activate(session.name):
            self._begin_window(session)
            with self._or_drop(session) as progress:
                progress.append(True)
                with in_pass(self.engine):
                    self.engine.backward(part.loss.sum, sync=session.window.due_after_next())
                session.window.add(losses.detached(part.loss).weight)
        del session.pending[True]
        session.pending.pop(False, None)  # an evaluation before it is not the last forward any more
        session.last_loss = normalise.mean_of(part.loss)
        measure(session.metrics[True], part.batch, part.output, part.loss)

    def forward_backward(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        micro_batch_size: int | None = None,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        task: str = "causal_lm",
        **loss_args: Any,
    ) -> torch.Tensor | float:
        """Forward, loss and backward. Counts one towards the window, however many pieces ``micro_batch_size`` cuts it into.

        Args:
            inputs: encoded rows, one collated batch, or conversations.
            micro_batch_size: rows of a micro-batch; groups of the loss stay together.
            gradient_accumulation_steps: becomes the session's.
            temperature, task: as for ``forward``.
            loss_args: for the loss; tensors, arrays and lists of the rows' length are cut with the rows, anything else is
                passed whole.

        Returns:
            Mean loss per item over the rows given: a detached 0-d tensor (no device synchronisation); 0 when nothing is
            labelled.

        Raises:
            LabelsMissing, NoTemplate, EmptyBatch, BadInputs, BadArgument, WrongArgument, WindowSizeChanged, WindowNotStepped,
            NoTrainableParameters, NotInOptimizer, LoraDisabled: nothing was changed. What a loss or model raises leaves the
            window as it was if no backward had run; otherwise the window's gradients are dropped, and a note on the exception
            says so. Metrics learn of a call that succeeded only.
        """
        limits.check_temperature(temperature)
        session = self._session(adapter_name)  # here: which one is meant depends on the thread that calls
        self._check_enabled("forward_backward", session)
        asked = Asked(session, inputs, micro_batch_size, gradient_accumulation_steps, temperature, task, loss_args)
        return self._serve(asked)


def _shown(output: ModelOutput, logits: bool) -> ModelOutput:
    """A copy for the caller: what they do to it does not reach what is kept."""
    return ModelOutput({k: v for k, v in output.items() if logits or k != "logits"})
