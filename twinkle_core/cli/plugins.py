"""``twinkle plugins``: what is installed, and whether it works (L0)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle_core import api, registry
from twinkle_core.cli.tables import table
from twinkle_core.index import HOOK_MODULES, Entry
from twinkle_core.known import KNOWN
from twinkle_core.names import KINDS, PLURAL, kind_of

OFF, FOREIGN_API, SHARED, INSTALLED, WORKS, BROKEN = "off", "other API", "shared name", "installed", "ok", "broken"


@dataclass(frozen=True, slots=True)
class Row:
    """One component or hook module, its state, and why if that is not plain."""

    entry: Entry
    state: str
    why: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("plugins", help="what is installed", description=__doc__)
    parser.add_argument("--kind", help=f"only this kind: {', '.join(KINDS)}")
    parser.add_argument("--load", action="store_true", help="import each component, in a child process, and say what fails")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table. A fault of somebody's plugin is part of the answer, not a failure of this command: returns 0."""
    kinds = [kind_of(args.kind)] if args.kind else list(PLURAL)
    index = registry.index()
    components = rows([e for kind in kinds for e in index.of(kind)], load=args.load)
    hook_modules = rows(index.of(HOOK_MODULES), load=True)
    if args.json:
        found = {"components": components, "hook_modules": hook_modules}
        document = {key: [_plain(row) for row in value] for key, value in found.items()}
        print(json.dumps(document | {"faults": list(index.faults)}, indent=2, ensure_ascii=False))
    else:
        print("\n\n".join([text(components, hook_modules, index.faults), *not_installed(kinds)]))
    return 0


def rows(entries: Sequence[Entry], *, load: bool) -> list[Row]:
    """The state of each entry; with ``load`` found by importing it in a child process."""
    found = [Row(entry, *_state(entry)) for entry in entries]
    to_try = [number for number, row in enumerate(found) if row.state in (INSTALLED, SHARED)] if load else []
    if to_try:
        from twinkle_core.cli.probe import probe

        for number, why in zip(to_try, probe([found[n].entry for n in to_try]), strict=True):
            row = found[number]
            if why:
                found[number] = Row(row.entry, BROKEN, why)
            elif row.state == INSTALLED:
                found[number] = Row(row.entry, WORKS)
    return found


def _state(entry: Entry) -> tuple[str, str]:
    """What can be said without importing."""
    if entry.disabled:
        return OFF, "by TWINKLE_DISABLE_PLUGINS or TWINKLE_PLUGINS"
    if not set(entry.api) & set(api.SUPPORTED):
        return FOREIGN_API, f"{entry.label} was written for plugin API {max(entry.api)}; this twinkle-core has API {api.API}"
    if entry.kind != HOOK_MODULES:
        others = {e.dist for e in registry.index().hits(entry.kind, entry.name) if not e.disabled} - {entry.dist}
        whose = registry.owner(entry.kind, entry.name)
        if whose and not entry.first_party:
            return SHARED, f"the name is {whose}'s, installed or not; ask for '{entry.qualified}'"
        if others and not entry.first_party:
            return SHARED, f"{', '.join(sorted(others))} has this name too; ask for '{entry.qualified}'"
    return INSTALLED, ""


def text(components: Sequence[Row], hook_modules: Sequence[Row], faults: Sequence[str]) -> str:
    """Tables, then the reasons of what is not plain."""
    header = ("kind", "name", "class", "distribution", "version", "state")
    cells = [(r.entry.kind, r.entry.name, r.entry.cls, r.entry.dist, r.entry.version, r.state) for r in components]
    parts = [table(header, cells)]
    if hook_modules:
        hooks = [(r.entry.name, r.entry.value, r.entry.dist, r.entry.version, r.state) for r in hook_modules]
        parts.append(table(("hook module", "imports", "distribution", "version", "state"), hooks))
    parts += [_note(row) for row in (*components, *hook_modules) if row.why]
    return "\n\n".join([*parts, *faults])


def _note(row: Row) -> str:
    """An error names its component already."""
    named = row.why.startswith(row.entry.label)
    return row.why if named else f"{row.entry.label}: {row.why}"


def not_installed(kinds: Sequence[str]) -> list[str]:
    """One text: twinkle's own components whose distribution is not here; nothing if there are none."""
    index = registry.index()
    absent = sorted((dist, f"{k} '{n}'") for (k, n), (_, dist, _) in KNOWN.items() if k in kinds and not index.version(dist))
    lines = [f"    pip install {dist}  # {', '.join(what for d, what in absent if d == dist)}" for dist in dict(absent)]
    return ["\n".join(["not installed:", *lines])] if lines else []


def _plain(row: Row) -> dict[str, str]:
    e = row.entry
    return {
        "kind": e.kind,
        "name": e.name,
        "class": e.cls,
        "value": e.value,
        "distribution": e.dist,
        "version": e.version,
        "state": row.state,
        "why": row.why,
    }
