"""Errors of names and plugins (L0)."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle_core.errors.base import WHY, TwinkleError, listed, meant, shown, shown_lines


class UnknownKind(TwinkleError, LookupError):
    """A kind of component that does not exist."""

    def __init__(self, kind: str, near: str | None, kinds: Iterable[str]) -> None:
        super().__init__(f"unknown kind of component '{shown(kind)}'.{meant(near)}\n    kinds: {listed(kinds)}")


class UnknownName(TwinkleError, LookupError):
    """Nobody provides a component of this name. ``kind`` singular, ``group`` plural."""

    def __init__(self, kind: str, group: str, name: str, near: str | None, installed: Iterable[str]) -> None:
        self.kind, self.name, self.near = kind, name, near
        super().__init__(
            f"unknown {kind} '{shown(name)}'.{meant(near)}\n    installed: {listed(installed)}\n"
            f"    list them with: twinkle plugins --kind {group}"
        )


class UnknownClass(TwinkleError, ImportError):
    """UnknownName for ``from twinkle.loss import X``: an ImportError, because Python keeps its text there."""


class NotInstalled(TwinkleError, ImportError):
    """A first-party component whose distribution is not here, or is too old to have it."""

    def __init__(
        self, kind: str, name: str, cls: str, distribution: str, prefix: str, *, since: str = "", installed: str = ""
    ) -> None:
        head = f"{kind} '{name}' ({cls}) is provided by {distribution}"
        if installed:
            text = f"{head} since {since}; {installed} is installed in {prefix}\n    pip install -U {distribution}"
        else:
            text = f"{head}, which is not installed in {prefix}\n    pip install {distribution}"
        super().__init__(text)


class Broken(TwinkleError, ImportError):
    """An installed component that can't be imported.

    Args:
        label: ``loss 'bad' from bad-losses 0.3``.
        value: what was imported.
        distribution: whose it is.
        why: the cause.
        damaged: metadata that can't be read, of whatever distribution: who reads all of it, as torch does, fails by it.
    """

    def __init__(self, label: str, value: str, distribution: str, why: str, damaged: Iterable[str] = ()) -> None:
        lines = "".join(f"    {shown(line, WHY)}\n" for line in damaged)
        damage = f"    It may come of metadata that is damaged; mend or uninstall that first:\n{lines}" if lines else ""
        super().__init__(
            f"{label} could not be imported ({shown(value)}).\n    {shown_lines(why)}\n{damage}"
            f"    The fault is in {distribution} or what it needs; other plugins are not affected.\n"
            f"    Update it, or switch it off: TWINKLE_DISABLE_PLUGINS={distribution}"
        )


class NeedsLibrary(TwinkleError, ImportError):
    """Something that is here needs a library that is not. ``what`` needs it; ``requirement``: what pip is to install.

    ``optional``: it is an extra of its distribution, the rest of which does without.
    """

    def __init__(self, what: str, library: str, requirement: str, prefix: str) -> None:
        self.library, self.optional = library, "[" in requirement
        asked = f"'{requirement}'" if "[" in requirement or "<" in requirement or ">" in requirement else requirement
        super().__init__(f"{what} needs '{library}', which is not installed in {prefix}\n    pip install {asked}")


class Ambiguous(TwinkleError, LookupError):
    """Several third parties provide one name. ``providers``: (qualified name, version, value)."""

    def __init__(self, kind: str, name: str, providers: Iterable[tuple[str, str, str]]) -> None:
        rows = sorted((shown(q), shown(v), shown(value)) for q, v, value in providers)
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = "".join(f"\n    {q:<{wide[0]}}   {v:<{wide[1]}}   {value}" for q, v, value in rows)
        count = len({q.partition("/")[0] for q, _, _ in rows})
        who = f"{count} distributions" if count > 1 else f"1 distribution under {len(rows)} spellings"
        super().__init__(f"{kind} '{shown(name)}' is provided by {who}; say which one:{lines}")


class ApiMismatch(TwinkleError):
    """A plugin written for another version of the plugin API."""

    def __init__(self, label: str, distribution: str, wants: int, has: Iterable[int]) -> None:
        supported = tuple(has)
        update = "twinkle-core" if wants > max(supported) else distribution
        super().__init__(
            f"{label} was written for plugin API {wants}; this twinkle-core has API {', '.join(map(str, supported))}.\n"
            f"    pip install -U {update}"
        )


class Disabled(TwinkleError):
    """Installed, and switched off by the user."""

    def __init__(self, label: str) -> None:
        super().__init__(f"{label} is installed but switched off by TWINKLE_DISABLE_PLUGINS or TWINKLE_PLUGINS.")


class NotA(TwinkleError, TypeError):
    """A component that does not keep its contract. ``lacks``: the methods that are missing."""

    def __init__(self, label: str, contract: str, lacks: Iterable[str], distribution: str = "") -> None:
        missing = list(lacks)
        why = f"it lacks {', '.join(missing)}" if missing else f"it does not derive from twinkle_core.{contract}"
        check = f"\n    check it with: twinkle check {distribution}" if distribution else ""
        super().__init__(f"{label} is not a twinkle {contract}: {why}.{check}")


class WrongArgument(TwinkleError, TypeError):
    """A keyword that a class or function does not have."""

    def __init__(self, owner: str, name: str, near: str | None, known: Iterable[str] = ()) -> None:
        has = "" if near else f"\n    it has: {listed(known, 'no parameters')}"
        super().__init__(f"{owner} has no parameter '{shown(name)}'.{meant(near)}{has}")


class ReservedArgument(TwinkleError, TypeError):
    """A keyword that twinkle itself fills in."""

    def __init__(self, owner: str, name: str) -> None:
        super().__init__(f"{owner} gets its '{name}' from twinkle; leave it out.")


class MissingArgument(TwinkleError, TypeError):
    """Keywords that a class or function can't do without."""

    def __init__(self, owner: str, names: Iterable[str]) -> None:
        super().__init__(f"{owner} needs {', '.join(repr(n) for n in names)}, which was not given.")


