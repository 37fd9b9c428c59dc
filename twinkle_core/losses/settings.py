"""Checks of what losses are built with (L2): one text for each kind of setting."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from twinkle_core.errors import BadLossSetting
from twinkle_core.train.limits import is_number


def number(
    loss: object,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """A finite number inside its bounds.

    Raises:
        BadLossSetting
    """
    bounds = [
        ("at least", least, operator.ge),
        ("above", above, operator.gt),
        ("at most", most, operator.le),
        ("less than", below, operator.lt),
    ]
    asked = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
    if not is_number(value) or not math.isfinite(value) or not all(holds(value, bound) for _, bound, holds in asked):
        told = " and ".join(f"{words} {bound:g}" for words, bound, _ in asked)
        raise BadLossSetting(type(loss).__name__, name, value, f"a number, {told}" if told else "a finite number")
    return float(value)


def count(loss: object, name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises:
        BadLossSetting
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadLossSetting(type(loss).__name__, name, value, f"a whole number of at least {least}")
    return value


def flag(loss: object, name: str, value: Any) -> bool:
    """True or False.

    Raises:
        BadLossSetting
    """
    if not isinstance(value, bool):
        raise BadLossSetting(type(loss).__name__, name, value, "True or False")
    return value


def choice(loss: object, name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some names.

    Raises:
        BadLossSetting
    """
    if value not in allowed:
        raise BadLossSetting(type(loss).__name__, name, value, "one of " + ", ".join(map(repr, allowed)))
    return str(value)
