"""Which calls share a pass: those that wait when the model is free."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_core.isolation import attempt

if TYPE_CHECKING:
    import torch

    from twinkle_core.train.calls import Asked, Call
    from twinkle_multilora.together import Together


class _Ticket:
    """A call that waits, and what came of it."""

    __slots__ = ("asked", "done", "outcome")

    def __init__(self, asked: Asked) -> None:
        self.asked, self.done = asked, False
        self.outcome: Any = None


class TenantScheduler:
    """Gathers ``forward_backward`` calls of different tenants that arrive together, and lets them share passes.

    There is no thread of its own and no clock to wait for: a call queues for the model's turn, and the one whose turn it is
    serves all that wait, as far as the budget goes. So a tenant that is alone never waits for others, and those who came while
    a pass was running share the next one. Only where fewer calls wait than the last pass held, the turn is held for
    ``patience`` seconds: those who come straight from their optimizer's step are about to call.

    Args:
        model: a model with slots.
        budget: tokens of a pass that several share, at most.
        alone: a call with more tokens than this has a pass for itself: its matmuls are busy already.
        patience: seconds.
    """

    def __init__(self, model: Together, *, budget: int = 2048, alone: int = 512, patience: float = 0.002) -> None:
        self.budget, self.alone, self.patience = budget, alone, patience
        self._model = model
        self._waiting: list[_Ticket] = []
        self._came = threading.Condition()
        self._last = 1  # calls of the last pass

    def serve(self, asked: Asked) -> torch.Tensor:
        """Run a call, with others that wait, or let another thread run it. Returns or raises what the call does."""
        ticket = _Ticket(asked)
        with self._came:
            self._waiting.append(ticket)
            self._came.notify_all()
        try:
            with self._model.turns:
                if not ticket.done:
                    self._serve_with(ticket)
        finally:
            with self._came:
                if ticket in self._waiting:  # interrupted before its turn
                    self._waiting.remove(ticket)
        if isinstance(ticket.outcome, BaseException):
            raise ticket.outcome
        return ticket.outcome  # type: ignore[no-any-return]

    def groups(self, calls: Sequence[Call], tokens: Callable[[Call], int | None]) -> Iterator[list[Call]]:
        """Calls in groups that share a pass: in order, within the budget, of one temperature.

        Args:
            tokens: of a call in a shared pass; None: it can't share one.
        """
        open_groups: dict[float, tuple[list[Call], int]] = {}
        for call in calls:
            count = tokens(call)
            if count is None or count > self.alone:
                yield [call]
                continue
            key = call.asked.temperature
            group, held = open_groups.pop(key, ([], 0))
            if group and held + count > self.budget:
                yield group
                group, held = [], 0
            open_groups[key] = ([*group, call], held + count)
        yield from (group for group, _ in open_groups.values())

    def _serve_with(self, mine: _Ticket) -> None:
        """It is this thread's turn: serve its call and those that wait, of each session the first."""
        tickets = self._gather(mine)
        calls = []
        try:
            for ticket in tickets:
                done = attempt(functools.partial(self._model._ready, ticket.asked))
                if done.value is None:
                    ticket.outcome = done.error  # is raised to the tenant whose call it is
                else:
                    calls.append((ticket, done.value))
            outcomes = self._model._run_all([call for _, call in calls])
            for (ticket, _), outcome in zip(calls, outcomes, strict=True):
                ticket.outcome = outcome
        except BaseException as error:  # Ctrl-C: nobody waits for ever
            for ticket in tickets:
                ticket.outcome = ticket.outcome if ticket.outcome is not None else error
            raise
        finally:
            for ticket in tickets:
                ticket.done = True
        self._last = len(tickets)

    def _gather(self, mine: _Ticket) -> list[_Ticket]:
        until = time.monotonic() + self.patience
        with self._came:
            while len(self._waiting) < self._last and (rest := until - time.monotonic()) > 0:
                self._came.wait(rest)
            taken = [mine]
            for ticket in self._waiting:
                if all(ticket.asked.session is not other.asked.session for other in taken):
                    taken.append(ticket)
            self._waiting = [ticket for ticket in self._waiting if ticket not in taken]
            return taken