class AlreadyBuilt(TwinkleError, TypeError):
    """Constructor arguments for something that is no class."""

    def __init__(self, kind: str, what: str, names: Iterable[str]) -> None:
        super().__init__(
            f"{kind} {what} is built already and takes no arguments ({listed(names)}).\n"
            f"    give its class or its name with them, or the object without"
        )


class BadName(TwinkleError, ValueError):
    """A name that could never be asked for, or an object that is none."""

    def __init__(self, kind: str, name: object, why: str) -> None:
        super().__init__(f"{kind} {shown(repr(name))} can't be registered: {why}.")


class NameTaken(TwinkleError, ValueError):
    """A name registered a second time in one process."""

    def __init__(self, kind: str, name: str, holder: str) -> None:
        super().__init__(
            f"{kind} '{shown(name)}' is taken by {holder}.\n"
            f"    choose another name, or register(..., override=True) to use yours in this process"
        )


class BadImportPath(TwinkleError, ImportError):
    """``module:Class`` that leads nowhere."""

    def __init__(self, kind: str, path: str, why: str) -> None:
        super().__init__(f"{kind} '{shown(path)}' could not be imported.\n    {shown_lines(why)}\n    the form is module:Class")


class FrozenRegistry(TwinkleError, PermissionError):
    """A frozen registry was asked for what it does not hold, or to change."""

    def __init__(self, kind: str, name: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"{kind} '{shown(name)}' is not allowed here: the registry is frozen.\n    allowed: {listed(allowed)}\n"
            f"    import paths, repositories and new registrations are refused in a frozen registry"
        )


class RemoteCodeRefused(TwinkleError, PermissionError):
    """A component in a repository of a hub, without leave to run its code."""

    def __init__(self, kind: str, reference: str, unclear: str = "") -> None:
        super().__init__(
            f"{kind} '{shown(reference)}' is code in a repository, and running it is off.{unclear and f' {unclear}.'}\n"
            f"    read that code; if you trust it: TWINKLE_TRUST_REMOTE_CODE=1"
        )


class BadRemoteComponent(TwinkleError, ImportError):
    """A repository of a hub that does not hold the component asked for."""

    def __init__(self, kind: str, reference: str, why: str) -> None:
        repository = shown(reference.partition("#")[0])
        super().__init__(
            f"{kind} '{shown(reference)}' could not be loaded.\n    {shown_lines(why)}\n"
            f"    such a repository is a package (__init__.py at its top); name the class: {repository}#Class"
        )


class BadHook(TwinkleError):
    """A function marked as a hook that can't be one."""

    def __init__(self, hook: str, near: str | None, why: str) -> None:
        super().__init__(f"hook '{hook}': {why}.{meant(near)}")


class HookFailed(TwinkleError):
    """A hook module that can't be loaded or a hook that raised; a warning, or raised with TWINKLE_STRICT_PLUGINS=1.

    ``distribution``: its name and version; empty for a listener of this process.
    """

    def __init__(self, entry: str, distribution: str, what: str, cause: BaseException) -> None:
        why = f"{type(cause).__name__}: {shown(' '.join(str(cause).split()), WHY)}"
        entry, distribution = shown(entry), shown(distribution)
        self.entry, self.distribution, self.why = entry, distribution, why
        if distribution:
            off = f"switch it off: TWINKLE_DISABLE_PLUGINS={distribution.split()[0]}"
            super().__init__(f"plugin '{entry}' from {distribution} {what}: {why} ({off})")
        else:
            super().__init__(f"listener '{entry}' of this process {what}: {why}")


class WorkerMismatch(TwinkleError, RuntimeError):
    """A worker has other plugins than the driver. Versions are empty where a distribution is absent."""

    def __init__(self, rank: int, host: str, distribution: str, worker: str, driver: str, *, detail: str = "") -> None:
        host, distribution, worker, driver = map(shown, (host, distribution, worker, driver))
        has = f"{distribution} {worker}" if worker else f"no {distribution}"
        theirs = f"has {has}{shown(detail)}; the driver has {driver}."
        super().__init__(f"worker {rank} ({host}) {theirs}\n    pip install '{distribution}=={driver}' on the workers")
