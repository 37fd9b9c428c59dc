"""Tensors of all ranks, with a gradient to each (L2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The ranks of one mesh dimension as a loss sees them.

    Args:
        group: a process group of torch.distributed; None: its default one.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)

    def gather(self, x: Tensor) -> list[Tensor]:
        """``x`` ``[n, …]`` of each rank, in rank order; ``n`` may differ, the rest may not.

        All ranks must call it, and go backward through it, the same number of times. The gradient that a rank gets is that of
        the **sum** over ranks of what they compute from its rows. So where each rank's loss is a sum over its own items, and
        the sums are added up, gradients are those of one process with all rows. (``torch.distributed.all_gather`` has none.)
        """
        return list(_Gather.apply(x, self.group))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> tuple[Tensor, ...]:
        size, index = dist.get_world_size(group), dist.get_rank(group)
        counts = [torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([x.shape[0]], device=x.device), group=group)
        rows = [int(n) for n in counts]
        padded = x.new_zeros((max(rows), *x.shape[1:]))  # the ranks' tensors must have one shape on the way
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        ctx.group, ctx.rows, ctx.index = group, rows, index
        return tuple(part[:n].clone() for part, n in zip(parts, rows, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        everything = torch.cat(grads)
        dist.all_reduce(everything, group=ctx.group)
        start = sum(ctx.rows[: ctx.index])
        return everything[start : start + ctx.rows[ctx.index]], None
