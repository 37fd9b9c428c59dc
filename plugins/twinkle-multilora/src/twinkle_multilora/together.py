"""Calls of several tenants in one pass of the base model, each with its own loss, gradients, window and metrics."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.contracts.engine import Batch, LossFn
from twinkle_core.errors import EmptyBatch, FailedElsewhere, RanksApart
from twinkle_core.errors.adapters import whose
from twinkle_core.isolation import attempt
from twinkle_core.train.calls import Asked, Call
from twinkle_core.train.micro import cut_batch
from twinkle_core.train.together import calling, in_pass, said
from twinkle_core.types import IGNORE_INDEX, LossOutput, ModelOutput
from twinkle_multilora.engine import Share, SlotEngine
from twinkle_multilora.many import Many, Outcome, result_of
from twinkle_multilora.ranks import MEETING
from twinkle_multilora.scheduler import TenantScheduler

if TYPE_CHECKING:
    from twinkle_multilora.adapters import SlotAdapters


class Together(Many):
    """``forward_backward`` for many tenants in shared passes: asked for at once, or by threads that happen to call together."""

    engine: SlotEngine
    adapters: SlotAdapters
    scheduler: TenantScheduler

    def _serve(self, asked: Asked) -> torch.Tensor:
        return self.scheduler.serve(asked)

    def _turn(self, verb: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        if not self.engine.several:
            return self.turns
        if verb.__name__ not in MEETING:
            return self.turns.local()
        given = inspect.signature(verb).bind_partial(self, *args, **kwargs).arguments
        many = given.get("inputs") if verb.__name__ == "forward_backward_many" else None
        name = given.get("adapter_name", self._chosen())
        return self.turns.of(verb.__name__, ", ".join(sorted(map(str, many))) if isinstance(many, Mapping) else str(name or ""))

    # ------------------------------------------------------------------------------------------------ inside

    def _serve_all(self, asked: Sequence[Asked]) -> list[Outcome]:
        """Calls of different sessions. What one raises is its outcome."""
        ready = self._all_ready(asked)
        calls = iter(self._run_all([call for call in ready if isinstance(call, Call)]))
        return [next(calls) if isinstance(each, Call) else each for each in ready]

    def _all_ready(self, many: Sequence[Asked]) -> list[Call | BaseException]:
        """Calls that are checked and on the device, or what is wrong with them. On several ranks each has as many batches on
        all of them, and is wrong on all if it is on one."""
        engine = self.engine
        if not engine.several:
            return super()._all_ready(many)
        _ = engine.packs  # asked by all ranks at once
        with engine.by_itself():
            found = [attempt(functools.partial(self._ready, asked)) for asked in many]
        here = [
            (done.why, _size(done.value), said(asked.temperature, asked.task)) for asked, done in zip(many, found, strict=True)
        ]
        told = engine.gather_objects(here, "world")
        ready: list[Call | BaseException] = []
        for i, (asked, done) in enumerate(zip(many, found, strict=True)):
            wrong = next((rank for rank, calls in enumerate(told) if calls[i][0]), None)
            what = f"forward_backward of {whose(asked.session.name)}"
            if done.value is None:
                ready.append(result_of(done))
            elif wrong is None and len({calls[i][2] for calls in told}) > 1:  # they would share passes in other groups
                ready.append(RanksApart.differently([what + calls[i][2] for calls in told]))
            elif wrong is not None:
                ready.append(FailedElsewhere(what, wrong, told[wrong][i][0]))
            elif not any(calls[i][1][1] for calls in told):
                ready.append(EmptyBatch())
            else:
                ready.append(_filled(done.value, max(calls[i][1][0] for calls in told)))
        return ready

    def _run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        """Calls of different sessions, grouped. What one raises is its outcome."""
        tokens: dict[int, int | None] = {id(call): self._tokens(call) for call in calls}
        limits = self.scheduler.limits
        if self.engine.several:  # by what rank 0 allows, and the rank with most
            told = self.engine.gather_objects((limits, list(tokens.values())), "world")
            limits = told[0][0]
            most = [max(counts) if None not in counts else None for counts in zip(*(counts for _, counts in told), strict=True)]
            tokens = dict(zip(tokens, most, strict=True))
        outcomes: dict[int, Outcome] = {}
        for group in self.scheduler.groups(calls, lambda call: tokens[id(call)], limits):
            found = self._run_group(group) if len(group) > 1 else [self._attempt(group[0])]
            outcomes.update(zip(map(id, group), found, strict=True))
        return [outcomes[id(call)] for call in calls]

    def _tokens(self, call: Call) -> int | None:
        """Tokens of a call in a shared pass; None: it can't take part."""
        if len(call.batches) != 1:
            return None
        piece = self.engine.piece(call.batches[0], call.needs, call.asked.task)
        return piece.count if piece is not None else None

    def _loss_fn(self, call: Call, progress: list[bool]) -> LossFn:
        """A call's loss, in the context of the thread that called, whoever's turn its pass runs in: what names no adapter there
        means that thread's."""
        loss_fn = super()._loss_fn(call, progress)

        def called(batch: Batch, output: ModelOutput) -> LossOutput:
            with calling(self.engine, "forward_backward", call.session.name):
                return loss_fn(batch, output)

        return lambda batch, output: call.asked.context.run(called, batch, output)

    def _run_group(self, calls: Sequence[Call]) -> list[Outcome]:
        """Calls in one pass. Where it fails before any loss, each by itself: so whose fault it is shows."""
        begun: list[list[bool]] = [[] for _ in calls]
        done = attempt(lambda: self._pass_of(calls, begun))
        if done.error is not None and self.engine.in_step:
            raise done.error  # in the middle of a pass in which other ranks wait for this one
        if done.value is not None:
            return done.value
        return [done.error for _ in calls] if any(begun) else [self._attempt(call) for call in calls]

    def _pass_of(self, calls: Sequence[Call], begun: Sequence[list[bool]]) -> list[Outcome]:
        """One pass. ``begun``: gets, for each call, what is not empty once its loss may have gone back."""
        shares = []
        with self._all_or_as_before(calls):
            for call, mine in zip(calls, begun, strict=True):
                self._begin(call)
                slot = self.adapters.slot(call.session.name).index
                shares.append(Share(slot, call.batches[0], call.needs, self._loss_fn(call, mine)))
            with in_pass(self.engine):
                self.engine.run_shared(shares, temperature=calls[0].asked.temperature)
            return [self._outcome(*each) for each in zip(calls, shares, begun, strict=True)]

    @contextlib.contextmanager
    def _all_or_as_before(self, calls: Sequence[Call]) -> Iterator[None]:
        """What stops a pass in the middle, such as Ctrl-C in the loss of one tenant, leaves the windows of all as they were.
        (Gradients are there to be put back: a pass adds to none in place.)"""
        sessions = [call.session for call in calls]
        draws = [self.adapters.training_state(session.name) for session in sessions]
        windows = [copy.deepcopy(session.window) for session in sessions]
        found = [(p, p.grad) for session in sessions for p in self._named(session).values()]
        try:
            yield
        except BaseException:
            for session, window, state in zip(sessions, windows, draws, strict=True):
                session.window = window
                self.adapters.load_training_state(session.name, state)
            for parameter, gradient in found:
                parameter.grad = gradient
            raise

    def _outcome(self, call: Call, share: Share, progress: list[bool]) -> Outcome:
        if share.error is not None:
            return attempt(lambda: self._fail(call, share.error, progress)).error
        mean = self._count(call.session, call.sums)
        self._measure_later(call)
        return mean

    def _fail(self, call: Call, error: BaseException | None, progress: list[bool]) -> None:
        """Raise what a call's loss raised, to the session as if it had run alone. On several ranks it costs the window always:
        on some a backward may have begun, and they go on alike."""
        with self._or_drop(call.session) as begun:
            begun.extend(progress or [True] * self.engine.several)
            assert error is not None
            raise error


def _size(call: Call | None) -> tuple[int, bool]:
    """How many micro-batches a call has, and whether any is of rows that were given."""
    return (0, False) if call is None else (len(call.batches), any(not batch.dummy for batch in call.batches))


def _filled(call: Call, count: int) -> Call:
    """A call with as many micro-batches as other ranks have: further ones are a row that trains nothing."""
    batches = list(call.batches)
    while len(batches) < count:
        row = cut_batch(batches[0].inputs, range(1))
        row["labels"] = torch.full_like(row["labels"], IGNORE_INDEX)
        batches.append(Batch(row, range(0), dummy=True))
    return replace(call, batches=batches)
