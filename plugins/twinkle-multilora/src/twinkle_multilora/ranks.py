"""Several ranks whose threads take turns at one model: rank 0 says whose turn it is, and which calls ride one pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import RanksApart
from twinkle_core.train.turns import Turns
from twinkle_multilora.scheduler import TenantScheduler, Ticket

if TYPE_CHECKING:
    from twinkle_multilora.together import Together

#: verbs in which ranks meet; all others are each rank's own business
MEETING = frozenset(
    {"forward", "forward_only", "backward", "forward_backward", "forward_backward_many", "generate"}
    | {"clip_grad_norm", "step", "clip_grad_and_step", "flush", "calculate_metric"}
    | {"add_adapter_to_model", "remove_adapter", "apply_patch", "save", "load", "resume_from_checkpoint"}
)
_SHARED = "forward_backward"


@dataclass(frozen=True, slots=True)
class Turn:
    """What rank 0 tells: a verb, and whose calls of it, in order."""

    verb: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verb} of {', '.join(map(repr, self.names))}"


class RankTurns(Turns):
    """Turns that all ranks give in one order: the one in which threads of rank 0 asked for them.

    On every rank the same program runs, with the same threads, each of which calls for its own tenants in its own order. When
    a turn begins, rank 0 tells whose it is; on another rank the thread that waits with this very call has it, and if it has not
    come yet, the others wait for it. So what ranks send one another is never mixed, however threads run.

    Args:
        rank: of this process.
        tell: gives all ranks what rank 0 gives it.
        chosen: the adapter that this thread's context names.
        patience: seconds after which a rank that waits for a call that does not come raises RanksApart.
    """

    def __init__(self, rank: int, tell: Callable[[Any], Any], chosen: Callable[[], str], *, patience: float = 600.0) -> None:
        super().__init__()
        self._rank, self._tell, self._chosen, self._patience = rank, tell, chosen, patience
        self._changed = threading.Condition()
        self._wishes: list[Turn] = []
        self._next: Turn | None = None  # told, and not begun
        self._busy = False  # a turn that was told runs, or the next one is being told
        self._entered = threading.local()

    def of(self, verb: str, name: str) -> AbstractContextManager[Any]:
        return self._run(Turn(verb, (name,)))

    def local(self) -> AbstractContextManager[Any]:
        return self._locked()

    def __enter__(self) -> Turns:
        turn = self.of("a turn", self._chosen())
        turn.__enter__()
        self._entered.__dict__.setdefault("turns", []).append(turn)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.turns.pop().__exit__(kind, error, trace)

    @property
    def mine(self) -> bool:
        """Whether it is this thread's turn already."""
        return self._owner == threading.get_ident()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def _run(self, wish: Turn) -> Iterator[None]:
        nested = self.mine
        if self._rank and not nested:
            self.follow(wish)
        try:
            with self._locked():
                if not self._rank and not nested:
                    self._tell(wish)
                yield
        finally:
            if self._rank and not nested:
                self.done()

    # ------------------------------------------------------------------------------------------------ rank 0

    def tell(self, turn: Turn) -> None:
        """Rank 0, whose turn has begun, tells what it is."""
        self._tell(turn)

    # ------------------------------------------------------------------------------------------------ all others

    def follow(self, wish: Turn, served: Callable[[], bool] = lambda: False) -> Turn | None:
        """Wait until rank 0 tells a turn that this call is part of, and begin it. Ends with ``done``.

        Args:
            wish: the verb and one name.
            served: whether the call has been served in another's turn meanwhile.

        Returns:
            The turn; None: it has been served.

        Raises:
            RanksApart: another turn was told, and the one that waits for it is not there.
        """
        until = time.monotonic() + self._patience
        with self._changed:
            self._wishes.append(wish)
            try:
                while not served():
                    told = self._next
                    if (
                        told is not None
                        and (told.verb, wish.names[0]) == (wish.verb, wish.names[0])
                        and wish.names[0] in told.names
                    ):
                        self._next, self._busy = None, True
                        return told
                    if told is None and not self._busy:
                        self._hear()
                        continue
                    late = time.monotonic() > until
                    if told is not None and (late or threading.active_count() == 1):  # nobody is left who could come
                        raise RanksApart(self._rank, str(told), map(str, self._wishes), self._patience if late else None)
                    self._changed.wait(until - time.monotonic() if told is not None else None)
                return None
            finally:
                self._wishes.remove(wish)

    def _hear(self) -> None:
        """What rank 0 tells next. One thread listens; the lock is free meanwhile."""
        self._busy = True
        self._changed.release()
        try:
            told = self._tell(None)
        finally:
            self._changed.acquire()
            self._busy = False
            self._changed.notify_all()
        self._next = told

    def done(self) -> None:
        """A turn that was told has ended."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()


class RankScheduler(TenantScheduler):
    """Rank 0 decides which calls share a pass, as in one process; the others wait for these calls of their own threads."""

    _model: Together

    def __init__(self, model: Together, turns: RankTurns, rank: int, **options: Any) -> None:
        super().__init__(model, **options)
        self._turns, self._rank = turns, rank

    def _take_turn(self, ticket: Ticket) -> None:
        name = ticket.asked.session.name
        if self._turns.mine:  # within a turn of several calls, of which all ranks know already
            self._serve_all([ticket])
        elif not self._rank:
            with self._turns.local():
                if not ticket.done:
                    tickets = self._gather(ticket)
                    self._turns.tell(Turn(_SHARED, tuple(each.asked.session.name for each in tickets)))
                    self._serve_all(tickets)
        else:
            told = self._turns.follow(Turn(_SHARED, (name,)), lambda: ticket.done)
            if told is None:
                return
            try:
                with self._turns.local():
                    self._serve_all(self._of(told.names))
            finally:
                self._turns.done()

    def _of(self, names: Sequence[str]) -> list[Ticket]:
        """The first call that waits of each of these tenants, in this order, once all have come.

        Raises:
            RanksApart
        """
        until = time.monotonic() + self._turns._patience
        with self._came:
            while True:
                found: dict[str, Ticket] = {}
                for ticket in self._waiting:
                    found.setdefault(ticket.asked.session.name, ticket)
                if found.keys() >= set(names):
                    break
                if not self._came.wait(until - time.monotonic()):
                    there = [str(Turn(_SHARED, (name,))) for name in found]
                    raise RanksApart(self._rank, str(Turn(_SHARED, tuple(names))), there, self._turns._patience)
            taken = [found[name] for name in names]
            self._waiting = [ticket for ticket in self._waiting if ticket not in taken]
            return taken
