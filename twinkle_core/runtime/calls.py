"""What travels between a proxy and the object that it stands for (L0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an object on workers. ``path``: the attribute of the object that has it (``multi_lora``); '': the object."""

    key: str
    path: str
    name: str

    @property
    def shown(self) -> str:
        """``multi_lora.acquire_lora``."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(frozen=True, slots=True)
class Context:
    """A context manager of an object, inside which calls are made."""

    method: Method
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as one worker gets it. ``collect``: a declared way, or ``each``; ``wanted``: whether its answer is read;
    ``first``: the number of its first row among those of the caller; of rows of several adapters, by name."""

    method: Method
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    contexts: tuple[Context, ...] = ()
    collect: str = "each"
    wanted: bool = True
    first: int | Mapping[str, int] = 0

    def before(self, adapter: str | None) -> int:
        """How many of the caller's rows come before the first of this call; where it has several adapters', of this one's."""
        return self.first if isinstance(self.first, int) else self.first.get(adapter or "", 0)


@dataclass(slots=True)
class Answer:
    """What a call gave. ``events``: hooks that were called meanwhile, as (name, arguments); ``trace``: of an error, as text."""

    value: Any = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Itself:
    """An answer that is the object whose method was called."""


@dataclass(frozen=True, slots=True)
class Held:
    """An answer that is an iterator, which stays with its worker."""

    number: int


@dataclass(frozen=True, slots=True)
class Rows:
    """An output for rows of one data rank. ``packed``: they lie one after the other; ``left``: they are padded on the left."""

    output: Any
    packed: bool
    left: bool


#: a ``next`` of an iterator that has ended
END = "end"
