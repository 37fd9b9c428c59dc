"""Every exception of twinkle with its text (L0). Other rooms raise these; none builds a text of its own.

An exception takes values and writes the sentence: what was given, why it can't be, and the way out. It is raised before any
state changes, unless its text says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class TwinkleError(Exception):
    """Base of all errors raised on purpose by twinkle. They travel between processes whatever their constructors take."""

    #: what the command ``twinkle`` ends with when one of these ends it
    exit_status = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[TwinkleError], args: tuple[Any, ...], state: dict[str, Any]) -> TwinkleError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


# ---------------------------------------------------------------------------------------------------- names and plugins


NAME = 100  # characters of a name that are shown
WHY = 2000  # of a text that others wrote
LISTED = 40  # names that are listed


def shown(text: object, limit: int = NAME) -> str:
    """A text from metadata, a network or a file as one line that can do nothing to a terminal or a log.

    Signs that print nothing (control characters, line ends, lone surrogates, marks of direction) are written as Python writes
    them, and what is longer than ``limit`` is cut.
    """
    text = str(text)
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return plain if len(plain) <= limit else f"{plain[:limit]}..."


def _lines(text: object) -> str:
    """``shown`` for each line of a text that may have several."""
    return "\n".join(shown(line, WHY) for line in str(text).split("\n"))


def _meant(near: str | None) -> str:
    return f" Did you mean '{shown(near)}'?" if near else ""


def _listed(words: Iterable[str], empty: str = "none") -> str:
    every = [shown(word) for word in words]
    more = f", ... and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more or empty


class UnknownKind(TwinkleError, LookupError):
    """A kind of component that does not exist."""

    def __init__(self, kind: str, near: str | None, kinds: Iterable[str]) -> None:
        super().__init__(f"unknown kind of component '{shown(kind)}'.{_meant(near)}\n    kinds: {_listed(kinds)}")


class UnknownName(TwinkleError, LookupError):
    """Nobody provides a component of this name. ``kind`` singular, ``group`` plural."""

    def __init__(self, kind: str, group: str, name: str, near: str | None, installed: Iterable[str]) -> None:
        self.kind, self.name, self.near = kind, name, near
        super().__init__(
            f"unknown {kind} '{shown(name)}'.{_meant(near)}\n    installed: {_listed(installed)}\n"
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
            f"{label} could not be imported ({shown(value)}).\n    {_lines(why)}\n{damage}"
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
        has = "" if near else f"\n    it has: {_listed(known, 'no parameters')}"
        super().__init__(f"{owner} has no parameter '{shown(name)}'.{_meant(near)}{has}")


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
        super().__init__(f"{kind} '{shown(path)}' could not be imported.\n    {_lines(why)}\n    the form is module:Class")


class FrozenRegistry(TwinkleError, PermissionError):
    """A frozen registry was asked for what it does not hold, or to change."""

    def __init__(self, kind: str, name: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"{kind} '{shown(name)}' is not allowed here: the registry is frozen.\n    allowed: {_listed(allowed)}\n"
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
            f"{kind} '{shown(reference)}' could not be loaded.\n    {_lines(why)}\n"
            f"    such a repository is a package (__init__.py at its top); name the class: {repository}#Class"
        )


class BadHook(TwinkleError):
    """A function marked as a hook that can't be one."""

    def __init__(self, hook: str, near: str | None, why: str) -> None:
        super().__init__(f"hook '{hook}': {why}.{_meant(near)}")


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


class RankFailed(TwinkleError, RuntimeError):
    """One of several processes that work together ended badly; the others were ended too."""

    def __init__(self, rank: int, world_size: int, what: str, output: str) -> None:
        lines = "".join(f"\n    {line}" for line in output.strip().splitlines()[-20:])
        super().__init__(f"rank {rank} of {world_size} {what}:{lines or ' it wrote nothing'}")


class AlreadyInitialized(TwinkleError, RuntimeError):
    """``initialize`` was called twice with different arguments."""

    def __init__(self, first: dict[str, object], second: dict[str, object]) -> None:
        different = [name for name in second if first.get(name) != second[name]]
        lines = "".join(f"\n    {name}: {first.get(name)!r} before, {second[name]!r} now" for name in different)
        super().__init__(f"twinkle.initialize was already called with other arguments:{lines}\n    Call it once, at the start.")


# ---------------------------------------------------------------------------------------------------- hubs and data


class HubError(TwinkleError):
    """A model or data set could not be found. Raised by ``twinkle_core.hub.resolve`` and nothing else."""


class NoSuchPath(HubError, FileNotFoundError):
    """A local path that is not there, or not what it should be."""

    @classmethod
    def missing(cls, given: str, looked_at: object, kind: str, similar: Sequence[str] = ()) -> NoSuchPath:
        hint = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        return cls(
            f"the {kind} path {given!r} does not exist (looked at {looked_at}).{hint}\n"
            f"    A hub id is written with its hub: 'hf://org/name' or 'ms://org/name'."
        )

    @classmethod
    def impossible(cls, given: str, kind: str, cause: object) -> NoSuchPath:
        short = given if len(given) <= 80 else f"{given[:80]}..."
        return cls(f"the {kind} path {short!r} can't be one on this machine: {str(cause)[:120]}")

    @classmethod
    def empty(cls, given: str, wanted: str) -> NoSuchPath:
        return cls(f"the folder {given!r} holds no data that can be read; give a file or a folder of {wanted}.")


