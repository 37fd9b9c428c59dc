"""From one hidden state a token to one a row (L2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from twinkle_core.errors import BadInputs
from twinkle_core.ops.rows import floats
from twinkle_core.processors.input import row_lengths
from twinkle_core.train.micro import is_packed

Pooling = Literal["last_token", "mean", "cls"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


def pool(hidden: Tensor, inputs: Mapping[str, Any], how: Pooling) -> Tensor:
    """One vector for each row of a collated batch, of its real tokens alone.

    ``last_token``: the hidden state of a row's last token; ``cls``: of its first; ``mean``: the mean over its tokens. The mask
    tells padding, on whichever side it is; ``seq_lens``, or positions that begin anew, tell the rows of a packed batch.

    Args:
        hidden: ``[B, T, D]``, of a packed batch ``[1, T, D]``.
        inputs: the batch: ``attention_mask`` ``[B, T]`` where rows are padded; ``seq_lens`` or ``position_ids`` where packed.

    Returns:
        ``[rows, D]``, in at least float32.

    Raises:
        BadInputs: a mask that does not say which tokens are real.
    """
    hidden = floats(hidden)
    lengths = _packed_lengths(hidden, inputs)
    return _of_packed(hidden[0], lengths, how) if lengths is not None else _of_padded(hidden, _real(hidden, inputs), how)


def _packed_lengths(hidden: Tensor, inputs: Mapping[str, Any]) -> list[int] | None:
    """Lengths of the rows in one sequence; None for a padded batch."""
    if is_packed(inputs):
        return row_lengths(inputs)
    positions = inputs.get("position_ids")
    if inputs.get("attention_mask") is not None or hidden.shape[0] > 1 or getattr(positions, "ndim", 0) != 2:
        return None
    return row_lengths(inputs)


def _real(hidden: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """``[B, T]`` bool: which tokens are no padding."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:2]:
        raise BadInputs(f"'attention_mask' is {list(mask.shape)}; to pool {list(hidden.shape[:2])} tokens it must be [B, T]")
    return mask.to(hidden.device) != 0  # type: ignore[no-any-return]


def _of_padded(hidden: Tensor, real: Tensor, how: Pooling) -> Tensor:
    if how == "mean":  # what a kernel leaves in padding may be no number: it is put out, not multiplied by 0
        return torch.where(real[..., None], hidden, 0.0).sum(1) / real.sum(1, keepdim=True).clamp_min(1)
    size = hidden.shape[1]
    places = torch.arange(size, device=hidden.device)
    if how == "cls":
        at = torch.where(real, places, size - 1).amin(1)
    else:
        at = torch.where(real, places, 0).amax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), at]


def _of_packed(hidden: Tensor, lengths: list[int], how: Pooling) -> Tensor:
    sizes = torch.tensor(lengths, device=hidden.device)
    stops = sizes.cumsum(0)
    if how == "cls":
        return hidden[stops - sizes]
    if how == "last_token":
        return hidden[stops - 1]
    rows = torch.arange(len(lengths), device=hidden.device).repeat_interleave(sizes, output_size=len(hidden))
    return hidden.new_zeros(len(lengths), hidden.shape[1]).index_add(0, rows, hidden) / sizes[:, None]
