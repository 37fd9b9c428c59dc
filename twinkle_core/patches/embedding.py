"""A pooling head (L2)."""

from __future__ import annotations

from typing import Any

from twinkle_core.contracts.patch import Patch
from twinkle_core.ops.pooling import Pooling
from twinkle_core.patches import heads


class EmbeddingPatch(Patch):
    """One vector a row, from the network's last hidden states: what ``task='embedding'`` and ``outputs.embeddings`` need.

    What the model computes otherwise stays as it is. Take the pooling that the model was trained with: ``last_token`` for
    Qwen3-Embedding and other decoders, ``cls`` for GTE and BGE, ``mean`` for E5 and MiniLM.

    Args:
        pooling: ``last_token``, ``mean`` or ``cls``, over each row's real tokens, padded on either side or packed.
        normalize: to length 1, so that dot products are cosines.

    Raises:
        PatchRefused
    """

    def __init__(self, pooling: Pooling = "last_token", normalize: bool = True) -> None:
        heads.check_pooling(type(self).__name__, pooling, normalize)
        self.pooling, self.normalize = pooling, normalize
        self._head: heads.PoolingHead | None = None

    def apply(self, model: Any) -> None:
        """Give ``model.module`` the head.

        Raises:
            PatchRefused: it has one already.
        """
        if self._head is None:
            head = heads.PoolingHead(self.pooling, self.normalize)
            heads.put(type(self).__name__, model.module, heads.POOLING, head)
            head.training = model.module.training
            self._head = head

    def undo(self, model: Any) -> None:
        """Take it away again."""
        if self._head is not None:
            heads.take(type(self).__name__, model.module, heads.POOLING, self._head)
            self._head = None
