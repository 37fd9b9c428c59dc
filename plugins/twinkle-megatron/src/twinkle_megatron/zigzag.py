"""Which positions of a sequence a context rank holds: Megatron's zig-zag, one piece from the front and one from the back."""

from __future__ import annotations

import torch


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Of ``length`` positions, those of ``rank`` of ``size``, in the order in which it holds them.

    ``length`` must be a multiple of ``2 * size``: causal attention then costs all ranks the same.

    >>> positions(0, 2, 8).tolist(), positions(1, 2, 8).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    n = length // (2 * size)
    front = torch.arange(rank * n, (rank + 1) * n)
    return torch.cat([front, torch.arange((2 * size - rank - 1) * n, (2 * size - rank) * n)])
