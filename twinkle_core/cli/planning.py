"""Everything about a run that can be told before anything is loaded (L0 at import)."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_core import arguments, errors, hub, registry, settings
from twinkle_core.cli import checkpoints, quickstart_model, workers
from twinkle_core.cli.plans import base as plans
from twinkle_core.cli.plans import embedding
from twinkle_core.config.schema import AdapterConfig, Component, DatasetConfig, ModelConfig, TemplateConfig, TrainConfig
from twinkle_core.config.source import Place, Source
from twinkle_core.isolation import Attempt, attempt
from twinkle_core.mesh import DeviceMesh

#: Data sets that come with twinkle.
BUNDLED = {
    "bundled://self-cognition": quickstart_model.bundled_set,
    "bundled://exclusions": embedding.bundled_set,
}

Fault = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration that was checked, with its task's defaults. ``resume``: the checkpoint to go on from, or None."""

    config: TrainConfig
    source: Source
    output_dir: Path
    resume: Path | None = None
    classes: Mapping[str, Any] = field(default_factory=dict)  # what the names of components resolved to, by kind
    mesh: DeviceMesh | None = None  # of several processes, or of workers

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.mesh is None or self.mesh.rank == 0

    @property
    def ranks(self) -> DeviceMesh | None:
        """The mesh, where this process is one of its ranks."""
        return self.mesh if self.config.mode == workers.LOCAL else None

    @property
    def task(self) -> plans.Task:
        """What is trained for."""
        return plans.of(self.config.task)


def make(config: TrainConfig, source: Source | None = None, resume: str | None = None) -> Plan:
    """Check names, arguments and paths, and make the folder of the run.

    Args:
        config: the typed tree.
        source: where it came from, for the lines of faults; none for a tree that was built in code.
        resume: None, ``auto`` or a checkpoint folder.

    Raises:
        BadConfig: all faults, each with its line. OutputInUse, NoCheckpoint, NeedsLibrary.
    """
    if importlib.util.find_spec("datasets") is None:
        raise errors.NeedsLibrary("training from a configuration", "datasets", "twinkle-core[data]", sys.prefix)
    source = source or Source("the configuration")
    classes: dict[str, Any] = {}
    task = plans.of(config.task)
    config = task.complete(config)
    faults = [*_components(config, source, classes), *_paths(config, source), *_adapter(config.adapter, source)]
    faults += [*workers.faults(config, source), *task.faults(config, source, classes)]
    if faults:
        raise errors.BadConfig(source.name, faults)
    output_dir = Path(config.output_dir).expanduser()
    plan = Plan(config, source, output_dir, checkpoints.to_resume(resume, output_dir), classes, _mesh(config, source))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = f"output_dir: {output_dir} can't be made ({error.strerror or error})"
        raise errors.BadConfig(source.name, [(source.origin(("output_dir",)), fault)]) from None
    return plan


def _mesh(config: TrainConfig, source: Source) -> DeviceMesh | None:
    """How processes or workers share the work; None for a single process."""
    remote = config.mode != workers.LOCAL
    if config.mesh is None and settings.world_size() == 1 and not remote:
        return None
    try:
        mesh = workers.mesh(config)
    except errors.BadMesh as error:
        raise errors.BadConfig(source.name, [(source.origin(("mesh",)), f"mesh: {error}")]) from error
    if remote:
        return mesh
    if mesh.world_size != settings.world_size():
        wrong = errors.ManyProcesses("mesh", mesh.world_size, settings.world_size())
        raise errors.BadConfig(source.name, [(source.origin(("mesh",)), str(wrong))])
    return None if mesh.world_size == 1 else mesh


