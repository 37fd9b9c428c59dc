"""Optimizers over named parameters, and their state by name (L2)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from twinkle_core import arguments
from twinkle_core.errors import BadArgument, BadOptimizer, CheckpointMismatch, NotInOptimizer, NoTrainableParameters
from twinkle_core.ops.sharded import like
from twinkle_core.train.limits import A_TEXT, is_number, number_texts
from twinkle_core.train.plain import from_plain, to_plain

#: where a class takes them and the user gave none
DEFAULTS = {"lr": 1e-5, "weight_decay": 0.01}
#: options that say how an update is computed, and not what: on resume the live optimizer's count, which fit where tensors lie
HOW = frozenset({"foreach", "fused"})


def _takes(cls: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(cls).parameters)
    except (ValueError, TypeError):
        return set()


def check_kwargs(cls: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise WrongArgument for a keyword that the optimizer does not have, BadArgument for a text or rate that is no number."""
    arguments.check(cls, kwargs, positional=1)
    for key in number_texts(kwargs):
        raise BadArgument(key, kwargs[key], A_TEXT)
    for key in DEFAULTS.keys() & kwargs.keys() & _takes(cls):
        value = kwargs[key]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not is_number(value) or not 0 <= value < math.inf:
            raise BadArgument(key, kwargs[key], "a finite number of at least 0")


