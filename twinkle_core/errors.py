"""Every exception of twinkle with its text (L0). Other rooms raise these; none builds a text of its own.

An exception takes values and writes the sentence: what was given, why it can't be, and the way out. It is raised before any
state changes, unless its text says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class TwinkleError(Exception):
    """Base of all errors raised on purpose by twinkle."""


# ---------------------------------------------------------------------------------------------------- names and plugins


def _meant(near: str | None) -> str:
    return f" Did you mean '{near}'?" if near else ""


def _listed(words: Iterable[str], empty: str = "none") -> str:
    return ", ".join(words) or empty


class UnknownKind(TwinkleError, LookupError):
    """A kind of component that does not exist."""

    def __init__(self, kind: str, near: str | None, kinds: Iterable[str]) -> None:
        super().__init__(f"unknown kind of component '{kind}'.{_meant(near)}\n    kinds: {_listed(kinds)}")


class UnknownName(TwinkleError, LookupError):
    """Nobody provides a component of this name. ``kind`` singular, ``group`` plural."""

    def __init__(self, kind: str, group: str, name: str, near: str | None, installed: Iterable[str]) -> None:
        self.kind, self.name, self.near = kind, name, near
        super().__init__(
            f"unknown {kind} '{name}'.{_meant(near)}\n    installed: {_listed(installed)}\n"
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
    """An installed component that can't be imported. ``label``: ``loss 'bad' from bad-losses 0.3``; ``why``: the cause."""

    def __init__(self, label: str, value: str, distribution: str, why: str) -> None:
        super().__init__(
            f"{label} could not be imported ({value}).\n    {why}\n"
            f"    The fault is in {distribution} or what it needs; other plugins are not affected.\n"
            f"    Update it, or switch it off: TWINKLE_DISABLE_PLUGINS={distribution}"
        )


class NeedsLibrary(TwinkleError, ImportError):
    """Something that is here needs a library that is not. ``what`` needs it; ``requirement``: what pip is to install."""

    def __init__(self, what: str, library: str, requirement: str, prefix: str) -> None:
        self.library = library
        asked = f"'{requirement}'" if "[" in requirement or "<" in requirement or ">" in requirement else requirement
        super().__init__(f"{what} needs '{library}', which is not installed in {prefix}\n    pip install {asked}")


class Ambiguous(TwinkleError, LookupError):
    """Several third parties provide one name. ``providers``: (qualified name, version, value)."""

    def __init__(self, kind: str, name: str, providers: Iterable[tuple[str, str, str]]) -> None:
        rows = sorted(providers)
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = "".join(f"\n    {q:<{wide[0]}}   {v:<{wide[1]}}   {value}" for q, v, value in rows)
        count = len({q.partition("/")[0] for q, _, _ in rows})
        who = f"{count} distributions" if count > 1 else f"1 distribution under {len(rows)} spellings"
        super().__init__(f"{kind} '{name}' is provided by {who}; say which one:{lines}")


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
        has = "" if near else f"\n    it has: {_listed(known, 'no parameters')}"
        super().__init__(f"{owner} has no parameter '{name}'.{_meant(near)}{has}")


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
            f"{kind} {what} is built already and takes no arguments ({_listed(names)}).\n"
            f"    give its class or its name with them, or the object without"
        )


class NameTaken(TwinkleError, ValueError):
    """A name registered a second time in one process."""

    def __init__(self, kind: str, name: str, holder: str) -> None:
        super().__init__(
            f"{kind} '{name}' is taken by {holder}.\n"
            f"    choose another name, or register(..., override=True) to use yours in this process"
        )


class BadImportPath(TwinkleError, ImportError):
    """``module:Class`` that leads nowhere."""

    def __init__(self, kind: str, path: str, why: str) -> None:
        super().__init__(f"{kind} '{path}' could not be imported.\n    {why}\n    the form is module:Class")


