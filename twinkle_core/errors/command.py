"""Errors of the command line (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinkle_core.errors.base import TwinkleError, listed, meant, shown


class UnknownCommand(TwinkleError, LookupError):
    """``twinkle WORD`` where no such command exists."""

    def __init__(self, command: str, near: str | None, known: Iterable[str]) -> None:
        super().__init__(f"unknown command '{shown(command)}'.{meant(near)}\n    commands: {listed(known)}")


class BadReference(TwinkleError, ValueError):
    """What should read KIND/NAME and does not."""

    def __init__(self, text: str, kinds: Iterable[str]) -> None:
        super().__init__(f"'{shown(text)}' is not KIND/NAME, such as loss/cross_entropy\n    kinds: {listed(kinds)}")


class BadPluginName(TwinkleError, ValueError):
    """A new plugin can't be called so. Nothing was written."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"a plugin can't be called {shown(repr(name))}: {why}.\n    Choose another name, such as acme-losses.")


class FolderExists(TwinkleError, FileExistsError):
    """A folder that a command would make is there."""

    def __init__(self, folder: object) -> None:
        super().__init__(f"{folder} is there already, and is left as it is.\n    Choose another place (--dir FOLDER) or name.")


class NotWritable(TwinkleError, OSError):
    """A new plugin's folder could not be written; nothing of it is left."""

    def __init__(self, folder: object, reason: object) -> None:
        super().__init__(f"{folder} can't be written ({reason}).\n    Choose another place: --dir FOLDER")


class UnknownDistribution(TwinkleError, LookupError):
    """``twinkle check`` of what provides nothing. ``installed``: whether there is such a distribution at all."""

    exit_status = 2

    def __init__(self, name: str, installed: bool, near: str | None, known: Iterable[str]) -> None:
        why = "is installed, but provides no component of twinkle" if installed else "is not installed"
        super().__init__(
            f"'{shown(name)}' {why}.{meant(near)}\n    distributions with components: {listed(known)}\n"
            "    a class that is not installed: twinkle check module:Class"
        )


class BadTarget(TwinkleError, ValueError):
    """``twinkle check module:Class`` of what is no component."""

    def __init__(self, target: str, why: str, kinds: Iterable[str]) -> None:
        super().__init__(
            f"'{shown(target)}' can't be checked: {why}\n"
            f"    what can: a class that derives from a contract ({listed(kinds)}), or a suite"
        )


class UnknownCheck(TwinkleError, LookupError):
    """A suite's ``expected_failures`` names a test that it does not have."""

    def __init__(self, suite: str, name: str, near: str | None, tests: Iterable[str]) -> None:
        super().__init__(f"{suite} expects '{name}' to fail, which it does not have.{meant(near)}\n    tests: {listed(tests)}")


class BadSuite(TwinkleError, TypeError):
    """A class attribute of a suite that is none of its options, or of another kind than the option."""

    @classmethod
    def unknown(cls, suite: str, name: str, near: str, options: Iterable[str]) -> BadSuite:
        return cls(
            f"{suite} has '{name}', which is no option of its suite.{meant(near)}\n    options: {listed(options)}\n"
            "    an attribute of your own that only looks like one begins with an underscore"
        )

    @classmethod
    def value(cls, suite: str, name: str, value: object, wanted: str) -> BadSuite:
        return cls(f"{suite}: {name} is {shown(repr(value))}; it is to be {wanted}")


class CannotBuild(TwinkleError, TypeError):
    """A compliance suite can't make what it is to check, or can't call it."""

    @classmethod
    def because(cls, kind: str, name: str, why: str) -> CannotBuild:
        return cls(f"{kind} {name} can't be built for its checks: {why}")

    @classmethod
    def without(cls, kind: str, name: str, why: str) -> CannotBuild:
        suite = f"class Test{name}({kind.capitalize()}Suite): component = {name}; arguments = {{...}}"
        return cls(f"{cls.because(kind, name, why)}\n    give them in a suite: {suite}\n{_in_metadata(name)}")

    @classmethod
    def at_each_call(cls, name: str, missing: Sequence[str]) -> CannotBuild:
        return cls(
            f"loss {name} can't be called for its checks without its loss arguments: {listed(missing)}\n"
            f"    give them in a suite: class Test{name}(LossSuite) with component = {name} and the fixture\n"
            f"        def loss_args(self): return {{{', '.join(f'{word!r}: [...]' for word in missing)}}}\n"
            "    a list or tensor with one entry for each of the suite's six rows is cut along with the rows\n"
            f"{_in_metadata(name)}"
        )


def _in_metadata(name: str) -> str:
    """How ``twinkle check`` finds a suite."""
    return (
        "    and name it for twinkle check in pyproject.toml:\n"
        '        [project.entry-points."twinkle.testing"]\n'
        f'        "<group>.<name>" = "<module>:Test{name}"   # such as "losses.focal"'
    )
