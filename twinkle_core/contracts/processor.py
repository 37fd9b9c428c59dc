"""What a processor is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from twinkle_core.types import InputFeature


class Processor(ABC):
    """Rows (lists) to one batch (tensors).

    ``padding_side``: where ``collate`` pads, ``right`` or ``left``. What comes beside a batch with one number for each token
    is cut on that side.
    """

    padding_side: str = "right"

    @abstractmethod
    def collate(self, rows: Sequence[InputFeature]) -> InputFeature:
        """Pad or pack rows.

        Args:
            rows: at least one encoded row.

        Returns:
            Tensors on CPU: ``[B, T]`` padded, or packed with B = 1 and ``seq_lens``.

        Raises:
            BadRow: a row lacks a field or its fields differ in length; the text names the row and the field.
        """

    @property
    def packs(self) -> bool:
        """Whether rows share one sequence (then the engine probes that the model keeps them apart)."""
        return False
