"""Cross entropy with a chunk size of one's own (L2)."""

from __future__ import annotations

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadLossSetting
from twinkle_core.ops.token_logps import token_logps
from twinkle_core.types import IGNORE_INDEX, InputFeature, LossOutput, ModelOutput


class ChunkedCrossEntropyLoss(Loss):
    """Cross entropy straight from hidden states, so many labelled tokens at a time.

        L = - sum_t log p(y_t)                                           over t with y_t != -100

    The same value and gradients as ``cross_entropy``, which works in chunks too where the model's output layer allows it. This
    one sets the size: smaller chunks take less memory, larger ones make better use of a device. The model must give ``hidden``.

    Args:
        chunk_size: labelled tokens whose logits are there at once; memory is about 2 × chunk_size × V × 4 bytes.
    """

    needs = frozenset({"hidden", "labels"})
    scope = "token"
    token_local = True

    def __init__(self, chunk_size: int = 1024) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise BadLossSetting("ChunkedCrossEntropyLoss", "chunk_size", chunk_size, "a whole number of at least 1")
        self.chunk_size = chunk_size

    def __call__(self, inputs: InputFeature, outputs: ModelOutput) -> LossOutput:
        """Args: ``labels`` ``[B, T]`` aligned; ``hidden`` ``[B, T, D]`` and its ``output_layer``. Weight: labelled tokens."""
        labels = inputs["labels"]
        logps, _, _ = token_logps(outputs.hidden, outputs.output_layer, labels, chunk_size=self.chunk_size)
        return LossOutput(-logps.sum(), (labels != IGNORE_INDEX).sum())
