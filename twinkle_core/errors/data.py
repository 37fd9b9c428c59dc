"""Errors of hubs and data (L0)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle_core.errors.base import TwinkleError


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
    def keys(cls, who: str, missing: Sequence[str], row: Mapping[str, Any], way: str = "") -> DataError:
        names = ", ".join(repr(m) for m in missing)
        here = ", ".join(f"{key!r} (None)" if value is None else repr(key) for key, value in row.items()) or "nothing"
        return cls(f"{who} needs {names} in each row; this row has {here}.{way and ' ' + way}")

    @classmethod
    def value(cls, who: str, key: str, value: object, wanted: str) -> DataError:
        return cls(f"{who}: {key} is {value!r:.80}, not {wanted}.")

    @classmethod
    def judged(cls, who: str, key: str, value: object) -> DataError:
        return cls(
            f"{who}: the row has {key!r} ({value!r:.40}), a judgement of its two texts, and every pair would be trained as one "
            f"that belongs together.\n"
            f"    Keep the rows that do, and give them without that column:\n"
            f"    dataset.filter(lambda row: row[{key!r}] == …); "
            f"dataset.map(lambda row: {{k: v for k, v in row.items() if k != {key!r}}})"
        )

    @classmethod
    def unknown_texts(cls, who: str, key: str, near: str) -> DataError:
        return cls(
            f"{who}: the row has texts under {key!r}, which is no name that it knows; they would be left out. "
            f"Did you mean {near!r}?\n    Rename the column, or remove it."
        )

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
    def split_group(cls, role: str, count: int) -> DataError:
        return cls(
            f"its '{role}' would be cut into {count} rows, and the rows of a group (a pair, a triplet) stay together.\n"
            f"    Use another truncation_strategy than 'split', such as 'delete', which drops the whole group."
        )

    @classmethod
    def packed_group(cls, index: int) -> DataError:
        return cls(f"row {index} is a group (a pair, a triplet), whose rows must not be packed with others; use Dataset.")

    @classmethod
    def other_task(cls, task: str, has: Sequence[str], grouped: bool) -> DataError:
        here = ", ".join(map(repr, has))
        return cls(
            f"task '{task}' trains on pairs of answers, rows of 'positive' and 'negative'; the rows have {here}.\n"
            f"    Let a preprocessor make pairs of them: preprocessor: preference"
            if grouped
            else f"the rows are groups ({here}), and task '{task}' trains on single rows.\n    For pairs of answers: task: dpo"
        )

    @classmethod
    def no_texts(cls, template: str) -> DataError:
        return cls(
            f"{template} encodes conversations, not texts to be embedded (it has no encode_text).\n"
            f"    Take the template 'chat', with use_chat_template=False."
        )

    @classmethod
    def no_anchor(cls, has: Iterable[str]) -> DataError:
        here = ", ".join(map(repr, has)) or "nothing"
        return cls(
            f"embeddings are trained on groups of 'anchor', 'positive' and 'negatives'; the rows have {here}.\n"
            f"    Let a preprocessor make groups of them: preprocessor: triplet"
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
