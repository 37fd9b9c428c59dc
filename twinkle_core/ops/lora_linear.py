"""Linear layers with LoRA: one adapter for all rows, or each tenant's own adapter for its own rows (L2).

    y = x W^T + bias + s (d(x) A^T) B^T,    d: the adapter's dropout, s: its scale

Written as layers of their own, the output of B, its product with s and the sum are three more tensors as large as the output,
and as many gradients. Here low-rank products are added in place, and x (or d(x), where there is dropout) and A d(x) are kept:

    dx = g W + d'(s (g B) A),   dA = s (g B)^T d(x),   dB = s g^T (d(x) A^T)

``W`` is frozen; a weight that trains goes by autograd's own layers. Products of low rank are laid out ``[r, rows]``: with r as
the number of columns a matmul on the CPU takes two to four times as long.

What a tenant's rows give depends on these rows alone: every product of its adapter and every gradient is over them alone, and
its dropout is drawn from a seed of its own. What they share is ``x W^T`` and ``g W``, whose rows do not depend on one another
as long as the matmul's kernel treats them alike; where it does not, ``apart`` makes them one matmul a tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from twinkle_core.errors import RowsDisagree
from twinkle_core.ops.matmul import linear, times


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which numbers an adapter's dropout sets to 0: a function of a seed, so backward and a checkpointed forward draw the same.

    ``rate``: the share that is set to 0; the others are divided by ``1 - rate``. ``seed``: see ``dropout_seed``.
    """

    rate: float
    seed: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x [n, D]`` with its dropout. Also the way back: it is a product with a fixed matrix."""
        if self.rate >= 1.0:
            return torch.zeros_like(x)
        generator = torch.Generator(x.device).manual_seed(self.seed)
        kept = torch.empty_like(x).bernoulli_(1.0 - self.rate, generator=generator)
        return kept.mul_(x).div_(1.0 - self.rate)


def dropout_seed(*key: object) -> int:
    """A seed for a key, such as (the tenant's seed, its step, the layer's name): the same for the same key, everywhere."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter at one layer: ``a [r, in]``, ``b [out, r]``, ``scale`` and, in training, its dropout."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: Dropout | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``s (d(x) A^T) B^T`` by autograd, as the formula stands: ``[n, in]`` to ``[n, out]``."""
        x = x if self.dropout is None else x * self.dropout(torch.ones_like(x))
        return F.linear(F.linear(x, self.a), self.b) * self.scale


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, *, dropped: Tensor | None = None
) -> Tensor:
    """A linear layer with one adapter.

    Args:
        x: ``[..., in]``.
        weight, bias: of the base layer, ``[out, in]`` and ``[out]``.
        a, b, scale: the adapter, ``[r, in]`` and ``[out, r]``.
        dropped: ``x`` after the adapter's dropout, where the caller has drawn it; default: no dropout.

    Returns:
        ``[..., out]``, in the types that linear layers would give, under autocast too.
    """
    if weight.requires_grad and torch.is_grad_enabled():
        return F.linear(x, weight, bias) + F.linear(F.linear(x if dropped is None else dropped, a), b) * scale
    x, weight, bias, a, b, dropped = _cast(x, weight, bias, a, b, dropped)
    rows = (x.numel() // x.shape[-1],)
    return _LoraLinear.apply(x, dropped, weight, bias, rows, (scale,), (None,), False, a, b)  # type: ignore[no-any-return,no-untyped-call]


def lora_linear_many(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sequence[int], adapters: Sequence[Lora | None], *, apart: bool = False
) -> Tensor:
    """A linear layer in which each tenant's rows meet its own adapter.

    Args:
        x: ``[..., in]``, flattened to rows that are sorted by tenant.
        weight, bias: of the base layer; the weight is frozen.
        rows: how many rows each tenant has; together all of them.
        adapters: each tenant's, of any rank; None: the base layer alone.
        apart: one matmul with ``weight`` a tenant, over its own rows alone, in place of one for all.

    Returns:
        ``[..., out]``.

    Raises:
        RowsDisagree: ``rows`` do not add up to the rows of ``x``, or are not as many as adapters.
    """
    found = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if len(rows) != len(adapters) or sum(rows) != found:
        raise RowsDisagree(list(rows), len(adapters), found)
    factors = [t for lora in adapters if lora is not None for t in (lora.a, lora.b)]
    if weight.requires_grad and torch.is_grad_enabled():
        return _by_autograd(x, weight, bias, rows, adapters)
    x, weight, bias, *cast = _cast(x, weight, bias, *factors)
    pairs = iter(cast)
    flat = [next(pairs) if lora is not None else None for lora in adapters for _ in range(2)]
    scales = tuple(lora.scale if lora is not None else 0.0 for lora in adapters)
    drops = tuple(lora.dropout if lora is not None else None for lora in adapters)
    return _LoraLinear.apply(x, None, weight, bias, tuple(rows), scales, drops, apart, *flat)  # type: ignore[no-any-return,no-untyped-call]


class _LoraLinear(torch.autograd.Function):
    """Saved: the input (after the caller's dropout, where there is one), and ``A d(x)`` of each tenant, ``[r, rows]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, rows: tuple[int, ...],
        scales: tuple[float, ...], drops: tuple[Dropout | None, ...], apart: bool, *factors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        flat = x.reshape(-1, x.shape[-1])
        kept = flat if dropped is None else dropped.reshape(-1, x.shape[-1])
        if apart:
            y = torch.cat([linear(flat[cut], weight, bias) for cut in _cuts(rows)])
        else:
            y = linear(flat, weight, bias)
        low: list[Tensor | None] = []
        for cut, scale, drop, (a, b) in zip(_cuts(rows), scales, drops, _pairs(factors), strict=True):
            if a is None or b is None:
                low.append(None)
                continue
            part = kept[cut] if drop is None else drop(kept[cut])
            low.append(a @ part.t())
            y[cut].addmm_(low[-1].t(), b.t(), alpha=scale)  # type: ignore[union-attr]
        ctx.settings = (rows, scales, drops, apart, dropped is not None, len(factors))
        ctx.save_for_backward(kept, weight, *factors, *low)
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, scales, drops, apart, given, count = ctx.settings
        kept, weight, *rest = ctx.saved_tensors
        factors, low = rest[:count], rest[count:]
        g = gradient.reshape(-1, gradient.shape[-1])
        wants_x, wants_dropped = ctx.needs_input_grad[:2]
        d_x = d_dropped = None
        if wants_x:
            d_x = torch.cat([times(g[cut], weight) for cut in _cuts(rows)]) if apart else times(g, weight)
        if wants_dropped:
            d_dropped = torch.zeros_like(kept)
        target = d_dropped if given else d_x
        d_factors: list[Tensor | None] = []
        nothing = g.new_empty(())  # times 0: with ``alpha`` the scale costs no pass of its own
        for i, (cut, scale, drop, (a, b)) in enumerate(zip(_cuts(rows), scales, drops, _pairs(factors), strict=True)):
            wants_a, wants_b = ctx.needs_input_grad[8 + 2 * i : 10 + 2 * i]
            if a is None or b is None:
                d_factors += [None, None]
                continue
            own = g[cut]
            g_low = torch.addmm(nothing, b.t(), own.t(), beta=0, alpha=scale)
            d_factors.append(g_low @ (kept[cut] if drop is None else drop(kept[cut])) if wants_a else None)
            d_factors.append(torch.addmm(nothing, low[i], own, beta=0, alpha=scale).t() if wants_b else None)
            if target is not None and drop is None:
                target[cut].addmm_(g_low.t(), a)
            elif target is not None and drop is not None:
                target[cut].add_(drop(g_low.t() @ a))
        d_bias = g.sum(0) if ctx.needs_input_grad[3] else None
        shaped = (None if t is None else t.view(ctx.shape) for t in (d_x, d_dropped))
        return (*shaped, None, d_bias, None, None, None, None, *d_factors)


def one_type(x: Tensor, *others: Tensor) -> bool:
    """Whether linear layers would compute in one type: that of all, or autocast's. Else theirs is not what is computed here."""
    if torch.is_autocast_enabled(x.device.type):
        return all(t.dtype != torch.float64 for t in (x, *others))
    return all(t.dtype == x.dtype for t in others)


def _by_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sequence[int], adapters: Sequence[Lora | None]
) -> Tensor:
    """The formula as it stands, for a weight that trains."""
    parts = []
    for cut, lora in zip(_cuts(rows), adapters, strict=True):
        part = x.reshape(-1, x.shape[-1])[cut]
        y = F.linear(part, weight, bias)
        parts.append(y if lora is None else y + lora(part))
    return torch.cat(parts).view(*x.shape[:-1], weight.shape[0])


def _cuts(rows: Sequence[int]) -> Iterator[slice]:
    start = 0
    for count in rows:
        yield slice(start, start + count)
        start += count


def _pairs(factors: Sequence[Tensor | None]) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    return zip(factors[::2], factors[1::2], strict=True)


def _cast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """What autocast would do to linear layers; here, because a custom function computes beyond its reach."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, *others
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), *(None if t is None else t.to(dtype) for t in others)
