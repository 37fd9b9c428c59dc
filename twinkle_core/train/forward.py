"""The verbs that compute: forward, loss, backward (L2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.contracts.model import Inputs
from twinkle_core.errors import (
    LoraDisabled,
    NoForward,
    NotInForward,
    NoTrainableParameters,
    UnknownAdapter,
)
from twinkle_core.processors.input import row_lengths
from twinkle_core.train import limits, losses, micro, normalise, optim
from twinkle_core.train.calls import Asked, Call, by_size, measure, read_by
from twinkle_core.train.generation import GenerateVerb
from twinkle_core.train.prepare import by_token, fit_args
from twinkle_core.train.session import Pending, Session
from twinkle_core.train.sessions import one_at_a_time
from twinkle_core.types import LossOutput, ModelOutput


class ForwardVerbs(GenerateVerb):
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
        with self.adapters.activate(active):
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

        with self.adapters.activate(active):
            self.engine.run_schedule(batches, needs, keep, train=False, temperature=temperature, task=task)
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
            NoForward, NotInForward, LabelsMissing, WrongArgument.
        """
        session = self._session(adapter_name)
        waiting = session.pending.get(True) or session.pending.get(False)
        if not waiting:
            raise NoForward("calculate_loss", session.name)
        self._losses_of(session, waiting, loss_args)
        total = weight = 0.0
        for part in waiting:
            assert part.loss is not None
            total, weight = total + float(part.loss.sum.detach()), weight + float(part.loss.weight)
        return total / weight if weight else total

    @one_at_a_time
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Gradients of the last training forward; its loss is computed if ``calculate_loss`` was not called. Counts one.

        Raises:
            NoForward: there is none, or its backward is done. LoraDisabled: it was one of the base model. NotInForward,
            WindowNotStepped, NoTrainableParameters, NotInOptimizer, BadLossResult.
        """
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
        self._losses_of(session, waiting, {})
        assert part.loss is not None
        with self.adapters.activate(session.name):
            self._begin_window(session)
            with self._or_drop(session) as progress:
                progress.append(True)
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

    # ------------------------------------------------------------------------------------------------ inside

    def _pads_left(self, session: Session) -> bool:
        return getattr(self._or_base(session, "processor"), "padding_side", "right") == "left"

    @one_at_a_time
    def _serve(self, asked: Asked) -> torch.Tensor:
        """One ``forward_backward``. A subclass may gather several first."""
        return self._run(self._ready(asked))

    def _run(self, call: Call) -> torch.Tensor:
        """A call by itself."""
        session = call.session
        with self.adapters.activate(session.name):
            self._begin(call)
            with self._or_drop(session) as progress:
                self.engine.run_schedule(
                    call.batches,
                    call.needs,
                    self._loss_fn(call, progress),
                    sync=session.window.due_after_next(),
                    temperature=call.asked.temperature,
                    task=call.asked.task,
                )
                mean = self._count(session, call.sums)
        self._measure_later(call)
        return mean

    def _ready(self, asked: Asked) -> Call:
        """Check a call, and bring its rows to the device. Changes nothing."""
        session, given = asked.session, asked.loss_args
        if self.sessions.get(session.name) is not session:  # it was removed while the call waited for its turn
            raise UnknownAdapter(session.name, None, [name for name in self.sessions if name != BASE])
        loss = self._loss(session)
        losses.check_args(loss, given)
        rows = self._encode(session, asked.inputs, given)
        losses.check_labels(loss, rows)
        session.window.check_size(asked.gradient_accumulation_steps)
        session.window.check_backward()
        self._check_trained(session)
        size = asked.micro_batch_size
        batches = self.engine.prepare(self._resolved(session), rows, micro_batch_size=size, loss_args=given)
        aux = self.engine.aux_loss_coef != 0
        needs = losses.engine_needs(loss, session.metrics[True], task=asked.task, aux=aux)
        asked = replace(asked, task=losses.task_of(asked.task, needs))
        return Call(asked, loss, batches, needs, *by_size(session.metrics[True]))

    def _begin(self, call: Call) -> None:
        """The session takes the call's window size, and begins a window if the last one is finished."""
        call.session.window.resize(call.asked.gradient_accumulation_steps)
        call.session.pending.pop(False, None)
        self._begin_window(call.session)

    def _loss_fn(self, call: Call, progress: list[bool]) -> LossFn:
        """What an engine calls for each micro-batch. ``progress``: of ``_or_drop``; from here on a backward may run."""
        coefficient, ranks = self.engine.aux_loss_coef, self.engine.ranks()

        def loss_fn(batch: Batch, output: ModelOutput) -> LossOutput:
            value = losses.call(call.loss, batch, output, train=not batch.dummy, ranks=ranks, aux_coef=coefficient)
            held = losses.detached(value)
            if not batch.dummy:
                measure(call.at_once, batch, output, held)
                call.measured.append((batch, read_by(call.later, output), held))
            call.sums.append(held)
            progress.append(True)
            return value

        return loss_fn

    def _measure_later(self, call: Call) -> None:
        """Hand a call that succeeded to the metrics that waited for that."""
        for batch, output, value in call.measured:
            measure(call.later, batch, output, value)

    def _losses_of(self, session: Session, waiting: list[Pending], loss_args: Mapping[str, Any]) -> None:
        """Compute what is missing of the losses of a forward, with the weights and in the mode that the forward had."""
        loss = self._loss(session)
        if all(part.loss is not None for part in waiting) and not loss_args:
            return
        losses.check_args(loss, loss_args)
        rows = sum(len(part.batch.rows) for part in waiting)
        real = [part.batch.inputs for part in waiting if not part.batch.dummy] if by_token(loss_args) else []
        lengths = [length for inputs in real for length in row_lengths(inputs)]
        left = self._pads_left(session)
        for part in waiting:
            losses.check_labels(loss, part.batch.inputs)
            if missing := losses.not_computed(loss, part.output):
                raise NotInForward(losses.name_of(loss), missing, session.name)
            at = range(part.batch.rows[0], part.batch.rows[-1] + 1) if part.batch.rows else range(0)
            fitted = fit_args(loss_args, lengths, at, part.batch.inputs, left=left) if lengths else loss_args
            args = micro.cut_args(fitted, at, rows, self.engine.device)
            batch = Batch(part.batch.inputs, part.batch.rows, args, part.batch.dummy)
            with self.adapters.activate(part.active), self.engine.mode(part.train):
                train = part.train and not part.batch.dummy and part.active == session.name
                ranks = self.engine.ranks()
                coefficient = self.engine.aux_loss_coef if part.train else 0.0
                part.loss = losses.call(loss, batch, part.output, train=train, ranks=ranks, aux_coef=coefficient)

    def _check_trained(self, session: Session) -> None:
        """Raise if a backward would make no gradient, or one that the session's optimizer has never heard of."""
        parameters = self.adapters.parameters(session.name)
        if not parameters:
            raise NoTrainableParameters(session.name)
        if session.optimizer is not None:
            optim.check_knows(session.name, session.optimizer, parameters, session.named)

    def _begin_window(self, session: Session) -> None:
        """Begin a window if the last one is finished; it starts with no gradient left."""
        if session.window.begin():
            self._clear(session)

    def _clear(self, session: Session) -> None:
        """Drop a session's gradients, also those that its optimizer leaves out."""
        if session.optimizer is not None:
            self.engine.zero_grad(session.optimizer)
        # with an optimizer, ``_check_trained`` lets no other parameter get a gradient
        parameters = self.adapters.parameters(session.name) if session.optimizer is None else session.named
        for parameter in parameters.values():
            parameter.grad = None

    @contextmanager
    def _or_drop(self, session: Session) -> Iterator[list[bool]]:
        """Where a backward may have run when something fails, the window's gradients are no sum of whole batches: drop them.

        Gives a list; empty means that no backward can have run.
        """
        progress: list[bool] = []
        try:
            yield progress
        except BaseException as error:
            if progress:
                lost = session.window.count
                session.window.reset()
                self._clear(session)
                session.pending.pop(True, None)
                error.add_note(
                    f"twinkle: a backward had begun, so the gradients of this accumulation window ({lost} backward(s) before "
                    f"this one) were dropped; weights and optimizer are unchanged"
                )
            raise

    def _count(self, session: Session, sums: list[LossOutput]) -> torch.Tensor:
        """Add one call to the window. Returns its mean loss, without waiting for the device."""
        device = self.engine.device
        total = torch.zeros((), dtype=normalise.exact_dtype(device), device=device)
        weight = torch.zeros_like(total)
        for part in sums:
            total += part.sum
            weight += part.weight
        total, weight = self.engine.from_last_stage(torch.stack([total, weight])).unbind()
        session.window.add(weight)
        session.last_loss = normalise.mean(total, weight)
        return session.last_loss  # type: ignore[no-any-return]


def _shown(output: ModelOutput, logits: bool) -> ModelOutput:
    """A copy for the caller: what they do to it does not reach what is kept."""
    return ModelOutput({k: v for k, v in output.items() if logits or k != "logits"})
