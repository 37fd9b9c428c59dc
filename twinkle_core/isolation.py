"""The one place where any exception is caught: around code that a plugin brought (L0)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinkle_core.errors import WHY, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """What a foreign call gave: a value, or the error that stopped it."""

    value: T | None
    error: BaseException | None

    @property
    def why(self) -> str:
        """``ImportError: no libfoo``; empty when it went well."""
        return describe(self.error) if self.error is not None else ""


def attempt(call: Callable[[], T]) -> Attempt[T]:
    """Call foreign code so that its failure is a value; only Ctrl-C passes through.

    ``sys.exit()`` is a failure, and so are the exceptions beside ``Exception`` that some libraries bring (a panic in Rust).
    """
    try:
        return Attempt(call(), None)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return Attempt(None, error)


def describe(error: BaseException) -> str:
    """Type and text of an error in one line."""
    text = shown(" ".join(str(error).split()), WHY)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
