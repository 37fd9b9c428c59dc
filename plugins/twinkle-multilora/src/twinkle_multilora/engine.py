"""How a model with slots computes: as TransformersModel does, with each tenant's dropout from numbers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinkle_multilora.backend import needed

if TYPE_CHECKING:
    from twinkle_core.contracts.engine import Batch
    from twinkle_core.types import ModelOutput
    from twinkle_multilora.adapters import SlotAdapters
    from twinkle_transformers.engine import TransformersEngine
else:
    TransformersEngine = needed("twinkle_transformers.engine", "transformers", "SlotEngine").TransformersEngine


class SlotEngine(TransformersEngine):
    """TransformersEngine, which tells the store when a training forward begins."""

    slots: SlotAdapters | None = None

    def forward(self, batch: Batch, needs: frozenset[str], *, train: bool, **how: Any) -> ModelOutput:
        if train and self.slots is not None:
            self.slots.begin_pass()
        return super().forward(batch, needs, train=train, **how)