class BareId(HubError, ValueError):
    """An id without its hub."""

    def __init__(self, given: str, kind: str, looked_at: object) -> None:
        super().__init__(
            f"the {kind} {given!r} is no path on this machine (looked at {looked_at}), and no hub is named.\n"
            f"    If it is on a hub, say which: 'hf://{given}' (Hugging Face) or 'ms://{given}' (ModelScope)."
        )


class BadHubId(HubError, ValueError):
    """An id that no hub can have."""

    def __init__(self, given: str, kind: str) -> None:
        super().__init__(f"{given!r} is no {kind} id; write 'hf://org/name', 'ms://org/name', or a local path.")


class Unreachable(HubError, ConnectionError):
    """The hub does not answer, or must not be asked, and there is no copy in the local cache."""

    def __init__(self, given: str, kind: str, hub: str, offline: bool, cause: str) -> None:
        why = (
            f"HF_HUB_OFFLINE forbids asking {hub}, and its local cache has no copy"
            if offline
            else f"{hub} can't be reached from here, and its local cache has no copy"
        )
        super().__init__(
            f"the {kind} {given!r} can't be fetched: {why}.\n    {cause}\n"
            f"    Without a network give the path of a folder instead: copy it from a machine that has one, "
            f"and pass '/path/to/{given.rpartition('/')[2]}'."
        )


class NotOnHub(HubError, FileNotFoundError):
    """The hub answers that there is no such thing, or that this user may not have it."""

    def __init__(self, given: str, kind: str, hub: str, revision: str | None, cause: str) -> None:
        at = f" at revision {revision!r}" if revision else ""
        super().__init__(
            f"{hub} has no {kind} {given!r}{at}, or you may not read it.\n    {cause}\n"
            f"    Check the name; for a private or gated one log in first."
        )


class DataError(TwinkleError, ValueError):
    """A data set, a row of one, or a loader's arguments that can't be."""

    @classmethod
    def format(cls, path: object, known: str) -> DataError:
        return cls(f"{path}: unknown format of data; the known ones are {known}.")

    @classmethod
    def formats(cls, path: object, files: Mapping[str, Sequence[str]]) -> DataError:
        kinds = "; ".join(f"{kind}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" for kind, names in files.items())
        return cls(
            f"the folder {path} holds data of several formats ({kinds}), and only one of them would be read.\n"
            f"    Give the file that is meant, or a folder of one format."
        )

    @classmethod
    def encoding(cls, place: object, cause: object) -> DataError:
        return cls(f"{place}: not UTF-8 text ({cause}). Convert it, for example with 'iconv -f latin1 -t utf-8'.")

    @classmethod
    def line(cls, path: object, line: int, cause: str) -> DataError:
        return cls(f"{path}, line {line}: not a JSON object ({cause}).")

    @classmethod
    def choice(cls, what: str, value: object, source: object, choices: Iterable[object]) -> DataError:
        return cls(f"{source} has no {what} {value!r}; it has {', '.join(map(repr, choices)) or 'none'}.")

    @classmethod
    def only(cls, what: str, value: object, source: object, there: str) -> DataError:
        return cls(
            f"{source} has no {what} {value!r}; it has {there!r} alone.\n"
            f"    Take a part of its rows with data_slice (in a configuration: slice), or give another file."
        )

    @classmethod
    def part(cls, split: str) -> DataError:
        name = split.partition("[")[0].partition("+")[0] or "train"
        return cls(
            f"split={split!r}: a split is one name, such as {name!r}.\n"
            f"    Take a part of it with data_slice=range(100) (in a configuration: slice: 100)."
        )

    @classmethod
    def loading(cls, source: object, cause: object) -> DataError:
        return cls(f"{source} could not be read: {cause}")

    @classmethod
    def argument(cls, name: str, value: object, way: str) -> DataError:
        return cls(f"{name}={value!r}: {way}.")

    @classmethod
    def not_rows(cls, index: int, value: object) -> DataError:
        return cls(f"row {index} is a {type(value).__name__}, not a mapping of column names to values: {value!r:.80}")

    @classmethod
    def keys(cls, who: str, missing: Sequence[str], has: Iterable[str], way: str = "") -> DataError:
        names = ", ".join(repr(m) for m in missing)
        here = ", ".join(map(repr, has)) or "nothing"
        return cls(f"{who} needs {names} in each row; this row has {here}.{way and ' ' + way}")

    @classmethod
    def value(cls, who: str, key: str, value: object, wanted: str) -> DataError:
        return cls(f"{who}: {key} is {value!r:.80}, not {wanted}.")

    @classmethod
    def half_character(cls, text: str) -> DataError:
        return cls(f"it holds half a character (a lone surrogate), which is no text: ...{text!a}... Repair or drop the row.")

    @classmethod
    def key(cls, key: object) -> DataError:
        return cls(
            f"its key {key!r:.80} is of type {type(key).__name__}, and a row's keys are texts. Write {str(key)!r:.80} for it."
        )

    @classmethod
    def unkept(cls, cause: object) -> DataError:
        return cls(f"it can't be kept as JSON: {cause}")

    @classmethod
    def in_the_way(cls, path: object) -> DataError:
        return cls(f"'{path}' is there and was not written by save_as, so it is not replaced. Choose another name, or move it.")

    @classmethod
    def in_row(cls, what: str, index: int, cause: object) -> DataError:
        return cls(f"{what}, row {index}: {cause}")

    @classmethod
    def returned(cls, what: str, value: object) -> DataError:
        return cls(f"{what} returned a {type(value).__name__}; it must return a row (a mapping), or None to drop it.")

    @classmethod
    def no_template(cls) -> DataError:
        return cls("the data set has no template; call set_template('chat', model_id=…) before encode().")

    @classmethod
    def lazy(cls, strategy: str) -> DataError:
        return cls(
            f"truncation_strategy={strategy!r} changes the number of rows, which a LazyDataset must know beforehand.\n"
            f"    Use Dataset, or one of 'raise', 'left', 'right'."
        )

    @classmethod
    def unsized(cls, what: str) -> DataError:
        return cls(f"{what} needs to know the data set's length, which a stream does not have; use Dataset or LazyDataset.")

    @classmethod
    def resized(cls, before: int, now: int) -> DataError:
        return cls(
            f"the data set has {now} rows, and had {before} when its DataLoader was made; its order and length were made from "
            f"these.\n    Make a new DataLoader after the data set's last change."
        )

    @classmethod
    def no_batches(cls, rows: int, rule: str) -> DataError:
        return cls(f"a data set of {rows} rows gives no batch at all with {rule}.")

    @classmethod
    def empty(cls, what: str) -> DataError:
        return cls(f"{what} has no rows.")

    @classmethod
    def encoded(cls, verb: str) -> DataError:
        return cls(f"{verb} comes before encode(): the rows of this data set are encoded already.")

    @classmethod
    def not_encoded(cls, what: str) -> DataError:
        return cls(f"{what} needs encoded rows; call set_template and encode() first.")


