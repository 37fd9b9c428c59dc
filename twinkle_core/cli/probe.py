"""Import components in a child process, so that not even ``os._exit`` in a plugin reaches this one (L0).

Run as a program it is that child.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twinkle_core import api, loading
from twinkle_core.cli.children import Ended, each, serve
from twinkle_core.errors import NeedsLibrary, NotA
from twinkle_core.index import HOOK_MODULES, Entry
from twinkle_core.isolation import attempt, describe
from twinkle_core.names import CONTRACTS

TIMEOUT = 60.0  # seconds for one component; the first one may import torch and transformers cold, which takes tens


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of an import: why the component can't be used ('': it can), and whether an extra is all that it lacks."""

    why: str = ""
    optional: bool = False


def probe(entries: Sequence[Entry], timeout: float = TIMEOUT, tell: Callable[[int], None] = lambda number: None) -> list[Tried]:
    """Try to load each entry, and compare it with its kind's contract.

    Args:
        timeout: seconds for each.
        tell: called with an entry's number before its turn.

    Returns:
        What came of each entry.
    """
    results: list[Tried] = []
    if entries:
        tell(0)
    for answer in each("twinkle_core.cli.probe", [to_plain(e) for e in entries], timeout):
        results.append(Tried(f"its import {answer.why}") if isinstance(answer, Ended) else Tried(**answer))
        if len(results) < len(entries):
            tell(len(results))
    return results


def to_plain(entry: Entry) -> dict[str, Any]:
    """An entry as JSON can hold it."""
    return {k: v for k, v in asdict(entry).items() if k != "obj"}


def of_plain(fields: Mapping[str, Any]) -> Entry:
    """The entry of ``to_plain``."""
    return Entry(**{**fields, "api": tuple(fields["api"])})


def load(entry: Entry) -> Any:
    """The object of an entry, compared with its kind's contract.

    Raises:
        NotA, BadHook; all of ``loading.load``.
    """
    obj = loading.load(entry, api.SUPPORTED)
    if entry.kind == HOOK_MODULES:
        from twinkle_core.plugins import check

        check(entry, obj)
    elif entry.kind in CONTRACTS and not (entry.kind == "loss" and inspect.isroutine(obj)):  # a loss may be a plain function
        module, name = CONTRACTS[entry.kind]
        contract = getattr(importlib.import_module(module), name)
        cls = obj if inspect.isclass(obj) else type(obj)
        if not loading.keeps(cls, contract):
            raise NotA(entry.label, name, loading.lacking(cls, contract), entry.dist)
    return obj


def _answer(fields: Mapping[str, Any]) -> dict[str, Any]:
    error = attempt(lambda: load(of_plain(fields))).error
    if error is None:
        return asdict(Tried())
    return asdict(Tried(str(error) or describe(error), isinstance(error, NeedsLibrary) and error.optional))


if __name__ == "__main__":
    serve(_answer)
