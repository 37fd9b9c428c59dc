"""Names to components (L0). One scan of installed metadata; nothing is imported before it is asked for.

A spec resolves in this order:

1. an object, class or callable is taken as it is;
2. ``dist/name`` asks that distribution;
3. what ``register`` gave this process;
4. the one installed entry of that name; names compare without case, ``_``, ``-`` and the kind's suffix, and a class's name
   works as well as its entry's;
5. among several, twinkle's own distributions win, and a name of twinkle's own is answered by its distribution alone, installed
   or not; third parties must be told apart (never by the order of sys.path); after the installed ones come those that hooks
   name (``twinkle_components``);
6. ``module:Class``;
7. ``ms://owner/repo`` or ``hf://owner/repo``, only with ``TWINKLE_TRUST_REMOTE_CODE=1``;
8. the hook ``twinkle_resolve``;
9. an error that says what was meant, or what to install.

The functions of this module are the methods of one :class:`Registry` for the process.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from twinkle_core import api, arguments, loading, snapshots
from twinkle_core.errors import (
    AlreadyBuilt,
    Ambiguous,
    BadName,
    Disabled,
    FrozenRegistry,
    NameTaken,
    NotA,
    NotInstalled,
    TwinkleError,
    UnknownName,
    WrongType,
)
from twinkle_core.index import Entry, Index, scan
from twinkle_core.known import FIRST_PARTY, KNOWN
from twinkle_core.names import PLURAL, closest, fold, kind_of, normalise, unusable

if TYPE_CHECKING:
    from twinkle_core.plugins import Plugins


class Registry:
    """Names of one process. ``path``: where distributions are looked for; default ``sys.path``, as it is at the scan."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._index: Index | None = None
        self._registered: dict[tuple[str, str], Entry] = {}
        self._frozen: Index | None = None
        self._resolved: dict[tuple[str, str, str], Entry] = {}
        self._plugins: Plugins | None = None
        self._lock = threading.Lock()
        self._thread = threading.local()  # what this thread registered within ``undo_on_error``

    # ------------------------------------------------------------------------------------------------ what is there

    def index(self) -> Index:
        """The scan of the installed metadata, made at the first call."""
        if self._index is None:
            self._index = scan(self._path)
        return self._index

    def refresh(self) -> None:
        """Forget the scan, so that what was installed or repaired meanwhile is found. A frozen table stays as it is."""
        importlib.invalidate_caches()
        self._index = None

    def entries(self, kind: str) -> list[Entry]:
        """All that can be asked for now, switched-off ones left out: registered, installed, and those hooks name."""
        kind = kind_of(kind)
        if self._frozen is not None:
            return self._frozen.of(kind)
        own = [e for e in self._registered.values() if e.kind == kind]
        live = [e for e in [*self.index().of(kind), *self.plugins().components(kind)] if not e.disabled]
        return own + live

    def register(self, kind: str, name: str, obj: Any, override: bool = False) -> None:
        """Give this process a component by hand.

        Args:
            kind: ``"loss"``.
            name: what it is asked for by.
            obj: the class, callable or object, or ``"module:Class"``.
            override: whether it may take the place of an installed or registered one of that name.

        Raises:
            BadName: '', or with '/' or ':', or an object that is none (None, a number, a list). NameTaken, FrozenRegistry.
        """
        kind = kind_of(kind)
        if self._frozen is not None:
            raise FrozenRegistry(kind, name, (e.qualified for e in self._frozen.of(kind)))
        if unusable(name):
            raise BadName(kind, name, unusable(name))
        if _plain(obj):
            raise BadName(kind, name, f"{obj!r:.80} is no component")
        key = (kind, fold(kind, name))
        held = [self._registered[key]] if key in self._registered else []
        held += [e for e in self.index().hits(kind, name) if not e.disabled]
        whose = owner(kind, name)
        if whose and not held and not override:
            raise NameTaken(kind, name, f"{whose}, installed or not")
        if held and not override:
            raise NameTaken(kind, name, held[0].label if held[0].dist else f"{held[0].value}, registered in this process")
        entry = entry_of(kind, name, obj)
        if getattr(self._thread, "added", None) is not None:
            self._thread.added.append((key, entry, self._registered.get(key)))
        self._registered[key] = entry

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """Inside: what this thread registers is taken back if an error leaves the block; what others register stays."""
        outer, mine = getattr(self._thread, "added", None), list[tuple[tuple[str, str], Entry, Entry | None]]()
        self._thread.added = mine
        try:
            yield
        except BaseException:
            for key, entry, before in reversed(mine):
                if self._registered.get(key) is not entry:
                    continue
                if before is None:
                    del self._registered[key]
                else:
                    self._registered[key] = before
            mine.clear()
            raise
        finally:
            self._thread.added = outer
            if outer is not None:
                outer += mine

    # ------------------------------------------------------------------------------------------------ names to entries

    def find(self, kind: str, name: str) -> Entry:
        """The entry that a name means. Imports nothing of it.

        Raises:
            UnknownName, NotInstalled, Disabled, Ambiguous, FrozenRegistry.
        """
        kind = kind_of(kind)
        entry = self._search(kind, name)
        if entry is None:
            raise self._explain(kind, name)
        return entry

    def _search(self, kind: str, name: str) -> Entry | None:
        dist, _, bare = name.rpartition("/")
        dist = normalise(dist)
        if self._frozen is not None:
            return _choose(kind, bare, self._frozen, _hits(self._frozen, kind, bare, dist))
        if not dist and (kind, fold(kind, bare)) in self._registered:
            return self._registered[kind, fold(kind, bare)]
        installed = self.index()
        entry = _choose(kind, bare, installed, _hits(installed, kind, bare, dist))
        if entry is None:
            named = Index(self.plugins().components(kind))
            entry = _choose(kind, bare, named, _hits(named, kind, bare, dist))
        return entry

    def plugins(self) -> Plugins:
        """The hook modules among what is installed."""
        from twinkle_core.plugins import Plugins  # brings pluggy, which names that are installed don't need

        with self._lock:
            if self._plugins is None:
                self._plugins = Plugins(self)
            return self._plugins

    def _explain(self, kind: str, name: str) -> TwinkleError:
        """Why a name has no answer."""
        if self._frozen is not None:
            return FrozenRegistry(kind, name, (e.qualified for e in self._frozen.of(kind)))
        dist, _, bare = name.rpartition("/")
        hits = _hits(self.index(), kind, bare, normalise(dist))
        if hits:  # none of them live
            return Disabled(hits[0].label)
        for (k, known), (cls, whose, since) in KNOWN.items():
            if k == kind and fold(kind, bare) in _keys(kind, known, cls) and normalise(dist) in ("", whose):
                return NotInstalled(kind, known, cls, whose, sys.prefix, since=since, installed=self.index().version(whose))
        live = self.entries(kind)
        names = sorted({e.name for e in live})
        words = [e.qualified for e in live] if dist else [*names, *(e.cls for e in live if e.cls)]
        words += [known for k, known in KNOWN if k == kind and not dist]  # asked for again, it says what to install
        return UnknownName(kind, PLURAL[kind], name, closest(name, words), names)

    # ------------------------------------------------------------------------------------------------ entries to objects

    def load(self, entry: Entry) -> Any:
        """Import what an entry names. A failure is never remembered: the next call tries again.

        Raises:
            ApiMismatch, NeedsLibrary, Broken.
        """
        obj = loading.load(entry, api.SUPPORTED, self._path)
        self._resolved[entry.kind, entry.dist, entry.name] = entry
        return obj

    def resolve(self, kind: str, spec: Any) -> Any:
        """The class, callable or object that a spec means; the order is in the module's text.

        Args:
            kind: ``"loss"``, ``"template"``, ...
            spec: an object (taken as it is) or a name.

        Raises:
            UnknownName, NotInstalled, Disabled, Ambiguous: no answer. ApiMismatch, NeedsLibrary, Broken: an answer that does
            not load. BadImportPath, RemoteCodeRefused, BadRemoteComponent, FrozenRegistry. WrongType: None, a number or a list.
        """
        kind = kind_of(kind)
        if _plain(spec):
            raise WrongType("registry.resolve", kind, spec, "a name, a class, a function or an object of a class")
        if not isinstance(spec, str):
            return spec
        if self._frozen is None and ":" in spec:
            return self._resolve_reference(kind, spec)
        entry = self._search(kind, spec)
        if entry is not None:
            return self.load(entry)
        dist, _, bare = spec.rpartition("/")
        if self._frozen is None and not (owner(kind, bare) if not dist else normalise(dist) in FIRST_PARTY):
            answer = self.plugins().hooks().twinkle_resolve(kind=kind, name=spec)
            if answer is not None:
                return answer
        raise self._explain(kind, spec)

    def _resolve_reference(self, kind: str, spec: str) -> Any:
        """``module:Class``, or a repository of a hub."""
        if "://" in spec:
            from twinkle_core import remote_components

            obj = remote_components.load(kind, spec)
        else:
            obj = loading.import_path(kind, spec)
        self._resolved[kind, "", spec] = Entry(kind, spec, spec)
        return obj

    def build(self, kind: str, spec: Any, kwargs: Mapping[str, Any] | None = None, *, contract: type | None = None) -> Any:
        """An instance of what a spec means.

        Args:
            kind, spec: as for ``resolve``.
            kwargs: for the constructor; checked against its signature first. An object that is no class takes none.
            contract: the class that it must derive from.

        Raises:
            NotA: it does not keep the contract. WrongArgument, MissingArgument, AlreadyBuilt; all of ``resolve``.
        """
        kind, kwargs = kind_of(kind), dict(kwargs or {})
        obj = self.resolve(kind, spec)
        if inspect.isclass(obj):
            if contract is not None:
                self._keep(kind, spec, obj, contract)
            arguments.check(obj, kwargs, complete=True)
            return obj(**kwargs)
        if kwargs:
            raise AlreadyBuilt(kind, getattr(obj, "__name__", None) or repr(obj), kwargs)
        if contract is not None and not isinstance(obj, contract):
            self._keep(kind, spec, type(obj), contract)
        return obj

    def _keep(self, kind: str, spec: Any, cls: type, contract: type) -> None:
        """Raise NotA unless ``cls`` derives from ``contract`` and leaves nothing of it open."""
        if loading.keeps(cls, contract):
            return
        entry = self._search(kind, spec) if isinstance(spec, str) and ":" not in spec else None
        label = entry.label if entry is not None else f"{kind} {cls.__module__}.{cls.__qualname__}"
        lacks = loading.lacking(cls, contract)
        raise NotA(label, contract.__name__, lacks, entry.dist if entry is not None else "")

    # ------------------------------------------------------------------------------------------------ safety and records

    def freeze(self, allow: Mapping[str, str | Iterable[str]] | None = None) -> None:
        """From now on names resolve in a fixed table only; import paths, repositories and registrations are refused.

        Args:
            allow: kind -> names (or one name), each resolved now (without importing it). A kind that is absent allows nothing.
                None: all that can be asked for at this moment.

        Objects handed over inside the process are still taken as they are. There is no way back.

        Raises:
            UnknownName and the other errors of ``find`` for a name in ``allow``; WrongType where it holds something else; then
            nothing is frozen.
        """
        if not isinstance(allow, Mapping | None):
            raise WrongType("registry.freeze", "allow", allow, "None or kinds with their names, such as {'loss': ['mse']}")
        if allow is None:
            table = [e for kind in PLURAL for e in self.entries(kind)]
        else:
            table = [self.find(kind, name) for kind, names in allow.items() for name in _several(kind, names)]
        self._frozen = Index(dict.fromkeys(table))

    @property
    def frozen(self) -> bool:
        """Whether ``freeze`` was called."""
        return self._frozen is not None

    def snapshot(self, of: Iterable[Mapping[str, str]] | None = None) -> snapshots.Snapshot:
        """Distribution, version and value of all that was resolved so far, sorted; plain JSON.

        Args:
            of: another process's snapshot: then what *this* process has under the same names, without importing anything.
        """
        if of is None:
            return snapshots.of(self._resolved.values())
        found = (self.index().hits(r["kind"], r["name"], r["distribution"]) for r in of if r["distribution"])
        return snapshots.of(e for hits in found for e in hits[:1])


