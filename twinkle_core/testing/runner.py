"""Running a compliance suite without a test file, and finding the suite of a component (L2)."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from twinkle_core import loading, registry, settings
from twinkle_core.errors import TwinkleError
from twinkle_core.testing import declared

if TYPE_CHECKING:
    import pytest

    from twinkle_core.testing.suites.base import Checks

#: kind -> its suite
SUITES = {
    "model": "twinkle_core.testing.suites.model:ModelSuite",
    "loss": "twinkle_core.testing.suites.loss:LossSuite",
    "metric": "twinkle_core.testing.suites.metric:MetricSuite",
    "template": "twinkle_core.testing.suites.template:TemplateSuite",
    "patch": "twinkle_core.testing.suites.patch:PatchSuite",
    "processor": "twinkle_core.testing.suites.processor:ProcessorSuite",
    "optimizer": "twinkle_core.testing.suites.simple:OptimizerSuite",
    "scheduler": "twinkle_core.testing.suites.simple:SchedulerSuite",
    "runtime": "twinkle_core.testing.suites.simple:RuntimeSuite",
    "preprocessor": "twinkle_core.testing.suites.simple:PreprocessorSuite",
}
PASSED, FAILED, EXPECTED, LEFT_OUT = "passed", "failed", "expected", "left out"

_ASKED: ContextVar[type[Checks]] = ContextVar("_ASKED")
_OPTIONS = ("-q", "-s", "--tb=no", "--no-header", "--no-summary", "--import-mode=importlib", "--disable-plugin-autoload")
#: what would write files, take the watchdog of a hang away, or collect garbage five times at the end
_PLUGINS_OFF = ("cacheprovider", "faulthandler", "junitxml", "pastebin", "unraisableexception", "threadexception")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test: ``passed``, ``failed``, ``expected`` (a failure with a reason) or ``left out``; and why."""

    test: str
    outcome: str
    text: str = ""


def suite_for(kind: str, component: Any) -> type[Checks]:
    """The kind's suite over a class, function or object; it is built without arguments.

    Raises:
        NeedsLibrary: pytest is not installed.
    """
    import_module("twinkle_core.testing.has_pytest")
    module, _, name = SUITES[kind].partition(":")
    base = getattr(import_module(module), name)
    name = getattr(component, "__name__", type(component).__name__)
    return type(f"Test{name}", (base,), {"component": component, "__module__": __name__})


def compliance(distribution: str, *kinds: str) -> dict[str, type[Checks]]:
    """A test class for each component of an installed distribution, for one line in a test file::

        globals().update(compliance("acme-losses"))

    Args:
        distribution: its name.
        kinds: only these; default all that have a suite.

    Raises:
        UnknownDistribution; what an import of a component raises.
    """
    entries = declared.entries_of(distribution)
    named, _ = declared.named_suites(entries)
    found: dict[str, type[Checks]] = {}
    for entry in entries:
        if entry.kind not in (kinds or SUITES):
            continue
        own = named.get(declared.key_of(entry))
        suite = loading.import_path("suite", own) if own else suite_for(entry.kind, registry.load(entry))
        found[f"Test_{entry.kind}_{entry.name}"] = suite
    return found


def asked() -> type[Checks]:
    """The suite that ``run`` is running: what its test file imports."""
    return _ASKED.get()


def run(suite: type[Checks]) -> list[Outcome]:
    """Run all tests of a suite in this process, whatever the folder and the settings of pytest here."""
    import pytest

    recorder = _Recorder()
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="twinkle_check_") as folder, _asking(suite):
        file = Path(folder, f"test_{Path(folder).name}.py")
        file.write_text("from twinkle_core.testing.runner import asked\n\nTestSuite = asked()\n", encoding="utf-8")
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        off = [word for plugin in _PLUGINS_OFF for word in ("-p", f"no:{plugin}")]
        with settings.without("PYTEST_ADDOPTS"), contextlib.redirect_stdout(said):
            status = pytest.main([*_OPTIONS, *off, f"--rootdir={folder}", str(file)], plugins=[recorder])
        sys.modules.pop(file.stem, None)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        recorder.outcomes.append(Outcome("pytest", FAILED, said.getvalue().strip()))
    return recorder.outcomes


@contextlib.contextmanager
def _asking(suite: type[Checks]) -> Iterator[None]:
    token = _ASKED.set(suite)
    try:
        yield
    finally:
        _ASKED.reset(token)


class _Recorder:
    """A plugin of pytest that keeps one outcome a test."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    @pluggy.HookimplMarker("pytest")(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        test, expected = item.name, hasattr(report, "wasxfail")
        if report.failed and "_unusable" in vars(getattr(item, "cls", object)):
            item.session.shouldfail = "there is nothing to check"  # this outcome says why; once is enough
        if report.failed:
            self._add(test, FAILED, _why(call.excinfo) if call.excinfo is not None else str(report.longrepr))
        elif report.skipped:
            reason = report.wasxfail if expected else report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
            self._add(test, EXPECTED if expected else LEFT_OUT, str(reason).removeprefix("reason: ").removeprefix("Skipped: "))
        elif report.when == "call":
            self._add(test, PASSED, "")
        return report

    def _add(self, test: str, outcome: str, text: str) -> None:
        mark = "[XPASS(strict)] "
        if text.startswith(mark):
            text = f"it passes, but expected_failures says it would not ({text.removeprefix(mark)}): take it out there"
        self.outcomes.append(Outcome(test, outcome, text))


def _why(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """What a plugin's author is to read: a check's own text, or the error with the place where it was raised."""
    error, text = caught.value, str(caught.value)
    if text and (type(error) is AssertionError or isinstance(error, TwinkleError)):
        return text
    last = caught.traceback[-1]
    return f"{caught.exconly(tryshort=False)}\n    raised at {last.path}:{last.lineno + 1}"
