"""``twinkle show KIND/NAME``: one component's class, parameters and text (L0)."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

from twinkle_core import registry
from twinkle_core.cli.plugins import try_hook_modules
from twinkle_core.cli.tables import pairs
from twinkle_core.errors import BadReference
from twinkle_core.isolation import attempt
from twinkle_core.names import KINDS, PLURAL, kind_of, normalise

_TEXT = "Show one component: who provides it, its class, what it declares, the parameters of its constructor, and its text."
#: what a class of a kind declares, and is worth a line
DECLARED = {"loss": ("needs", "scope", "token_local"), "metric": ("needs",)}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("show", help="one component: its class, parameters and text", description=_TEXT)
    parser.add_argument("reference", metavar="KIND/NAME", help="such as loss/cross_entropy, or loss/acme-losses/focal")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    kind, slash, name = args.reference.partition("/")
    if not slash or not name or kind not in {*KINDS, *PLURAL}:
        raise BadReference(args.reference, PLURAL)
    kind = kind_of(kind)
    dist, _, bare = name.rpartition("/")
    if not registry.index().hits(kind, bare, normalise(dist)):  # hook modules are asked next: one may end the process
        for fault in try_hook_modules():
            print(fault, file=sys.stderr)
    print(describe(kind, name))
    return 0


def describe(kind: str, name: str) -> str:
    """A component as text.

    Raises:
        All of ``registry.find`` and ``registry.load``.
    """
    entry = registry.find(kind, name)
    obj = registry.load(entry)
    facts = [("from", f"{entry.dist} {entry.version}".strip() or "this process"), ("class", entry.value)]
    facts += [(word, _declared(getattr(obj, word))) for word in DECLARED.get(kind, ()) if hasattr(obj, word)]
    facts.append(("parameters", signature(obj)))
    parts = [f"{kind} '{entry.name}'", pairs(facts)]
    text = own_text(obj) or "no documentation"
    return "\n".join([*parts, "", *(f"    {line}".rstrip() for line in text.splitlines())])


def own_text(obj: Any) -> str:
    """What was written about this very class or function; a base class's text is about another."""
    owner = obj if inspect.isclass(obj) else type(obj)
    text = obj.__doc__ if inspect.isroutine(obj) else vars(owner).get("__doc__")
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def signature(obj: Any) -> str:
    """Parameters with types and defaults, one a line."""
    read = attempt(lambda: inspect.signature(obj))
    if read.value is None:
        return "not readable"
    return "\n".join(str(parameter) for parameter in read.value.parameters.values()) or "none"


def _declared(value: Any) -> str:
    return ", ".join(sorted(value)) or "nothing" if isinstance(value, frozenset | set) else str(value)
