"""What a patch is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Patch(ABC):
    """A change of *how* a model computes, never of *what*. Model-wide; can be undone."""

    @abstractmethod
    def apply(self, model: Any) -> None:
        """Change the model in place. Applying twice equals applying once.

        Args:
            model: a twinkle model, whose ``module`` is the torch network; its gradients go on as its outputs do.
        """

    @abstractmethod
    def undo(self, model: Any) -> None:
        """Put back what ``apply`` found: attributes, methods and outputs bit for bit. Where it is not applied, or was undone
        already: nothing.

        Raises:
            PatchOrder: a patch that was applied later stands on this one; the text names it.
        """
