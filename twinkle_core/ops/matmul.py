"""Matmuls through a weight, outside autograd, by the kernel that is fastest for float32 on this processor (L2).

PyTorch gives float32 matmuls on x86 to MKL, which on other processors than Intel's can stay at half of what they reach
(measured on an AMD EPYC with AVX-512: 105 GFLOP/s a core, and 250 by oneDNN). oneDNN is part of PyTorch, which uses it for
bfloat16 and in compiled graphs. It sums in another order, so results agree to rounding.
``torch.backends.mkldnn.set_flags(False)`` turns it off.

Which kernel computes depends on the weight and the processor alone, never on the number of rows or on how they lie in memory.
So a row stays the same in any company (``row_invariance`` tries it).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

#: numbers in a weight from which on oneDNN is asked: a kernel is made for each new number of rows, in half a millisecond
LEAST = 2**16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``: ``[n, in]`` and ``[out, in]`` to ``[n, out]``. Without a graph: for the inside of autograd's functions."""
    if _by_onednn(x, weight, bias):
        laid = None if bias is None else bias.contiguous()  # the operator reads a bias as if its numbers lay side by side
        return _onednn()(x.contiguous(), weight, laid, "none", [], "")  # type: ignore[no-any-return]
    return torch.nn.functional.linear(x, weight, bias)


def times(g: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``g W``: ``[n, out]`` and ``[out, in]`` to ``[n, in]``. Without a graph. ``out``: where to put it."""
    if not _by_onednn(g, weight):
        return torch.mm(g, weight, out=out)
    found: Tensor = _onednn()(g.contiguous(), weight.t(), None, "none", [], "")
    return found if out is None else out.copy_(found)


def kernel() -> str:
    """What computes float32 matmuls through large weights here, in words."""
    return "oneDNN" if _onednn() is not None and torch.backends.mkldnn.enabled else "what PyTorch chooses"


def _by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = (rows, weight) if bias is None else (rows, weight, bias)
    if any(t.dtype != torch.float32 for t in given) or weight.numel() < LEAST or not rows.shape[0]:
        return False
    plain = type(rows) is Tensor and all(type(t) in (Tensor, torch.nn.Parameter) for t in given[1:])
    near = plain and weight.is_contiguous() and weight.device.type == "cpu"
    return near and _onednn() is not None and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _onednn() -> Any:
    """The operator, where it is there and faster than what PyTorch takes; else None."""
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not there or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