def _components(config: TrainConfig, source: Source, classes: dict[str, Any]) -> Iterator[Fault]:
    """Names that nobody provides, arguments that the named class doesn't have, and values that it refuses."""
    for kind, section in (("model", config.model), ("template", config.template)):
        resolved = yield from _resolve(kind, section.cls, (kind, "cls"), source)
        if resolved is not None:
            yield from _arguments(resolved, section.arguments, (kind, "arguments"), source)
            yield from _said_elsewhere(section, (kind,), {"model_id": "model.id"}, source)
            yield from _arguments(resolved, own_arguments(section), (kind,), source)
    parts: list[tuple[str, Place, Component | None]] = [
        ("loss", ("loss",), config.loss),
        ("optimizer", ("optimizer",), config.optimizer),
        ("scheduler", ("scheduler",), config.scheduler),
        ("processor", ("processor",), config.processor),
        *(("metric", ("metrics", i), metric) for i, metric in enumerate(config.metrics)),
        *(("patch", ("patches", i), patch) for i, patch in enumerate(config.patches)),
        *(
            ("preprocessor", (section, i, "preprocessor"), part.preprocessor)
            for section, sets in (("dataset", config.dataset), ("eval_dataset", config.eval_dataset))
            for i, part in enumerate(sets)
        ),
    ]
    for kind, place, part in parts:
        resolved = None if part is None else (yield from _resolve(kind, part.cls, place, source))
        if part is None or resolved is None:
            continue
        classes[kind] = resolved
        faults = list(_arguments(resolved, part.arguments, place, source, positional=1 if kind in _OVER else 0))
        yield from faults or _trial(kind, part, resolved, place, source)


#: a run's length, where the data has not told it yet
LONG = 10**9
#: kinds whose first argument is what they work over
_OVER = ("optimizer", "scheduler")


def _resolve(kind: str, name: str, place: Place, source: Source) -> Generator[Fault, None, Any]:
    try:
        return registry.resolve(kind, name)
    except errors.TwinkleError as error:
        yield source.origin(place), str(error)
        return None


def _arguments(target: Any, given: Iterable[str], place: Place, source: Source, positional: int = 0) -> Iterator[Fault]:
    """One at a time, so that each fault has its own line."""
    for key in given:
        try:
            arguments.check(target, [key], positional=positional)
        except errors.TwinkleError as error:
            yield source.origin((*place, key)), str(error)


def _said_elsewhere(
    section: ModelConfig | TemplateConfig | AdapterConfig, place: Place, others: Mapping[str, str], source: Source
) -> Iterator[Fault]:
    """Further arguments that have a key of their own: of two values one would be passed over."""
    own = {key: ".".join(map(str, (*place, key))) for key in type(section).model_fields if key not in ("cls", "arguments")}
    for key in section.arguments:
        if home := {**own, **others}.get(key):
            yield source.origin((*place, "arguments", key)), f"argument '{key}' is said by {home}; set it there"


def _trial(kind: str, part: Component, resolved: Any, place: Place, source: Source, total: int = LONG) -> Iterator[Fault]:
    """Build it once over a stand-in: a value that its constructor refuses shows now, not when the model is loaded."""

    def build(given: Mapping[str, Any]) -> Attempt[Any]:
        return attempt(lambda: _stand_in(kind, part.cls, resolved, given, total))

    got = build(part.arguments)
    if got.error is None:
        return
    plain = isinstance(got.error, errors.TwinkleError | TypeError | ValueError)
    why = str(got.error) if plain else got.why
    guilty = _guilty(build, part.arguments)
    if not guilty:
        yield source.origin(place), f"{kind} '{part.cls}': {why}"
    for key in guilty:
        given = f"{key}={part.arguments[key]!r}: "
        yield source.origin((*place, key)), f"{kind} '{part.cls}': {given}{why.removeprefix(given)}"


def _guilty(build: Callable[[Mapping[str, Any]], Attempt[Any]], given: Mapping[str, Any]) -> list[str]:
    """The argument that a constructor refuses: without it, it builds. One that stands alone is it, too."""
    cured = [key for key in given if build({k: v for k, v in given.items() if k != key}).error is None]
    return cured or (list(given) if len(given) == 1 else [])


def _stand_in(kind: str, name: str, resolved: Any, given: Mapping[str, Any], total: int) -> Any:
    """A component as the run will build it, over a parameter of no importance."""
    if kind not in _OVER:
        return registry.build(kind, name, given)
    if not callable(resolved):
        return resolved
    if kind == "optimizer":
        return stand_in_optimizer(resolved, given)
    import torch

    from twinkle_core.train import schedulers

    schedulers.check_usable(resolved)
    schedulers.check_makeable(resolved, given)
    over = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    return resolved(over, **with_lengths(resolved, given, total))


