"""Whether a row of a matmul is the same number for number, whatever other rows are there (L2).

It is not a matter of course: a kernel may be chosen by the number of rows, and sum in another order. Where it holds, rows of
several tenants can share a matmul without feeling one another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from twinkle_core.ops.matmul import kernel, linear, times

#: numbers of rows that are tried; the first is the least that a shared pass has
COUNTS = (16, 23, 64, 200, 512, 2048)


def rows_invariant(
    out: int, inner: int, dtype: torch.dtype, device: torch.device | str, counts: Sequence[int] = COUNTS
) -> bool:
    """Whether ``x W^T`` and ``g W`` give the first and the last 16 rows as they are alone, bit for bit, for all ``counts``.

    Asked by trying it, once for each shape, type, device and number of threads and kernel of a process.

    Args:
        out, inner: shape of W.
        counts: numbers of rows, from 16 up.
    """
    return _tried(out, inner, dtype, torch.device(device), tuple(counts), torch.get_num_threads(), kernel())


@functools.lru_cache(maxsize=256)
def _tried(
    out: int, inner: int, dtype: torch.dtype, device: torch.device, counts: tuple[int, ...], threads: int, by: str
) -> bool:
    draw = torch.Generator(device).manual_seed(0)
    weight, x, g = (
        torch.randn(shape, generator=draw, device=device).to(dtype)
        for shape in ((out, inner), (max(counts), inner), (max(counts), out))
    )
    with torch.no_grad():
        for rows, way in ((x, linear), (g, times)):
            first = way(rows[:16].clone(), weight)
            for count in counts:
                got, last = way(rows[:count].clone(), weight), way(rows[count - 16 : count].clone(), weight)
                if not (torch.equal(got[:16], first) and torch.equal(got[-16:], last)):
                    return False
    return True
