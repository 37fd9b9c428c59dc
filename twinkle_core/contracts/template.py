"""What a template is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from twinkle_core.types import InputFeature, Message, Trajectory


class Template(ABC):
    """Conversations to rows and back. Pure text and ids: no torch at import, no network after construction."""

    @abstractmethod
    def encode(
        self, trajectory: Trajectory, *, add_generation_prompt: bool = False
    ) -> InputFeature | list[InputFeature] | None:
        """One conversation to one row (``input_ids``, aligned ``labels``, ``length``).

        A message of the assistant that is marked not to be trained (``weight``, ``loss`` or ``train`` is 0 or False) has no
        labels; ``twinkle_core.templates.messages.untrained`` reads the marks.

        Returns:
            A row; a list of rows under truncation strategy ``split``; None where strategy ``delete`` drops it (counted).

        Raises:
            TemplateError: the conversation can't be encoded rightly; the text names the place.
        """

    def batch_encode(self, trajectories: Iterable[Trajectory], **kwargs: Any) -> list[InputFeature]:
        """``encode`` of each, flattened, without the dropped ones."""
        rows: list[InputFeature] = []
        for trajectory in trajectories:
            row = self.encode(trajectory, **kwargs)
            rows.extend(row if isinstance(row, list) else [] if row is None else [row])
        return rows

    @abstractmethod
    def check(self, trajectory: Trajectory) -> str | None:
        """Why ``encode`` would refuse it, or None when it would not."""

    def batch_check(self, trajectories: Iterable[Trajectory]) -> list[str | None]:
        """``check`` of each."""
        return [self.check(t) for t in trajectories]

    @abstractmethod
    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        """Ids to text."""

    def batch_decode(self, ids: Iterable[Sequence[int]], **kwargs: Any) -> list[str]:
        """``decode`` of each."""
        return [self.decode(row, **kwargs) for row in ids]

    @abstractmethod
    def parse(self, text: str) -> Message:
        """A completion to an assistant message (reasoning and tool calls apart)."""
