"""Contrastive training of embeddings: groups of texts, and a model that gives one vector for each (L0)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import errors
from twinkle_core.cli.plans.base import Fault, Task
from twinkle_core.config.schema import TrainConfig
from twinkle_core.config.source import Source

if TYPE_CHECKING:
    from twinkle_core.data.dataset import Dataset


class Embedding(Task):
    """Groups of an anchor, a positive and negatives."""

    grouped = True
    embeds = True
    unit = "nats a group"

    def defaults(self, config: TrainConfig) -> dict[str, Any]:
        """Plain texts, InfoNCE, a pooling head; transformers' models without an output layer, which nothing reads."""
        model = {"model": {"arguments": {"model_cls": "AutoModel"}}} if config.model.cls == "transformers" else {}
        return {
            **super().defaults(config),
            **model,
            "template": {"max_length": 512, "truncation_strategy": "right", "arguments": {"use_chat_template": False}},
            "patches": ["embedding"],
            "loss": {"cls": "infonce"},
            "metrics": ["loss", "embedding", "train"],
        }

    def faults(self, config: TrainConfig, source: Source, classes: Mapping[str, Any]) -> Iterator[Fault]:
        """Packing, and a loss that reads no embeddings."""
        yield from super().faults(config, source, classes)
        if config.packing:
            yield source.origin(("packing",)), "packing: groups of texts can't be packed; remove it, or set it to false"
        loss = classes.get("loss")
        needs = getattr(loss, "needs", None)
        if inspect.isclass(loss) and isinstance(needs, frozenset) and "embeddings" not in needs:
            yield source.origin(("loss",)), f"loss '{config.loss.cls}' reads no embeddings; take infonce"

    def check_rows(self, dataset: Dataset, name: str) -> None:
        """Raise DataError if rows are no groups of an anchor and what belongs to it."""
        first = dataset[0] if len(dataset) else None
        if first is not None and "anchor" not in first:
            raise errors.DataError.no_anchor(sorted(first))

    def peft_type(self, config: TrainConfig) -> str:
        """What peft calls the model that an adapter is saved for."""
        return "FEATURE_EXTRACTION" if config.model.arguments.get("model_cls") == "AutoModel" else "CAUSAL_LM"


def bundled_set() -> Path:
    """Rows of a query for one thing and not another, a sentence of the first, and one of the second (``query``, ``positive``,
    ``negative``). Of the 130 the first 100 are for training; the things of the others are in none of them."""
    return Path(__file__).parents[2] / "data" / "bundled" / "exclusions.jsonl"


TASK = Embedding()
