"""Attention of packed rows, one row at a time: transformers computes all pairs of a packed sequence and masks most of them.

So a row costs what it does alone, and gives what it does alone: rows of several tenants may be packed.
"""

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
    """transformers' mask for ``sdpa``, which carries each row's own part of it as ``rows``, None for a row that is plainly
    causal. A layer that is run again in backward gets the mask again, in whatever thread that is."""
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    lengths = _lengths.get()
    packed = (kwargs.get("q_length"), kwargs.get("kv_length")) == (sum(lengths),) * 2
    if mask is None and packed and len(lengths) > 1:  # positions that go on from row to row look like one row
        device = kwargs.get("device", "cpu")
        blocks = [torch.ones(n, n, dtype=torch.bool, device=device).tril() for n in lengths]
        mask = torch.block_diag(*blocks).bool()[None, None]  # type: ignore[no-untyped-call]
    if mask is not None and lengths and tuple(mask.shape[2:]) == (sum(lengths),) * 2:
        mask.row_lengths = lengths  # type: ignore[attr-defined]
        mask.rows = _rows(mask, lengths)  # type: ignore[attr-defined]
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
    causal = {**kwargs, "is_causal": True}
    split = (torch.split(states, list(lengths), 2) for states in (query, key, value))
    rows = [
        sdpa_attention_forward(module, q, k, v, mask, **(causal if mask is None else kwargs))[0]
        for q, k, v, mask in zip(*split, attention_mask.rows, strict=True)  # type: ignore[attr-defined]
    ]
    return torch.cat(rows, 1), None


def _rows(mask: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor | None]:
    """Each row's part of a mask ``[1, 1, T, T]``; None where it shows all that came before and nothing else: without a mask
    kernels leave out what lies after a token. Asked once for all rows, since elsewhere than on the CPU one waits for it."""
    parts, start = [], 0
    for length in lengths:
        cut = slice(start, start := start + length)
        parts.append(mask[:, :, cut, cut])
    if mask.dtype != torch.bool:
        return list(parts)
    longest = torch.ones(max(lengths), max(lengths), dtype=torch.bool, device=mask.device).tril()
    same = torch.stack([(part == longest[: part.shape[2], : part.shape[2]]).all() for part in parts]).tolist()
    return [None if causal else part for part, causal in zip(parts, same, strict=True)]


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
