"""Tiny models whose gradients can be worked out by hand, and rows for them (L2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from twinkle_core.types import IGNORE_INDEX, InputFeature


class TinyLM(nn.Module):
    """Embedding, one hidden layer, dropout, output layer: ``forward`` gives hidden states ``[B, T, D]``.

    Each token sees itself and the mean of those before it in its row (``position_ids`` tell rows apart, so packing is exact).
    """

    def __init__(self, vocabulary: int = 11, width: int = 8, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.output_layer = nn.Linear(width, vocabulary, bias=bias)
        self.value_head = nn.Linear(width, 1)

    def forward(self, inputs: InputFeature) -> torch.Tensor:
        ids = inputs["input_ids"]
        x = self.embed(ids)
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rows = (positions == 0).cumsum(1)
        sees = (rows[:, :, None] == rows[:, None, :]) & (positions[:, :, None] >= positions[:, None, :])
        past = (sees.to(x.dtype) / sees.sum(-1, keepdim=True)) @ x
        return self.drop(self.norm(torch.tanh(self.mix(torch.cat([x, past], -1)))))  # type: ignore[no-any-return]


class TwoWords(nn.Module):
    """Vocabulary 2 and one trainable vector w = (0, 0): the logits at every position are w.

    A token with target 0 gives w the gradient (-0.5, 0.5), one with target 1 gives (0.5, -0.5); each loss is ln 2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.output_layer = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.output_layer.weight)

    @property
    def w(self) -> nn.Parameter:
        """The vector, ``[2, 1]``."""
        weight = self.output_layer.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(self, inputs: InputFeature) -> torch.Tensor:
        weight = self.output_layer.weight
        return torch.ones(*inputs["input_ids"].shape, 1, dtype=weight.dtype, device=weight.device)


def row(labels: Sequence[int], ids: Sequence[int] | None = None) -> InputFeature:
    """An encoded row with these aligned labels; the ids are zeros unless given."""
    tokens = list(ids) if ids is not None else [0] * len(labels)
    return {"input_ids": tokens, "labels": list(labels), "length": len(tokens)}


def random_rows(lengths: Sequence[int], vocabulary: int = 11, seed: int = 0, masked: float = 0.3) -> list[InputFeature]:
    """Rows of these lengths with a share of labels masked, but never all of a row."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        labels = torch.randint(0, vocabulary, (length,), generator=generator)
        labels[torch.rand(length, generator=generator) < masked] = IGNORE_INDEX
        labels[-1] = int(ids[0])
        rows.append(row(labels.tolist(), ids.tolist()))
    return rows


def logps_like(rows: Sequence[InputFeature], seed: int = 0) -> list[list[float]]:
    """Logps as another model might give them, one list a row: somewhat below and above log 1/11, the least sure."""
    generator = torch.Generator().manual_seed(seed)
    return [(-2.4 + 0.5 * torch.randn(len(r["input_ids"]), generator=generator)).tolist() for r in rows]


def contrast_rows(sizes: Sequence[int], seed: int = 0) -> list[InputFeature]:
    """Groups of an anchor, a positive and negatives: one label a row, 1 where a group begins."""
    rows = random_rows([2 + (3 * i) % 5 for i in range(sum(sizes))], seed=seed)
    starts = {sum(sizes[:i]) for i in range(len(sizes))}
    return [{**row, "labels": int(i in starts)} for i, row in enumerate(rows)]
