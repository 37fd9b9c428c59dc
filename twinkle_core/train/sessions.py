"""The sessions of one model: whose call it is, one call at a time (L2)."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from twinkle_core import names
from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.contracts.engine import SPLIT_STEP, Engine
from twinkle_core.contracts.loss import Loss
from twinkle_core.data import groups
from twinkle_core.errors import (
    BadArgument,
    BadInputs,
    EmptyBatch,
    LoraDisabled,
    NoTemplate,
    RowsChanged,
    TwinkleError,
    UnknownAdapter,
    Unsupported,
    WhichAdapter,
)
from twinkle_core.runtime.dispatch import remote_function
from twinkle_core.train import together
from twinkle_core.train.micro import of_rows
from twinkle_core.train.prepare import Rows, as_rows
from twinkle_core.train.session import Session
from twinkle_core.train.turns import Turns

if TYPE_CHECKING:
    import torch

    from twinkle_core.contracts.patch import Patch

F = TypeVar("F", bound=Callable[..., Any])

#: the enclosing ``adapter()`` contexts, as (id of the model, name, disable_lora): of this thread or task alone
_CHOSEN: ContextVar[tuple[tuple[int, str, bool], ...]] = ContextVar("twinkle_adapter", default=())


def one_at_a_time(verb: F) -> F:
    """Hold the model's lock: threads that call at once never meet inside a verb, and are served in the order they came. Where
    ranks meet in the verb, they tell its name and the adapter's."""
    parameters = inspect.signature(verb).parameters
    named_first, told = list(parameters)[1:2] == ["adapter_name"], {"temperature", "task"} & parameters.keys()

    @functools.wraps(verb)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn(verb, args, kwargs):
            if self.engine.mesh.world_size == 1:
                return verb(self, *args, **kwargs)
            name = kwargs.get("adapter_name", args[0] if named_first and args else None)
            how = together.said(**{key: kwargs[key] for key in told & kwargs.keys()})
            with together.calling(self.engine, verb.__name__, self._meant(name), how):
                return verb(self, *args, **kwargs)

    return cast(F, locked)


