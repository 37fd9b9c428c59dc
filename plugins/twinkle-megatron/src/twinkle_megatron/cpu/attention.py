"""Attention as Transformer Engine's core attention does it, by torch's own: causal, packed, and split over context ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from twinkle_megatron.zigzag import positions


class DotProductAttention(nn.Module):
    """``[T, B, H, D]`` to ``[T, B, H * D]``; packed rows as ``[T, H, D]``.

    Of a sequence that is split over context ranks (Megatron's zig-zag), keys and values are gathered: each rank has its own
    queries and sees what lies before them.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        cp_group: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.attn_mask_type, self.softmax_scale = attn_mask_type, softmax_scale
        self.dropout, self.cp_group = attention_dropout, cp_group

    def _attend(self, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )
        return y.permute(2, 0, 1, 3).flatten(2)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        attention_mask: Any = None,
        qkv_format: str = "sbhd",
        attn_mask_type: str | None = None,
        cu_seqlens_q: Any = None,
        **unused: Any,
    ) -> Any:
        kind = attn_mask_type or self.attn_mask_type
        if qkv_format == "thd":
            cuts = cu_seqlens_q.tolist()
            rows = [(a, b) for a, b in itertools.pairwise(cuts) if b > a]
            return torch.cat([self._attend(q[a:b, None], k[a:b, None], v[a:b, None], None, True)[:, 0] for a, b in rows])
        size = self.cp_group.size() if self.cp_group is not None else 1
        if size > 1:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather

            k, v = (gather(x.contiguous(), group=self.cp_group) for x in (k, v))
            total = k.size(0)
            keys = torch.cat([positions(rank, size, total) for rank in range(size)])
            mine = positions(self.cp_group.rank(), size, total)
            return self._attend(q, k, v, keys[None] <= mine[:, None], False)
        if "causal" in kind and (attention_mask is None or "padding" not in kind):
            return self._attend(q, k, v, None, True)
        return self._attend(q, k, v, None if attention_mask is None else ~attention_mask, False)
