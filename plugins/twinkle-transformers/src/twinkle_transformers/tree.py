"""A model's tree with peft's layers in it: the plain view of the base model, and a copy of the tree without weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinkle_core.ops.sharded import is_sharded, local


def text_config(module: Any) -> Any:
    """The config of a model's text part; None for a module without a config."""
    config = getattr(module, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def peft_layers(module: torch.nn.Module) -> list[Any]:
    """All layers of peft's, outermost first."""
    return [m for m in module.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """What a layer of peft's stands in for; None for any other module."""
    if isinstance(module, BaseTunerLayer):
        return module.base_layer  # type: ignore[no-any-return]
    if isinstance(module, AuxiliaryTrainingWrapper):
        return module.original_module  # type: ignore[no-any-return]
    return None


def unwrap(module: torch.nn.Module) -> None:
    """Put what peft's layers stand in for back into their places, and forget peft's configs."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            while child is not None and (inner := _wrapped(child)) is not None:
                child = inner
                setattr(parent, name, child)
    module.__dict__.pop("peft_config", None)


def plain_modules(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """``named_modules`` of the base model as it was before any adapter: peft's layers are looked through."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from plain_modules(child, f"{prefix}.{name}" if prefix else name)


def plain_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The base model's parameters under its own names, each once (a tied one under its first name)."""
    found: dict[str, torch.nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, part in plain_modules(module):
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def plain_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The base model's ``state_dict`` under its own names: live tensors; a tied weight under each of its names."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in plain_modules(module):
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = tensor.detach()
    return found


def untied_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """``plain_state`` with a tied weight under its first name alone. (By the parameter: of parts that are empty on a rank the
    storage says nothing.)"""
    again = {
        f"{prefix}.{name}" if prefix else name for prefix, part in plain_modules(module) for name in part._parameters
    } - plain_parameters(module).keys()
    return {name: tensor for name, tensor in plain_state(module).items() if name not in again}


def weight_of(layer: Any) -> torch.Tensor:
    """The weight of a layer of the base model, looked for through peft's layers."""
    while hasattr(layer, "base_layer") or hasattr(layer, "original_module"):
        layer = layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
    return layer.weight  # type: ignore[no-any-return]


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, ``found`` gathers the names of parameters whose values something looks at. Types and shapes are no values.

    Args:
        parameters: those to watch, by name. Their storages are watched, so a view or an alias counts too.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                name = self._names.get(value.untyped_storage()._cdata)
                if name is not None:
                    self.found.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_ins(module: torch.nn.Module) -> Iterator[None]:
    """Inside, parameters that lie apart on ranks are plain ones of the whole's shape that hold one number: what is put beside
    them takes their shape, type and device. (peft would take the shape of a part.)"""
    found = [(m, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None and is_sharded(p)]
    plain: dict[int, torch.nn.Parameter] = {}
    try:
        for m, name, p in found:
            empty = torch.zeros((), dtype=p.dtype, device=local(p).device).expand(p.shape)
            m._parameters[name] = plain.setdefault(id(p), torch.nn.Parameter(empty, requires_grad=p.requires_grad))
        yield
    finally:
        for m, name, p in found:
            m._parameters[name] = p


def skeleton(module: torch.nn.Module, weightless: bool = True) -> Any:
    """A copy of the module tree whose parameters have shapes but no storage; nothing done to it reaches the original.

    With ``weightless=False`` they share the original's storage: reading is possible then, and writing would be seen.

    Used to rehearse a change: what peft would refuse, and which tensors it would make, is known before the model is
    touched. Configs and other plain attributes are shared, containers are copied one level deep, ties stay ties.
    """
    copies: dict[int, Any] = {}

    def tensor(t: torch.Tensor | None) -> Any:
        if t is None:
            return None
        if id(t) not in copies:
            # by shape: of a tensor that lies apart on ranks the whole is meant
            copy = torch.empty(t.shape, dtype=t.dtype, device="meta") if weightless else t.detach()
            whole = isinstance(t, torch.nn.Parameter)
            copies[id(t)] = torch.nn.Parameter(copy, requires_grad=t.requires_grad) if whole else copy
        return copies[id(t)]

    def visit(m: torch.nn.Module) -> Any:
        if id(m) not in copies:
            new = copies[id(m)] = object.__new__(type(m))
            attributes = {k: v.copy() if type(v) in (dict, list, set, OrderedDict) else v for k, v in m.__dict__.items()}
            new.__dict__.update(attributes)
            new.__dict__["_parameters"] = {k: tensor(p) for k, p in m._parameters.items()}
            new.__dict__["_buffers"] = {k: tensor(b) for k, b in m._buffers.items()}
            new.__dict__["_modules"] = {k: None if c is None else visit(c) for k, c in m._modules.items()}
        return copies[id(m)]

    return visit(module)
