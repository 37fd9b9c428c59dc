"""Attention of a packed pass: one causal call for each row, so that a row costs and gives what it does alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from twinkle_core.errors import RowsNotApart

#: what configs call it
NAME = "twinkle_rows"
#: id of a config -> lengths of the rows of the pass that is running. Keyed, so that two models may run at once; no context
#: variable, because backward may compute a layer anew in a thread of its own.
_LENGTHS: dict[int, list[int]] = {}
#: what some models hand to their attention beyond q, k, v, and this one doesn't know
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: ``[1, heads, T, d]`` each; returns ``[1, T, heads, d]``.

    Raises:
        RowsNotApart: it is more than causal softmax attention.
    """
    lengths = _LENGTHS[id(module.config)]
    more = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if more or dropout or not causal or attention_mask is not None:
        raise RowsNotApart(type(module).__name__, ", ".join(more) or "a mask, dropout, or a look ahead")
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for q, k, v in zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True):
        n = q.shape[2]
        mask = None
        if sliding_window is not None and n > sliding_window:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None and n > 1, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)


def configs_of(module: torch.nn.Module) -> list[Any]:
    """The configs that a model's modules ask how attention is computed, each once."""
    found = {id(m.config): m.config for m in module.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


@contextmanager
def rows_apart(configs: Sequence[Any], lengths: Sequence[int]) -> Iterator[None]:
    """Inside, the attention of the model with these configs takes one sequence ``[1, T]`` for rows of these lengths."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
            _LENGTHS[id(config)] = list(lengths)
        yield
    finally:
        for config, how in zip(configs, before, strict=True):
            config._attn_implementation_internal = how
            _LENGTHS.pop(id(config), None)
