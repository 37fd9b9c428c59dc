"""What a patch is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Patch(ABC):
    """A change of *how* a model computes, never of *what*. Model-wide; can be undone."""

    @abstractmethod
    def apply(self, model: Any) -> None:
        """Change the model in place. Applying twice equals applying once."""

    @abstractmethod
    def undo(self, model: Any) -> None:
        """Put back what ``apply`` found: attributes, methods and outputs bit for bit.

        Raises:
            PatchOrder: a patch that was applied later stands on this one; the text names it.
        """
