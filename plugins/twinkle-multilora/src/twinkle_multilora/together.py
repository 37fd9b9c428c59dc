"""Calls of several tenants in one pass of the base model, each with its own loss, gradients, window and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinkle_core.isolation import attempt
from twinkle_core.train.calls import Asked, Call
from twinkle_multilora.engine import Share, SlotEngine
from twinkle_multilora.many import Many, Outcome
from twinkle_multilora.scheduler import TenantScheduler

if TYPE_CHECKING:
    import torch

    from twinkle_multilora.adapters import SlotAdapters


class Together(Many):
    """``forward_backward`` for many tenants in shared passes: asked for at once, or by threads that happen to call together."""

    engine: SlotEngine
    adapters: SlotAdapters
    scheduler: TenantScheduler

    def _serve(self, asked: Asked) -> torch.Tensor:
        return self.scheduler.serve(asked)

    # ------------------------------------------------------------------------------------------------ inside

    def _run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        """Calls of different sessions, grouped. What one raises is its outcome."""
        outcomes: dict[int, Outcome] = {}
        for group in self.scheduler.groups(calls, self._tokens):
            found = self._run_group(group) if len(group) > 1 else [self._attempt(group[0])]
            outcomes.update(zip(map(id, group), found, strict=True))
        return [outcomes[id(call)] for call in calls]

    def _tokens(self, call: Call) -> int | None:
        """Tokens of a call in a shared pass; None: it can't take part."""
        if len(call.batches) != 1:
            return None
        piece = self.engine.piece(call.batches[0], call.needs, call.asked.task)
        return piece.count if piece is not None else None

    def _run_group(self, calls: Sequence[Call]) -> list[Outcome]:
        """Calls in one pass. Where it fails before any backward, each by itself: so whose fault it is shows."""
        drops: list[list[bool]] = []
        done = attempt(lambda: self._pass_of(calls, drops))
        if done.value is not None:
            return [self._outcome(*each) for each in zip(calls, done.value, drops, strict=True)]
        if any(drops):
            return [done.error for _ in calls]
        return [self._attempt(call) for call in calls]

    def _pass_of(self, calls: Sequence[Call], drops: list[list[bool]]) -> list[Share]:
        """One pass. ``drops``: gets, for each call, what is not empty once a backward of it may have run."""
        with contextlib.ExitStack() as stack:
            shares = []
            for call in calls:
                self._begin(call)
                drops.append(stack.enter_context(self._or_drop(call.session)))
                slot = self.adapters.slot(call.session.name).index
                shares.append(Share(slot, call.batches[0], call.needs, self._loss_fn(call, drops[-1])))
            self.engine.run_shared(shares, temperature=calls[0].asked.temperature)
        return shares

    def _outcome(self, call: Call, share: Share, progress: list[bool]) -> Outcome:
        if share.error is not None:
            return attempt(lambda: self._fail(call, share.error, progress)).error
        mean = self._count(call.session, call.sums)
        self._measure_later(call)
        return mean

    def _fail(self, call: Call, error: BaseException | None, progress: list[bool]) -> None:
        """Raise what a call's loss raised, to the session as if it had run alone."""
        with self._or_drop(call.session) as begun:
            begun.extend(progress)
            assert error is not None
            raise error
