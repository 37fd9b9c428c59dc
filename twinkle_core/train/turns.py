"""Whose turn it is: a lock that is given in the order in which it was asked for (L0 in spirit: pure Python)."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from threading import Lock, get_ident
from types import TracebackType
from typing import Any


class Turns:
    """A re-entrant lock with a queue: the thread that has waited longest is next.

    ``threading.RLock`` gives itself to whoever happens to run; a tenant that asks again at once can keep others out for long.

    ::

        with turns:
            ...  # nobody else's; ``with turns`` inside, by the same thread, is allowed
    """

    def __init__(self) -> None:
        self._guard = Lock()  # held for a few lines at a time, never while waiting
        self._queue: deque[tuple[int, Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def of(self, verb: str, name: str) -> AbstractContextManager[Any]:
        """The turn in which ``verb`` of an adapter runs. Where several ranks take turns together, this is how they know which
        of their threads' calls are one call."""
        return self

    def local(self) -> AbstractContextManager[Any]:
        """The turn for something that no other rank has a part in."""
        return self

    @property
    def nested(self) -> bool:
        """Whether the thread whose turn it is has taken it more than once."""
        return self._depth > 1

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return len(self._queue)

    def acquire(self) -> None:
        """Wait for the turn of this thread."""
        me = get_ident()
        with self._guard:
            if self._owner == me or self._owner is None:
                self._owner, self._depth = me, self._depth + 1
                return
            gate = Lock()
            gate.acquire()
            self._queue.append((me, gate))
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C while waiting: leave the queue, or pass on the turn that came meanwhile
            with self._guard:
                if (me, gate) in self._queue:
                    self._queue.remove((me, gate))
                else:
                    self._pass_on()
            raise

    def release(self) -> None:
        """Give the turn to the thread that waits longest, once each ``acquire`` has had its ``release``.

        Raises:
            RuntimeError: it is not this thread's turn.
        """
        with self._guard:
            if self._owner != get_ident():
                raise RuntimeError("a turn is given up by the thread whose turn it is")
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    def _pass_on(self) -> None:
        self._owner, self._depth = None, 0
        if self._queue:
            self._owner, gate = self._queue.popleft()
            self._depth = 1
            gate.release()

    def __enter__(self) -> Turns:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
