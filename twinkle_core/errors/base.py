"""The base of all errors, and how values are shown in their texts (L0)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class TwinkleError(Exception):
    """Base of all errors raised on purpose by twinkle. They travel between processes whatever their constructors take."""

    #: what the command ``twinkle`` ends with when one of these ends it
    exit_status = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[TwinkleError], args: tuple[Any, ...], state: dict[str, Any]) -> TwinkleError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


NAME = 100  # characters of a name that are shown
WHY = 2000  # of a text that others wrote
LISTED = 40  # names that are listed


def shown(text: object, limit: int = NAME) -> str:
    """A text from metadata, a network or a file as one line that can do nothing to a terminal or a log.

    Signs that print nothing (control characters, line ends, lone surrogates, marks of direction) are written as Python writes
    them, and what is longer than ``limit`` is cut.
    """
    text = str(text)
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return plain if len(plain) <= limit else f"{plain[:limit]}..."


def shown_lines(text: object) -> str:
    """``shown`` for each line of a text that may have several."""
    return "\n".join(shown(line, WHY) for line in str(text).split("\n"))


def meant(near: str | None) -> str:
    """A question after the name that was likely meant; nothing where there is none."""
    return f" Did you mean '{shown(near)}'?" if near else ""


def listed(words: Iterable[str], empty: str = "none") -> str:
    """Names in a row, the first ``LISTED`` of them and how many more there are."""
    every = [shown(word) for word in words]
    more = f", ... and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more or empty
