"""A file and the options beside it to a ``TrainConfig``, or an error that names every fault with its line (L1)."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from twinkle_core import errors
from twinkle_core.config.schema import TrainConfig
from twinkle_core.config.source import Place, Source, read, scalar


def options(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """``--a.b 1 --c=2 --d`` to ``[('a.b', '1'), ('c', '2'), ('d', None)]``.

    Raises:
        StrayWord: a word that belongs to no option.
    """
    found: list[tuple[str, str | None]] = []
    waiting = False
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            found.append((key, value if equals else None))
            waiting = not equals
        elif waiting:
            found[-1] = (found[-1][0], word)
            waiting = False
        else:
            raise errors.StrayWord(word)
    return found


def load(path: str | Path, overrides: Sequence[tuple[str, str | None]] = ()) -> tuple[TrainConfig, Source]:
    """Read, override, validate.

    Args:
        path: a YAML file.
        overrides: what ``options`` gave: dotted keys and texts; without a text the value is true.

    Returns:
        The configuration, and its source, for the lines of faults that are found later.

    Raises:
        NoConfigFile, BadConfig: all faults at once.
    """
    source = read(Path(path))
    for key, text in overrides:
        _override(source, key, True if text is None else scalar(text, f"--{key}"))
    try:
        return TrainConfig.model_validate(source.tree), source
    except ValidationError as error:
        raise errors.BadConfig(source.name, _faults(error, source)) from None


def _override(source: Source, key: str, value: Any) -> None:
    """Put ``value`` at a dotted key; what lies on the way is made where it is absent."""
    place: Place = ()
    here: Any = source.tree
    steps = key.replace("-", "_").split(".")
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        if isinstance(here, list):
            if not step.isdigit() or int(step) >= len(here):
                raise errors.BadConfig(source.name, [(f"--{key}", f"'{step}' is no index of a list of {len(here)}")])
            step_key: str | int = int(step)
        elif isinstance(here, dict):
            step_key = step
        else:
            raise errors.BadConfig(source.name, [(f"--{key}", f"'{'.'.join(map(str, place))}' is a value; it has no keys")])
        place = (*place, step_key)
        if last:
            here[step_key] = value
            _forget(source, place)
        else:
            here = _step_into(here, step_key, top=i == 0)
        source.origins[place] = source.origins.get(place, f"--{key}")


def _step_into(here: Any, step: str | int, top: bool) -> Any:
    """The value there; made where absent, a section (``top``) as it is by default.

    ``optimizer: adamw`` becomes ``{cls: adamw}`` to take an argument.
    """
    value = here.get(step) if isinstance(here, dict) else here[step]
    if top and step not in here:
        value = here[step] = _default(str(step))
    if value is None:
        value = here[step] = {}
    elif isinstance(value, str):
        value = here[step] = {"cls": value}
    return value


def _default(section: str) -> Any:
    """What the schema fills in for a section that is not written, as a file would have it; None where there is nothing."""
    field = TrainConfig.model_fields.get(section)
    if field is None or field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    return [_plain(part) for part in value] if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def _forget(source: Source, place: Place) -> None:
    """An overridden value no longer stands where the file has it, nor does anything within it."""
    for known in [p for p in source.origins if p[: len(place)] == place]:
        del source.origins[known]


def _faults(error: ValidationError, source: Source) -> list[tuple[str, str]]:
    """(where, what) of each fault of pydantic's; what it says of each branch of a union is one fault here."""
    told: dict[Place, list[Any]] = {}
    for fault in error.errors(include_url=False):
        told.setdefault(_as_written(fault["loc"], source), []).append(fault)
    return [(source.origin(place), _sentence(place, faults)) for place, faults in told.items()]


def _sentence(place: Place, faults: Sequence[Any]) -> str:
    name = ".".join(str(step) for step in place)
    first = faults[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key '{name}'{guess(str(place[-1]), keys_at(place[:-1]), place[:-1])}"
    if first["type"] == "missing":
        return f"'{name}' is missing"
    if first["type"] == "value_error":
        return f"{name}: {first['ctx']['error']}" if name else str(first["ctx"]["error"])
    wanted = [fault["msg"].removeprefix("Input should be ") for fault in faults]
    return f"{name}: must be {' or '.join(wanted)}, not {first['input']!r}"


def _as_written(place: Place, source: Source) -> Place:
    """pydantic's place in the user's words: without the branch of a union (``slice.int``), and without the index of a list that
    the file has as a single mapping."""
    written: Place = ()
    for i, step in enumerate(place):
        if place[: i + 1] in source.origins or (isinstance(step, str) and step != "Component" and not _is_type(step)):
            written = (*written, step)
    return written


def _is_type(step: str) -> bool:
    return step in ("int", "str") or "[" in step


def guess(word: str, known: Sequence[str], place: Place = ()) -> str:
    """``. Did you mean 'lr'?``, or the keys that there are."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f". Did you mean '{'.'.join(str(step) for step in (*place, near[0]))}'?"
    return f"; there are: {', '.join(known)}" if known else ""


def keys_at(place: Place) -> list[str]:
    """The keys that the schema knows at a place."""
    model: type[BaseModel] | None = TrainConfig
    for step in place:
        if isinstance(step, int) or model is None:
            continue
        field = model.model_fields.get(step)
        model = next(_models(field.annotation), None) if field is not None else None
    return list(model.model_fields) if model is not None else []


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (list, tuple, Union, Annotated, types.UnionType):
        for argument in get_args(annotation):
            yield from _models(argument)
