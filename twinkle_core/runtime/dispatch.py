"""Declarations of how a method is called on many workers (L0). In local mode they change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

DISPATCH = ("slice", "slice_dp", "all")
EXECUTE = ("all", "first")
#: ``loss``: (sum, weight) added, then divided; ``metric``: states merged, then computed; ``rows``: joined in row order.
COLLECT = ("none", "mean", "sum", "first", "flatten", "loss", "metric", "rows")


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """How a runtime sends a call to workers and brings the answers together."""

    dispatch: str | Callable[..., Any] = "all"
    execute: str = "all"
    collect: str | Callable[..., Any] = "none"


def _checked(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not callable(value) and value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}, nor a callable")


def remote_function(
    dispatch: str | Callable[..., Any] = "slice",
    execute: str = "all",
    collect: str | Callable[..., Any] = "none",
) -> Callable[[F], F]:
    """Declare how a method is dispatched over workers and how their results are collected."""
    _checked("dispatch", dispatch, DISPATCH)
    _checked("execute", execute, EXECUTE)
    _checked("collect", collect, COLLECT)

    def mark(function: F) -> F:
        function.__remote__ = RemoteSpec(dispatch, execute, collect)  # type: ignore[attr-defined]
        return function

    return mark


def remote_class(execute: str = "all") -> Callable[[C], C]:
    """Declare that a class may live on workers. ``execute``: construct it on all of them, or on the first."""
    _checked("execute", execute, EXECUTE)

    def mark(cls: C) -> C:
        cls.__remote__ = RemoteSpec(execute=execute)  # type: ignore[attr-defined]
        return cls

    return mark


def remote_spec(cls: type, name: str) -> RemoteSpec | None:
    """The declaration of a method, looked up along the classes it overrides: a subclass need not repeat it."""
    for base in cls.__mro__:
        spec = getattr(base.__dict__.get(name), "__remote__", None)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
