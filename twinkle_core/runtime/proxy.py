"""What stands here for an object on workers, built from what its class declares (L0)."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from twinkle_core import plugins
from twinkle_core.errors import BadDispatch, NotRemote
from twinkle_core.names import closest
from twinkle_core.runtime import collect, cut
from twinkle_core.runtime.calls import END, Answer, Call, Context, Held, Itself, Method
from twinkle_core.runtime.dispatch import RemoteSpec, declared

#: arguments of a call for one worker, and the number of its first row (of each adapter's, by name)
Part = tuple[tuple[Any, ...], dict[str, Any], int | dict[str, int]]
#: those of each worker, which workers' answers count, and the rows of each of these
Parts = tuple[list[Part], list[int], list[int] | None]


class Home(ABC):
    """The workers on which one object lives. A runtime says how calls get there.

    Args:
        owner: the object's class.
        where: in words, for error texts: ``group 'actor'``.
        key: what the workers know the object by.
        shares: the data rank of each worker.
    """

    def __init__(self, owner: type, where: str, key: str, shares: Sequence[int]) -> None:
        self.owner, self.where, self.key, self.shares = owner, where, key, list(shares)
        #: the first worker of each data rank
        self.leads = [self.shares.index(share) for share in range(max(self.shares) + 1)]
        self._inside: ContextVar[tuple[Context, ...]] = ContextVar(f"twinkle_inside_{key}", default=())
        #: how rows of forwards were divided, by whose they were and how many
        self._cuts: dict[str, dict[int, cut.Cut]] = {}

    @abstractmethod
    def send(self, calls: Sequence[Call]) -> list[Answer]:
        """Call workers, the first ones where there are fewer calls, all at once. Their answers; what they raise is raised."""

    @abstractmethod
    def fetch(self, worker: int, held: Held) -> Any:
        """The next item of an iterator that a worker holds, or ``END``."""

    @abstractmethod
    def let_go(self, worker: int, held: Held) -> None:
        """An iterator is not wanted any more. Called while objects are collected: it may not wait."""

    @abstractmethod
    def reference(self, path: str) -> tuple[Any, ...]:
        """``(function, arguments)`` that give the object, or an attribute of it, on its own workers: how a proxy travels."""

    def call(
        self,
        method: Method,
        spec: RemoteSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: str = "",
        this: Remote | None = None,
    ) -> Any:
        """Call a method as it is declared.

        Args:
            rows: the name of its first parameter.
            this: what the caller gets where the method gives its own object.
        """
        parts, counting, counts = self._divide(method, spec, args, kwargs, rows)
        how = "each" if callable(spec.collect) else spec.collect
        if how in ("first", "metric", "context"):
            counting = counting[:1]
        made: dict[tuple[int, int, bool], Call] = {}  # one object for all workers that get the same: it is packed once
        calls: list[Call] = []
        for worker, (own, named, first) in enumerate(parts):
            wanted = worker in counting
            call = Call(method, own, named, self._inside.get(), how, wanted, first)
            calls.append(made.setdefault((id(own), id(named), wanted), call))
        answers = self.send(calls)
        for name, arguments in answers[0].events:
            plugins.tell(name, arguments)
        values = [self._here(answers[worker].value, worker, this) for worker in counting]
        if counts is not None and len(counts) != len(values):
            counts = None
        return collect.together(method.shown, spec.collect, values, counts)

    def enter(self, method: Method, spec: RemoteSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A context manager of the workers: calls of this thread inside it are made inside theirs."""

        @contextmanager
        def inside() -> Iterator[Any]:
            value = self.call(method, spec, args, kwargs)  # tells at once what is wrong with it
            token = self._inside.set((*self._inside.get(), Context(method, args, kwargs)))
            try:
                yield value
            finally:
                self._inside.reset(token)

        return inside()

    def _here(self, value: Any, worker: int, this: Remote | None) -> Any:
        """An answer as the caller sees it."""
        if isinstance(value, Itself):
            return this
        return RemoteIterator(self, worker, value) if isinstance(value, Held) else value

    def _divide(self, method: Method, spec: RemoteSpec, args: tuple[Any, ...], kwargs: dict[str, Any], rows: str) -> Parts:
        workers = list(range(len(self.shares)))
        if spec.execute == "first":
            return [(args, kwargs, 0)], [0], None
        if callable(spec.dispatch):
            made = spec.dispatch(len(workers), args, kwargs)
            fits = isinstance(made, list) and len(made) == len(workers) and all(len(part) == 2 for part in made)
            if not fits:
                raise BadDispatch(method.shown, repr(made), len(workers))
            return [(tuple(own), dict(named), 0) for own, named in made], workers, None
        counting = self.leads if spec.dispatch in ("slice_dp", "slice_each") or spec.collect == "loss" else workers
        if spec.dispatch == "along" and (args or kwargs) and len(self.leads) > 1:
            return self._along(args, kwargs), counting, None
        if spec.dispatch == "slice_each":
            return self._each(method, args, kwargs, rows), counting, None
        given = bool(args) or rows in kwargs
        if spec.dispatch in ("all", "along") or not given:
            return [(args, kwargs, 0)] * len(workers), counting, None
        places = workers if spec.dispatch == "slice" else self.shares
        first = args[0] if args else kwargs[rows]
        asks = spec.dispatch == "slice_dp" and not method.path
        whose, grouping, left = self._grouping(kwargs) if asks else ("", None, False)
        first, how = cut.of(method.shown, first, max(places) + 1, grouping, left=left)
        if spec.collect == "rows":
            cuts = self._cuts.setdefault(whose, {})
            cuts.pop(how.count, None)
            cuts[how.count] = how
        mine = how.rows(first)
        beside: Callable[[Any], list[Any]] = how.beside if spec.cut_beside else lambda value: [value] * len(mine)
        others = [beside(value) for value in args[1:]]
        named = {key: beside(value) for key, value in kwargs.items() if args or key != rows}
        parts: list[Part] = []
        for place in places:
            own = {key: value[place] for key, value in named.items()}
            head = (mine[place], *(value[place] for value in others)) if args else ()
            parts.append((head, own if args else {rows: mine[place], **own}, how.ranges[place].start))
        return parts, counting, [len(how.ranges[places[worker]]) for worker in counting]

    def _along(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
        """Arguments divided as the rows of a forward were that are as many."""
        known = list(self._cuts.get(self._grouping(kwargs)[0], {}).values())

        def parts(value: Any) -> list[Any]:
            for how in reversed(known):
                found = how.beside(value)
                if any(part is not value for part in found):
                    return found
            return [value] * len(self.leads)

        own, named = [parts(value) for value in args], {key: parts(value) for key, value in kwargs.items()}
        return [
            (tuple(value[share] for value in own), {key: value[share] for key, value in named.items()}, 0)
            for share in self.shares
        ]

    def _each(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], rows: str) -> list[Part]:
        """Rows of several adapters, and what goes beside them. What names no adapter goes to all as it is: they say what is
        wrong with it."""
        given, everything = args[0] if args else kwargs.get(rows), [(args, kwargs, 0)] * len(self.shares)
        ask = declared(self.owner).get("groupings")
        if ask is None or len(self.leads) == 1 or not isinstance(given, Mapping):
            return list(everything)
        others = {key: value for key, value in kwargs.items() if args or key != rows}
        words = [name for part in (given, *others.values()) if isinstance(part, Mapping) for name in part]
        names = [name for name in dict.fromkeys(words) if isinstance(name, str)]
        told: dict[str, cut.Told] = self.call(Method(self.key, "", "groupings"), ask, (names,), {})
        if not given.keys() <= told.keys():
            return list(everything)
        mine, how = cut.each(method.shown, given, told, len(self.leads))
        beside = {key: how.beside(value) for key, value in others.items()}
        made: list[Part] = []
        for share in range(len(self.leads)):
            own = {key: parts[share] for key, parts in beside.items()}
            head = (mine[share], *args[1:]) if args else ()
            made.append((head, own if args else {rows: mine[share], **own}, how.starts(share)))
        return [made[share] for share in self.shares]

    def _grouping(self, kwargs: Mapping[str, Any]) -> cut.Told:
        """Whose rows a call means, which of them the loss wants together, and whether they are padded on the left. Asked each
        time: a loss may be set at any."""
        ask = declared(self.owner).get("grouping")
        if ask is None or len(self.leads) == 1:
            return "", None, False
        named = {key: kwargs[key] for key in ("adapter_name",) if key in kwargs}
        found: cut.Told = self.call(Method(self.key, "", "grouping"), ask, (), named)
        return found


