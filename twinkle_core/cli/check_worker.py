"""The child of ``twinkle check``: one component against its contract (L2)."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from importlib import import_module
from typing import Any

import pytest  # noqa: F401  (with torch imported here, the time of a task is the component's own)
import torch  # noqa: F401

from twinkle_core import loading
from twinkle_core.cli import children, probe
from twinkle_core.errors import BadTarget
from twinkle_core.index import HOOK_MODULES
from twinkle_core.isolation import attempt
from twinkle_core.names import CONTRACTS
from twinkle_core.testing import runner
from twinkle_core.testing.runner import FAILED, PASSED, Outcome

#: kinds without a contract of twinkle's -> the class of torch's that they derive from
_OF_TORCH = {
    "optimizer": ("torch.optim", "Optimizer"),
    "scheduler": ("torch.optim.lr_scheduler", "LRScheduler"),
}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """The outcomes of one task.

    Args:
        task: ``entry`` (the fields of an Entry) and ``suite`` (``module:Class`` or empty); or ``target``, ``module:Class``.

    Returns:
        ``kind`` and ``outcomes``; or ``refused``, the text of an error about the target itself.
    """
    if "target" in task:
        got = attempt(lambda: loading.import_path("component", task["target"]))
        if got.error is not None:
            return {"kind": "", "outcomes": _plain([Outcome("loads", FAILED, _text(got))])}
        kind = _kind_of(got.value)
        if not kind:
            return {"refused": str(BadTarget(task["target"], f"it is {_what(got.value)}", [*CONTRACTS, *_OF_TORCH]))}
        return {"kind": kind, "outcomes": _plain(_outcomes(kind, got.value, ""))}
    entry = probe.of_plain(task["entry"])
    got = attempt(lambda: probe.load(entry))
    if got.error is not None:
        outcomes = [Outcome("loads", FAILED, _text(got))]
    else:
        outcomes = [Outcome("loads", PASSED)]
        outcomes += _outcomes(entry.kind, got.value, task["suite"]) if entry.kind != HOOK_MODULES else []
    return {"kind": entry.kind, "outcomes": _plain(outcomes)}


def _outcomes(kind: str, component: Any, suite: str) -> list[Outcome]:
    if suite:
        found = attempt(lambda: _declared(suite, kind))
        if found.error is not None:
            return [Outcome("suite", FAILED, f"its suite {suite} can't be used: {_text(found)}")]
        return runner.run(found.value)  # type: ignore[arg-type]
    if _is_suite(component):
        return runner.run(component)
    return runner.run(runner.suite_for(kind, component)) if kind in runner.SUITES else []


def _declared(value: str, kind: str) -> Any:
    suite = loading.import_path("suite", value)
    if not _is_suite(suite) or suite.kind != kind:
        raise BadTarget(value, f"it is {_what(suite)}, not a suite of a {kind}", [f"{kind.capitalize()}Suite"])
    return suite


def _is_suite(obj: Any) -> bool:
    return inspect.isclass(obj) and issubclass(obj, import_module("twinkle_core.testing.suites.base").Checks)


def _kind_of(obj: Any) -> str:
    """By the class it derives from; empty where it derives from none."""
    if _is_suite(obj):
        return str(obj.kind)
    cls = obj if inspect.isclass(obj) else type(obj)
    for kind, (module, name) in {**CONTRACTS, **_OF_TORCH}.items():
        if issubclass(cls, getattr(import_module(module), name)):
            return kind
    return ""


def _text(got: Any) -> str:
    return str(got.error) or str(got.why)


def _what(obj: Any) -> str:
    return f"the class {obj.__qualname__}" if inspect.isclass(obj) else f"a {type(obj).__name__}"


def _plain(outcomes: list[Outcome]) -> list[dict[str, str]]:
    return [asdict(outcome) for outcome in outcomes]


if __name__ == "__main__":
    children.serve(work)
