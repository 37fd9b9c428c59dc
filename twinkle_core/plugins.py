"""Hook modules, each loaded and called in isolation (L0).

A module that can't be loaded, or a hook that raises, is one warning and a record that ``twinkle plugins`` shows; everything
else goes on. What a failed module had registered is taken back. ``TWINKLE_STRICT_PLUGINS=1`` raises instead.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pluggy

from twinkle_core import api, hookspecs, loading, registry, settings
from twinkle_core.errors import BadHook, HookFailed
from twinkle_core.index import HOOK_MODULES, Entry, Index
from twinkle_core.isolation import Attempt, attempt
from twinkle_core.log import get_logger
from twinkle_core.names import closest


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a hook module. ``state``: ``loaded``, ``off`` or ``failed``; ``why``: the cause in one line."""

    entry: Entry
    state: str
    why: str = ""


class Plugins:
    """The hook modules of a registry: loaded at the first call of a hook; after ``registry.refresh()`` again what failed."""

    def __init__(self, names: registry.Registry) -> None:
        self._names = names
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._loaded: list[Any] = []
        self._entries: dict[str, Entry] = {}  # by the name under which pluggy knows the module
        self._own: dict[str, Any] = {}  # the objects of this process that listen, by name
        self._records: dict[str, Record] = {}
        self._warned: set[tuple[str, str]] = set()
        self._seen: Index | None = None
        self._ready: Index | None = None  # of which all hook modules were looked at
        self._aside: set[str] = set()
        self._lock = threading.RLock()  # a second thread waits until all modules are there; the loading one may ask on
        self._ends = False  # whether the listeners will be told of the end of the process

    def hooks(self) -> Any:
        """The caller of hooks: ``hooks().twinkle_after_step(session=..., result=...)``, arguments by keyword.

        Returns:
            Calls give the list of answers that are not None; ``twinkle_resolve`` gives the first one.

        Raises:
            HookFailed: only with ``TWINKLE_STRICT_PLUGINS=1``.
        """
        installed = self._names.index()
        if installed is not self._ready:
            with self._lock:
                self._look_at(installed)
        return self._manager.hook

    def _look_at(self, installed: Index) -> None:
        if installed is self._seen:
            return  # done by another thread meanwhile, or this one is loading a module that asks for names
        before, self._seen = self._seen, installed
        try:
            for entry in installed.of(HOOK_MODULES):
                self._admit(entry)
        except BaseException:
            self._seen = before
            raise
        self._ready = installed
        for text in installed.unknown():
            if ("settings", text) not in self._warned:
                self._warned.add(("settings", text))
                get_logger("plugins").warning("%s", text)

    def set_aside(self, entry: Entry, why: str) -> None:
        """Don't load this module in this process: elsewhere its import was found to fail, or to end the process."""
        self._aside.add(entry.qualified)
        self._records[entry.qualified] = Record(entry, "failed", why)

    def records(self) -> list[Record]:
        """What became of each hook module that was looked at, and of hooks that raised."""
        return list(self._records.values())

    def register(self, plugin: Any, name: str) -> None:
        """Listen with an object or module of this process, until ``unregister(name)``.

        Raises:
            BadHook: it marks no function, or one that is no hook, or whose parameters the hook does not have; it is a class,
            or listens already; or the name is another listener's.
        """
        if not _marked(plugin):
            raise BadHook(name, None, f"no function of {plugin!r} is marked with @hookimpl")
        held = next((other for other, own in self._own.items() if own is plugin), None)
        if held is not None and held != name:
            raise BadHook(name, None, f"this object listens already, as '{held}', and would hear everything twice")
        self._listen(Entry(HOOK_MODULES, name, name), plugin)
        self._own[name] = plugin

    def unregister(self, name: str) -> None:
        """Tell a listener ``twinkle_shutdown``, and listen no longer. A name that nobody has is no fault.

        Args:
            name: as in ``register``; ``distribution/entry`` for an installed module.
        """
        ends = [i.function for i in self._manager.hook.twinkle_shutdown.get_hookimpls() if i.plugin_name == name]
        try:
            for end in ends:
                end()
        finally:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self._entries.pop(name, None)
            self._own.pop(name, None)
            self._records.pop(name, None)
            self._warned = {(who, what) for who, what in self._warned if who != name}

    @contextmanager
    def listening(self, *listeners: Any) -> Iterator[None]:
        """Listen with objects inside the block; on leaving, each is told ``twinkle_shutdown`` and listens no longer.

        Example::

            with listening(JsonLinesWriter("metrics.jsonl"), ProgressBar(total=100)):
                train()

        Raises:
            BadHook: as ``register``; nobody listens then.
        """
        with ExitStack() as stack:
            for listener in listeners:
                with self._lock:
                    kind = listener.__name__ if inspect.isclass(listener) else type(listener).__name__
                    name = next(n for n in chain([kind], (f"{kind} {i}" for i in count(2))) if n not in self._entries)
                    self.register(listener, name)
                stack.callback(self.unregister, name)
            yield

    def tell(self, hook: str, arguments: Mapping[str, Any]) -> None:
        """Call a hook for the objects of this process that listen. (Installed modules were told where it happened.)"""
        for impl in reversed(getattr(self.hooks(), hook).get_hookimpls()):  # pluggy calls who came last first
            if impl.plugin_name in self._own:
                impl.function(*(arguments[name] for name in impl.argnames))

    def components(self, kind: str) -> list[Entry]:
        """What the hook ``twinkle_components`` gives for a kind, with who gave it."""
        found = []
        for impl in self.hooks().twinkle_components.get_hookimpls():
            owner = self._entries[impl.plugin_name]
            answer = impl.function(*([kind] if impl.argnames else []))
            for name, obj in answer.items() if isinstance(answer, Mapping) else ():
                found.append(registry.entry_of(kind, str(name), obj, owner))
        return found

    # ------------------------------------------------------------------------------------------------ loading

    def _admit(self, entry: Entry) -> None:
        """Load one hook module, unless it is there or switched off."""
        record = self._records.get(entry.qualified)
        if (
            entry.qualified in self._aside
            or (record is not None and record.state == "loaded")
            or entry.qualified in self._entries
        ):
            return
        if entry.disabled:
            self._records[entry.qualified] = Record(entry, "off")
            return
        got = self._attempt(lambda: self._listen_once(entry, loading.load(entry, api.SUPPORTED)))
        if got.error is None:
            self._records[entry.qualified] = Record(entry, "loaded")
        else:
            self._failed(entry, "could not be loaded", got)

    def _attempt(self, call: Callable[[], Any]) -> Attempt[Any]:
        """A foreign call; names that it registered before it failed are taken back."""

        def guarded() -> Any:
            with self._names.undo_on_error():
                return call()

        return attempt(guarded)

    def _failed(self, entry: Entry, what: str, got: Attempt[Any]) -> None:
        error = got.error
        assert error is not None
        cause = error.__cause__ if error.__cause__ is not None else error
        failure = HookFailed(entry.name, f"{entry.dist} {entry.version}".strip(), what, cause)
        self._records[entry.qualified] = Record(entry, "failed", f"{what}: {failure.why}")
        if settings.strict_plugins():
            raise failure from error
        if (entry.qualified, what) not in self._warned:
            self._warned.add((entry.qualified, what))
            get_logger("plugins").warning("%s", failure)

    # ------------------------------------------------------------------------------------------------ listening

    def _listen_once(self, entry: Entry, plugin: Any) -> None:
        """A module that two entries name hears each hook once."""
        if not any(plugin is other for other in self._loaded):
            self._listen(entry, plugin)
            self._loaded.append(plugin)

    def _listen(self, entry: Entry, plugin: Any) -> None:
        """Give pluggy the marked functions of a module, each wrapped so that its failure stays its own."""
        wrapped = {name: self._isolated(entry, hook, function) for name, hook, function in _marked(plugin)}
        listener = SimpleNamespace(**wrapped)
        if entry.qualified in self._entries:
            raise BadHook(entry.name, None, "another listener of this process has that name")
        self._entries[entry.qualified] = entry
        try:
            self._manager.register(listener, entry.qualified)
        except (pluggy.PluginValidationError, ValueError) as error:
            self._entries.pop(entry.qualified)
            if self._manager.get_plugin(entry.qualified) is listener:
                self._manager.unregister(name=entry.qualified)
            raise BadHook(entry.name, None, " ".join(str(error).split())) from None
        if not self._ends:
            self._ends = True
            atexit.register(self._manager.hook.twinkle_shutdown)

    def _isolated(self, entry: Entry, hook: str, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            got = self._attempt(lambda: function(*args))
            if got.error is not None:
                self._failed(entry, f"failed in {hook}", got)
            return got.value

        return call


def _marked(plugin: Any) -> list[tuple[str, str, Any]]:
    """(attribute, hook, function) of what a module marks as hooks."""
    found = []
    for name in dir(plugin):
        function: Any = getattr(plugin, name, None)
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if not isinstance(options, dict):
            continue
        hook = options.get("specname") or name
        if hook not in hookspecs.NAMES:
            raise BadHook(hook, closest(hook, hookspecs.NAMES), "there is no such hook")
        if options.get("wrapper") or options.get("hookwrapper"):
            raise BadHook(hook, None, "wrappers of hooks are not supported: their failure could not be kept apart")
        if inspect.isclass(plugin) and "self" in inspect.signature(function).parameters:
            raise BadHook(hook, None, f"{plugin.__name__} is a class; give an object of it: {plugin.__name__}(...)")
        _check_function(hook, function)
        found.append((name, hook, function))
    return found


def _check_function(hook: str, function: Any) -> None:
    """Raise BadHook for a function whose body would not run when it is called, or that asks for what its hook does not give."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise BadHook(hook, None, "it is an async function, and nobody would await it; hooks are plain functions")
    if inspect.isgeneratorfunction(function):
        raise BadHook(
            hook, None, "it is a generator (it holds a yield), whose body nobody would run; hooks are plain functions"
        )
    gives = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for name, parameter in inspect.signature(function).parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if needed and name not in gives:
            has = f"it has {', '.join(gives)}" if gives else "it has none"
            raise BadHook(hook, closest(name, gives), f"the hook has no parameter '{name}'; {has}")


def check(entry: Entry, plugin: Any) -> None:
    """Raise BadHook where a hook module would be refused. Nothing listens afterwards."""
    Plugins(registry.Registry(path=()))._listen(entry, plugin)


_PROCESS = registry.process().plugins()
hooks = _PROCESS.hooks
records = _PROCESS.records
set_aside = _PROCESS.set_aside
register = _PROCESS.register
unregister = _PROCESS.unregister
listening = _PROCESS.listening
tell = _PROCESS.tell
components = _PROCESS.components
