"""Errors of the command line (L0)."""

from __future__ import annotations

from collections.abc import Iterable

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


class CannotBuild(TwinkleError, TypeError):
    """A compliance suite can't make the object that it is to check. ``arguments``: because of the constructor's."""

    def __init__(self, kind: str, name: str, why: str, arguments: bool = False) -> None:
        way = (
            f"\n    give them in a suite: class Test{name}({kind.capitalize()}Suite): component = {name}; arguments = {{...}}\n"
            "    and name it for twinkle check in pyproject.toml:\n"
            '        [project.entry-points."twinkle.testing"]\n'
            f'        "<group>.<name>" = "<module>:Test{name}"   # such as "losses.focal"'
        )
        super().__init__(f"{kind} {name} can't be built for its checks: {why}{way if arguments else ''}")
