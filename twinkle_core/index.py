"""What is installed: one scan of the distributions' metadata (L0). Nothing of a plugin is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_core import settings
from twinkle_core.isolation import attempt
from twinkle_core.known import FIRST_PARTY
from twinkle_core.names import KINDS, closest, fold, normalise, unusable

#: stands for "no object here" where None may be one
ABSENT: Any = object()
HOOK_MODULES = "plugins"
HANDSHAKE = "api"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of one provider: a line of somebody's ``entry_points.txt``, or an object of this process (``obj``).

    ``kind`` is singular, or ``plugins`` for a hook module. ``dist`` is normalised; empty for what was registered by hand.
    """

    kind: str
    name: str
    value: str
    dist: str = ""
    version: str = ""
    api: tuple[int, ...] = (1,)
    obj: Any = field(default=ABSENT, compare=False, repr=False)

    @property
    def module(self) -> str:
        """``acme_losses.focal`` of ``acme_losses.focal:FocalLoss [gpu]``."""
        return self.value.partition("[")[0].partition(":")[0].strip()

    @property
    def attribute(self) -> str:
        """``FocalLoss`` of ``acme_losses.focal:FocalLoss [gpu]``; empty for a module."""
        return self.value.partition("[")[0].partition(":")[2].strip()

    @property
    def cls(self) -> str:
        """The name of the class itself."""
        return self.attribute.rpartition(".")[2]

    @property
    def qualified(self) -> str:
        """``acme-losses/focal``."""
        return f"{self.dist}/{self.name}" if self.dist else self.name

    @property
    def label(self) -> str:
        """``loss 'focal' from acme-losses 1.2``, as errors write it."""
        provider = f"from {self.dist} {self.version}" if self.dist else "registered in this process"
        return f"{self.kind} '{self.name}' {provider}"

    @property
    def first_party(self) -> bool:
        """Whether twinkle's own distributions provide it."""
        return self.dist in FIRST_PARTY

    @property
    def disabled(self) -> bool:
        """Whether the user switched its distribution off. An allow list never excludes twinkle's own."""
        deny, allow = settings.disabled_plugins(), settings.allowed_plugins()
        if not self.dist or not (deny or allow):
            return False
        if self.dist in map(normalise, deny):
            return True
        return bool(allow) and not self.first_party and self.dist not in map(normalise, allow)


class Index:
    """The entries of one scan, by kind and folded name."""

    def __init__(self, entries: Iterable[Entry] = (), faults: Iterable[str] = ()) -> None:
        self.entries = tuple(entries)
        self.faults = tuple(faults)  # damaged metadata, one line each
        self._names: dict[tuple[str, str], list[Entry]] = {}
        self._classes: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            if entry.kind == HOOK_MODULES:
                continue
            self._names.setdefault((entry.kind, fold(entry.kind, entry.name)), []).append(entry)
            if entry.cls:
                self._classes.setdefault((entry.kind, fold(entry.kind, entry.cls)), []).append(entry)

    def of(self, kind: str) -> list[Entry]:
        """All entries of a kind, sorted by name and distribution."""
        return sorted((e for e in self.entries if e.kind == kind), key=lambda e: (e.name, e.dist, e.value))

    def version(self, distribution: str) -> str:
        """Of a distribution that has entries here; empty when there is none."""
        return next((e.version for e in self.entries if e.dist == distribution), "")

    def unknown(self) -> list[str]:
        """What the settings say of distributions that provide nothing to twinkle here, a line for each."""
        there = {e.dist for e in self.entries if e.dist}
        named = {"TWINKLE_DISABLE_PLUGINS": settings.disabled_plugins(), "TWINKLE_PLUGINS": settings.allowed_plugins()}
        return [
            f"{variable} names '{name}', and no installed distribution of that name provides anything to twinkle"
            + (f"; did you mean '{near}'?" if (near := closest(normalise(name), there)) else "")
            for variable, names in named.items()
            for name in sorted(names)
            if normalise(name) not in there
        ]

    def hits(self, kind: str, name: str, dist: str = "") -> list[Entry]:
        """Entries that a name may mean, by their own name first, then by their class's; only of ``dist`` if given."""
        key = (kind, fold(kind, name))
        found = dict.fromkeys([*self._names.get(key, ()), *self._classes.get(key, ())])
        return [e for e in found if not dist or e.dist == dist]

    def named(self, entry: Entry, name: str) -> bool:
        """Whether ``name`` means the entry by its own name rather than by its class's."""
        return fold(entry.kind, entry.name) == fold(entry.kind, name)


