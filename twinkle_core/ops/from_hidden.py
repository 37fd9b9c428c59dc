"""What a language model gives, made of its last hidden states (L2)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn

from twinkle_core.ops.token_logps import Tempered, logps_from_logits, token_logps
from twinkle_core.types import ModelOutput

#: fields of ModelOutput that can be made so
FROM_HIDDEN = frozenset({"logits", "logps", "entropies", "predictions", "hidden"})


def from_hidden(
    hidden: Tensor, layer: nn.Module, inputs: Mapping[str, Any], needs: Set[str], temperature: float = 1.0
) -> ModelOutput:
    """The fields in ``needs`` that are in ``FROM_HIDDEN``, and nothing else.

    Where ``logits`` are not among them they are never there as a whole: the output layer is used on labelled tokens alone, a
    chunk at a time.

    Args:
        hidden: ``[B, T, D]``, what the output layer is given.
        layer: the output layer, ``[…, D]`` to ``[…, V]``.
        inputs: the batch; its ``labels`` are read where something in ``needs`` is computed from them.
        temperature: divides the logits.
    """
    output, layer = ModelOutput(), layer if temperature == 1.0 else Tempered(layer, temperature)
    if "logits" in needs:
        output.logits = layer(hidden)
    if needs & {"logps", "entropies", "predictions"}:
        wanted = {"entropies": "entropies" in needs, "predictions": "predictions" in needs}
        if "logits" in needs:
            found = logps_from_logits(output.logits, inputs["labels"], **wanted)
        else:
            found = token_logps(hidden, layer, inputs["labels"], **wanted)
        output |= {k: v for k, v in zip(("logps", "entropies", "predictions"), found, strict=True) if k in needs}
    if "hidden" in needs:
        output.hidden, output.output_layer = hidden, layer
    return output
