"""Numbers, texts and lists as JSON holds them, and back in the form that a live object has (L2)."""

from __future__ import annotations

from typing import Any

import torch

from twinkle_core.errors import CheckpointUnfit

#: stands for a mapping whose keys are not texts, which JSON would make texts of
PAIRS = "__pairs__"


def to_plain(value: Any, what: str) -> Any:
    """``value`` as JSON holds it without loss.

    Args:
        what: whose it is, for the error.

    Raises:
        CheckpointUnfit: it holds something that is neither number, text, list nor mapping of these.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [to_plain(v, what) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: to_plain(v, what) for k, v in value.items()}
        return {PAIRS: [[to_plain(k, what), to_plain(v, what)] for k, v in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointUnfit(what, f"it holds {value!r} ({type(value).__name__}), which is neither number, text nor tensor")


def from_plain(value: Any, live: Any = None) -> Any:
    """What ``to_plain`` made, in the form that ``live`` has: a tuple, a tensor, a subclass of dict."""
    if isinstance(live, torch.Tensor):
        return torch.as_tensor(value, dtype=live.dtype, device=live.device)
    if isinstance(value, dict):
        if set(value) == {PAIRS}:
            value = {k: from_plain(v) for k, v in value[PAIRS]}
        else:
            value = {k: from_plain(v, live.get(k) if isinstance(live, dict) else None) for k, v in value.items()}
        return type(live)(value) if isinstance(live, dict) and type(live) is not dict else value
    if isinstance(value, list):
        lives = live if isinstance(live, (list, tuple)) and len(live) == len(value) else [None] * len(value)
        items = [from_plain(v, one) for v, one in zip(value, lives, strict=True)]
        return tuple(items) if isinstance(live, tuple) else items
    return value
