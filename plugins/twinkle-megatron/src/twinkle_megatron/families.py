"""Families of Hugging Face models: which are driven, what of their conversion is put right, and what is refused by name."""

from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

from mcore_bridge import hf_to_mcore_config
from mcore_bridge.model import get_mcore_model_type

from twinkle_core.errors import BadLayout, NeedsLibrary, UnsupportedFamily
from twinkle_core.log import get_logger
from twinkle_megatron.cpu.runtime import RUNTIME
from twinkle_megatron.parallel import OWNER, Layout

#: families of the same layers and names as another one, which is what mcore-bridge is told
SAME_AS = {"mistral": "llama"}
#: those with a vision tower whose language model is trained; the tower stays as it is
SEEING = frozenset({"qwen3_5", "qwen3_5_moe"})
#: those whose logits and files were compared with transformers'
PROVEN = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "glm4", "deepseek_v3"})
#: those whose conversion loses sight of windows, and of heads that are turned in part
PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
#: what a config can say that the conversion leaves out, or that changes which layers there are: by family, the values that it
#: may have. A model of another one would be computed wrongly, mostly in silence.
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    **{family: {"hidden_act": ("silu",)} for family in PROVEN},
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen3": {"hidden_act": ("silu",), "attention_bias": (False,)},
    "qwen3_moe": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1,),
    },
    "deepseek_v3": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "rope_interleave": (True,),
    },
}
WAY = "train it with TransformersModel"


def family_of(hf_config: Any) -> str:
    """How transformers calls it."""
    return str(getattr(hf_config, "model_type", ""))


def convert(owner: str, hf_config: Any) -> dict[str, Any]:
    """Megatron's settings of a Hugging Face config, which is left as it is.

    Raises:
        UnsupportedFamily: one that mcore-bridge doesn't know, or whose model would compute or be written wrongly.
        NeedsLibrary: what its layers need on CUDA.
    """
    family = family_of(hf_config)
    known = SAME_AS.get(family, family)
    if get_mcore_model_type(known) is None:
        raise UnsupportedFamily(owner, family, "mcore-bridge doesn't know this family", WAY)
    _check(owner, family, hf_config)
    converted = dict(hf_to_mcore_config(copy.deepcopy(hf_config)))
    if known != family:
        converted["hf_model_type"] = converted["llm_model_type"] = known
    if family == "mistral":
        converted["add_qkv_bias"] = False  # its config has no word for what it never has
    if family in SEEING:
        converted["language_model_only"] = True
        if not RUNTIME.installed and importlib.util.find_spec("fla") is None:
            raise NeedsLibrary(owner, "fla", "flash-linear-attention", sys.prefix)
    if family == "deepseek_v3":
        # always its own; a config that does not say so would be converted to softmax, without the bias of each expert
        converted["moe_router_score_function"] = "sigmoid"
        converted["moe_router_enable_expert_bias"] = True
        converted["moe_router_bias_update_rate"] = 0.0  # as in transformers; Megatron would move the bias with each update
    text = hf_config.get_text_config()
    if getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 0):
        get_logger("megatron").warning("the router's auxiliary loss (router_aux_loss_coef) is not added by %s", owner)
    if family not in PROVEN:
        get_logger("megatron").warning(
            "'%s' is among the families that mcore-bridge knows, and not among those compared here with transformers; "
            "compare its logits before you trust it",
            family,
        )
    return converted


def _check(owner: str, family: str, hf_config: Any) -> None:
    if getattr(hf_config, "vision_config", None) is not None and family not in SEEING:
        raise UnsupportedFamily(owner, family, "models that see are not driven by this backend yet", WAY)
    if getattr(hf_config, "quantization_config", None) is not None:
        why = "its weights are quantised, and would be written as if they still were"
        raise UnsupportedFamily(owner, family, why, "take a copy of it in bf16, without 'quantization_config' in its config")
    text = hf_config.get_text_config()
    for field, allowed in ONLY.get(family, {}).items():
        value = getattr(text, field, allowed[0])
        if value not in allowed:
            why = f"its config says {field}={value!r}, and mcore-bridge makes models of {field}={allowed[0]!r} alone"
            raise UnsupportedFamily(owner, family, why, WAY)
    part = (getattr(text, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if part != 1.0 and family in PLAIN:
        why = f"its config says partial_rotary_factor={part!r}, which mcore-bridge leaves out for this family"
        raise UnsupportedFamily(owner, family, why, WAY)
    if family not in PLAIN:
        return
    layers = getattr(hf_config, "layer_types", None) or ()
    if "sliding_attention" in layers or (family == "mistral" and getattr(hf_config, "sliding_window", None) is not None):
        why = f"its attention has a window (sliding_window={hf_config.sliding_window}), which mcore-bridge leaves out"
        raise UnsupportedFamily(owner, family, why, WAY)


def check_layout(hf_config: Any, layout: Layout) -> None:
    """Raise BadLayout where a family's layers can't be split so."""
    if family_of(hf_config) in SEEING and layout.cp > 1:
        why = "its linear attention is recurrent over the sequence, of which a context rank has two pieces"
        raise BadLayout(OWNER, f"cp_size = {layout.cp}: {why}; leave cp_size at 1")


def stays(hf_config: Any, key: str) -> bool:
    """Whether a tensor is no part of what is trained (a vision tower, layers for speculation): it is written as it was read."""
    family = family_of(hf_config)
    if family in SEEING:
        return key.startswith(("model.visual.", "mtp."))
    number = key.removeprefix("model.layers.").partition(".")[0]
    return key.startswith("model.layers.") and number.isdigit() and int(number) >= int(hf_config.num_hidden_layers)


def made_anew(hf_config: Any, key: str) -> bool:
    """Whether a tensor of a file need not be read: tables, and an output layer that is the embedding."""
    tied = bool(getattr(hf_config.get_text_config(), "tie_word_embeddings", False))
    return key.endswith("rotary_emb.inv_freq") or (tied and key.endswith("lm_head.weight"))
