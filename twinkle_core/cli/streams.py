"""The process's streams while a command runs: each line is out at once, and no text is one that can't be written (L0)."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def ready() -> Iterator[None]:
    """Lines go out as they are printed, in order with those of stderr; signs that the encoding lacks are written as ``\\xe9``.

    What a closed stream would hold goes nowhere. All is put back on leaving.
    """
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            found = getattr(sys, name)
            if found is None:  # closed by who started the process
                setattr(sys, name, stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
                stack.callback(setattr, sys, name, found)
            elif isinstance(found, io.TextIOWrapper):
                stack.callback(found.reconfigure, errors=found.errors, line_buffering=found.line_buffering)
                found.reconfigure(errors="backslashreplace", line_buffering=True)
        yield


def lost() -> bool:
    """Whether stdout takes no more: its disk is full, or it is gone. Tried with a line end, for what failed is not kept."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def give_up() -> None:
    """Let what is left in stdout's buffer go nowhere, so that the interpreter does not try it again on its way out."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):  # no file stands behind it
        pass
    finally:
        os.close(null)
