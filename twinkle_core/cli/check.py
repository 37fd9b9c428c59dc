"""``twinkle check DIST | module:Class``: components against the contracts, without a test file (L0)."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module

from twinkle_core.cli.children import Ended, each
from twinkle_core.cli.probe import to_plain
from twinkle_core.cli.tables import table
from twinkle_core.errors import UnknownDistribution
from twinkle_core.index import HOOK_MODULES
from twinkle_core.testing.declared import entries_of, key_of, named_suites

WORKER = "twinkle_core.cli.check_worker"
TIMEOUT = 300.0  # seconds for one component: imports of torch and transformers, and all of its suite
LONGEST = 86400.0  # a day; timers of the system overflow somewhere above
OUTCOMES = ("passed", "failed", "expected", "left out")


@dataclass(frozen=True, slots=True)
class Row:
    """One component and what became of its checks: (test, outcome, text)."""

    label: str
    outcomes: tuple[tuple[str, str, str], ...]

    def count(self, outcome: str) -> int:
        """How many checks ended so."""
        return sum(o == outcome for _, o, _ in self.outcomes)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "check",
        help="components against the contracts",
        description="Run the compliance suites on all that a distribution provides, or on one class; each in a child process.",
        epilog="Exit status: 0 all passed, 1 something failed, 2 there is no such distribution or component.",
    )
    parser.add_argument("target", metavar="DIST | module:Class", help="an installed distribution, a class, or a suite")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--timeout", type=_seconds, default=TIMEOUT, metavar="SECONDS", help="for one component (%(default)s)")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0 and at most {LONGEST:.0f}, not {text!r}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Check, print a table and what failed.

    Raises:
        UnknownDistribution: nothing of that name provides components. NeedsLibrary: pytest is missing.
    """
    import_module("twinkle_core.testing.has_pytest")
    faults: list[str] = []
    if ":" in args.target:
        labels, tasks, path = [args.target], [{"target": args.target}], ["", *sys.path]
    else:
        entries = entries_of(args.target)
        suites, faults = named_suites(entries)
        labels = [f"{e.kind} {e.name}" if e.kind != HOOK_MODULES else f"hooks {e.name}" for e in entries]
        tasks = [{"entry": to_plain(e), "suite": suites.get(key_of(e), "")} for e in entries]
        path = list(sys.path)
    rows: list[Row] = []
    for label, answer in zip(labels, each(WORKER, tasks, args.timeout, path), strict=True):
        if isinstance(answer, Ended):
            rows.append(Row(label, (("runs", "failed", f"it {answer.why}"),)))
        elif "refused" in answer:
            print(answer["refused"], file=sys.stderr)
            return UnknownDistribution.exit_status
        else:
            name = f"{answer['kind']} {label}".strip() if label == args.target else label
            rows.append(Row(name, tuple((o["test"], o["outcome"], o["text"]) for o in answer["outcomes"])))
    print(_document(rows, faults) if args.json else text(rows, faults))
    return 1 if faults or any(row.count("failed") for row in rows) else 0


def text(rows: Sequence[Row], faults: Iterable[str]) -> str:
    """The table; below it what failed with its text, expected failures with their reasons, and a line for what was left out."""
    parts = [table(("component", *OUTCOMES), [(row.label, *(str(row.count(o)) for o in OUTCOMES)) for row in rows])]
    parts += [note for row in rows for note in _notes(row, "failed")]
    parts += [note for row in rows for note in _notes(row, "expected")]
    beside = [f"left out: {row.label}: {test}: {why}" for row in rows for test, o, why in row.outcomes if o == "left out"]
    parts += ["\n".join(beside)] * bool(beside)
    parts += faults
    total = Counter(o for row in rows for _, o, _ in row.outcomes)
    failed = total["failed"] + len(list(faults))
    checks = f"{total['passed']} check{'' if total['passed'] == 1 else 's'}"
    parts.append(f"{failed} failed, {total['passed']} passed" if failed else f"all passed: {checks}")
    return "\n\n".join(parts)


def _notes(row: Row, outcome: str) -> list[str]:
    """A paragraph a text; tests that say the same together."""
    by_text: dict[str, list[str]] = {}
    for test, got, why in row.outcomes:
        if got == outcome:
            by_text.setdefault(why, []).append(test)
    notes = []
    for why, tests in by_text.items():
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        lines = "\n".join(f"    {line}".rstrip() for line in why.splitlines())
        notes.append(f"{outcome}: {row.label}: {tests[0]}{more}\n{lines}")
    return notes


def _document(rows: Sequence[Row], faults: Sequence[str]) -> str:
    components = [
        {"component": row.label, "checks": [{"test": t, "outcome": o, "text": why} for t, o, why in row.outcomes]}
        for row in rows
    ]
    return json.dumps({"components": components, "faults": list(faults)}, indent=2)  # ASCII: any encoding of stdout holds it
