"""What the tasks of ``twinkle train`` have in common, and what one of them may change (L0 at import)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinkle_core import errors
from twinkle_core.config.schema import TrainConfig
from twinkle_core.config.source import Source

if TYPE_CHECKING:
    from twinkle_core.contracts.model import TwinkleModel
    from twinkle_core.data.dataset import Dataset

Fault = tuple[str, str]
#: what the verbs are given of a batch besides its rows
Beside = Callable[[list[Any]], dict[str, Any]]

PACKED = {"cls": "input", "padding_free": True}


class Task:
    """A task: what its configuration means where it is silent, which rows it trains on, and what its loss is given.

    One module of this package for each, of the task's name, with a ``TASK``.

    Attributes:
        grouped: whether an item of its data is a pair of rows; it must be one, and else must not.
        unit: of its loss, for the plot.
    """

    grouped: bool = False
    unit: str = "nats a token"

    def defaults(self, config: TrainConfig) -> dict[str, Any]:
        """What stands for keys that were not written, as a tree."""
        return {"processor": PACKED} if config.packing else {}

    def complete(self, config: TrainConfig) -> TrainConfig:
        """The configuration with this task's defaults."""
        defaults = self.defaults(config)
        if not defaults:
            return config
        return TrainConfig.model_validate(_merged(defaults, config.model_dump(exclude_unset=True)))

    def faults(self, config: TrainConfig, source: Source, classes: Mapping[str, Any]) -> Iterator[Fault]:
        """What can't be with this task. ``classes``: what the names of components resolved to, by kind."""
        yield from ()

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


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are put together key by key; a component (it has ``cls``) and anything else is taken as it is given."""
    merged = {**defaults, **given}
    for key, value in defaults.items():
        mine = given.get(key)
        if isinstance(value, Mapping) and "cls" not in value and isinstance(mine, Mapping):
            merged[key] = _merged(value, mine)
    return merged