# ---------------------------------------------------------------------------------------------------- templates and processors


class TemplateError(TwinkleError, ValueError):
    """A conversation that can't be encoded rightly. ``turn``: index of the message at fault, if it is one's."""

    turn: int | None = None

    @classmethod
    def at(cls, turn: int, role: object, cause: str) -> TemplateError:
        error = cls(f"message {turn} ({role}): {cause}")
        error.turn = turn
        return error

    @classmethod
    def shape(cls, value: object) -> TemplateError:
        has = ", ".join(map(repr, value)) if isinstance(value, Mapping) else type(value).__name__
        return cls(f"a conversation needs 'messages', a list of at least one message; this one has {has or 'nothing'}.")

    @classmethod
    def rendering(cls, cause: object) -> TemplateError:
        return cls(f"the model's chat template refuses this conversation: {cause}")

    @classmethod
    def role(cls, turn: int, role: str, near: str | None, known: Iterable[str]) -> TemplateError:
        return cls.at(
            turn,
            role,
            f"the model's chat template does not know the role {role!r}.{_meant(near)}\n"
            f"    roles: {_listed(known)}, and what the template handles by name; only 'assistant' is trained",
        )

    @classmethod
    def tools(cls, count: int) -> TemplateError:
        return cls(
            f"the model's chat template shows nothing of the row's 'tools' ({count}); the model would learn to call what "
            f"it does not see.\n    Remove 'tools' from the rows, or give a template that shows them as chat_template=…"
        )

    @classmethod
    def prompt(cls) -> TemplateError:
        return cls("add_generation_prompt is for a conversation that waits for an answer; this one ends with the assistant.")

    @classmethod
    def strategy(cls, value: object, choices: Iterable[str]) -> TemplateError:
        return cls(f"truncation_strategy={value!r} is none of {', '.join(map(repr, choices))}.")

    @classmethod
    def argument(cls, name: str, value: object, way: str) -> TemplateError:
        return cls(f"{name}={value!r}: {way}.")

    @classmethod
    def tokenizer(cls, name: object, cause: object) -> TemplateError:
        return cls(f"no tokenizer could be loaded from {name}: {cause}")

    @classmethod
    def unreadable(cls, turn: int, field: str) -> TemplateError:
        way = f"read back, it has another {field!r}: its text holds signs of the format, which nothing escapes"
        return cls.at(turn, "assistant", way)

    @classmethod
    def tokens(cls, name: object, missing: Iterable[str], release: str) -> TemplateError:
        return cls(
            f"the tokenizer of {name} has no single token for {', '.join(missing)}, which {release} writes.\n"
            f"    Take a tokenizer of that release's checkpoints, or the release that fits the tokenizer."
        )

    @classmethod
    def slow(cls, name: object) -> TemplateError:
        return cls(f"the tokenizer of {name} gives no character offsets (it is no 'fast' one), so labels can't be placed.")


class NoChatTemplate(TemplateError):
    """A tokenizer of a base model."""

    def __init__(self, name: object) -> None:
        super().__init__(
            f"the tokenizer of {name} has no chat template (a base model?).\n"
            f"    Give one with chat_template=…, take an instruct model's, or train plain text with use_chat_template=False."
        )


