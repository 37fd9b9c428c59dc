"""Ctrl-C and SIGTERM as a wish to stop after the running step (L0)."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from twinkle_core.listeners.progress import note

#: what a shell expects of a program that was ended by a signal
EXIT = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupts:
    """A context in which the first SIGINT or SIGTERM is noted and the second SIGINT stops at once (KeyboardInterrupt).

    On leaving, the handlers are those that were found. Outside the main thread Python allows no handlers: it does nothing.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self, notice: str = "Stopping after this step; once more stops at once.") -> None:
        self.received: signal.Signals | None = None
        self._notice = notice
        self._found: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in EXIT:
                self._found[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._found.items():
            # None: the handler was not installed from Python and can't be put back from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._found.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a terminal sends Ctrl-C to the data loader's processes too; they end with this one
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            note(self._notice)

    @property
    def exit_status(self) -> int:
        """130 or 143; 0 when no signal came."""
        return EXIT[self.received] if self.received is not None else 0
