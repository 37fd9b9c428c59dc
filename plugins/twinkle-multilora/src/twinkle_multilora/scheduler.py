"""Which calls share a pass: those that wait when the model is free."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from twinkle_core.errors import BadArgument
from twinkle_core.train import limits

if TYPE_CHECKING:
    from twinkle_core.train.calls import Asked, Call
    from twinkle_multilora.together import Together


def _check_patience(name: str, seconds: Any) -> None:
    if not limits.is_number(seconds) or not 0 <= seconds <= threading.TIMEOUT_MAX:
        most = f"{threading.TIMEOUT_MAX:.0f}"
        raise BadArgument(name, seconds, f"a number of seconds from 0 (a pass waits for nobody) to {most}")


#: what a scheduler's settings must be, whenever one is set
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "budget": functools.partial(limits.check_count, least=1),
    "alone": functools.partial(limits.check_count, least=1),
    "patience": _check_patience,
}


class Ticket:
    """A call that waits, and what came of it. ``settings``: of the thread that calls, see ``thread_settings``."""

    __slots__ = ("asked", "done", "outcome", "settings")

    def __init__(self, asked: Asked, settings: tuple[Any, ...] = ()) -> None:
        self.asked, self.settings, self.done = asked, settings, False
        self.outcome: Any = None


def thread_settings(kind: str) -> tuple[Any, ...]:
    """What torch computes by in this thread alone: whether there are gradients, autocast, among how many threads kernels divide
    their work (each of Python's has a number of its own), hooks on what graphs keep, and modes, as ``with torch.device(...)``.

    Args:
        kind: of the device that computes.
    """
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())  # type: ignore[no-untyped-call]
    gradients = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (*gradients, autocast, torch.get_num_threads(), hooks, *modes)


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
        patience: seconds; 0: a pass waits for nobody.

    Raises:
        BadArgument: here, or where one of the three is set later: no number of that kind. The old one stays.
    """

    def __init__(self, model: Together, *, budget: int = 2048, alone: int = 512, patience: float = 0.002) -> None:
        self.budget, self.alone, self.patience = budget, alone, patience
        self._model = model
        self._waiting: list[Ticket] = []
        self._came = threading.Condition()
        self._last = 1  # calls of the last pass

    def serve(self, asked: Asked) -> torch.Tensor:
        """Run a call, with others that wait, or let another thread run it. Returns or raises what the call does."""
        ticket = Ticket(asked, thread_settings(self._model.engine.device.type))
        with self._came:
            self._waiting.append(ticket)
            self._came.notify_all()
        try:
            self._take_turn(ticket)
        finally:
            with self._came:
                if ticket in self._waiting:  # interrupted before its turn
                    self._waiting.remove(ticket)
        if isinstance(ticket.outcome, BaseException):
            raise ticket.outcome
        return ticket.outcome  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CHECKS:
            _CHECKS[name](name, value)
        super().__setattr__(name, value)

    @property
    def limits(self) -> tuple[int, int]:
        """``budget`` and ``alone``."""
        return self.budget, self.alone

    @staticmethod
    def groups(calls: Sequence[Call], tokens: Callable[[Call], int | None], within: tuple[int, int]) -> Iterator[list[Call]]:
        """Calls in groups that share a pass: in order, within the budget, of one temperature.

        Args:
            tokens: of a call in a shared pass; None: it can't share one.
            within: ``budget`` and ``alone``.
        """
        budget, alone = within
        open_groups: dict[float, tuple[list[Call], int]] = {}
        for call in calls:
            count = tokens(call)
            if count is None or count > alone:
                yield [call]
                continue
            key = call.asked.temperature
            group, held = open_groups.pop(key, ([], 0))
            if group and held + count > budget:
                yield group
                group, held = [], 0
            open_groups[key] = ([*group, call], held + count)
        yield from (group for group, _ in open_groups.values())

    def _take_turn(self, ticket: Ticket) -> None:
        """Wait for this thread's turn, and serve its call and those that wait, unless another's turn did."""
        with self._model.turns:
            if not ticket.done:  # inside a turn that was taken for more than this call nobody else is served
                self._serve_all([ticket] if self._model.turns.nested else self._gather(ticket))

    def _serve_all(self, tickets: Sequence[Ticket]) -> None:
        """It is this thread's turn: serve these calls, each of another session."""
        try:
            for ticket, outcome in zip(tickets, self._model._serve_all([t.asked for t in tickets]), strict=True):
                ticket.outcome = outcome  # what is an error is raised to the tenant whose call it is
        except BaseException as error:  # Ctrl-C: nobody waits for ever
            for ticket in tickets:
                ticket.outcome = ticket.outcome if ticket.outcome is not None else error
            raise
        finally:
            for ticket in tickets:
                ticket.done = True
        self._last = len(tickets)

    def _gather(self, mine: Ticket) -> list[Ticket]:
        """This call and those that wait, of each session the first. One that was made under other settings of its thread,
        such as autocast, is left to that thread."""
        until = time.monotonic() + self.patience
        with self._came:
            while len(self._waiting) < self._last and (rest := until - time.monotonic()) > 0:
                self._came.wait(rest)
            taken = [mine]
            for ticket in self._waiting:
                new = all(ticket.asked.session is not other.asked.session for other in taken)
                if new and ticket.settings == mine.settings:
                    taken.append(ticket)
            self._waiting = [ticket for ticket in self._waiting if ticket not in taken]
            return taken
