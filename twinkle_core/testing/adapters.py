"""A store with adapters over one number, for tests of who is active (L2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import BadAdapter, CheckpointNotFound, DuplicateAdapter, UnknownAdapter
from twinkle_core.train.single import check_state, distinct
from twinkle_core.types import InputFeature


class ToyLinear(nn.Module):
    """y = W x + B A x of each token id x, with W = 2 frozen, A = 1, and B of the active adapter. Read as ``values``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.lora = nn.ModuleDict()
        self.active = BASE
        self.output_layer = nn.Identity()
        self.value_head = nn.Identity()

    def forward(self, inputs: InputFeature) -> torch.Tensor:
        x: torch.Tensor = inputs["input_ids"].to(self.weight.dtype)[..., None]
        y = self.weight * x
        if self.active != BASE:
            pair: Any = self.lora[self.active]
            y = y + pair["B"] * pair["A"] * x
        return y


class ToyAdapters(AdapterStore):
    """Adapters of a ToyLinear. A config is the value of B."""

    def __init__(self, module: ToyLinear) -> None:
        self.module = module

    def names(self) -> list[str]:
        return list(self.module.lora)

    def _check(self, name: str) -> None:
        if name != BASE and name not in self.module.lora:
            raise UnknownAdapter(name, None, self.names())

    def acquire(self, name: str, config: Any) -> str:
        if name in self.module.lora:
            raise DuplicateAdapter(name)
        if not isinstance(config, (int, float)):
            raise BadAdapter(name, f"{config!r} is not a number")
        one = self.module.weight.new_ones(())
        pair = nn.ParameterDict({"A": nn.Parameter(one.clone()), "B": nn.Parameter(one * float(config))})
        self.module.lora[name] = pair.requires_grad_(False)
        return name

    def release(self, name: str) -> None:
        self._check(name)
        del self.module.lora[name]

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        self._check(name)
        found = self.module.active, {key: p.requires_grad for key, p in self.module.named_parameters()}
        self.module.active = name
        for key, p in self.module.named_parameters():
            p.requires_grad_(bool(name) and key.startswith(f"lora.{name}."))
        try:
            yield
        finally:
            self.module.active = found[0]
            for key, p in self.module.named_parameters():
                p.requires_grad_(found[1].get(key, False))

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        self._check(name)
        return dict(self.module.lora[name].named_parameters()) if name else {}

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        self._check(name)
        return dict(self.module.lora[name].state_dict()) if name else {"weight": self.module.weight.detach()}

    def load_state_dict(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        live = self.state_dict(name)
        check_state(live, state, "adapter.safetensors")
        for key, tensor in live.items():
            tensor.copy_(state[key])

    def write(self, name: str, folder: Path) -> None:
        save_file(distinct(self.state_dict(name)), folder / "adapter.safetensors")

    def read(self, name: str, folder: Path) -> dict[str, torch.Tensor]:
        path = folder / "adapter.safetensors"
        if not path.is_file():
            raise CheckpointNotFound(str(path), "there is no such file")
        state: dict[str, torch.Tensor] = load_file(path)
        return state
