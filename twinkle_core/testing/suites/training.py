"""Training a model for a few steps, and comparing what came of it (L2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.errors import Unsupported
from twinkle_core.types import InputFeature

Weights = dict[str, torch.Tensor]
Rows = Sequence[InputFeature]


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Torch's seed is 0 inside; on leaving, its random state is what it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def train(
    model: TwinkleModel, name: str, batches: Sequence[Rows], *, steps: int = 1, **how: Any
) -> list[tuple[float, float | None]]:
    """A backward for each batch, and an update after each ``steps`` of them: losses, and gradient norms (None: no update)."""
    found = []
    for batch in batches:
        loss = model.forward_backward(batch, adapter_name=name, gradient_accumulation_steps=steps, **how)
        found.append((float(loss), model.clip_grad_and_step(adapter_name=name, gradient_accumulation_steps=steps)))
    return found


def weights(model: TwinkleModel, name: str) -> Weights:
    """Copies of an adapter's weights."""
    return {key: tensor.detach().cpu().clone() for key, tensor in model.get_state_dict(adapter_name=name).items()}


def is_refused(call: Callable[[], Any]) -> bool:
    """Whether a call raises Unsupported."""
    try:
        call()
    except Unsupported:
        return True
    return False


def assert_same(found: Weights, expected: Weights) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    other = [key for key in found if not torch.equal(found[key], expected[key])]
    assert not other, f"{len(other)} of {len(found)} tensors differ: {', '.join(other[:3])}"


def assert_close(found: Weights, expected: Weights, start: Weights, tolerance: float, way: str) -> None:
    """Weights differ by no more than a share of what the training has changed."""
    assert found.keys() == expected.keys()
    changed = distance(expected, start)
    assert changed > 0, "the training changed nothing"
    error = distance(found, expected) / changed
    assert error <= tolerance, f"{way}: the weights differ by {error:.2g} of what the training has changed"


def distance(a: Weights, b: Weights) -> float:
    """Euclidean, over all tensors, in float64."""
    return float(sum(float((a[key].double() - b[key].double()).square().sum()) for key in a) ** 0.5)