class RemoteIterator:
    """An iterator on a worker. What it gives comes one by one."""

    def __init__(self, home: Home, worker: int, held: Held) -> None:
        self._home, self._worker, self._held = home, worker, held

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        item = self._home.fetch(self._worker, self._held)
        if isinstance(item, str) and item == END:
            raise StopIteration
        return item

    def __del__(self) -> None:
        self._home.let_go(self._worker, self._held)


class Remote:
    """Stands for an object on workers: methods that its class declares are called there."""

    _home: Home
    _path: str
    _of: type

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # what Python itself asks for is told as Python tells it
            raise AttributeError(name)
        raise _not_there(self._of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _not_there(self._of, name)  # it would stay here, and the workers know nothing of it

    def __repr__(self) -> str:
        return f"<{self._of.__name__} on {self._home.where}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._home.reference(self._path)


def _not_there(cls: type, name: str) -> NotRemote:
    there = [known for known in declared(cls) if not known.startswith("_")]
    return NotRemote(f"this {cls.__name__}", name, closest(name, there), sorted(there))


def proxy(cls: type, home: Home, path: str = "", managers: Mapping[str, type] | None = None) -> Any:
    """A proxy of an object.

    Args:
        cls: its class, whose declared methods and properties the proxy has; where it is abstract, ``isinstance`` knows it.
        path: the attribute of the home's object that it is; '': the object itself.
        managers: attributes of it that are proxies themselves, with their classes.
    """
    made = _class_of(cls)()
    parts = {name: proxy(kind, home, f"{path}.{name}".lstrip(".")) for name, kind in (managers or {}).items()}
    vars(made).update(_home=home, _path=path, **parts)
    return made


@functools.cache
def _class_of(cls: type) -> Any:
    body: dict[str, Any] = {"_of": cls, "__doc__": cls.__doc__, "__module__": __name__}
    for name, spec in declared(cls).items():
        body[name] = _method(cls, name, spec)
    made = type(f"Remote{cls.__name__}", (Remote,), body)
    if isinstance(cls, ABCMeta):
        cls.register(made)
    return made


def _method(cls: type, name: str, spec: RemoteSpec) -> Any:
    whole = next(base.__dict__[name] for base in cls.__mro__ if name in base.__dict__)
    if isinstance(whole, property):

        def read(self: Remote) -> Any:
            return self._home.call(Method(self._home.key, self._path, name), spec, (), {}, this=self)

        return property(read, doc=whole.__doc__)
    rows = next(iter(list(inspect.signature(whole).parameters)[1:]), "")

    @functools.wraps(whole)
    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        there = Method(self._home.key, self._path, name)
        if spec.collect == "context":
            return self._home.enter(there, spec, args, kwargs)
        return self._home.call(there, spec, args, kwargs, rows, self)

    return method