class FrozenRegistry(TwinkleError, PermissionError):
    """A frozen registry was asked for what it does not hold, or to change."""

    def __init__(self, kind: str, name: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"{kind} '{name}' is not allowed here: the registry is frozen.\n    allowed: {_listed(allowed)}\n"
            f"    import paths, repositories and new registrations are refused in a frozen registry"
        )


class RemoteCodeRefused(TwinkleError, PermissionError):
    """A component in a repository of a hub, without leave to run its code."""

    def __init__(self, kind: str, reference: str) -> None:
        super().__init__(
            f"{kind} '{reference}' is code in a repository, and running it is off.\n"
            f"    read that code; if you trust it: TWINKLE_TRUST_REMOTE_CODE=1"
        )


class BadRemoteComponent(TwinkleError, ImportError):
    """A repository of a hub that does not hold the component asked for."""

    def __init__(self, kind: str, reference: str, why: str) -> None:
        super().__init__(
            f"{kind} '{reference}' could not be loaded.\n    {why}\n"
            f"    such a repository is a package (__init__.py at its top); name the class: {reference.partition('#')[0]}#Class"
        )


class BadHook(TwinkleError):
    """A function marked as a hook that can't be one."""

    def __init__(self, hook: str, near: str | None, why: str) -> None:
        super().__init__(f"hook '{hook}': {why}.{_meant(near)}")


class HookFailed(TwinkleError):
    """A hook module that can't be loaded or a hook that raised; a warning, or raised with TWINKLE_STRICT_PLUGINS=1."""

    def __init__(self, entry: str, distribution: str, what: str, cause: BaseException) -> None:
        why = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        self.entry, self.distribution, self.why = entry, distribution, why
        off = f"switch it off: TWINKLE_DISABLE_PLUGINS={distribution.split()[0]}"
        super().__init__(f"plugin '{entry}' from {distribution} {what}: {why} ({off})")


class WorkerMismatch(TwinkleError, RuntimeError):
    """A worker has other plugins than the driver. Versions are empty where a distribution is absent."""

    def __init__(self, rank: int, host: str, distribution: str, worker: str, driver: str, *, detail: str = "") -> None:
        has = f"{distribution} {worker}" if worker else f"no {distribution}"
        theirs = f"has {has}{detail}; the driver has {driver}."
        super().__init__(f"worker {rank} ({host}) {theirs}\n    pip install '{distribution}=={driver}' on the workers")


# ---------------------------------------------------------------------------------------------------- meshes and runtimes


class BadMesh(TwinkleError, ValueError):
    """Sizes of a mesh, or of a group, that can't be."""

    @classmethod
    def size(cls, name: str, value: object) -> BadMesh:
        return cls(f"{name}={value!r} is not a size; give a whole number from 1 up, or leave it out.")

    @classmethod
    def product(cls, sizes: dict[str, int], world_size: int) -> BadMesh:
        used = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        product = 1
        for size in used.values():
            product *= size
        sum_ = " × ".join(f"{name}_size {size}" for name, size in used.items())
        return cls(
            f"{sum_} = {product}, which does not fit a world size of {world_size}.\n"
            f"    Start {product} processes, or give sizes whose product is {world_size}."
        )

    @classmethod
    def divides(cls, name: str, value: int, of: str, total: int) -> BadMesh:
        return cls(f"{name} = {value} must divide {of} = {total}; {total} / {value} = {total / value:.4g}.")

    @classmethod
    def rank(cls, rank: int, world_size: int) -> BadMesh:
        return cls(f"rank {rank} is outside a mesh of {world_size} (0 … {world_size - 1}).")

    @classmethod
    def group(cls, field: str, value: object, way: str) -> BadMesh:
        return cls(f"DeviceGroup({field}={value!r}): {way}.")