def entry_of(kind: str, name: str, obj: Any, giver: Entry | None = None) -> Entry:
    """An entry for an object, or for ``"module:Class"``, of this process or of the plugin ``giver``."""
    dist, version, versions = (giver.dist, giver.version, giver.api) if giver is not None else ("", "", api.SUPPORTED)
    if isinstance(obj, str):
        return Entry(kind, name, obj, dist, version, versions)
    where = getattr(obj, "__module__", type(obj).__module__)
    value = f"{where}:{getattr(obj, '__qualname__', type(obj).__qualname__)}"
    return Entry(kind, name, value, dist, version, versions, obj)


@lru_cache(maxsize=4096)
def owner(kind: str, name: str) -> str:
    """The distribution of twinkle's own whose name this is, installed or not; empty for a name that is free."""
    key = fold(kind, name)
    known = [
        (fold(kind, n) == key, dist) for (k, n), (cls, dist, _) in KNOWN.items() if k == kind and key in _keys(kind, n, cls)
    ]
    return max(known, default=(False, ""))[1]  # the name's rather than the class's


def _several(kind: str, names: str | Iterable[str]) -> list[str]:
    many = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    for name in many:
        if not isinstance(name, str):
            raise WrongType("registry.freeze", f"allow[{kind!r}]", name, "a name, or several")
    return many


