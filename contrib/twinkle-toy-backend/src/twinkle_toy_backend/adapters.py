"""Whose weights: low-rank adapters by name. The base model's part (``''``) is core's SingleAdapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import BadAdapter, DuplicateAdapter, UnknownAdapter
from twinkle_core.names import closest
from twinkle_core.train.single import SingleAdapter, check_state


class LowRank(nn.Linear):
    """``y = x Wᵀ + b``, and ``x Aᵀ Bᵀ`` more while an adapter is active. A and B are the store's, not this module's."""

    pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.pair is None else y + x @ self.pair[0].T @ self.pair[1].T


class ToyAdapters(SingleAdapter):
    """Adapters on every LowRank layer. A config is a rank, or the folder of an adapter that was saved."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._layers = {key: m for key, m in module.named_modules() if isinstance(m, LowRank)}
        self._weights: dict[str, dict[str, nn.Parameter]] = {}  # adapter -> "layer.A" or "layer.B" -> weights

    def names(self) -> list[str]:
        return list(self._weights)

    def check(self, name: str) -> None:
        if name != BASE and name not in self._weights:
            raise UnknownAdapter(name, closest(name, self.names()), self.names())

    def acquire(self, name: str, config: Any) -> str:
        if name in self._weights:
            raise DuplicateAdapter(name)
        if isinstance(config, (str, Path)):
            state = self.read(BASE, Path(config))
        elif type(config) is int and config > 0:
            state = self._start(config)
        else:
            raise BadAdapter(name, f"{config!r} is no rank (a whole number from 1 up) and no folder of a saved adapter")
        rank = next((len(t) for key, t in state.items() if key.endswith(".A")), 1)
        check_state(self._start(rank), state, str(config))
        self._weights[name] = {key: nn.Parameter(t.clone()) for key, t in state.items()}
        return name

    def _start(self, rank: int) -> dict[str, torch.Tensor]:
        """A by a fixed seed, so that all ranks begin alike; B zero, so that a new adapter changes nothing."""
        seed, state = torch.Generator().manual_seed(rank), {}
        for key, layer in self._layers.items():
            state[f"{key}.A"] = torch.randn(rank, layer.in_features, generator=seed) / layer.in_features**0.5
            state[f"{key}.B"] = torch.zeros(layer.out_features, rank)
        return state

    def release(self, name: str) -> None:
        self.check(name)
        del self._weights[name]

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        self.check(name)
        own = self._weights.get(name)
        pairs = {layer: layer.pair for layer in self._layers.values()}
        flags = {p: p.requires_grad for p in self.module.parameters()}
        try:
            for key, layer in self._layers.items():
                layer.pair = None if own is None else (own[f"{key}.A"], own[f"{key}.B"])
            for p in flags if own is not None else ():
                p.requires_grad_(False)  # the base rests while an adapter works
            yield
        finally:  # what was found, also after an exception
            for layer, pair in pairs.items():
                layer.pair = pair
            for p, flag in flags.items():
                p.requires_grad_(flag)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        self.check(name)
        return super().parameters(name) if name == BASE else dict(self._weights[name])

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        self.check(name)
        return super().state_dict(name) if name == BASE else {key: p.detach() for key, p in self._weights[name].items()}
