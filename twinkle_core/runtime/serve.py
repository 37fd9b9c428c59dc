"""The other end of a proxy: the objects of one worker, and how they are called (L0)."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from twinkle_core import plugins
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.errors import BadRow, WorkerFailed
from twinkle_core.hookspecs import hookimpl
from twinkle_core.isolation import Attempt, attempt, describe
from twinkle_core.runtime.calls import END, Answer, Call, Held, Itself, Method
from twinkle_core.runtime.collect import portable
from twinkle_core.runtime.dispatch import RemoteSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinkle_core.contracts.metric import StepResult
    from twinkle_core.train.session import Session


class Server:
    """The objects of one worker.

    Args:
        check: raises for a value that can't travel.
        tells: whether hooks that are called here are noted, for the listeners of the process that calls.
    """

    def __init__(self, check: Callable[[Any], object], tells: bool) -> None:
        self._check = check
        self._objects: dict[str, Any] = {}
        self._iterators: dict[int, Iterator[Any]] = {}
        self._numbers = itertools.count()
        self._noted = Noted() if tells else None
        if self._noted is not None:
            plugins.register(self._noted, "what is told to the driver")

    def build(self, unpack: Callable[[], tuple[str, type, tuple[Any, ...], dict[str, Any]]]) -> Answer:
        """Construct an object.

        Args:
            unpack: gives what it is known by, its class, and arguments.

        Returns:
            Its attributes whose own classes may live on workers, by name.
        """

        def construct() -> dict[str, type]:
            key, cls, args, kwargs = unpack()
            made = self._objects[key] = cls(*args, **kwargs)
            public = {name: type(value) for name, value in getattr(made, "__dict__", {}).items() if not name.startswith("_")}
            return {name: kind for name, kind in public.items() if isinstance(getattr(kind, "__remote__", None), RemoteSpec)}

        return self._answer(attempt(construct))

    def drop(self, key: str) -> None:
        """Let go of an object."""
        self._objects.pop(key, None)

    def object(self, key: str, path: str = "") -> Any:
        """An object, or an attribute of it."""
        found = self._objects[key]
        for name in filter(None, path.split(".")):
            found = getattr(found, name)
        return found

    def call(self, unpack: Callable[[], Call]) -> Answer:
        """Call a method."""
        got = attempt(unpack)
        call = got.value
        return self._answer(got) if call is None else self._answer(attempt(lambda: self._value(call)), call)

    def next(self, number: int) -> Answer:
        """The next item of an iterator, or END."""
        return self._answer(attempt(lambda: portable(next(self._iterators[number], END))))

    def let_go(self, number: int) -> None:
        """An iterator is not wanted any more."""
        self._iterators.pop(number, None)

    def _value(self, call: Call) -> Any:
        target = self.object(call.method.key, call.method.path)
        with ExitStack() as stack:
            for context in call.contexts:
                stack.enter_context(self._bound(context.method)(*context.args, **context.kwargs))
            found = getattr(target, call.method.name)
            if call.collect == "context":
                return stack.enter_context(found(*call.args, **call.kwargs))
            value = found(*call.args, **call.kwargs) if callable(found) else found
            if isinstance(target, TwinkleModel):
                value = _share(target, call, value)
        if value is target:
            return Itself()
        if isinstance(value, Iterator):
            number = next(self._numbers)
            self._iterators[number] = value
            return Held(number)
        value = portable(value)
        return value if call.wanted else None

    def _bound(self, method: Method) -> Any:
        return getattr(self.object(method.key, method.path), method.name)

    def _answer(self, got: Attempt[Any], call: Call | None = None) -> Answer:
        events = self._noted.taken() if self._noted is not None else []
        if got.error is None:
            return Answer(got.value, events)
        error, trace = got.error, _trace(got.error)
        if isinstance(error, BadRow) and call is not None:
            error = error.moved(call.before(error.adapter))
        sent = attempt(lambda: self._check(error))
        if sent.error is not None or not isinstance(error, Exception):  # one that ends a process is meant for that alone
            error = WorkerFailed(describe(error), sent.why or "it is no Exception")
        return Answer(None, events, error, trace)


def _share(model: TwinkleModel, call: Call, value: Any) -> Any:
    """What a verb answered, in a form that can be brought together with what other data ranks answered."""
    if call.collect == "loss_each":
        return {name: model.share("loss", each, adapter_name=name) for name, each in value.items()}
    if call.collect in ("loss", "rows"):
        return model.share(call.collect, value, adapter_name=call.kwargs.get("adapter_name"))
    return value


def _trace(error: BaseException) -> str:
    """A traceback that begins where this module ends."""
    begin = at = error.__traceback__
    while at is not None:
        begin = at.tb_next if at.tb_frame.f_code.co_filename == __file__ and at.tb_next is not None else begin
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, begin))


class Noted:
    """Listens on a worker, and keeps what was heard until it is taken. Of sessions the numbers alone are kept."""

    def __init__(self) -> None:
        self._events: list[tuple[str, dict[str, Any]]] = []

    def taken(self) -> list[tuple[str, dict[str, Any]]]:
        """What was heard since the last time."""
        found, self._events = self._events, []
        return found

    @hookimpl
    def twinkle_after_step(self, session: Session, result: StepResult) -> None:
        """Note it."""
        self._events.append(("twinkle_after_step", {"session": _numbers(session), "result": result}))

    @hookimpl
    def twinkle_metrics_logged(self, step: int, metrics: Mapping[str, float], session: Session, is_training: bool) -> None:
        """Note it."""
        told = {"step": step, "metrics": dict(metrics), "session": _numbers(session), "is_training": is_training}
        self._events.append(("twinkle_metrics_logged", told))

    @hookimpl
    def twinkle_checkpoint_saved(self, path: str, session: Session) -> None:
        """Note it."""
        self._events.append(("twinkle_checkpoint_saved", {"path": path, "session": _numbers(session)}))

    @hookimpl
    def twinkle_checkpoint_loaded(self, path: str, session: Session) -> None:
        """Note it."""
        self._events.append(("twinkle_checkpoint_loaded", {"path": path, "session": _numbers(session)}))


def _numbers(session: Session) -> Session:
    from twinkle_core.train.session import Session

    return Session(
        session.name,
        cur_step=session.cur_step,
        consumed_train_samples=session.consumed_train_samples,
        skipped_steps=session.skipped_steps,
    )