class BadCompletion(TemplateError):
    """A completion that breaks its format. ``place``: the character at which it does, counted from 0."""

    place: int = 0

    @classmethod
    def at_character(cls, text: str, place: int, cause: str) -> BadCompletion:
        rest = text[place : place + 40]
        error = cls(f"character {place}: {cause}; there stands {rest!r}." if rest else f"character {place}, the end: {cause}.")
        error.place = place
        return error


class RowTooLong(TemplateError):
    """More tokens than ``max_length``, and the strategy is to say so."""

    def __init__(self, tokens: int, max_length: int, strategy: str) -> None:
        super().__init__(
            f"the row has {tokens} tokens, max_length is {max_length} (truncation_strategy={strategy!r}).\n"
            f"    Raise max_length, or choose 'left', 'right', 'split' or 'delete'."
        )


class NoLabels(TemplateError):
    """A row with nothing to learn from: it would reach the loss as an all -100 row."""

    @classmethod
    def untrained(cls) -> NoLabels:
        return cls("no token of the row is trained: the conversation has no assistant turn that train_on asks for.")

    @classmethod
    def short(cls, tokens: int) -> NoLabels:
        return cls(
            f"the text is {tokens or 'no'} token{'s' if tokens != 1 else ''} long, and one token predicts another: there is "
            f"nothing to learn.\n    Remove such rows, or drop them with truncation_strategy='delete'."
        )

    @classmethod
    def cut(cls, tokens: int, max_length: int, strategy: str) -> NoLabels:
        return cls(
            f"no trained token is left after truncation_strategy={strategy!r} cut {tokens} tokens to max_length {max_length}.\n"
            f"    Raise max_length, cut the other side, or drop such rows with 'delete'."
        )


class BadRow(TwinkleError, ValueError):
    """An encoded row that can't be collated."""

    @classmethod
    def no_rows(cls) -> BadRow:
        return cls("an empty batch: there are no rows to collate.")

    @classmethod
    def kind(cls, row: int, value: object) -> BadRow:
        return cls(f"row {row} is a {type(value).__name__}, not a mapping with 'input_ids'.")

    @classmethod
    def missing(cls, row: int, field: str, has: Iterable[str]) -> BadRow:
        keys = list(has)
        raw = " It is a conversation that no template has encoded: call set_template first." if "messages" in keys else ""
        return cls(f"row {row} has no {field!r}; it has {', '.join(map(repr, keys)) or 'nothing'}.{raw}")

    @classmethod
    def field(cls, row: int, field: str, way: str) -> BadRow:
        return cls(f"row {row}: {field!r} {way}.")

    @classmethod
    def length(cls, row: int, field: str, length: int, tokens: int) -> BadRow:
        return cls(f"row {row}: {field!r} has {length} values, 'input_ids' has {tokens}; one value a token is needed.")

    @classmethod
    def argument(cls, name: str, value: object, way: str) -> BadRow:
        return cls(f"{name}={value!r}: {way}.")


class PatchOrder(TwinkleError, RuntimeError):
    """A patch that can't be undone yet: what it changed was changed again. ``later``: by what."""

    def __init__(self, patch: str, later: str) -> None:
        super().__init__(f"{patch} can't be undone: {later} stands on it.\n    Undo the later one first. Nothing was changed.")


# ---------------------------------------------------------------------------------------------------- training


class BadArgument(TwinkleError, ValueError):
    """A value that a parameter can't have. Nothing was changed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r}: it must be {allowed}.")


class BadWindowSize(TwinkleError, ValueError):
    """gradient_accumulation_steps that is no positive whole number."""

    def __init__(self, size: object) -> None:
        super().__init__(f"gradient_accumulation_steps={size!r} is not a whole number of at least 1.")


class WindowSizeChanged(TwinkleError, ValueError):
    """Another window size while a window is open."""

    def __init__(self, old: int, new: int, count: int) -> None:
        super().__init__(
            f"gradient_accumulation_steps={new} was given while a window of {old} is open ({count} of {old} backwards done).\n"
            f"    keep {old} until the window closes, close it with flush(), or give it up with zero_grad(drop=True)"
        )


class WindowNotStepped(TwinkleError, RuntimeError):
    """A backward on gradients that have been normalised already."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"the window of {count} backward(s) has been normalised, but not used: more gradients can't be added to it.\n"
            f"    call step() to use it or zero_grad() to drop it, then go on"
        )


class NoOptimizer(TwinkleError, RuntimeError):
    """A verb that needs an optimizer."""

    def __init__(self, verb: str, adapter: str, base_has_one: bool = False) -> None:
        hint = "\n    the base model has one, but an optimizer belongs to one adapter" if base_has_one and adapter else ""
        call = f"set_optimizer({_by_name(adapter)})"
        super().__init__(f"{verb}() of {_whose(adapter)} needs an optimizer: call {call} first.{hint}")


class NoTrainableParameters(TwinkleError, ValueError):
    """An optimizer, or a backward, for nothing."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"{_whose(adapter)} has no trainable parameter, so there is nothing to train.")


class BadOptimizer(TwinkleError, ValueError):
    """An optimizer that can't be used here."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"optimizer {what} can't be used: {why}")


