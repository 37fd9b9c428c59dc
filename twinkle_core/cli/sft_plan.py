"""Everything about a run of supervised fine-tuning that can be told before anything is loaded (L0 at import)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_core import arguments, errors, hub, registry
from twinkle_core.cli import checkpoints, quickstart_model
from twinkle_core.config.schema import AdapterConfig, Component, DatasetConfig, TrainConfig
from twinkle_core.config.source import Place, Source

#: Data sets that come with twinkle.
BUNDLED = {"bundled://self-cognition": quickstart_model.bundled_set}

Fault = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration that was checked. ``resume``: the checkpoint to go on from, or None."""

    config: TrainConfig
    output_dir: Path
    resume: Path | None = None
    classes: Mapping[str, Any] = field(default_factory=dict)  # what the names of components resolved to, by section


def make(config: TrainConfig, source: Source | None = None, resume: str | None = None) -> Plan:
    """Check names, arguments and paths.

    Args:
        config: the typed tree.
        source: where it came from, for the lines of faults; none for a tree that was built in code.
        resume: None, ``auto`` or a checkpoint folder.

    Raises:
        BadConfig: all faults, each with its line. OutputInUse, NoCheckpoint.
    """
    source = source or Source("the configuration")
    classes: dict[str, Any] = {}
    faults = [*_components(config, source, classes), *_paths(config, source), *_adapter(config.adapter, source)]
    if faults:
        raise errors.BadConfig(source.name, faults)
    output_dir = Path(config.output_dir).expanduser()
    return Plan(config, output_dir, checkpoints.to_resume(resume, output_dir), classes)


def _components(config: TrainConfig, source: Source, classes: dict[str, Any]) -> Iterator[Fault]:
    """Names that nobody provides, and arguments that the named class doesn't have."""
    model, template = config.model, config.template
    named: list[tuple[str, Place, str, Mapping[str, Any], Place]] = [
        ("model", ("model", "cls"), model.cls, model.arguments, ("model", "arguments")),
        ("template", ("template", "cls"), template.cls, template.arguments, ("template", "arguments")),
    ]
    parts: list[tuple[str, Place, Component | None]] = [
        ("loss", ("loss",), config.loss),
        ("optimizer", ("optimizer",), config.optimizer),
        ("scheduler", ("scheduler",), config.scheduler),
        ("processor", ("processor",), config.processor),
        *(("metric", ("metrics", i), metric) for i, metric in enumerate(config.metrics)),
        *(
            ("preprocessor", (section, i, "preprocessor"), part.preprocessor)
            for section, sets in (("dataset", config.dataset), ("eval_dataset", config.eval_dataset))
            for i, part in enumerate(sets)
        ),
    ]
    named += [(kind, place, part.cls, part.arguments, place) for kind, place, part in parts if part is not None]
    for kind, place, name, given, within in named:
        try:
            resolved = registry.resolve(kind, name)
        except errors.TwinkleError as error:
            yield source.origin(place), str(error)
            continue
        classes[".".join(map(str, place))] = resolved
        yield from _arguments(resolved, given, within, source, positional=1 if kind in ("optimizer", "scheduler") else 0)


def _arguments(target: Any, given: Iterable[str], place: Place, source: Source, positional: int = 0) -> Iterator[Fault]:
    """One at a time, so that each fault has its own line."""
    for key in given:
        try:
            arguments.check(target, [key], positional=positional)
        except errors.TwinkleError as error:
            yield source.origin((*place, key)), str(error)


def _adapter(adapter: AdapterConfig | None, source: Source) -> Iterator[Fault]:
    if adapter is None:
        return
    if adapter.path is not None:
        if not Path(adapter.path).expanduser().is_dir():
            yield source.origin(("adapter", "path")), f"adapter.path: there is no folder {adapter.path}"
        return
    try:
        from peft import LoraConfig
    except ImportError:
        yield source.origin(("adapter",)), "a LoRA needs peft: pip install peft (or train all weights: adapter: null)"
        return
    yield from _arguments(LoraConfig, adapter.arguments, ("adapter", "arguments"), source)


def _paths(config: TrainConfig, source: Source) -> Iterator[Fault]:
    """Local paths that are not there. A hub is not asked here."""
    places: list[tuple[Place, str, str]] = []
    if config.model.id not in (quickstart_model.DEFAULT, quickstart_model.TOY):
        places.append((("model", "id"), config.model.id, "model"))
    for section, sets in (("dataset", config.dataset), ("eval_dataset", config.eval_dataset)):
        places += [((section, i, "id"), part.id, "dataset") for i, part in enumerate(sets) if part.id not in BUNDLED]
    for place, given, kind in places:
        if hub.is_hub_id(given):
            continue
        try:
            hub.resolve(given, kind=kind)
        except errors.TwinkleError as error:
            yield source.origin(place), str(error)
    output_dir = Path(config.output_dir).expanduser()
    if output_dir.exists() and not output_dir.is_dir():
        yield source.origin(("output_dir",)), f"output_dir: {output_dir} is a file"


def dataset_path(part: DatasetConfig) -> str:
    """The id as ``DatasetMeta`` takes it."""
    return str(BUNDLED[part.id]()) if part.id in BUNDLED else part.id