class AlreadyInitialized(TwinkleError, RuntimeError):
    """``initialize`` was called twice with different arguments."""

    def __init__(self, first: dict[str, object], second: dict[str, object]) -> None:
        different = [name for name in second if first.get(name) != second[name]]
        lines = "".join(f"\n    {name}: {first.get(name)!r} before, {second[name]!r} now" for name in different)
        super().__init__(f"twinkle.initialize was already called with other arguments:{lines}\n    Call it once, at the start.")


# ---------------------------------------------------------------------------------------------------- hubs and data


# ---------------------------------------------------------------------------------------------------- templates and processors


# ---------------------------------------------------------------------------------------------------- training


# ---------------------------------------------------------------------------------------------------- adapters


# ---------------------------------------------------------------------------------------------------- checkpoints


# ---------------------------------------------------------------------------------------------------- backends


# ---------------------------------------------------------------------------------------------------- the command line


class UnknownCommand(TwinkleError, LookupError):
    """``twinkle WORD`` where no such command exists."""

    def __init__(self, command: str, near: str | None, known: Iterable[str]) -> None:
        super().__init__(f"unknown command '{command}'.{_meant(near)}\n    commands: {_listed(known)}")


class BadReference(TwinkleError, ValueError):
    """What should read KIND/NAME and does not."""

    def __init__(self, text: str, kinds: Iterable[str]) -> None:
        super().__init__(f"'{text}' is not KIND/NAME, such as loss/cross_entropy\n    kinds: {_listed(kinds)}")


# ---------------------------------------------------------------------------------------------------- configuration files


class NoConfigFile(TwinkleError, FileNotFoundError):
    """The file named on the command line is not there."""

    def __init__(self, path: object) -> None:
        super().__init__(f"there is no configuration file {path}\n    twinkle train --schema prints what it may hold")


class NoConfigGiven(TwinkleError, ValueError):
    """``twinkle train`` alone."""

    def __init__(self) -> None:
        super().__init__("which file? twinkle train CONFIG.yaml [--key value]\n    twinkle train --schema prints what it may hold")


class BadConfig(TwinkleError, ValueError):
    """A configuration that can't be run. All its faults are told at once.

    Args:
        name: the file.
        faults: (where, what): ``line 7`` or the option that set it, and a sentence.
    """

    def __init__(self, name: object, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = list(faults)
        lines = [f"{where}: {what}" if where else what for where, what in self.faults]
        count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
        super().__init__(f"{name} has {count}:\n" + "\n".join("    " + line.replace("\n", "\n    ") for line in lines))


class StrayWord(TwinkleError, ValueError):
    """A word on the command line that belongs to no option."""

    def __init__(self, word: str) -> None:
        super().__init__(f"'{word}' belongs to no option; write --key value or --key=value (--optimizer.lr 1e-4)")


class OutputInUse(TwinkleError, FileExistsError):
    """A new run would mix its checkpoints with another's."""

    def __init__(self, output_dir: object, checkpoint: object) -> None:
        super().__init__(
            f"{output_dir} already holds {checkpoint} of another run.\n"
            "    Go on with it: --resume. Or begin elsewhere: --output_dir FOLDER."
        )


class NoCheckpoint(TwinkleError, FileNotFoundError):
    """``--resume PATH`` names no checkpoint."""

    def __init__(self, path: object) -> None:
        super().__init__(f"--resume {path}: there is no such checkpoint folder; --resume alone takes the newest in output_dir")


class CacheNotWritable(TwinkleError, OSError):
    """The quickstart's model could not be kept."""

    def __init__(self, folder: object, reason: object) -> None:
        super().__init__(f"{folder} can't be written ({reason}).\n    Choose another place: TWINKLE_CACHE=FOLDER")


class UnsupportedGGUF(TwinkleError, ValueError):
    """A GGUF file that the quickstart's reader does not know."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}.\n    The quickstart reads GGUF files of Llama models with a byte-level BPE tokenizer.\n"
            "    For another model: --model ID"
        )
