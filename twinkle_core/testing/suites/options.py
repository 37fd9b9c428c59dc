"""The class attributes by which a suite is told about its component, checked when the suite is made (L2)."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from twinkle_core.errors import BadSuite, UnknownCheck
from twinkle_core.names import closest

#: attributes that say what is checked, and may be anything
_ANYTHING = frozenset(("component",))


def check_options(suite: type) -> None:
    """Check what a suite's own class body says.

    Raises:
        BadSuite: an option of the suites is misspelt, or its value is of another kind.
        UnknownCheck: ``expected_failures`` names a test that the suite does not have.
    """
    options = _options(suite)
    own = {name: value for name, value in vars(suite).items() if not _is_code(name, value)}
    for name, value in own.items():
        if name in options and name not in _ANYTHING:
            if not _fits(value, options[name]):
                raise BadSuite.value(suite.__name__, name, value, _kind(options[name]))
        elif name not in options and name not in inspect.get_annotations(suite):
            near = closest(name, options)
            if near is not None and _fits(value, options[near]):  # a suite may well have attributes of its own
                raise BadSuite.unknown(suite.__name__, name, near, sorted(options))
    if "expected_failures" in own:
        _check_expected(suite, own["expected_failures"])


def _check_expected(suite: type, expected: Mapping[Any, Any]) -> None:
    tests = [name for name in dir(suite) if name.startswith("test")]
    for name, reason in expected.items():
        if name not in tests:
            raise UnknownCheck(suite.__name__, str(name), closest(str(name), tests), tests)
        if not isinstance(reason, str) or not reason.strip():
            raise BadSuite.value(suite.__name__, f"expected_failures[{name!r}]", reason, "the reason, a text")


def _options(suite: type) -> dict[str, Any]:
    """Name -> default, of all class variables that the suite's bases declare."""
    return {
        name: vars(base)[name]
        for base in reversed(suite.__mro__[1:])
        for name, annotation in inspect.get_annotations(base).items()
        if "ClassVar" in str(annotation) and name in vars(base) and not name.startswith("_") and name != "kind"
    }


def _is_code(name: str, value: Any) -> bool:
    return name.startswith("_") or name == "pytestmark" or callable(value) or inspect.isdatadescriptor(value)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind that the default is of."""
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, int | str | Mapping):
        return isinstance(value, type(default) if isinstance(default, int | str) else Mapping)
    return isinstance(value, Collection) and not isinstance(value, str | Mapping)


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "True or False"
    if isinstance(default, int | float):
        return "a whole number" if isinstance(default, int) else "a number"
    if isinstance(default, str):
        return "a text"
    return "a dict" if isinstance(default, Mapping) else "a set, list or tuple of names"
