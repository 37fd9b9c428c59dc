"""Calls of several tenants in one pass of the base model, each with its own loss, gradients, window and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import BadArgument
from twinkle_core.isolation import attempt
from twinkle_core.train import limits
from twinkle_core.train.calls import Asked, Call
from twinkle_core.train.forward import ForwardVerbs
from twinkle_core.train.sessions import one_at_a_time
from twinkle_multilora.engine import Share, SlotEngine
from twinkle_multilora.scheduler import TenantScheduler

if TYPE_CHECKING:
    import torch

    from twinkle_core.contracts.model import Inputs
    from twinkle_multilora.adapters import SlotAdapters

#: what a call gave, or what it raised
Outcome = Any


class Together(ForwardVerbs):
    """``forward_backward`` for many tenants at once: asked for at once, or by threads that happen to call together."""

    engine: SlotEngine
    adapters: SlotAdapters
    scheduler: TenantScheduler

    @one_at_a_time
    def forward_backward_many(
        self,
        inputs: Mapping[str, Inputs],
        *,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        **loss_args: Any,
    ) -> dict[str, torch.Tensor]:
        """``forward_backward`` of several tenants, in as few passes as the scheduler's token budget allows.

        What comes out is, bit for bit, what a ``forward_backward`` of each tenant alone gives, in any order and company.

        Args:
            inputs: by tenant: encoded rows, one collated batch, or conversations.
            gradient_accumulation_steps: becomes each session's.
            temperature: as for ``forward``.
            loss_args: for the losses. A dict whose keys are names of tenants gives each its own, and those that it doesn't
                name nothing; any other value goes to all.

        Returns:
            By tenant, what its ``forward_backward`` returns.

        Raises:
            What ``forward_backward`` raises of a call that can't be: nothing was changed then, of any tenant. BadArgument: a
            tenant is named twice, or the base model. What a tenant's loss raises is raised after the others are done.
        """
        limits.check_temperature(temperature)
        if not isinstance(inputs, Mapping) or not inputs:
            raise BadArgument("inputs", type(inputs).__name__, "a dict: each tenant's name, and its rows")
        calls: list[Call] = []
        for name, rows in inputs.items():
            session = self._session(name)
            if session.name == BASE or any(call.session is session for call in calls):
                raise BadArgument("inputs", name, "each tenant once, by its name or its slot's")
            self._check_enabled("forward_backward_many", session)
            own = _own(loss_args, name, inputs)
            calls.append(self._ready(Asked(session, rows, None, gradient_accumulation_steps, temperature, loss_args=own)))
        outcomes = self._run_all(calls)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return dict(zip(inputs, outcomes, strict=True))

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

    def _attempt(self, call: Call) -> Outcome:
        done = attempt(lambda: self._run(call))  # what it raises is raised to the tenant whose call it is
        return done.value if done.error is None else done.error

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


def _own(loss_args: Mapping[str, Any], name: str, tenants: Mapping[str, Any]) -> dict[str, Any]:
    """A tenant's loss arguments: its part of dicts by tenant, and all others whole.

    Raises:
        BadArgument: a dict with names of tenants and other keys.
    """
    own = {}
    for key, value in loss_args.items():
        named = set(value) & set(tenants) if isinstance(value, Mapping) else set()
        if not named:
            own[key] = value
        elif strange := [other for other in value if other not in named]:
            raise BadArgument(key, strange[0], f"a dict by tenant, of tenants in this call: {', '.join(tenants)}")
        elif name in value:
            own[key] = value[name]
    return own
