"""Bringing the answers of workers together, and what of an answer can travel (L0)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from twinkle_core.errors import NotCollected
from twinkle_core.runtime.calls import Rows


def together(function: str, how: str | Callable[..., Any], answers: Sequence[Any], counts: Sequence[int] | None = None) -> Any:
    """One answer of several, as ``remote_function`` describes.

    Args:
        answers: of those whose answer counts, in the order of their rows.
        counts: how many rows each had; None where none were divided.

    Raises:
        NotCollected: the answers are not of the kind that was declared.
    """
    if callable(how):
        return how(list(answers))
    if how == "none":
        return None if all(answer is None for answer in answers) else list(answers)
    if how in ("first", "metric", "context"):
        return answers[0]
    weights: list[int] = [1] * len(answers) if counts is None or not any(counts) else list(counts)
    try:
        if how == "flatten":
            return list(itertools.chain.from_iterable(answers))
        if how == "sum":
            return _weighted(answers, [1] * len(answers), 1)
        if how == "mean":
            counted = [(answer, weight) for answer, weight in zip(answers, weights, strict=True) if weight]
            return _weighted([a for a, _ in counted], [w for _, w in counted], sum(weights))
        if how == "loss":
            return _loss(answers)
        if how == "loss_each":
            return {name: _loss([answer[name] for answer in answers]) for name in answers[0]}
        return _rows([part for part, w in zip(answers, weights, strict=True) if w], [w for w in weights if w])
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise NotCollected(function, how, f"{type(error).__name__}: {error}") from error


def _loss(parts: Sequence[Any]) -> float:
    """The mean of (sum, weight) of each data rank."""
    total, weight = (sum(part[i] for part in parts) for i in (0, 1))
    return float(total / weight if weight else total)


def _weighted(values: Sequence[Any], weights: Sequence[int], total: float) -> Any:
    """Σ weight · value / total, of numbers or tensors, or of each entry of mappings of these."""
    if isinstance(values[0], Mapping):
        return {key: _weighted([value[key] for value in values], weights, total) for key in values[0]}
    summed = sum(value * weight for value, weight in zip(values[1:], weights[1:], strict=True))
    return (values[0] * weights[0] + summed) / total if total != 1 else values[0] * weights[0] + summed


def _rows(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Outputs of data ranks as one, in row order; lists one after the other."""
    if not isinstance(parts[0], Rows):
        return list(itertools.chain.from_iterable(parts))
    import torch

    from twinkle_core.train import micro
    from twinkle_core.types import ModelOutput

    joined = []
    for part, count in zip(parts, counts, strict=True):
        layout = {"seq_lens": [1] * count} if part.packed else {"input_ids": torch.empty(count, 0)}
        joined.append((layout, part.output))
    return ModelOutput(micro.join(joined, pad_left=parts[0].left))


def portable(value: Any) -> Any:
    """A value as another process can use it: tensors on the CPU, without graph, and whole where ranks hold parts of them (all
    ranks must be here then). Modules among the entries of a mapping stay behind."""
    import torch

    from twinkle_core.ops.sharded import whole

    def walk(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return whole(x).detach().cpu()
        if isinstance(x, Rows):
            return Rows(walk(x.output), x.packed, x.left)
        if isinstance(x, dict):
            return _like(x, ((k, walk(v)) for k, v in x.items() if not isinstance(v, torch.nn.Module)))
        if type(x) in (list, tuple):
            return type(x)(map(walk, x))
        return x

    return walk(value)


def _like(given: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    from twinkle_core.types import ModelOutput

    return ModelOutput(items) if type(given) is ModelOutput else dict(items)
