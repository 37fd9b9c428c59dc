"""Keyword arguments against a signature, before anything is built (L0)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from twinkle_core.errors import MissingArgument, ReservedArgument, WrongArgument
from twinkle_core.names import closest

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check(
    target: Callable[..., Any],
    kwargs: Mapping[str, Any] | Iterable[str],
    name: str | None = None,
    *,
    positional: int = 0,
    complete: bool = False,
) -> None:
    """Check the names of keyword arguments against what a class or function takes.

    Args:
        target: a class (its constructor is meant), function or callable object.
        kwargs: the keyword arguments, or their names.
        name: how errors call the target; default its own name.
        positional: how many leading parameters the caller fills in itself (an optimizer's ``params``).
        complete: whether all that has no default must be there.

    Raises:
        WrongArgument: with did-you-mean. ReservedArgument: one of those the caller fills in. MissingArgument.

    A target that takes ``**kwargs`` takes every name; one without a readable signature (builtins) is not checked.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (ValueError, TypeError):
        return
    owner = name or getattr(target, "__name__", None) or type(target).__name__
    filled, rest = {p.name for p in parameters[:positional]}, parameters[positional:]
    known = [p.name for p in rest if p.kind in _NAMED]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in rest)
    for key in kwargs:
        if key in filled:
            raise ReservedArgument(owner, key)
        if key not in known and not open_ended:
            raise WrongArgument(owner, key, closest(key, known), known)
    if complete:
        given = set(kwargs)
        missing = [p.name for p in rest if p.kind in _NAMED and p.default is p.empty and p.name not in given]
        if missing:
            raise MissingArgument(owner, missing)