class NotInOptimizer(TwinkleError, RuntimeError):
    """Parameters that became trainable after the optimizer was set: their gradients would pile up, and nothing would use them.

    ``window``: how many backwards an open window holds, which made no gradients of them.
    """

    def __init__(self, adapter: str, names: Sequence[str], window: int = 0) -> None:
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        listed = _listed(names[:3]) + rest
        call = f"set_optimizer({_by_name(adapter)})"
        if window:
            super().__init__(
                f"{listed} of {_whose(adapter)} became trainable inside a window: its {window} backward(s) made no gradients "
                f"of them, so an optimizer set now would get wrong ones.\n"
                f"    close the window with flush() or give it up with zero_grad(drop=True), then call {call}"
            )
            return
        super().__init__(
            f"{listed} of {_whose(adapter)} became trainable after its optimizer was set, which does not hold them.\n"
            f"    call {call} again, add them to it (optimizer.add_param_group), or freeze them"
        )


class BadScheduler(TwinkleError, ValueError):
    """A scheduler that can't be used here."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"scheduler {what} can't be used: {why}")


class NoForward(TwinkleError, RuntimeError):
    """A split verb without the forward it belongs to."""

    def __init__(self, verb: str, adapter: str) -> None:
        super().__init__(
            f"{verb}() of {_whose(adapter)} has no forward to work on: call forward({_by_name(adapter)}) first. "
            f"Each forward has one backward."
        )


class NotInForward(NoForward):
    """A loss set after a forward that did not compute what it reads."""

    def __init__(self, loss: str, missing: Iterable[str], adapter: str) -> None:
        TwinkleError.__init__(
            self,
            f"{loss} needs {_listed(missing)}, which the last forward of {_whose(adapter)} did not compute: it was made for "
            f"the loss before.\n    call it again after set_loss(...)",
        )


class NoTemplate(TwinkleError, ValueError):
    """Raw trajectories without a template to encode them."""

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"the inputs are conversations ('messages'), and {_whose(adapter)} has no template to encode them.\n"
            f"    call set_template(...) first, or give encoded rows ('input_ids', 'labels')"
        )


class EmptyBatch(TwinkleError, ValueError):
    """Nothing to compute on."""

    def __init__(self, given: int = 0) -> None:
        why = f": the template dropped all {given} conversations" if given else " (no rows)"
        super().__init__(f"the batch is empty{why}. Give at least one row.")


class BadInputs(TwinkleError, ValueError):
    """Inputs of a form that is not known."""

    def __init__(self, why: str) -> None:
        super().__init__(f"inputs can't be used: {why}")


class LabelsMissing(TwinkleError, ValueError):
    """A loss that needs labels, and rows without."""

    def __init__(self, loss: str, keys: Iterable[str]) -> None:
        super().__init__(
            f"{loss} needs 'labels', and the rows have only: {_listed(keys)}.\n"
            f"    labels are aligned: labels[t] is the token that position t must predict, -100 where nothing is trained"
        )


class NotDeclared(TwinkleError, TypeError):
    """A loss that failed after it had read an output that it does not declare, so that nobody computed it.

    ``read``: all that it had read till then. ``plain``: it is a function.
    """

    def __init__(
        self, loss: str, missing: str, read: Iterable[str], needs: Iterable[str], cause: BaseException, *, plain: bool
    ) -> None:
        wanted = "{" + ", ".join(repr(name) for name in sorted(read)) + "}"
        name = loss if loss.isidentifier() else "function"
        way = f"before set_loss: {name}.needs = {wanted}" if plain else f"in its class: needs = frozenset({wanted})"
        default = " (all that a function gets which declares nothing)" if plain and set(needs) == {"logits"} else ""
        super().__init__(
            f"{loss} read outputs.{missing}, which was not computed: its needs are {_listed(sorted(needs))}{default}.\n"
            f"    declare what it reads {way}\n"
            f"    what failed: {type(cause).__name__}: {cause}"
        )


class BadNeeds(TwinkleError, TypeError):
    """What a loss or metric declares to read is no set of names, or names what no model gives."""

    @classmethod
    def kind(cls, owner: str, needs: object) -> BadNeeds:
        names = [needs] if isinstance(needs, str) else needs
        words = names if isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names) else ["logps"]
        wanted = "{" + ", ".join(repr(word) for word in words) + "}"
        return cls(f"needs of {owner} is {needs!r} ({type(needs).__name__}); it must be a set of names: frozenset({wanted})")

    @classmethod
    def unknown(cls, owner: str, name: str, near: str | None, known: Iterable[str]) -> BadNeeds:
        return cls(f"{owner} needs '{name}', which is no output of a model.{_meant(near)}\n    outputs: {_listed(known)}")


class BadMetricResult(TwinkleError, TypeError):
    """A metric that calculates something else than numbers by name."""

    def __init__(self, metric: str, what: str) -> None:
        super().__init__(
            f"{metric}.calculate() returned {what}. It must return a dict of numbers by name, {{}} where there is none."
        )


class BadGroups(TwinkleError, ValueError):
    """A loss whose groups don't cover the rows."""

    def __init__(self, loss: str, sizes: Iterable[int], rows: int) -> None:
        super().__init__(f"{loss} cuts {rows} rows into groups of {list(sizes)}: sizes are at least 1 and add up to {rows}.")


