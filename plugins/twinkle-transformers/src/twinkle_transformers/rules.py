"""What an adapter may be called, and which peft configs keep the promises of an adapter store."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.constants import EMBEDDING_LAYER_NAMES, INCLUDE_LINEAR_LAYERS_SHORTHAND

from twinkle_core.errors import BadAdapter
from twinkle_core.log import get_logger
from twinkle_core.patches.heads import VALUE_HEAD
from twinkle_core.train import limits
from twinkle_transformers.tree import plain_modules
from twinkle_transformers.vision import parts_that_see

#: Methods that need more than layers in the model, and what they need.
_NEEDS_MORE = {
    "ADALORA": "needs its rank budget updated by a call of its own after each step",
    "POLY": "needs task ids with each row",
    "XLORA": "needs a forward pass of its own",
    "SHADOW": "needs a forward pass of its own",
}
#: Values of init_lora_weights (as beginnings) that change the base model's weights, or need data first.
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "eva")


def check_name(name: Any) -> None:
    """A name is part of file names and of tables, so it is one word without separators."""
    if not isinstance(name, str) or not name:
        raise BadAdapter(name, "an adapter's name is a string of at least one letter ('' is the base model)")
    bad = sorted({c for c in name if c in "./\\" or c.isspace() or not c.isprintable()})
    if bad:
        raise BadAdapter(name, f"a name may not hold {', '.join(repr(c) for c in bad)}; use '-' or '_'")


def blockwise_layers(module: Any) -> dict[str, torch.nn.Module]:
    """Linear layers of a model's own that are no ``x W^T``, such as blocks of a matrix: nothing can be added beside them."""

    def blockwise(layer: torch.nn.Module) -> bool:
        own = type(layer).__module__.startswith(("transformers.models.", "transformers_modules."))  # not a quantised one
        if not isinstance(layer, torch.nn.Linear) or not own or type(layer).forward is torch.nn.Linear.forward:
            return False
        try:
            with torch.no_grad():
                return layer(layer.weight.new_zeros(1, layer.in_features)).shape != (1, layer.out_features)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError, IndexError):
            return True

    return {key: layer for key, layer in plain_modules(module) if blockwise(layer)}


def _check_blockwise(name: str, config: Any, module: Any) -> None:
    """Leave such layers out of ``all-linear``, and refuse them where they are named."""
    layers, targets = blockwise_layers(module), getattr(config, "target_modules", None)
    if not layers or not targets:
        return
    if isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        before = config.exclude_modules
        if isinstance(before, str):
            config.exclude_modules = "|".join([f"({before})", *map(re.escape, layers)])
        else:
            config.exclude_modules = [*(before or ()), *layers]
        return
    for key, layer in layers.items():
        if check_target_module_exists(config, key):
            kind = type(layer).__name__
            raise BadAdapter(name, f"{key} is a {kind}, which multiplies by blocks; leave it out of target_modules")


def tell_left_out(name: str, module: Any) -> None:
    """One line on linear layers to which ``all-linear`` did not come: blocks, and what peft confuses with a model's experts."""
    carried = {id(layer.base_layer) for layer in module.modules() if isinstance(layer, BaseTunerLayer)}
    output = getattr(module, "get_output_embeddings", lambda: None)()
    left = [
        key
        for key, layer in plain_modules(module)
        if isinstance(layer, torch.nn.Linear) and id(layer) not in carried and layer is not output and key != VALUE_HEAD
    ]
    if left:
        ends = sorted({".".join(key.split(".")[-2:]) for key in left})
        text = "adapter '%s': target_modules='all-linear' leaves out %d linear layer(s): %s"
        get_logger("transformers").warning(text, name, len(left), ", ".join(ends))


def _tied(module: Any) -> bool:
    first = getattr(module, "get_input_embeddings", lambda: None)()
    last = getattr(module, "get_output_embeddings", lambda: None)()
    return first is not None and last is not None and getattr(first, "weight", None) is getattr(last, "weight", ())


def check_config(name: str, config: Any, module: torch.nn.Module, others: Sequence[PeftConfig]) -> PeftConfig:
    """A copy of the config, ready for peft. Of a model that sees, ``all-linear`` means the language model alone.

    Raises:
        BadAdapter: it is no peft config, or an option of it can't be honoured; the text names the option.
    """
    if not isinstance(config, PeftConfig):
        raise BadAdapter(name, f"expected a peft config or the folder of a saved adapter, got {type(config).__name__}")
    limits.check_lora(name, config)
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt or config.peft_type not in PEFT_TYPE_TO_TUNER_MAPPING:
        raise BadAdapter(name, f"{type(config).__name__} adds inputs, not layers; use a layer method such as LoRA, IA3 or LoHa")
    if method in _NEEDS_MORE:
        raise BadAdapter(name, f"{type(config).__name__} {_NEEDS_MORE[method]}, which the training verbs don't give")
    for other in others:
        if other.peft_type != config.peft_type:
            there = str(getattr(other.peft_type, "value", other.peft_type))
            raise BadAdapter(name, f"this model's adapters are {there}; peft can't mix {method} with it on one base model")
    if getattr(config, "bias", "none") != "none":
        raise BadAdapter(name, f"bias={config.bias!r} trains biases that the base model and all adapters share; use 'none'")
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_REWRITES_BASE):
        raise BadAdapter(name, f"init_lora_weights={init!r} rewrites base weights that all adapters share, or needs data first")
    for option in ("layer_replication", "alora_invocation_tokens"):
        if getattr(config, option, None):
            raise BadAdapter(name, f"{option} changes how the base model itself runs")
    saved = list(getattr(config, "modules_to_save", None) or [])
    embeddings = [m for m in saved if m.split(".")[-1] in EMBEDDING_LAYER_NAMES]
    if embeddings and _tied(module) and not getattr(config, "ensure_weight_tying", False):
        raise BadAdapter(
            name,
            f"modules_to_save={embeddings} would part the tied embedding and output layer; set ensure_weight_tying=True to "
            "train them as one, or load the model with tie_word_embeddings=False",
        )
    config = copy.deepcopy(config)
    _check_blockwise(name, config, module)
    if hasattr(module, VALUE_HEAD) and VALUE_HEAD not in saved:  # each adapter trains a value head of its own
        if not hasattr(config, "modules_to_save"):
            why = "can't hold the value head that the model has; undo the patch 'value_head', or take LoRA"
            raise BadAdapter(name, f"{type(config).__name__} {why}")
        config.modules_to_save = saved = [*saved, VALUE_HEAD]
    if getattr(config, "target_modules", None) == "all-linear" and getattr(config, "exclude_modules", None) is None:
        seeing = parts_that_see(module)
        if seeing:  # peft itself would put an adapter on each layer of them
            config.exclude_modules = rf"(?:{'|'.join(map(re.escape, seeing))})(?:\..*)?"
            text = "adapter '%s': 'all-linear' leaves out %s; exclude_modules=[] takes them in"
            get_logger("transformers").info(text, name, ", ".join(seeing))
    if str(getattr(config.task_type, "value", config.task_type)) in ("SEQ_CLS", "TOKEN_CLS"):  # as peft: the head is trained
        ends = {key.rpartition(".")[2] for key, _ in module.named_modules()}
        config.modules_to_save = saved + [m for m in ("classifier", "score") if m in ends and m not in saved] or None
    return config
