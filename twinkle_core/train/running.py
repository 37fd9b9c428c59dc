"""How calls that compute are checked, run and counted: what the verbs of ``forward`` are made of (L2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from twinkle_core.contracts.adapters import BASE
from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.errors import (
    NotInForward,
    NoTrainableParameters,
    UnknownAdapter,
)
from twinkle_core.processors.input import row_lengths
from twinkle_core.train import losses, micro, normalise, optim
from twinkle_core.train.calls import Asked, Call, by_size, measure, read_by
from twinkle_core.train.failing import as_one
from twinkle_core.train.prepare import by_token, fit_args, width_of
from twinkle_core.train.session import Pending, Session
from twinkle_core.train.sessions import Sessions, one_at_a_time
from twinkle_core.train.together import calling, said, together, until_met
from twinkle_core.types import LossOutput, ModelOutput


class Running(Sessions):
    """Loss and backward of a session's calls."""

    def _pads_left(self, session: Session) -> bool:
        processor = self._or_base(session, "processor")
        return processor is not None and processor.padding_side == "left"

    @one_at_a_time
    def _serve(self, asked: Asked) -> torch.Tensor:
        """One ``forward_backward``. A subclass may gather several first."""
        how = said(asked.temperature, asked.task)
        with calling(self.engine, "forward_backward", asked.session.name, how), until_met(self.engine):
            call = self._ready(asked)
        return self._run(call)

    def _run(self, call: Call) -> torch.Tensor:
        """A call by itself."""
        session = call.session
        with calling(self.engine, "forward_backward", session.name), self.adapters.activate(session.name):
            self._begin(call)
            with self._or_drop(session) as progress:
                if self.engine.mesh.world_size > 1:  # a rank doesn't know how far others came, and all drop the same
                    progress.append(True)
                with as_one(self.engine, self._loss_fn(call, progress)) as loss_fn:
                    self.engine.run_schedule(
                        call.batches,
                        call.needs,
                        loss_fn,
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
        left, widest = self._pads_left(session), max(map(width_of, real), default=0)
        for part in waiting:
            losses.check_labels(loss, part.batch.inputs)
            if missing := losses.not_computed(loss, part.output):
                raise NotInForward(losses.name_of(loss), missing, session.name)
            at = range(part.batch.rows[0], part.batch.rows[-1] + 1) if part.batch.rows else range(0)
            fitted = fit_args(loss_args, lengths, widest, at, part.batch.inputs, left=left) if lengths else loss_args
            args = micro.cut_args(fitted, at, rows, self.engine.device)
            batch = Batch(part.batch.inputs, part.batch.rows, args, part.batch.dummy)
            with self.adapters.activate(part.active), self.engine.mode(part.train):
                train = part.train and not part.batch.dummy and part.active == session.name
                ranks = self.engine.ranks()
                coefficient = self.engine.aux_loss_coef if part.train else 0.0
                part.loss = losses.call(loss, batch, part.output, train=train, ranks=ranks, aux_coef=coefficient)

    def _on_all(self) -> AbstractContextManager[None]:
        """Inside, a loss is computed by itself: where ranks go back together, one that fails on one of them fails on all."""
        return together(self.engine, None) if self.engine.in_step else nullcontext()

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
        session.last_sums = total, weight
        session.last_loss = normalise.mean(total, weight)
        return session.last_loss  # type: ignore[no-any-return]
