"""``twinkle new``: the files of a plugin that works already, to change into yours (L0)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from twinkle_core import registry
from twinkle_core.errors import shown
from twinkle_core.scaffold import project

_TEXT = (
    "Begin a plugin: a folder with the files of a distribution that works already, to change into yours. No network is used."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("new", help="begin a plugin that works already", description=_TEXT)
    parser.add_argument("kind", metavar="KIND", help=", ".join(project.KINDS))
    parser.add_argument("name", metavar="NAME", help="what it is asked for by, and what the distribution is called")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="D", help="where its folder is made; default here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder and say what comes next."""
    new = project.plan(args.kind, args.name)
    folder = project.write(new, args.dir)
    others = registry.index().hits(new.kind, new.package) if new.kind != project.HOOKS else []
    if others:
        print(
            f"{others[0].label} has that name already: where both are installed, users must say which, as in "
            f"'{shown(new.distribution)}/{new.package}'",
            file=sys.stderr,
        )
    print(f"{folder}: {project.KINDS[new.kind].summary.lower()}, ready to use\n")
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        print(f"    {path.relative_to(folder)}")
    print(f"\nnext:\n\n    cd {folder}\n    pip install -e '.[test]'\n    twinkle check {new.distribution}\n    pytest\n")
    print(f"then change src/{new.package}/{new.module}.py into yours.")
    return 0
