"""Attention of packed rows, one row at a time: transformers computes all pairs of a packed sequence and masks most of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from twinkle_transformers.tree import text_config

#: the name of ``row_attention`` among transformers' implementations
BY_ROW = "twinkle_by_row"
_lengths: ContextVar[Sequence[int]] = ContextVar("lengths of the packed rows", default=())


def row_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask for ``sdpa``, which carries the rows' lengths: a layer that is run again in backward gets it again."""
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    lengths = _lengths.get()
    if mask is not None and len(lengths) > 1 and tuple(mask.shape[2:]) == (sum(lengths),) * 2:
        mask.row_lengths = lengths  # type: ignore[attr-defined]
    return mask


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' ``sdpa``, each row for itself: the sum of T_i^2 pairs instead of (sum of T_i)^2.

    What the mask hides within a row (a sliding window) stays hidden. Without lengths, or where the queries and keys of a layer
    are not the packed tokens, all is computed at once.

    Args:
        query: ``[1, H, T, D]``; ``key``, ``value``: ``[1, H or fewer, T, D]``.
        attention_mask: from ``row_mask``, ``[1, 1, T, T]``, or None.

    Returns:
        ``[1, T, H, D]``, and None for the weights.
    """
    lengths = getattr(attention_mask, "row_lengths", ())
    whole = (query.shape[2], key.shape[2]) != (sum(lengths),) * 2 or kwargs.get("position_bias") is not None
    if attention_mask is None or whole:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows, start = [], 0
    for length in lengths:
        cut = slice(start, start := start + length)
        mask: torch.Tensor | None = attention_mask[:, :, cut, cut]
        given = kwargs
        if _is_causal(attention_mask[:, :, cut, cut]):  # without a mask kernels leave out what lies after a token
            mask, given = None, {**kwargs, "is_causal": True}
        rows.append(sdpa_attention_forward(module, query[:, :, cut], key[:, :, cut], value[:, :, cut], mask, **given)[0])
    return torch.cat(rows, 1), None


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask shows all that came before and nothing else. Asked on the CPU alone: elsewhere one waits for it."""
    if mask.device.type != "cpu" or mask.dtype != torch.bool:
        return False
    return torch.equal(mask, torch.ones(mask.shape[2:], dtype=torch.bool).tril().expand_as(mask))


AttentionInterface.register(BY_ROW, row_attention)
AttentionMaskInterface.register(BY_ROW, row_mask)


@contextlib.contextmanager
def by_row(module: Any, lengths: Sequence[int] | None = None) -> Iterator[None]:
    """Attention of packed rows row by row inside, where a model of transformers uses ``sdpa``; backward runs inside too.

    The layers of the text alone: another part of the model may see as many patches as there are tokens.

    Args:
        module: the model.
        lengths: of the rows of the packed batch whose forward runs inside; None for any other.
    """
    text = text_config(module)
    if getattr(text, "_attn_implementation", None) != "sdpa":
        yield
        return
    token = _lengths.set(tuple(lengths or ()))
    text._attn_implementation = BY_ROW
    try:
        yield
    finally:
        text._attn_implementation = "sdpa"
        _lengths.reset(token)
