"""What ``task: embedding`` means to ``twinkle train``: groups of texts, and a model that gives one vector for each (L0)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import errors
from twinkle_core.config.schema import TrainConfig
from twinkle_core.config.source import Source

if TYPE_CHECKING:
    from twinkle_core.data.dataset import Dataset

TASK = "embedding"


def complete(config: TrainConfig) -> TrainConfig:
    """The configuration with this task's defaults for what was not written; another task's stays as it is."""
    if config.task != TASK:
        return config
    given = config.model_dump(exclude_unset=True)
    return TrainConfig.model_validate(_merged(defaults(config), given))


def defaults(config: TrainConfig) -> dict[str, Any]:
    """What stands for keys that were not written, as a tree: plain texts, InfoNCE, a pooling head; transformers' models without
    an output layer, which nothing reads."""
    model = {"model": {"arguments": {"model_cls": "AutoModel"}}} if config.model.cls == "transformers" else {}
    return {
        **model,
        "template": {"max_length": 512, "truncation_strategy": "right", "arguments": {"use_chat_template": False}},
        "patches": [TASK],
        "loss": {"cls": "infonce"},
        "metrics": ["loss", "embedding", "train"],
    }


def faults(config: TrainConfig, source: Source, classes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What can't be with this task. ``classes``: what the names of components resolved to, by kind."""
    if config.task != TASK:
        return
    loss = classes.get("loss")
    needs = getattr(loss, "needs", None)
    if inspect.isclass(loss) and isinstance(needs, frozenset) and "embeddings" not in needs:
        yield source.origin(("loss",)), f"loss '{config.loss.cls}' reads no embeddings; take infonce"


def check_rows(config: TrainConfig, dataset: Dataset) -> None:
    """Raise DataError if rows are no groups of an anchor and what belongs to it."""
    first = dataset[0] if config.task == TASK and len(dataset) else None
    if first is not None and "anchor" not in first:
        raise errors.DataError.no_anchor(sorted(first))


def unit(config: TrainConfig) -> str:
    """Of the loss, for the plot."""
    return "nats a group" if config.task == TASK else "nats a token"


def bundled_set() -> Path:
    """Rows of a query for one thing and not another, a sentence of the first, and one of the second (``query``, ``positive``,
    ``negative``). Of the 130 the first 100 are for training; the things of the others are in none of them."""
    return Path(__file__).parent.parent / "data" / "bundled" / "exclusions.jsonl"


def task_type(config: TrainConfig) -> str:
    """What peft calls the model that an adapter is saved for."""
    return "FEATURE_EXTRACTION" if config.model.arguments.get("model_cls") == "AutoModel" else "CAUSAL_LM"


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are put together key by key; a component (it has ``cls``) and anything else is taken as it is given."""
    merged = {**defaults, **given}
    for key, value in defaults.items():
        mine = given.get(key)
        if isinstance(value, Mapping) and "cls" not in value and isinstance(mine, Mapping):
            merged[key] = _merged(value, mine)
    return merged
