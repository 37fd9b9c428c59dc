"""What the tasks of ``twinkle train`` have in common, and what one of them may change (L0 at import)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinkle_core import errors, registry
from twinkle_core.config.schema import Component, TrainConfig
from twinkle_core.config.source import Place, Source
from twinkle_core.isolation import attempt

if TYPE_CHECKING:
    from twinkle_core.contracts.model import TwinkleModel
    from twinkle_core.data.dataset import Dataset

Fault = tuple[str, str]
#: what the verbs are given of a batch besides its rows
Beside = Callable[[list[Any]], dict[str, Any]]

#: of an optimizer for which none is written; of all weights it is the one that ``set_optimizer`` takes by itself
LR_ADAPTER, LR_ALL_WEIGHTS = 1e-4, 1e-5
PACKED = {"cls": "input", "padding_free": True}


class Task:
    """A task: what its configuration means where it is silent, which rows it trains on, and what its loss is given.

    One module of this package for each, of the task's name, with a ``TASK``.

    Attributes:
        grouped: whether an item of its data is a group of rows; it must be one, and else must not.
        embeds: whether its model gives embeddings.
        gives: arguments of a loss that ``beside`` gives.
        unit: of its loss, for the plot.
    """

    grouped: bool = False
    embeds: bool = False
    gives: frozenset[str] = frozenset()
    unit: str = "nats a token"

    def defaults(self, config: TrainConfig) -> dict[str, Any]:
        """What stands for keys that were not written, as a tree."""
        return {"processor": PACKED} if config.packing else {}

    def complete(self, config: TrainConfig) -> TrainConfig:
        """The configuration with this task's defaults, and a learning rate."""
        defaults = self.defaults(config)
        if defaults:
            config = TrainConfig.model_validate(_merged(defaults, config.model_dump(exclude_unset=True)))
        return _with_rate(config)

    def faults(self, config: TrainConfig, source: Source, classes: Mapping[str, Any]) -> Iterator[Fault]:
        """What can't be with this task: a loss that is given or reads what it has none of, a metric that does.

        Args:
            classes: what the names of components resolved to, by kind.
        """
        from twinkle_core.contracts.loss import Loss

        loss = built("loss", config.loss)
        if missing := sorted(required(loss) - self.gives):
            yield (
                source.origin(("loss",)),
                f"loss '{config.loss.cls}' needs {missing}, which task '{config.task}' does not give",
            )
        elif isinstance(loss, Loss) and type(loss).groups is not Loss.groups and not self.grouped:
            text = f"loss '{config.loss.cls}' reads groups of rows, and task '{config.task}' has single ones"
            yield source.origin(("loss",)), f"{text}; for pairs take task: dpo, for embeddings task: embedding"
        parts: list[tuple[str, Place, Component]] = [("loss", ("loss",), config.loss)] if self.grouped else []
        parts += [("metric", ("metrics", number), metric) for number, metric in enumerate(config.metrics)]
        for kind, place, part in () if self.embeds else parts:
            if "embeddings" in getattr(built(kind, part), "needs", ()):
                text = f"{kind} '{part.cls}' reads embeddings, and task '{config.task}' makes none; take task: embedding"
                yield source.origin(place), text

    def dataset(self, config: TrainConfig) -> type[Dataset]:
        """The class of its data."""
        if config.packing:
            from twinkle_core.data.packing import PackingDataset

            return PackingDataset
        from twinkle_core.data.dataset import Dataset

        return Dataset

    def check_rows(self, dataset: Dataset, name: str) -> None:
        """Raise DataError if rows are pairs and this task has no place for pairs, or the other way round."""
        from twinkle_core.data.groups import is_group

        first = dataset[0] if len(dataset) else None
        if first is not None and (is_group(first) != self.grouped or "anchor" in first):
            raise errors.DataError.other_task(name, sorted(first), self.grouped)

    def peft_type(self, config: TrainConfig) -> str:
        """What peft calls a model of this task."""
        return "CAUSAL_LM"

    def beside(self, config: TrainConfig, model: TwinkleModel, make: Callable[[], TwinkleModel]) -> Beside:
        """What ``forward_backward`` and ``forward_only`` are given of a batch besides its rows.

        Args:
            model: that is trained, before its first step.
            make: gives another one, as this one began.
        """
        return lambda rows: {}


def of(name: str) -> Task:
    """The task of a name that the schema has let pass."""
    task: Task = import_module(f"twinkle_core.cli.plans.{name}").TASK
    return task


def built(kind: str, part: Component) -> Any:
    """A component, or None where its name or an argument is wrong, which is told elsewhere."""
    return attempt(lambda: registry.build(kind, part.cls, part.arguments)).value


def _with_rate(config: TrainConfig) -> TrainConfig:
    """The configuration with the learning rate of what is trained, where none is written and the optimizer takes one."""
    given = config.optimizer
    takes = attempt(lambda: set(inspect.signature(registry.resolve("optimizer", given.cls)).parameters)).value or set()
    if "lr" in given.arguments or "lr" not in takes:
        return config
    lr = LR_ALL_WEIGHTS if config.adapter is None else LR_ADAPTER
    return config.model_copy(update={"optimizer": Component.model_validate({"cls": given.cls, **given.arguments, "lr": lr})})


def required(loss: Any) -> frozenset[str]:
    """Arguments without which a loss can't be called."""
    try:
        parameters = list(inspect.signature(loss).parameters.values())[2:]
    except (TypeError, ValueError):
        return frozenset()
    named = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return frozenset(named) | frozenset(getattr(loss, "required_args", ()))


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are put together key by key; a component (it has ``cls``) and anything else is taken as it is given."""
    merged = {**defaults, **given}
    for key, value in defaults.items():
        mine = given.get(key)
        if isinstance(value, Mapping) and "cls" not in value and isinstance(mine, Mapping):
            merged[key] = _merged(value, mine)
    return merged
