"""Which options of a tenant's LoraConfig a slot serves. What it can't serve is refused by name; nothing is passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from peft import LoraConfig

from twinkle_core.errors import BadAdapter, RankTooLarge
from twinkle_core.names import closest

#: Fields that are honoured, and those that say nothing about what is computed.
_SERVED = frozenset(
    {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "inference_mode"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "task_type", "peft_type"}
    | {"auto_mapping", "base_model_name_or_path", "peft_version", "revision", "ensure_weight_tying"}
    | {"loftq_config", "corda_config", "eva_config", "lora_ga_config", "qalora_group_size", "runtime_config"}  # of refused ones
)
#: Why a slot can't serve an option, where more is to be said than that it is no part of a plain ``B A x``.
_WHY = {
    "modules_to_save": "whole modules are not in the slots; the base model is shared by all tenants",
    "bias": "biases belong to the base model, which all tenants share",
    "use_dora": "its magnitudes depend on the base weights' norms and have no room in a slot",
    "lora_bias": "a slot holds A and B alone",
    "trainable_token_indices": "embeddings belong to the base model, which all tenants share",
    "target_parameters": "slots are beside linear layers, not beside single parameters",
}


def check_options(name: str, config: Any) -> None:
    """Raise BadAdapter unless a config is LoRA, and all that it asks for is something that slots serve."""
    if type(config) is not LoraConfig:
        raise BadAdapter(name, f"slots hold LoRA, and this is {type(config).__name__}; use peft.LoraConfig")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _SERVED or not value or value == _default(field):
            continue
        why = _WHY.get(field.name, "it changes more than the A and B that a slot holds")
        raise BadAdapter(
            name, f"{field.name}={value!r} can't be served by a slot: {why}. Leave it out, or use TransformersModel"
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def check_ranks(name: str, config: LoraConfig, max_r: int) -> None:
    """Raise unless all ranks are whole numbers from 1 to ``max_r``.

    Raises:
        RankTooLarge: one is more than a slot holds. BadAdapter: one is no rank.
    """
    patterns = config.rank_pattern if isinstance(config.rank_pattern, Mapping) else {}
    ranks = {"r": config.r} | {f"rank_pattern[{key!r}]": rank for key, rank in patterns.items()}
    for where, rank in ranks.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise BadAdapter(name, f"{where}={rank!r} must be a whole number from 1 to {max_r}")
        if rank > max_r:
            raise RankTooLarge(name, where, rank, max_r)


def check_targets(name: str, found: Iterable[str], slots: Iterable[str]) -> None:
    """Raise BadAdapter if modules are meant that have no slots."""
    places = set(slots)
    outside = [module for module in found if module not in places]
    if not outside:
        return
    ends = sorted({module.rpartition(".")[2] for module in outside})
    inside = sorted({module.rpartition(".")[2] for module in places})
    shown = ", ".join(outside[:3]) + (", ..." if len(outside) > 3 else "")
    near = closest(ends[0], inside)
    hint = f" Did you mean '{near}'?" if near else ""
    raise BadAdapter(
        name,
        f"target_modules mean {', '.join(ends)} ({shown}), outside the slots.{hint}\n"
        f"    slots are beside: {', '.join(inside)}; target_modules=... of the model's constructor says where",
    )