class RowsChanged(TwinkleError, ValueError):
    """Loss arguments for each row, and a template that changed the number of rows."""

    def __init__(self, name: str, given: int, encoded: int) -> None:
        super().__init__(
            f"the template made {encoded} rows of {given} conversations (dropped or split), so '{name}', which has one value "
            f"for each conversation, no longer fits.\n"
            f"    encode first (template.batch_encode), then give rows and a '{name}' that fits them"
        )


class BadLossSetting(TwinkleError, ValueError):
    """A setting of a loss that is out of its range."""

    def __init__(self, loss: str, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{loss}({name}={value!r}): {name} must be {allowed}.")


class BadLossArgument(TwinkleError, ValueError):
    """An argument of a loss's call that doesn't fit the batch."""

    def __init__(self, loss: str, name: str, why: str, wanted: str) -> None:
        super().__init__(f"{loss} can't use '{name}': {why}.\n    give {wanted}")


class BadLossResult(TwinkleError, TypeError):
    """A loss that returns something else than a loss."""

    def __init__(self, loss: str, what: str) -> None:
        super().__init__(
            f"{loss} returned {what}. A loss returns LossOutput(sum, weight); a plain function may return a scalar tensor, "
            f"the mean."
        )


class BadLossWeight(TwinkleError, ValueError):
    """A loss weight that is no count."""

    def __init__(self, weight: float) -> None:
        super().__init__(
            f"the weight of the window is {weight} (nan also where one call's was negative): a loss must return how many items "
            f"its sum is over, 0 or more.\n"
            f"    weights and optimizer are unchanged; the accumulation window was dropped"
        )


class NonFiniteGradients(TwinkleError, ArithmeticError):
    """NaN or infinite gradients. The weights and the optimizer are as they were; the window has been dropped."""

    def __init__(self, adapter: str, names: Iterable[str], more: int, loss: float | None) -> None:
        rest = f" and {more} more" if more else ""
        last = "" if loss is None else f" (last loss: {loss:g})"
        super().__init__(
            f"gradients of {_whose(adapter)} are not finite in {_listed(names, 'a parameter')}{rest}{last}.\n"
            f"    weights and optimizer are unchanged; the accumulation window was dropped. Lower the learning rate, look at "
            f"the data of this batch, or choose on_nonfinite='skip'"
        )


class Unsupported(TwinkleError, TypeError):
    """A verb that this backend does not have."""

    def __init__(self, verb: str, backend: str, instead: str) -> None:
        super().__init__(f"{backend} has no {verb}(). Use {instead}.")


# ---------------------------------------------------------------------------------------------------- adapters


def _whose(adapter: str) -> str:
    return f"adapter '{adapter}'" if adapter else "the base model"


def _by_name(adapter: str) -> str:
    return f"..., adapter_name='{adapter}'" if adapter else "..."


class UnknownAdapter(TwinkleError, KeyError):
    """An adapter that is not there."""

    def __init__(self, name: str, near: str | None, live: Iterable[str]) -> None:
        known = _listed(live, "none yet; add_adapter_to_model makes one")
        self.text = f"unknown adapter '{name}'.{_meant(near)}\n    adapters: {known}"
        super().__init__(self.text)

    def __str__(self) -> str:  # KeyError shows the repr of its text
        return self.text


class WhichAdapter(TwinkleError, ValueError):
    """Several adapters, and none named."""

    def __init__(self, live: Iterable[str]) -> None:
        super().__init__(
            f"which adapter? This model has {_listed(live)}.\n"
            f"    give adapter_name=..., or put the calls in `with model.adapter(name):` (adapter_name='' is the base model)"
        )


class DuplicateAdapter(TwinkleError, ValueError):
    """A second adapter of one name. The live one is untouched."""

    def __init__(self, name: str) -> None:
        super().__init__(f"adapter '{name}' is there already. Remove it first (remove_adapter), or choose another name.")


class BadAdapter(TwinkleError, ValueError):
    """An adapter's name, configuration or folder that can't be used. Nothing was changed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"adapter '{name}' can't be made: {why}")


# ---------------------------------------------------------------------------------------------------- checkpoints


class BadCheckpointName(TwinkleError, ValueError):
    """A name that leaves the output folder."""

    def __init__(self, name: str, output_dir: str) -> None:
        super().__init__(f"name {name!r} is not a folder inside output_dir '{output_dir}'. Give a plain name like 'step-100'.")


class CheckpointInTheWay(TwinkleError, FileExistsError):
    """Something that is no checkpoint, or more than one, stands where one is to be written."""

    def __init__(self, path: str, why: str = "is there and is not a checkpoint, so it is not replaced") -> None:
        super().__init__(f"'{path}' {why}. Choose another name, or move it.")


class CheckpointNotWritten(TwinkleError, OSError):
    """Writing failed. What was there before is whole; nothing half-written is left."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"checkpoint '{path}' could not be written: {why}\n"
            f"    an older checkpoint of that name is whole; nothing half-written is left"
        )


class CheckpointNotFound(TwinkleError, FileNotFoundError):
    """No checkpoint there."""

    def __init__(self, path: str, why: str = "there is no such folder") -> None:
        super().__init__(f"no checkpoint at '{path}': {why}.")


