"""What is shared by those who compute logits of labelled rows alone, a chunk of rows at a time (L2)."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from twinkle_core.types import IGNORE_INDEX

#: bytes from which on memory comes fresh from the system each time (the upper limit of glibc's threshold)
FRESH = 2**25


def valid(labels: Tensor) -> Tensor:
    """Positions of flattened labels that are not -100. Waits for the device: how many there are sets the sizes."""
    return (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)


class _Taken(torch.autograd.Function):
    """Rows that are each taken once. Autograd's backward of ``index_select`` adds them up, one parallel region for each."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = flat.shape[0]
        return flat.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = grads
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy(0, index, gradient), None


def taken(flat: Tensor, index: Tensor) -> Tensor:
    """``flat[index]`` for an index that names no row twice."""
    return _Taken.apply(flat, index)  # type: ignore[no-untyped-call,no-any-return]


def cuts(count: int, chunk: int) -> Iterator[slice]:
    """Chunks of at most ``chunk`` rows, as even as they can be: a small rest would cost as much as a large one."""
    pieces = -(-count // chunk)
    return (slice(i * count // pieces, (i + 1) * count // pieces) for i in range(pieces))


def room(height: int, width: int, like: Tensor) -> Tensor:
    """An empty matrix with the type and device of ``like``; a large one on the CPU in huge pages, where the system has them.

    It is fresh memory each time, and to touch 100 MB of that in pages of 4 KiB takes as long as a matmul with 50 rows.
    """
    size = height * width * like.element_size()
    if like.device.type != "cpu" or size < FRESH or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(height, width)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(height, width)


def added(total: Tensor | None, dz: Tensor, rows: Tensor, wide: torch.dtype) -> Tensor:
    """``total + dz^T rows``, the gradient of a weight, in the type ``wide``; the first chunk needs no zeros to be added to."""
    if total is None:
        out = room(dz.shape[1], rows.shape[1], dz)
        return torch.mm(dz.t(), rows, out=out).to(wide)
    if total.dtype == dz.dtype:
        return total.addmm_(dz.t(), rows)
    return total.add_(dz.t() @ rows)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is nothing but ``x W^T + b``: no subclass, hook, parametrisation or sharding."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return False
    return type(layer.weight) in (nn.Parameter, Tensor)


def compute_dtype(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would do to a linear layer; here, because a custom function computes beyond its reach."""
    kind = rows.device.type
    if not torch.is_autocast_enabled(kind) or rows.dtype == torch.float64:
        return rows, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
