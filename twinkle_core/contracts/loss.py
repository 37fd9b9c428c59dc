"""What a loss is (L0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from twinkle_core.types import InputFeature, LossOutput, ModelOutput

Scope = Literal["token", "row", "group", "batch"]


class Loss(ABC):
    """A sum over items and the number of items.

    Class attributes that a subclass declares:

    * ``needs``: which fields of :class:`~twinkle_core.types.ModelOutput` it reads (``logits logps entropies predictions hidden
      embeddings values aux_loss``). The engine computes these and nothing else.
    * ``scope``: the grain at which it may be split without changing the result. ``token``, ``row`` and ``group`` losses give
      the same gradients for N micro-batches as for one batch; a ``batch`` loss (in-batch negatives) does not, and says so.
    * ``token_local``: True where the loss of a token depends on that token's outputs alone, so that ranks that hold slices of a
      row may call it on their slices.
    * ``required_args``: loss arguments that have a default in the signature, and with the settings of this object can't be done
      without (reference logps, where a KL term is on). They are asked for before anything runs.
    * ``masked_args``: loss arguments whose entries may be -inf, as logits of words that are ruled out. Everywhere else an entry
      that is not finite is refused before anything runs, a NaN and +inf always.
    * ``collective``: True where its call meets the other data ranks. It then has a keyword ``ranks``, which twinkle fills in
      (``twinkle_core.ops.gather.Ranks``), and is called on a rank without rows too, so that nobody waits in vain: with a
      row whose labels are all -100.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"logps"})
    scope: ClassVar[Scope] = "token"
    token_local: ClassVar[bool] = False
    required_args: ClassVar[frozenset[str]] = frozenset()
    masked_args: ClassVar[frozenset[str]] = frozenset()
    collective: ClassVar[bool] = False

    def groups(self, rows: Sequence[InputFeature]) -> list[int]:
        """Sizes of consecutive groups of rows that must stay together (pairs for DPO). Default: each row alone."""
        return [1] * len(rows)

    @abstractmethod
    def __call__(self, inputs: InputFeature, outputs: ModelOutput, *args: Any, **loss_args: Any) -> LossOutput:
        """The loss of one collated batch.

        Args:
            inputs: tensors ``[B, T]``; ``labels`` are aligned, -100 is ignored.
            outputs: the fields named in ``needs``, as a copy: what is written into it reaches nobody.
            loss_args: the keyword arguments of ``forward_backward``; declare them as real keyword parameters (``args`` is
                always empty: with both, type checkers accept that).

        Returns:
            LossOutput with the **sum** over items and the number of items. A batch without any item gives a sum of 0 that still
            has a graph (multiply by 0; never build a fresh zero), and weight 0.
        """
