"""Where tenants' own graphs meet the pass that they share: cut off for their losses, joined again by gradients, all or none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Seam:
    """An output of a pass, and the leaf that a tenant's loss sees of it."""

    root: torch.Tensor
    leaf: torch.Tensor


class _Handed(torch.autograd.Function):
    """The same numbers, and no leaf: so a loss may change them in place, as it may any output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def cut_off(root: torch.Tensor, seams: list[Seam] | None) -> torch.Tensor:
    """An output as a tenant's loss sees it: with ``seams``, its graph ends here, and a seam tells where the pass goes on."""
    if seams is None or not root.requires_grad:
        return root
    leaf = root.detach().requires_grad_()
    seams.append(Seam(root, leaf))
    return _Handed.apply(leaf)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def added(own: Mapping[int, Sequence[torch.nn.Parameter]], failed: Collection[int]) -> Iterator[None]:
    """Gradients that are made inside are added to those that were there when all are made; an exception leaves what was.

    Those of slots that ``failed`` stay what they were: their rows went through the model with those of others, and a backward
    gives each row a gradient, if only 0 (or NaN, where a number in it is not finite).

    Args:
        own: the parameters of each slot in the pass.
    """
    before = {parameter: parameter.grad for parameters in own.values() for parameter in parameters}
    after = dict(before)
    for parameter in before:
        parameter.grad = None
    try:
        yield
        for slot, parameters in own.items():
            for p in parameters if slot not in failed else ():
                old, new = before[p], p.grad
                after[p] = new if old is None else old if new is None else old + new
    except BaseException:
        after = before
        raise
    finally:
        for parameter, gradient in after.items():
            parameter.grad = gradient