class CheckpointDamaged(TwinkleError, ValueError):
    """A file that is missing, cut short or changed. Nothing was loaded."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"checkpoint file '{path}' is damaged: {why}. Nothing was loaded; take an older checkpoint.")


class CheckpointMismatch(TwinkleError, ValueError):
    """A checkpoint that belongs to something else. Nothing was loaded."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"checkpoint '{path}' does not fit: {why}. Nothing was loaded.")


class CheckpointUnfit(TwinkleError, ValueError):
    """A state that can't be written so that it could be resumed."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} can't be saved so that it could be resumed: {why}")


# ---------------------------------------------------------------------------------------------------- backends


class BadGeneration(TwinkleError, ValueError):
    """Options of ``generate`` that the model's library refuses."""

    def __init__(self, options: Mapping[str, Any], library_says: BaseException) -> None:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "the model's own settings"
        super().__init__(f"generate({given}) can't be done: {library_says}")


class Fp8Unavailable(TwinkleError, RuntimeError):
    """fp8 asked for where it can't run."""

    def __init__(self) -> None:
        super().__init__(
            "mixed_precision='fp8' needs a GPU with fp8 units (H100 class or newer) and the library transformer-engine, and "
            "this version of twinkle-transformers can't drive them yet. Use mixed_precision='bf16'."
        )


class UnknownModelClass(TwinkleError, LookupError):
    """A class name that transformers doesn't have."""

    def __init__(self, name: str, near: str | None) -> None:
        super().__init__(
            f"transformers has no model class '{name}'.{_meant(near)}\n"
            f"    give a class, or a name such as 'AutoModelForCausalLM'; a folder or hub id goes into model_id=..."
        )


class NoModel(TwinkleError, ValueError):
    """A constructor without a model to load or build."""

    def __init__(self, owner: str, given: Iterable[str] = ()) -> None:
        words = [f"{name}=..." for name in given]
        instead = f"\n    what it was given beside its own parameters, {', '.join(words)}, names no model" if words else ""
        super().__init__(
            f"{owner} needs model_id=... (a folder, 'ms://...' or 'hf://...') or config=... for a model with random weights"
            f"{instead}"
        )


class ModelNotLoaded(TwinkleError, OSError):
    """A folder that the model's library can't load."""

    def __init__(self, folder: object, library_says: str) -> None:
        super().__init__(f"the model in '{folder}' could not be loaded: {library_says}")

    @classmethod
    def incomplete(cls, folder: object, model: str, missing: Sequence[str], unexpected: Sequence[str]) -> ModelNotLoaded:
        """Weights that are not in its files, or that the model has no place for."""
        kinds = (("lack", missing, "which would be random numbers"), ("hold", unexpected, "which it has no place for"))
        parts = [
            f"its files {verb} {len(keys)} weight(s) of {model}'s body or output, {what}: {_listed(keys[:3])}"
            f"{', ...' if len(keys) > 3 else ''}"
            for verb, keys, what in kinds
            if keys
        ]
        return cls(
            folder, "; ".join(parts) + "\n    complete the folder, or give the model_cls or config that it was saved with"
        )


class HoldsAdapter(TwinkleError, ValueError):
    """An adapter's folder where a model is to be loaded from."""

    def __init__(self, folder: object, base: str | None) -> None:
        super().__init__(
            f"'{folder}' holds an adapter, not a model.\n"
            f"    load its base model (model_id={base or '...'!r}), then call add_adapter_to_model(name, '{folder}')"
        )


class UnknownOption(TwinkleError, ValueError):
    """A value that isn't one of those a parameter takes."""

    def __init__(self, parameter: str, value: object, near: str | None, known: Iterable[str]) -> None:
        super().__init__(f"{parameter}={value!r} is not known.{_meant(near)}\n    it is one of: {_listed(known)}")


class ManyProcesses(TwinkleError, RuntimeError):
    """A mesh of several processes where only one is supported."""

    def __init__(self, owner: str, count: int, source: str) -> None:
        super().__init__(
            f"{owner} trains in one process in this version; {source} has {count}. Leave the sizes at 1, or start one process"
        )


class NoDevice(TwinkleError, ValueError):
    """A device that isn't there."""

    def __init__(self, device: str) -> None:
        super().__init__(f"the mesh asks for device_type='{device}', and torch sees none here. Use device_type='cpu'.")


class PackingLeaks(TwinkleError, ValueError):
    """Packing asked of a model whose rows then see each other. ``cure``: the value of padding_free with which they do not."""

    def __init__(self, model: str, why: str, cure: bool = False) -> None:
        packs = " (or leave the rows' position_ids out, where each is one sample)" if cure else ""
        what = "packed rows" if not cure else "these packed rows"
        super().__init__(f"{model} can't train on {what}: {why}.\n    use a processor with padding_free={cure}{packs}")


class NotComputed(TwinkleError, ValueError):
    """A quantity that a loss or metric needs and this model doesn't have."""

    def __init__(self, model: str, need: str, why: str) -> None:
        super().__init__(f"{model} gives no {need}: {why}")