def stand_in_optimizer(resolved: Any, given: Mapping[str, Any]) -> Any:
    """An optimizer over a matrix of no importance, with all that the training state checks of one."""
    import torch

    from twinkle_core.train import optim

    return optim.build(resolved, {"weight": torch.nn.Parameter(torch.zeros(2, 2))}, given)


def check_scheduler(plan: Plan, total: int) -> None:
    """The scheduler once more, when the data has told how long the run is: a warm-up longer than it, for one.

    Raises:
        BadConfig.
    """
    part = plan.config.scheduler
    if part is not None:
        faults = list(_trial("scheduler", part, plan.classes["scheduler"], ("scheduler",), plan.source, total))
        if faults:
            raise errors.BadConfig(plan.source.name, faults)


def own_arguments(section: ModelConfig | TemplateConfig) -> dict[str, Any]:
    """What the section says to the constructor under keys of its own. Keys that were not written are left to the class."""
    return section.model_dump(exclude_unset=True, exclude={"id", "cls", "arguments"})


def with_lengths(scheduler: Any, given: Mapping[str, Any], total: int) -> dict[str, Any]:
    """The run's length, for schedulers that ask for it by these names."""
    takes = inspect.signature(scheduler).parameters if callable(scheduler) else {}
    lengths = {"num_training_steps": total, "num_warmup_steps": round(total * 0.05)}
    return {**{name: value for name, value in lengths.items() if name in takes}, **given}


def _adapter(adapter: AdapterConfig | None, source: Source) -> Iterator[Fault]:
    if adapter is None:
        return
    if adapter.path is not None:
        if not Path(os.path.expanduser(adapter.path)).is_dir():
            yield source.origin(("adapter", "path")), f"adapter.path: there is no folder {adapter.path}"
        return
    try:
        from peft import LoraConfig
    except ImportError:
        yield source.origin(("adapter",)), "a LoRA needs peft: pip install peft (or train all weights: adapter: null)"
        return
    yield from _arguments(LoraConfig, adapter.arguments, ("adapter", "arguments"), source)
    yield from _said_elsewhere(adapter, ("adapter",), {"task_type": "task"}, source)


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
            path = hub.resolve(given, kind=kind)
        except errors.TwinkleError as error:
            yield source.origin(place), str(error)
            continue
        if kind == "model" and hub.holds_adapter(path):
            base = hub.base_of_adapter(path) or "its base model"
            way = f"model.id: '{given}' holds an adapter, not a model. Give model.id: {base}, and adapter.path: {given}"
            yield source.origin(place), way
    for section, sets in (("dataset", config.dataset), ("eval_dataset", config.eval_dataset)):
        for i, part in enumerate(sets):
            yield from _parts(part, (section, i), source)
    output_dir = Path(os.path.expanduser(config.output_dir))
    if str(output_dir).startswith("~"):
        yield source.origin(("output_dir",)), f"output_dir: there is no user of the name in {output_dir}"
    elif "\0" in str(output_dir):
        yield source.origin(("output_dir",)), "output_dir: no path holds a NUL"
    elif os.path.exists(output_dir) and not output_dir.is_dir():
        yield source.origin(("output_dir",)), f"output_dir: {output_dir} is a file"


def _parts(part: DatasetConfig, place: Place, source: Source) -> Iterator[Fault]:
    """A split or subset that a local file does not have."""
    from twinkle_core.data.sources import DatasetMeta, check_local

    for key, subset, split in (("split", "default", part.split), ("subset", part.subset, "train")):
        try:
            check_local(DatasetMeta(dataset_path(part), subset, split))
        except errors.HubError:
            return  # told already
        except errors.DataError as error:
            yield source.origin((*place, key)), str(error)


def dataset_path(part: DatasetConfig) -> str:
    """The id as ``DatasetMeta`` takes it."""
    return str(BUNDLED[part.id]()) if part.id in BUNDLED else part.id
