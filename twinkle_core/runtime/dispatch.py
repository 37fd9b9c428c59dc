"""Declarations of how a class and its methods are called on many workers (L0). In local mode they change nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

#: ``slice``: rows are divided over all workers; ``slice_dp``: over data ranks; ``all``: everybody gets the same. ``along``: no
#: rows of its own, but what is as long as the rows of an earlier call that collects ``rows`` is divided as those were.
#: ``slice_each``: rows of several adapters, by their names, each divided as ``slice_dp`` divides its own.
DISPATCH = ("slice", "slice_dp", "slice_each", "all", "along")
EXECUTE = ("all", "first")
#: ``loss``: (sum, weight) added, then divided; ``loss_each``: the same by name of adapter; ``metric``: reduced over ranks by
#: the method itself; ``rows``: joined in row order; ``context``: a context manager, which is entered
#: around each call that is made inside it.
COLLECT = ("none", "mean", "sum", "first", "flatten", "loss", "loss_each", "metric", "rows", "context")


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """How a runtime sends a call to workers and brings the answers together. ``remote_function`` tells what is what."""

    dispatch: str | Callable[..., Any] = "all"
    execute: str = "all"
    collect: str | Callable[..., Any] = "none"
    cut_beside: bool = True


def _checked(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not callable(value) and value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}, nor a callable")


def remote_function(
    dispatch: str | Callable[..., Any] = "slice",
    execute: str = "all",
    collect: str | Callable[..., Any] = "none",
    *,
    cut_beside: bool = True,
) -> Callable[[F], F]:
    """Declare how a method is dispatched over workers and how their results are collected.

    A property may be declared too, beneath ``@property``.

    Args:
        dispatch: ``slice`` divides the first argument (a list of rows, a tensor, a collated batch) over all workers,
            ``slice_dp`` over data ranks, whose other ranks get the same share; ``slice_each`` does so with each value of a
            dict by adapter; ``all`` gives everything to everybody. Shares are contiguous and as even as can be, and rows that
            belong together stay so. A callable ``(workers, args, kwargs)`` gives a list of ``(args, kwargs)``, one for each
            worker.
        execute: on ``all`` workers, or on the ``first`` alone.
        collect: ``none`` gives the list of what workers gave (None where all gave None); ``first`` the first one's; ``flatten``
            joins lists in row order; ``sum`` adds; ``mean`` is over workers, weighted by their rows where rows were divided; a
            callable gets the list.
        cut_beside: whether other arguments as long as the rows (tensors, arrays, lists) are divided with them.

    After ``slice_dp`` one answer for each data rank counts.
    """
    _checked("dispatch", dispatch, DISPATCH)
    _checked("execute", execute, EXECUTE)
    _checked("collect", collect, COLLECT)

    def mark(function: F) -> F:
        function.__remote__ = RemoteSpec(dispatch, execute, collect, cut_beside)  # type: ignore[attr-defined]
        return function

    return mark


def remote_class(execute: str = "all") -> Callable[[C], C]:
    """Declare that a class may live on workers: where its constructor is given ``remote_group=``, under a remote runtime.

    The constructor need not have that parameter. What the proxy then has are the methods that ``remote_function`` declares, and
    attributes whose own class is declared.

    Args:
        execute: construct it on ``all`` workers of the group; or on the ``first``, where it is one of its kind, so that
            ``device_mesh`` means nothing to it.
    """
    _checked("execute", execute, EXECUTE)

    def mark(cls: C) -> C:
        cls.__remote__ = RemoteSpec(execute=execute)  # type: ignore[attr-defined]
        _place(cls)
        return cls

    return mark


def _place(cls: Any) -> None:
    """Let construction ask the runtime where. ``__new__`` may give something else; ``__init__`` never sees the group."""
    new, init = cls.__new__, cls.__init__
    signature = inspect.signature(init)
    if "remote_group" not in signature.parameters:
        group = inspect.Parameter("remote_group", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
        known = list(signature.parameters.values())
        at = next((i for i, p in enumerate(known) if p.kind is p.VAR_KEYWORD), len(known))
        signature = signature.replace(parameters=[*known[:at], group, *known[at:]])

    def __new__(kind: type, *args: Any, remote_group: str | None = None, **kwargs: Any) -> Any:
        if remote_group is not None:
            from twinkle_core.runtime import local

            placed = local.place(kind, args, kwargs, remote_group)
            if placed is not None:
                return placed
        return new(kind) if new is object.__new__ else new(kind, *args, **kwargs)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, remote_group: str | None = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    __new__.__signature__ = __init__.__signature__ = signature  # type: ignore[attr-defined]
    cls.__new__, cls.__init__ = __new__, __init__


def remote_spec(cls: type, name: str) -> RemoteSpec | None:
    """The declaration of a method or property, looked up along the classes it overrides: a subclass need not repeat it."""
    for base in cls.__mro__:
        found = base.__dict__.get(name)
        spec = getattr(found.fget if isinstance(found, property) else found, "__remote__", None)
        if isinstance(spec, RemoteSpec) and not isinstance(found, type):
            return spec
    return None


def declared(cls: type) -> dict[str, RemoteSpec]:
    """All declared methods and properties of a class, by name."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    specs = {name: remote_spec(cls, name) for name in names if name != "__remote__"}
    return {name: spec for name, spec in specs.items() if spec is not None}
