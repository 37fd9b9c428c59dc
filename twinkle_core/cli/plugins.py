"""``twinkle plugins``: what is installed, and whether it works (L0)."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle_core import api, registry
from twinkle_core.cli.tables import table
from twinkle_core.index import HOOK_MODULES, Entry
from twinkle_core.names import KINDS, PLURAL, kind_of

if TYPE_CHECKING:
    from twinkle_core.cli.probe import Tried

_LOAD = (
    "import each component and hook module, in a child process, check that it has what its kind needs, and say what is broken; "
    "one that takes longer than 60 s is broken"
)
_NOTHING_IMPORTED = "Nothing was imported for this list: twinkle plugins --load imports and checks each of them."
OFF, FOREIGN_API, SHARED, INSTALLED, WORKS, BROKEN = "off", "other API", "shared name", "installed", "ok", "broken"
LACKS = "lacks an extra"  # which its distribution works without


@dataclass(frozen=True, slots=True)
class Row:
    """One component or hook module, its state, and why if that is not plain."""

    entry: Entry
    state: str
    why: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "plugins",
        help="what is installed, and whether it works",
        description="List the components and hook modules of all installed distributions. Nothing is imported for it, unless "
        "--load asks for it. A fault of a plugin is part of the answer: the exit status is 0.",
    )
    parser.add_argument("--kind", help=f"only this kind: {', '.join(KINDS)}")
    parser.add_argument("--load", action="store_true", help=_LOAD)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table. A fault of somebody's plugin is part of the answer, not a failure of this command: returns 0."""
    kinds = [kind_of(args.kind)] if args.kind else list(PLURAL)
    index = registry.index()
    components = rows([e for kind in kinds for e in index.of(kind)], load=args.load)
    hook_modules = rows(index.of(HOOK_MODULES), load=args.load)
    if args.json:
        found = {"components": components, "hook_modules": hook_modules}
        document = {key: [_plain(row) for row in value] for key, value in found.items()}
        print(json.dumps(document | {"faults": list(index.faults)}, indent=2))  # ASCII: any encoding of stdout holds it
    else:
        print("\n\n".join([text(components, hook_modules, index.faults), *([] if args.load else [_NOTHING_IMPORTED])]))
    return 0


def rows(entries: Sequence[Entry], *, load: bool) -> list[Row]:
    """The state of each entry; with ``load`` found by importing it in a child process."""
    found = [Row(entry, *_state(entry)) for entry in entries]
    to_try = [number for number, row in enumerate(found) if row.state in (INSTALLED, SHARED)] if load else []
    if to_try:
        entries = [found[n].entry for n in to_try]
        for number, tried in zip(to_try, _probed(entries), strict=True):
            row = found[number]
            if tried.why:
                found[number] = Row(row.entry, LACKS if tried.optional else BROKEN, tried.why)
            elif row.state == INSTALLED:
                found[number] = Row(row.entry, WORKS)
    return found


def _probed(entries: Sequence[Entry]) -> list[Tried]:
    """What comes of importing each. On a terminal a line tells which one is being waited for."""
    from twinkle_core.cli.probe import probe

    if not sys.stderr.isatty():
        return probe(entries)

    def tell(number: int) -> None:
        line = f"checking {number + 1} of {len(entries)}: {entries[number].label}"
        print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)

    try:
        return probe(entries, tell=tell)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def set_aside(found: Iterable[Row]) -> None:
    """Don't load in this process the hook modules among the rows that can't be: one may end it."""
    from twinkle_core import plugins

    for row in found:
        if row.entry.kind == HOOK_MODULES and row.state in (BROKEN, LACKS):
            plugins.set_aside(row.entry, row.why)


def try_hook_modules() -> list[str]:
    """Try the hook modules in a child process before this one loads them; those that can't be are set aside.

    Returns:
        What to say of each of these.
    """
    found = rows(registry.index().of(HOOK_MODULES), load=True)
    set_aside(found)
    return [_note(row) for row in found if row.state in (BROKEN, LACKS)]


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
