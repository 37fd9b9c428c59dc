"""The store of a model without adapters (L2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import BadAdapter, CheckpointMismatch, CheckpointNotFound, UnknownAdapter

WEIGHTS = "model.safetensors"


class SingleAdapter(AdapterStore):
    """BASE alone: all of a module's own weights. What a backend without adapters uses, and what other stores start from: one
    that overrides ``check``, ``parameters`` and ``state_dict`` for more names loads, writes and reads these too.

    Args:
        module: the model. Weights are written as one ``model.safetensors`` under the module's own names.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def names(self) -> list[str]:
        return []

    def check(self, name: str) -> None:
        """Raise UnknownAdapter unless there are weights of this name."""
        if name != BASE:
            raise UnknownAdapter(name, None, [])

    def acquire(self, name: str, config: Any) -> str:
        raise BadAdapter(name, f"{type(self.module).__name__} takes no adapters; it is trained as a whole (adapter_name='')")

    def release(self, name: str) -> None:
        raise UnknownAdapter(name, None, [])

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        self.check(name)
        yield

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        self.check(name)
        return {key: p for key, p in self.module.named_parameters() if p.requires_grad}

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        self.check(name)
        return dict(self.module.state_dict())

    def load_state_dict(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        live = self.state_dict(name)
        check_state(live, state, f"adapter '{name}'" if name else "weights")
        with torch.no_grad():
            for key, tensor in live.items():
                tensor.copy_(state[key])

    def write(self, name: str, folder: Path) -> None:
        save_file(distinct(self.state_dict(name)), folder / WEIGHTS)

    def read(self, name: str, folder: Path) -> dict[str, torch.Tensor]:
        self.check(name)
        if not (folder / WEIGHTS).is_file():
            raise CheckpointNotFound(str(folder / WEIGHTS), "there is no such file")
        state: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
        return state


def distinct(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that safetensors can write: contiguous, and each with memory of its own (tied weights are written twice)."""
    seen: set[int] = set()
    out: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        value = tensor.detach().contiguous()
        pointer = value.untyped_storage().data_ptr()
        shared = pointer in seen or value.untyped_storage().nbytes() != value.numel() * value.element_size()
        seen.add(pointer)
        out[key] = value.clone() if shared else value
    return out


def check_state(live: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], source: str) -> None:
    """Compare keys and shapes.

    Raises:
        CheckpointMismatch: names up to three keys that are missing, unknown or misshapen.
    """
    missing, unknown = sorted(live.keys() - state.keys()), sorted(state.keys() - live.keys())
    bent = [k for k in live if k in state and live[k].shape != state[k].shape]
    faults = [f"{word} {', '.join(keys[:3])}{' …' if len(keys) > 3 else ''}"
              for word, keys in (("it lacks", missing), ("unknown are", unknown)) if keys]  # fmt: skip
    faults += [f"{k} is {list(state[k].shape)}, here {list(live[k].shape)}" for k in bent[:3]]
    if faults:
        raise CheckpointMismatch(source, "; ".join(faults))