def build(
    cls: Callable[..., torch.optim.Optimizer],
    parameters: Mapping[str, torch.nn.Parameter],
    kwargs: Mapping[str, Any],
    adapter: str = "",
) -> torch.optim.Optimizer:
    """An optimizer over named parameters.

    Weight decay acts on matrices only: biases and the weights of norms (parameters of at most one axis) are in a group without.

    Args:
        cls: an optimizer class, or a function ``(parameters, **kwargs)`` that returns one.
        parameters: trainable ones, by plain name.
        kwargs: for ``cls``; lr 1e-5 and weight_decay 0.01 are filled in where it takes them.

    Raises:
        WrongArgument, NoTrainableParameters, BadOptimizer.
    """
    check_kwargs(cls, kwargs)
    if not parameters:
        raise NoTrainableParameters(adapter)
    takes = _takes(cls)
    settings = {key: value for key, value in DEFAULTS.items() if key in takes} | dict(kwargs)
    decay = settings.get("weight_decay") or 0.0
    groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
    if decay:
        flat = [p for p in parameters.values() if p.dim() <= 1]
        groups = [{"params": [p for p in parameters.values() if p.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]
    try:
        optimizer = cls([g for g in groups if g["params"]], **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise BadOptimizer(getattr(cls, "__name__", repr(cls)), f"of {described(settings)} it says: {error}") from error
    check_usable(optimizer)
    return optimizer


#: what an update depends on beside gradients, by its name in a parameter group
_RULE = ("lr", "weight_decay", "betas", "eps", "momentum")


def rule(optimizer: torch.optim.Optimizer) -> str:
    """By what rule the next update is made, in words: kind, rates and moments of its parameter groups. To six digits, so that
    machines that compute a schedule's cosine otherwise agree. Does not synchronise: a rate on a device isn't read."""
    found = {}
    for key in _RULE:
        values = [group[key] for group in optimizer.param_groups if key in group]
        plain = [v for v in values if not isinstance(v, torch.Tensor) or v.device.type == "cpu"]
        if plain:  # the largest: groups may differ from stage to stage of a pipeline, by what parameters are there
            found[key] = max(tuple(map(float, v)) if isinstance(v, (tuple, list)) else (float(v),) for v in plain)
    said = ", ".join(f"{key} {' '.join(f'{x:.6g}' for x in value)}" for key, value in found.items())
    return f"{type(optimizer).__name__} ({said})"


def described(kwargs: Mapping[str, Any]) -> str:
    """Keyword arguments as they are written in a call."""
    return ", ".join(f"{k}={v!r}" for k, v in kwargs.items()) or "no arguments"


def check_usable(optimizer: Any) -> None:
    """Raise BadOptimizer if it is none, needs a closure, or gradients of a form that no model here has."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadOptimizer(name, "it is not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise BadOptimizer(name, "it takes sparse gradients alone, and a backward gives dense ones; take 'adamw'")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise BadOptimizer(name, "its step() needs a closure that computes the loss again")


def check_covers(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise BadOptimizer if a ready-made optimizer holds parameters that are not this adapter's."""
    own = {id(p) for p in parameters.values()}
    foreign = sum(1 for group in optimizer.param_groups for p in group["params"] if id(p) not in own)
    if foreign:
        raise BadOptimizer(
            type(optimizer).__name__,
            f"{foreign} of its parameters are not trainable parameters of this adapter (give the class instead of an instance)",
        )


def check_knows(
    adapter: str,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    named: Mapping[str, torch.nn.Parameter],
) -> None:
    """Raise NotInOptimizer if something is trainable that was not when the optimizer was set, and has not been added to it.

    Args:
        parameters: what is trainable now. ``named``: what was when the optimizer was set (what that left out was told then).
    """
    told = {id(p) for p in named.values()}
    fresh = {name: p for name, p in parameters.items() if id(p) not in told}
    if fresh and (unknown := left_out(optimizer, fresh)):
        raise NotInOptimizer(adapter, list(unknown))


def check_same(
    adapter: str, parameters: Mapping[str, torch.nn.Parameter], named: Mapping[str, torch.nn.Parameter], count: int
) -> None:
    """Raise NotInOptimizer if an open window of ``count`` backwards began before one of the parameters was trained."""
    told = {id(p) for p in named.values()}
    if fresh := [name for name, p in parameters.items() if id(p) not in told]:
        raise NotInOptimizer(adapter, fresh, window=count)


def left_out(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters that the optimizer does not hold: they get gradients, and nothing uses them."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in parameters.items() if id(p) not in held}


def names_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[list[str]]:
    """The names of each group's parameters."""
    by_id = {id(p): name for name, p in parameters.items()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def state_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State as tensors and plain data, by parameter name.

    Returns:
        Tensors under ``<state>/<parameter>``, and ``{"class", "groups": [{"params": names, **hyperparameters}], "values":
        {parameter: {state: number}}}``.
    """
    kind = type(optimizer).__name__
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    names = names_of(optimizer, parameters)
    for group, members in zip(optimizer.param_groups, names, strict=True):
        for name, p in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}/{name}"] = value.detach()
                else:
                    values.setdefault(name, {})[key] = to_plain(value, f"state '{key}' of optimizer {kind}")
    groups = [
        {"params": members} | {k: to_plain(v, f"'{k}' of optimizer {kind}") for k, v in group.items() if k != "params"}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return tensors, {"class": kind, "groups": groups, "values": values}


def prepare_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    data: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """A state dict for ``optimizer.load_state_dict``, all checked; changes nothing.

    Raises:
        CheckpointMismatch: another class, other groups or other parameters. (Shapes are the fingerprint's: an optimizer may
        hold state of any shape.)
    """
    kind = type(optimizer).__name__
    if data["class"] != kind:
        raise CheckpointMismatch(source, f"it holds the state of {data['class']}, and the optimizer here is {kind}")
    names = names_of(optimizer, parameters)
    saved = [group["params"] for group in data["groups"]]
    if [sorted(n) for n in names] != [sorted(n) for n in saved]:
        ours, theirs = {n for g in names for n in g}, {n for g in saved for n in g}
        odd = sorted(ours ^ theirs)[:3] or ["the same parameters in other groups"]
        raise CheckpointMismatch(source, f"parameters differ: {', '.join(odd)}")
    position = {name: i for i, name in enumerate(n for group in names for n in group)}
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if name not in position:
            raise CheckpointMismatch(source, f"it holds state of the unknown parameter {name}")
        live = parameters[name]
        state.setdefault(position[name], {})[part] = like(tensor, live) if tensor.shape == live.shape else tensor
    for name, values in data["values"].items():
        if name not in position:
            raise CheckpointMismatch(source, f"it holds state of the unknown parameter {name}")
        state.setdefault(position[name], {}).update(values)
    groups = [
        {k: live[k] if k in HOW and k in live else from_plain(v, live.get(k)) for k, v in group.items() if k != "params"}
        | {"params": [position[n] for n in members]}
        for group, live, members in zip(data["groups"], optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}
