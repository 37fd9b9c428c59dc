"""Adapters that were trained elsewhere, brought to the form that Megatron's layers have, where they compute the same.

Megatron has ``q_proj``, ``k_proj`` and ``v_proj`` in one layer, and ``gate_proj`` and ``up_proj``: their adapter has one A for
all of them. One that has an A for each is the same as one of a higher rank, whose A are these below one another, and whose
B are zero where they meet another's A:

    [B_q 0 0; 0 B_k 0; 0 0 B_v] [A_q; A_k; A_v] x
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from twinkle_core.errors import BadAdapter

#: how a key of a PEFT file begins, and what follows the layer's name
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
Pair = tuple[torch.Tensor, torch.Tensor]


def joined(
    name: str,
    config: LoraConfig,
    state: Mapping[str, torch.Tensor],
    layers: Mapping[str, tuple[str, ...]],
    outputs: Mapping[str, int],
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Config and tensors of an adapter with one A for each of Megatron's layers, one rank and one scale; as given where it has.

    Args:
        layers: Megatron's layers, and the layers that each of them is.
        outputs: rows of the base model's weights by layer, for parts that the adapter leaves out.

    Raises:
        BadAdapter: a tensor that is no A or B of such a layer.
    """
    pairs = _pairs(name, state, {part for parts in layers.values() for part in parts})
    groups = _groups(pairs, layers)
    rank = max((sum(a.shape[0] for a in _different(group)) for group in groups.values()), default=config.r)
    plain = not (config.rank_pattern or config.alpha_pattern)
    if plain and rank == config.r and all(len(group) == len(parts) for (_, parts), group in groups.items()):
        return config, dict(state)
    scale = _scale(config.lora_alpha, config.r, config)
    found: dict[str, torch.Tensor] = {}
    for (place, parts), group in groups.items():
        rows = _different(group)
        whole = torch.cat([*rows, rows[0].new_zeros(rank - sum(len(a) for a in rows), rows[0].shape[1])])
        for part in parts:
            path = f"{place}.{part}"
            found[PREFIX + path + A] = whole.clone()
            found[PREFIX + path + B] = _spread(path, group.get(part), rows, rank, scale, config, outputs)
    ready = copy.copy(config)
    ready.r, ready.rank_pattern, ready.alpha_pattern = rank, {}, {}
    ready.lora_alpha = scale * (math.sqrt(rank) if config.use_rslora else rank)
    ready.target_modules = {part for _, parts in groups for part in parts}
    return ready, found


def _pairs(name: str, state: Mapping[str, torch.Tensor], known: set[str]) -> dict[str, Pair]:
    """A and B by the path of their layer."""
    paths = sorted({key.removeprefix(PREFIX).partition(".lora_")[0] for key in state})
    for path in paths:
        keys = (PREFIX + path + A, PREFIX + path + B)
        if path.rpartition(".")[2] not in known or not all(key in state for key in keys):
            raise BadAdapter(name, f"it holds '{path}', which is no pair of A and B of a layer that is known")
    odd = sorted(key for key in state if not key.endswith((A, B)))
    if odd:
        raise BadAdapter(name, f"it holds '{odd[0]}', which is neither an A nor a B")
    return {path: (state[PREFIX + path + A], state[PREFIX + path + B]) for path in paths}


def _groups(
    pairs: Mapping[str, Pair], layers: Mapping[str, tuple[str, ...]]
) -> dict[tuple[str, tuple[str, ...]], dict[str, Pair]]:
    """Pairs by Megatron's layer: where it is, and the parts of it that there are."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, Pair]] = {}
    for path, pair in pairs.items():
        place, _, part = path.rpartition(".")
        parts = next(parts for parts in layers.values() if part in parts)
        found.setdefault((place, parts), {})[part] = pair
    return found


def _different(group: Mapping[str, Pair]) -> list[torch.Tensor]:
    """The A of a layer's parts, each once."""
    found: list[torch.Tensor] = []
    for a, _ in group.values():
        if not any(torch.equal(a, other) for other in found):
            found.append(a)
    return found


def _spread(
    path: str,
    pair: Pair | None,
    rows: list[torch.Tensor],
    rank: int,
    scale: float,
    config: LoraConfig,
    outputs: Mapping[str, int],
) -> torch.Tensor:
    """A part's B ``[out, rank]``, at the columns of its own A; zeros for a part that has none."""
    if pair is None:
        return rows[0].new_zeros(outputs[path], rank)
    a, b = pair
    patterns: dict[str, Any] = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(patterns.keys(), path), config.lora_alpha)
    own = _scale(alpha, len(a), config)
    at = 0
    for other in rows:
        if torch.equal(a, other):
            break
        at += len(other)
    whole = b.new_zeros(b.shape[0], rank)
    whole[:, at : at + len(a)] = b if own == scale else b * (own / scale)
    return whole


def _scale(alpha: float, rank: int, config: LoraConfig) -> float:
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)