class Sessions:
    """Engine, store and sessions, and which session a call means. The verbs stand on this.

    Args:
        engine: how to compute.
        adapters: whose weights.
    """

    def __init__(self, engine: Engine, adapters: AdapterStore) -> None:
        self.engine, self.adapters = engine, adapters
        self.sessions: dict[str, Session] = {BASE: Session(BASE)}
        self.patches: list[Patch] = []
        #: ``with model.turns:`` makes several calls of this thread one turn: nobody's come between
        self.turns = Turns()
        for name in adapters.names():
            self.sessions[name] = Session(name)

    def _turn(
        self, verb: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """The turn in which a verb runs that was called with these arguments."""
        return self.turns

    def _chosen(self) -> str | None:
        """The adapter of the innermost ``adapter()`` context of this thread."""
        chosen = [name for model, name, _ in _CHOSEN.get() if model == id(self)]
        return chosen[-1] if chosen else None

    @remote_function(dispatch="all", collect="context")
    @contextlib.contextmanager
    def adapter(self, name: str, *, disable_lora: bool = False) -> Iterator[str]:
        """Inside, verbs without ``adapter_name`` mean this adapter. Of this thread alone; nests.

        Args:
            disable_lora: the adapter's session (loss, template, metrics) over the base model's weights alone: what
                ``forward_only(disable_lora=True)`` is, for all verbs that compute. There is nothing to go back through.
        """
        session = self._session(name)
        token = _CHOSEN.set((*_CHOSEN.get(), (id(self), session.name, disable_lora)))
        try:
            yield name
        finally:
            _CHOSEN.reset(token)

    def _session(self, adapter_name: str | None) -> Session:
        """The session that a call means.

        Raises:
            UnknownAdapter, WhichAdapter, BadArgument.
        """
        if adapter_name is None:
            chosen = self._chosen()
            live = [name for name in list(self.sessions) if name != BASE]
            if chosen is None and len(live) > 1:
                raise WhichAdapter(live)
            adapter_name = chosen if chosen is not None else live[0] if live else BASE
        if not isinstance(adapter_name, str):
            raise BadArgument("adapter_name", adapter_name, "the name of an adapter ('' is the base model) or None")
        session = self.sessions.get(self.adapters.known_as(adapter_name))
        if session is None:
            live = [name for name in list(self.sessions) if name != BASE]
            raise UnknownAdapter(adapter_name, names.closest(adapter_name, live), live)
        return session

    def _meant(self, adapter_name: str | None) -> str:
        """The name of the session that a call means, or what was given in its place."""
        try:
            return self._session(adapter_name).name
        except TwinkleError:
            return str(adapter_name)

    def _disabled(self, session: Session) -> bool:
        """Whether the innermost ``adapter()`` context of this session says ``disable_lora``."""
        flags = [off for model, name, off in _CHOSEN.get() if (model, name) == (id(self), session.name)]
        return bool(flags) and flags[-1]

    def _active(self, session: Session, disable_lora: bool = False) -> str:
        """Whose weights take part in a forward of a session."""
        return BASE if disable_lora or self._disabled(session) else session.name

    def _check_enabled(self, verb: str, session: Session) -> None:
        """Raise LoraDisabled where a backward would have nothing to go back through."""
        if self._active(session) != session.name:
            raise LoraDisabled(verb, session.name)

    def _or_base(self, session: Session, part: str) -> Any:
        """A loss, template or processor of the session, else the base's."""
        own = getattr(session, part)
        return own if own is not None else getattr(self.sessions[BASE], part)

    def _loss(self, session: Session) -> Loss:
        """The loss of a session; cross entropy where none was set."""
        loss = self._or_base(session, "loss")
        if loss is None:
            from twinkle_core.losses.cross_entropy import CrossEntropyLoss

            loss = self.sessions[BASE].loss = CrossEntropyLoss()
        return loss  # type: ignore[no-any-return]

    def _named(self, session: Session) -> dict[str, torch.nn.Parameter]:
        """The parameters that a session trains, by name: also one that was frozen after its optimizer was set."""
        return {**session.named, **self.adapters.parameters(session.name)}

    def _resolved(self, session: Session, grouped: bool = True) -> Session:
        """What an engine's ``prepare`` sees: a view of the session in which nothing falls back any more.

        Args:
            grouped: False: no loss says which rows belong together (texts to be embedded have no labels to tell).
        """
        processor = self._or_base(session, "processor")
        if processor is None:
            from twinkle_core.processors.input import InputProcessor

            processor = self.sessions[BASE].processor = InputProcessor()
        loss = self._loss(session) if grouped else None
        return Session(session.name, loss, self._or_base(session, "template"), processor, session.optimizer)

    def _encode(self, session: Session, inputs: Any, loss_args: Mapping[str, Any] | None = None, **how: Any) -> Rows:
        """Inputs as encoded rows or a collated batch; conversations and plain texts go through the session's template.

        Raises:
            NoTemplate, EmptyBatch, BadInputs. RowsChanged: rows that belong together, or loss arguments, no longer do.
        """
        rows = as_rows(inputs)
        if isinstance(rows, Mapping):
            return rows
        grouped = any(map(groups.is_group, rows))
        rows = groups.flat(rows) if grouped else rows
        raw = [("messages" in row or "text" in row) and "input_ids" not in row for row in rows]
        if not any(raw):
            return rows
        if not all(raw):
            kinds = f"row {raw.index(True)} is a conversation or a text, row {raw.index(False)} is not"
            raise BadInputs(f"{kinds}; encode the conversations first (template.batch_encode), or give them alone")
        template = self._or_base(session, "template")
        if template is None:
            raise NoTemplate(session.name)
        encoded = template.batch_encode(rows, **how)
        if not encoded:
            raise EmptyBatch(len(rows))
        if len(encoded) != len(rows):
            aligned = next((k for k, v in (loss_args or {}).items() if of_rows(v, len(rows))), None)
            if aligned is not None or grouped:
                raise RowsChanged(aligned, len(rows), len(encoded))
        return encoded  # type: ignore[no-any-return]

    def _must_split(self, verb: str) -> None:
        if SPLIT_STEP not in self.engine.capabilities:
            raise Unsupported(verb, type(self.engine).__name__, "forward_backward(), which does it all at once")