def scan(path: Sequence[str] | None = None) -> Index:
    """Read the metadata of all distributions on ``path`` (default ``sys.path``). Damaged ones are noted, never fatal.

    Only ``entry_points.txt`` files that mention twinkle are parsed: a query for each group through ``entry_points()`` costs
    ten times as much.
    """
    found: dict[str, tuple[int, list[Entry]]] = {}
    faults: list[str] = []
    iterator = iter(_distributions(path))
    while True:
        step = attempt(lambda: next(iterator, None))
        if step.error is not None:
            faults.append(f"the list of installed distributions could not be read further: {step.why}")
        if step.value is None:
            break
        dist = step.value
        read = attempt(_reader(dist))
        if read.error is not None:
            faults.append(f"{_place(dist)} could not be read: {read.why}")
        elif read.value is not None:
            name, rank, entries, odd = read.value
            faults += odd
            # The same distribution twice on sys.path counts once. A dist-info outranks an egg-info, which may be what an
            # old build left behind; of two equals the first wins, as it does for import.
            if name not in found or rank < found[name][0]:
                found[name] = (rank, entries)
    return Index((e for _, entries in found.values() for e in entries), dict.fromkeys(faults))


def _distributions(path: Sequence[str] | None) -> Iterable[Any]:
    if sys.version_info >= (3, 12):
        from importlib.metadata import distributions
    else:
        from importlib_metadata import distributions
    return distributions() if path is None else distributions(path=list(path))


def distribution(name: str, path: Sequence[str] | None = None) -> Any:
    """The distribution of that normalised name; None when there is none."""
    for dist in _distributions(path):
        if normalise(attempt(lambda dist=dist: dist.metadata.get("Name")).value or "") == name:  # type: ignore[misc]
            return dist
    return None


def _reader(dist: Any) -> Callable[[], tuple[str, int, list[Entry], list[str]] | None]:
    return lambda: _read(dist)


def _read(dist: Any) -> tuple[str, int, list[Entry], list[str]] | None:
    """Normalised name, rank, entries and faulty lines of a distribution that mentions twinkle."""
    text = dist.read_text("entry_points.txt")
    if not text or "[twinkle." not in text:
        return None
    written = dist.metadata.get("Name")
    if not written:
        raise ValueError("its metadata gives no Name")
    name, version = normalise(written), str(dist.version or "0")
    points = [(p.group.removeprefix("twinkle."), p) for p in dist.entry_points if p.group.startswith("twinkle.")]
    api = tuple(sorted(int(p.name[1:]) for group, p in points if group == HANDSHAKE and p.name[1:].isdigit())) or (1,)
    kinds = KINDS | {HOOK_MODULES: HOOK_MODULES}
    entries = [Entry(kinds[group], p.name, p.value, name, version, api) for group, p in points if group in kinds]
    groups = {group for group, _ in points} - set(kinds) - {HANDSHAKE}
    odd = [
        f"{name} {version}: there is no group [twinkle.{g}]; did it mean [twinkle.{n}]?"
        for g in sorted(groups)
        if (n := closest(g, kinds))
    ]
    good: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        kept = good.setdefault((entry.kind, entry.name), entry)
        if why := unusable(entry.name):
            odd.append(f"{entry.label} can't be asked for: {why}")
            del good[entry.kind, entry.name]
        elif kept.value != entry.value:
            odd.append(f"{entry.label} stands twice in its metadata, as {kept.value} and as {entry.value}; the first is used")
    return name, 0 if dist.read_text("METADATA") else 1, list(good.values()), odd


def _place(dist: Any) -> str:
    return str(getattr(dist, "_path", None) or "a distribution")
