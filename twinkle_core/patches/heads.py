"""Heads that a patch puts on a network, and where engines find them (L2).

A head is a submodule of the model's ``module`` under a name of its own, so it travels, is saved and is trained as any part of
the network. An engine that has hidden states ``[B, T, D]`` computes ``embeddings`` and ``values`` with it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from twinkle_core.errors import PatchOrder, PatchRefused
from twinkle_core.ops.pooling import POOLINGS, Pooling, pool

#: names of the submodules
POOLING, VALUE_HEAD = "embedding_pooling", "value_head"
#: why an engine gives no embeddings, no values
NO_POOLING = "it has no pooling head; apply_patch('embedding', pooling=...) gives it one"
NO_VALUE_HEAD = "it has no value head; apply_patch('value_head') gives it one, before adapters and optimizer are set"


class PoolingHead(torch.nn.Module):
    """Hidden states to one vector a row; it has no parameters.

    Args:
        pooling: see ``twinkle_core.ops.pooling.pool``.
        normalize: to length 1.
    """

    def __init__(self, pooling: Pooling, normalize: bool) -> None:
        super().__init__()
        self.pooling, self.normalize = pooling, normalize

    def forward(self, hidden: Tensor, inputs: Any) -> Tensor:
        """``hidden`` ``[B, T, D]`` and the collated batch that it is of, to ``[rows, D]`` in at least float32."""
        pooled = pool(hidden, inputs, self.pooling)
        return functional.normalize(pooled, dim=-1) if self.normalize else pooled

    def extra_repr(self) -> str:
        """For printing the network."""
        return f"{self.pooling}, normalize={self.normalize}"


class ValueHead(torch.nn.Linear):
    """Hidden states ``[..., D]`` to one number each, ``[..., 1]``, in float32 whatever the network computes in.

    It begins with zeros: every state is worth 0, and no random number is drawn.
    """

    def __init__(self, width: int, device: Any = None) -> None:
        super().__init__(width, 1, device=device, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Zeros."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


def pooling_of(module: Any) -> PoolingHead | None:
    """The pooling head of a network, if it has one."""
    return cast("PoolingHead | None", getattr(module, POOLING, None))


def values_of(module: Any, hidden: Tensor) -> Tensor | None:
    """``[B, T]``: what a network's value head says of hidden states ``[B, T, D]``; None without a head."""
    head = getattr(module, VALUE_HEAD, None)
    return None if head is None else cast(Tensor, head(hidden)).squeeze(-1)


def check_pooling(patch: str, pooling: Any, normalize: Any) -> None:
    """Raise PatchRefused for an argument that is none of those there are."""
    if pooling not in POOLINGS:
        raise PatchRefused.argument(patch, "pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")
    if not isinstance(normalize, bool):
        raise PatchRefused.argument(patch, "normalize", normalize, "True or False")


def put(patch: str, module: Any, name: str, head: torch.nn.Module) -> None:
    """Give a network a head, where its place is free.

    Raises:
        PatchRefused: something has that name already.
    """
    if hasattr(module, name):
        what = f"it has a {type(getattr(module, name)).__name__} under the name '{name}' already"
        raise PatchRefused.of_model(
            patch, type(module).__name__, what, "Undo the patch that put it there, or use what there is"
        )
    module.add_module(name, head)


def take(patch: str, module: Any, name: str, head: torch.nn.Module) -> None:
    """Take away the head that ``put`` gave.

    Raises:
        PatchOrder: something else is in its place.
    """
    found = getattr(module, name, None)
    if found is not head:
        raise PatchOrder(patch, f"the {type(found).__name__} that is '{name}' now")
    delattr(module, name)
