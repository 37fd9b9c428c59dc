"""Which layers an adapter is beside, and which adapters there can be: by Megatron's names and those of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from peft import LoraConfig

from twinkle_core.errors import BadAdapter
from twinkle_core.train import limits
from twinkle_megatron.parallel import Layout

Layers: TypeAlias = Mapping[str, tuple[str, ...]]

#: layers of Megatron's, and the layers of the Hugging Face model that each of them is
FUSED: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
#: what of them is another one in a family
OTHERWISE: dict[str, dict[str, tuple[str, ...]]] = {"glm4": {"linear_fc1": ("gate_up_proj",)}}
#: families whose adapters were seen to give the same logits in transformers and PEFT
WRITTEN_RIGHTLY = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4"})
#: what of a LoraConfig is honoured; everything else must be as it is by default
HONOURED = frozenset({"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"})
#: of a LoraConfig, what says nothing of what it computes
SILENT = frozenset(
    {"peft_type", "task_type", "inference_mode", "base_model_name_or_path", "peft_version", "revision", "auto_mapping"}
)


def layers_of(family: str) -> Layers:
    """Megatron's layers that adapters may be beside, and the layers of this family that each of them is."""
    return {**FUSED, **OTHERWISE.get(family, {})}


def parts_of(config: LoraConfig, layers: Layers) -> list[str]:
    """The layers of the Hugging Face model that an adapter with a ``checked`` config is beside."""
    return [part for layer, parts in layers.items() if layer in (config.target_modules or ()) for part in parts]


def checked(name: str, config: Any, family: str, layout: Layout) -> LoraConfig:
    """A LoraConfig over Megatron's layers.

    Raises:
        BadAdapter: another method; a setting that is not honoured; targets that are a part of a layer; a family that can't be
        written rightly.
    """
    if type(config) is not LoraConfig:
        raise BadAdapter(name, f"{type(config).__name__} is no LoraConfig of peft's, nor the folder of an adapter")
    if family not in WRITTEN_RIGHTLY:
        known = ", ".join(sorted(WRITTEN_RIGHTLY))
        why = f"adapters of the family '{family}' can't be written so that PEFT reads them rightly; of {known} they can"
        raise BadAdapter(name, f"{why}. Train the whole model, or the adapter with TransformersModel")
    if layout.etp > 1:
        raise BadAdapter(name, "LoRA on experts that are split themselves (etp_size > 1) is not there; set etp_size=1")
    limits.check_lora(name, config)
    default = LoraConfig()
    odd = [
        field
        for field, value in vars(config).items()
        if field not in HONOURED | SILENT and hasattr(default, field) and value not in (getattr(default, field), None, {}, [])
    ]
    if odd:
        raise BadAdapter(
            name, f"{', '.join(f'{f}={getattr(config, f)!r}' for f in odd)} is not honoured on Megatron's layers; leave it out"
        )
    return LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        target_modules=_targets(name, config.target_modules, layers_of(family)),
    )


def _targets(name: str, given: Any, layers: Layers) -> list[str]:
    if given in (None, "all-linear"):
        return list(layers)
    wanted = {given} if isinstance(given, str) else set(given)
    known = set(layers) | {part for parts in layers.values() for part in parts}
    if unknown := sorted(wanted - known):
        raise BadAdapter(name, f"target '{unknown[0]}' is not known; 'all-linear', or names of {', '.join(sorted(known))}")
    found = []
    for layer, parts in layers.items():
        here = wanted & set(parts)
        if layer in wanted or here == set(parts):
            found.append(layer)
        elif here:
            lacks = ", ".join(sorted(set(parts) - here))
            raise BadAdapter(
                name, f"{', '.join(sorted(here))} and {lacks} are one layer in Megatron: target all of them, or none"
            )
    return found


def check_shared(name: str, state: Mapping[str, torch.Tensor], layers: Layers) -> None:
    """Raise BadAdapter where an adapter has another lora_A for each part of a layer that is one here."""
    groups: dict[tuple[str, tuple[str, ...]], list[torch.Tensor]] = {}
    for key, tensor in state.items():
        head, mark, _ = key.partition(".lora_A.")
        place, _, part = head.rpartition(".")
        for parts in layers.values():
            if mark and part in parts and len(parts) > 1:
                groups.setdefault((place, parts), []).append(tensor)
    for (place, parts), tensors in groups.items():
        if len(tensors) != len(parts) or any(not torch.equal(tensors[0], t) for t in tensors[1:]):
            why = f"{place}: {', '.join(parts)} are one layer in Megatron and need one lora_A; this adapter has several"
            raise BadAdapter(name, f"{why}. Make an adapter of its folder: add_adapter_to_model('{name}', FOLDER)")
