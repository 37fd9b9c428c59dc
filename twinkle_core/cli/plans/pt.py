"""Pretraining, or its continuation: plain text, all of it trained, packed to rows of one length."""

from __future__ import annotations

from typing import Any

from twinkle_core.cli.plans.base import Task
from twinkle_core.config.schema import TrainConfig


class Pretraining(Task):
    """Rows of ``text``, without a chat template. A long text is cut into several rows, and rows are packed."""

    def defaults(self, config: TrainConfig) -> dict[str, Any]:
        """Packing, unless it is turned off."""
        template = {"truncation_strategy": "split", "arguments": {"use_chat_template": False}}
        packing = config.packing is not False
        return {
            "template": template,
            "packing": packing,
            **super().defaults(config.model_copy(update={"packing": packing})),
        }


TASK = Pretraining()
