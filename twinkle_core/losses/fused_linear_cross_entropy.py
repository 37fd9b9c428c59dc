"""Cross entropy whose gradients are formed in the forward (L2)."""

from __future__ import annotations

from twinkle_core.contracts.loss import Loss
from twinkle_core.losses import settings
from twinkle_core.ops.linear_cross_entropy import BACKENDS, linear_cross_entropy
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput, ModelOutput


class FusedLinearCrossEntropyLoss(Loss):
    """Cross entropy straight from hidden states and the weight of the output layer.

        L = - sum_t log p(y_t)                                           over t with y_t != -100

    Tokens whose label is -100 are left out before the matmul; logits are there for a chunk of tokens at a time; their gradient
    is formed while they are, so nothing is computed twice and nothing of size V is kept (as Liger Kernel does, Hsu et al.
    2024). The value and gradients of ``cross_entropy``, which recomputes logits in backward where the output layer trains.

    The model must give ``hidden``. An output layer that is more than a plain linear one (with an adapter, scaled), or one in
    float16, goes the way of ``chunked_cross_entropy``. Scope ``token``.

    Args:
        chunk_size: labelled tokens at a time (None: 256, or 192 where the layer trains); memory beside the gradients is about
            chunk_size × V × 4 bytes.
        backend: ``torch`` runs on any device, ``liger`` is Liger's kernel, ``auto`` takes that on a GPU where it is installed.
    """

    needs = frozenset({"hidden", "labels"})
    scope = "token"
    token_local = True

    def __init__(self, chunk_size: int | None = None, backend: str = "auto") -> None:
        self.chunk_size = None if chunk_size is None else settings.count(self, "chunk_size", chunk_size)
        self.backend = settings.choice(self, "backend", backend, BACKENDS)

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """Args: ``labels`` ``[B, T]`` aligned; ``hidden`` ``[B, T, D]`` and its ``output_layer``. Weight: labelled tokens."""
        labels = inputs["labels"]
        total = linear_cross_entropy(
            outputs.hidden, outputs.output_layer, labels, chunk_size=self.chunk_size, backend=self.backend
        )
        return LossOutput(total, (labels != IGNORE_INDEX).sum())