def _plain(obj: Any) -> bool:
    """Whether it is a value of Python's own that could never be a component: None, a number, a list, a module."""
    return type(obj).__module__ == "builtins" and not callable(obj) and not isinstance(obj, str) and type(obj) is not object


def _keys(kind: str, name: str, cls: str) -> tuple[str, str]:
    return fold(kind, name), fold(kind, cls)


def _hits(index: Index, kind: str, bare: str, dist: str) -> list[Entry]:
    """Entries that a name may mean; a bare name of twinkle's own means nobody else's, nor one that its owner lacks."""
    hits = index.hits(kind, bare, dist)
    whose = owner(kind, bare) if not dist else ""
    return [e for e in hits if e.dist in ("", whose)] if whose else hits


def process() -> Registry:
    """The registry of this process, whose methods are this module's functions."""
    return _PROCESS


def _choose(kind: str, bare: str, index: Index, hits: Sequence[Entry]) -> Entry | None:
    """One of the live entries that a name may mean; None when there is none."""
    live = [e for e in hits if not e.disabled]
    pool = [e for e in live if not e.dist] or [e for e in live if e.first_party] or live
    pool = [e for e in pool if index.named(e, bare)] or pool
    if len({e.dist for e in pool}) == 1:  # spellings of one distribution: the exact one wins
        pool = [e for e in pool if bare in (e.name, e.cls)] or pool
    if len({(e.dist, e.value) for e in pool}) > 1:
        raise Ambiguous(kind, bare, ((e.qualified, e.version, e.value) for e in pool))
    return pool[0] if pool else None


_PROCESS = Registry()
index = _PROCESS.index
refresh = _PROCESS.refresh
entries = _PROCESS.entries
register = _PROCESS.register
find = _PROCESS.find
load = _PROCESS.load
resolve = _PROCESS.resolve
build = _PROCESS.build
freeze = _PROCESS.freeze
snapshot = _PROCESS.snapshot
compare_snapshots = snapshots.compare

__all__ = [
    "Entry",
    "Registry",
    "build",
    "compare_snapshots",
    "entries",
    "find",
    "freeze",
    "index",
    "load",
    "process",
    "refresh",
    "register",
    "resolve",
    "snapshot",
]
