"""Tensors of which each rank holds a part (torch's DTensor), and plain ones, under the same three words (L2).

torch.distributed is not imported until a DTensor is there: one can only come from it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def _dtensor() -> Any:
    """The class, where something has made one of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(x: Any) -> bool:
    """Whether ``x`` is a DTensor, however many ranks hold it."""
    cls = _dtensor()
    return cls is not None and isinstance(x, cls)


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its memory; a plain tensor itself. Outside of any graph."""
    return x._local_tensor if is_sharded(x) else x  # type: ignore[attr-defined]


def whole(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor on each rank; a plain tensor itself. All ranks that hold a part must call it together."""
    return x.detach().full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]


def like(x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """A whole tensor cut as ``live`` is, on its device; nothing is sent, so each rank must have the same ``x``."""
    if not is_sharded(live) or is_sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = live.device_mesh, live.placements  # type: ignore[attr-defined]
    return distribute_tensor(x.to(local(live).device), mesh, placements, src_data_rank=None)


def set_to(live: torch.Tensor, x: torch.Tensor) -> None:
    """Overwrite ``live`` with a whole tensor."""
    local(live).copy_(local(like(x, live)))
