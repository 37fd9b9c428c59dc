"""What a distribution provides, and the suites that it names for it in its metadata (L0)."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle_core import registry
from twinkle_core.errors import UnknownDistribution, UnknownKind
from twinkle_core.index import HOOK_MODULES, Entry, distribution
from twinkle_core.names import PLURAL, closest, fold, kind_of, normalise

#: the group of entry points: ``"losses.focal" = "acme_losses.testing:FocalSuite"``
GROUP = "twinkle.testing"


def entries_of(name: str) -> list[Entry]:
    """All components and hook modules of a distribution.

    Raises:
        UnknownDistribution: there are none.
    """
    index, dist = registry.index(), normalise(name)
    everything = [e for kind in (*PLURAL, HOOK_MODULES) for e in index.of(kind)]
    mine = [e for e in everything if e.dist == dist]
    if not mine:
        known = sorted({e.dist for e in everything})
        raise UnknownDistribution(name, distribution(dist) is not None, closest(dist, known), known)
    return mine


def named_suites(entries: Sequence[Entry]) -> tuple[dict[tuple[str, str], str], list[str]]:
    """The suites that the entries' distribution names: (kind, folded name) -> ``module:Class``; and faults of its metadata."""
    first = entries[0]
    faults = [fault for fault in registry.index().faults if fault.startswith(f"{first.dist} {first.version}: ")]
    known = {key_of(e) for e in entries}
    suites: dict[tuple[str, str], str] = {}
    for point in distribution(first.dist).entry_points:
        if point.group != GROUP:
            continue
        group, _, name = point.name.partition(".")
        key = _key(group, name)
        if key in known:
            suites[key] = point.value
        else:
            names = [f"{PLURAL[e.kind]}.{e.name}" for e in entries if e.kind in PLURAL]
            near = closest(point.name, names)
            meant = f" Did you mean '{near}'?" if near else ""
            faults.append(f"[{GROUP}] names '{point.name}', which {first.dist} does not provide.{meant}")
    return suites, faults


def key_of(entry: Entry) -> tuple[str, str]:
    """Kind and folded name."""
    return entry.kind, fold(entry.kind, entry.name) if entry.kind in PLURAL else entry.name


def _key(group: str, name: str) -> tuple[str, str]:
    try:
        kind = kind_of(group)
    except UnknownKind:
        return "", ""
    return kind, fold(kind, name)