class BadLabels(TwinkleError, ValueError):
    """Labels that are not one whole number for each position, where log-probabilities of labels are wanted."""

    TOKENS = "aligned labels, one whole number for each token: what it must predict, or -100 where nothing is trained"

    def __init__(self, why: str, wanted: str = TOKENS) -> None:
        super().__init__(f"labels can't be used: {why}.\n    give {wanted}")


class WrongType(TwinkleError, TypeError):
    """A constructor's argument of a type that can't be used."""

    def __init__(self, owner: str, parameter: str, value: object, wanted: str) -> None:
        super().__init__(f"{owner}: {parameter}={value!r} is a {type(value).__name__}; it must be {wanted}.")


class WeightsMismatch(CheckpointMismatch):
    """Tensors that are not those of the model or adapter. Nothing was loaded."""

    def __init__(
        self,
        what: str,
        *,
        missing: Sequence[str] = (),
        unknown: Sequence[str] = (),
        misshapen: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (),
        parted: Sequence[str] = (),
        mistyped: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        shapes = [f"{key} is {list(there)} in the file and {list(here)} here" for key, there, here in misshapen]
        types = [f"{key} is {there} in the file and {here} here" for key, there, here in mistyped]
        found = {
            "missing": missing,
            "unknown": unknown,
            "misshapen": shapes,
            "of another kind": types,
            "tied here, different there": parted,
        }
        lines = [
            f"{label} ({len(keys)}): {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
            for label, keys in found.items()
            if keys
        ]
        TwinkleError.__init__(self, f"the tensors don't fit {what}. Nothing was loaded.\n    " + "\n    ".join(lines))


# ---------------------------------------------------------------------------------------------------- the command line


class UnknownCommand(TwinkleError, LookupError):
    """``twinkle WORD`` where no such command exists."""

    def __init__(self, command: str, near: str | None, known: Iterable[str]) -> None:
        super().__init__(f"unknown command '{shown(command)}'.{_meant(near)}\n    commands: {_listed(known)}")


class BadReference(TwinkleError, ValueError):
    """What should read KIND/NAME and does not."""

    def __init__(self, text: str, kinds: Iterable[str]) -> None:
        super().__init__(f"'{shown(text)}' is not KIND/NAME, such as loss/cross_entropy\n    kinds: {_listed(kinds)}")


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
            f"'{shown(name)}' {why}.{_meant(near)}\n    distributions with components: {_listed(known)}\n"
            "    a class that is not installed: twinkle check module:Class"
        )


class BadTarget(TwinkleError, ValueError):
    """``twinkle check module:Class`` of what is no component."""

    def __init__(self, target: str, why: str, kinds: Iterable[str]) -> None:
        super().__init__(
            f"'{shown(target)}' can't be checked: {why}\n"
            f"    what can: a class that derives from a contract ({_listed(kinds)}), or a suite"
        )


class UnknownCheck(TwinkleError, LookupError):
    """A suite's ``expected_failures`` names a test that it does not have."""

    def __init__(self, suite: str, name: str, near: str | None, tests: Iterable[str]) -> None:
        super().__init__(
            f"{suite} expects '{name}' to fail, which it does not have.{_meant(near)}\n    tests: {_listed(tests)}"
        )


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


# ---------------------------------------------------------------------------------------------------- configuration files


class NoConfigFile(TwinkleError, FileNotFoundError):
    """The file named on the command line is not there."""

    def __init__(self, path: object) -> None:
        super().__init__(f"there is no configuration file {path}\n    twinkle train --schema prints what it may hold")


class NoConfigGiven(TwinkleError, ValueError):
    """``twinkle train`` alone."""

    def __init__(self) -> None:
        super().__init__(
            "which file? twinkle train CONFIG.yaml [--key value]\n    twinkle train --schema prints what it may hold"
        )


class BadConfig(TwinkleError, ValueError):
    """A configuration that can't be run. All its faults are told at once.

    Args:
        name: the file.
        faults: (where, what): ``line 7`` or the option that set it, and a sentence.
    """

    def __init__(self, name: object, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = list(faults)
        # an option is called as the key that it sets, which is told once
        lines = [f"{where}: {what.removeprefix(where[2:] + ': ')}" if where else what for where, what in self.faults]
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
            f"    Go on with it: --resume. Or begin elsewhere: --output_dir FOLDER."
        )


class NoCheckpoint(TwinkleError, FileNotFoundError):
    """``--resume PATH`` names no checkpoint."""

    def __init__(self, path: object) -> None:
        super().__init__(f"--resume {path}: there is no such checkpoint folder; --resume alone takes the newest in output_dir")


class DataOrderChanged(TwinkleError, ValueError):
    """A resumed run whose rows come in another order. ``different``: (what, before, now)."""

    def __init__(self, checkpoint: object, file: object, different: Iterable[tuple[str, object, object]]) -> None:
        lines = "".join(f"\n    {what}: {before!r} before, {now!r} now" for what, before, now in different)
        super().__init__(
            f"{checkpoint} can't be gone on from: its run drew other rows, or in another order.{lines}\n"
            f"    Give what it had. For other data begin a new run, from the trained adapter with adapter.path.\n"
            f"    To go on all the same, counting rows on from where it was, remove {file}."
        )


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
