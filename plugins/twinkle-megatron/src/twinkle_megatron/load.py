"""From a Hugging Face folder or config to the chunks of a Megatron model on this rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from mcore_bridge.model import GPTModel, get_mcore_model_type
from mcore_bridge.utils import SafetensorLazyLoader

from twinkle_core import hub
from twinkle_core.errors import BadArgument, BadLayout, HoldsAdapter, ModelNotLoaded, UnsupportedFamily, WrongArgument
from twinkle_core.names import closest
from twinkle_megatron.parallel import Layout

#: settings of Megatron's that have another home here: where to give them
ELSEWHERE = {
    **dict.fromkeys(("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "left out; mixed_precision says it"),
    **{
        name: f"left out; DeviceMesh.from_sizes({size}=…) says it"
        for name, size in {
            "tensor_model_parallel_size": "tp_size",
            "pipeline_model_parallel_size": "pp_size",
            "virtual_pipeline_model_parallel_size": "vpp_size",
            "context_parallel_size": "cp_size",
            "expert_model_parallel_size": "ep_size",
            "expert_tensor_parallel_size": "etp_size",
            "sequence_parallel": "sequence_parallel",
        }.items()
    },
    **dict.fromkeys(
        (
            *("calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func", "no_sync_func"),
            *("perform_initialization", "variable_seq_lengths", "hf_config", "hf_model_type", "llm_model_type"),
            *("mcore_model_type", "padded_vocab_size"),
        ),
        "left out; twinkle sets it",
    ),
}
#: kernels that need CUDA, or Transformer Engine's own
FUSIONS = (
    *("apply_rope_fusion", "gradient_accumulation_fusion", "bias_dropout_fusion", "bias_activation_fusion"),
    *("masked_softmax_fusion", "moe_permute_fusion"),
)
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def fields() -> list[str]:
    """Megatron's settings that may be given by keyword."""
    return [f.name for f in dataclasses.fields(ModelConfig) if f.init and f.name not in ELSEWHERE]


def check_settings(owner: str, own: frozenset[str], given: Mapping[str, Any]) -> None:
    """Raise WrongArgument for a setting that Megatron doesn't have, BadArgument for one that has its home elsewhere."""
    known = fields()
    for key, value in given.items():
        if key in ELSEWHERE:
            raise BadArgument(key, value, ELSEWHERE[key])
        if key not in known:
            raise WrongArgument(owner, key, closest(key, own) or closest(key, known), sorted(own))
    if given.get("moe_aux_loss_coeff"):
        why = "0: Megatron adds a router's auxiliary loss by tokens, labelled or not, which a window's weight does not undo"
        raise BadArgument("moe_aux_loss_coeff", given["moe_aux_loss_coeff"], why)


def find(model_id: str | Path | None, config: Any) -> tuple[Path | None, Any]:
    """The folder with weights (None: random ones) and the Hugging Face config.

    Raises:
        HoldsAdapter, ModelNotLoaded, and what ``hub.resolve`` raises.
    """
    from transformers import AutoConfig

    folder = None if model_id is None else Path(hub.resolve(str(model_id)))
    if folder is not None and hub.holds_adapter(folder):
        raise HoldsAdapter(folder, hub.base_of_adapter(folder))
    try:
        found = copy.deepcopy(config) if config is not None else AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ModelNotLoaded(folder, str(error)) from error
    for part in (found, getattr(found, "text_config", None)):
        rope = getattr(part, "rope_parameters", None)
        if part is not None and rope and not hasattr(part, "rope_theta"):
            part.rope_theta = rope["rope_theta"]  # mcore-bridge reads the name of transformers 4
    return folder, found


def describe_shape(converted: Mapping[str, Any]) -> dict[str, int]:
    """What ``Layout.check`` compares."""
    names = ("num_attention_heads", "num_query_groups", "num_layers", "num_moe_experts")
    return {name: int(converted[name]) for name in names if converted.get(name)}


def convert(owner: str, hf_config: Any) -> dict[str, Any]:
    """Megatron's settings of a Hugging Face config.

    Raises:
        UnsupportedFamily: one that mcore-bridge doesn't know, or converts wrongly.
    """
    family = str(getattr(hf_config, "model_type", ""))
    if get_mcore_model_type(family) is None:
        raise UnsupportedFamily(owner, family, "mcore-bridge doesn't know this family", "train it with TransformersModel")
    if getattr(hf_config, "vision_config", None) is not None:
        why = "models that see are not driven by this backend yet"
        raise UnsupportedFamily(owner, family, why, "train it with TransformersModel")
    converted = dict(hf_to_mcore_config(hf_config))
    if family == "deepseek_v3":
        converted["moe_router_score_function"] = "sigmoid"  # always its own; a config without the word would get softmax
    return converted


@dataclasses.dataclass
class Built:
    """The model's part on this rank."""

    chunks: list[Any]
    config: Any
    bridge: Any
    hf_config: Any
    folder: Path | None
    vocabulary: int


def build(
    owner: str,
    folder: Path | None,
    hf_config: Any,
    converted: Mapping[str, Any],
    layout: Layout,
    precision: str,
    settings: Mapping[str, Any],
    *,
    on_cpu: bool,
) -> Built:
    """The chunks of this rank, with weights. Megatron's groups are there already.

    Raises:
        ModelNotLoaded, UnsupportedFamily, BadLayout.
    """
    vocabulary = int(converted["padded_vocab_size"])
    dtype = DTYPES[precision]
    values: dict[str, Any] = {
        **converted,
        "moe_grouped_gemm": True,
        "moe_aux_loss_coeff": 0.0,
        "overlap_p2p_comm": False,
        # two stages are each other's next and previous one, which batched messages of interleaved chunks mix up
        "batch_p2p_comm": layout.vpp == 1,
        "deallocate_pipeline_outputs": True,
        **(dict.fromkeys(FUSIONS, False) if on_cpu else {}),
        **settings,
        "padded_vocab_size": -(-vocabulary // layout.tp) * layout.tp,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": precision == "fp16",
        "bf16": precision == "bf16",
        "calculate_per_token_loss": True,  # gradients are sums, over ranks too: core divides them when a window closes
        "perform_initialization": True,  # without it shards are not marked as such, and gradient norms are wrong
        "variable_seq_lengths": layout.vpp == 1,
        "mtp_num_layers": None,
    }
    try:
        config = ModelConfig(**values)
    except (AssertionError, ValueError, TypeError) as error:
        raise BadLayout("MegatronModel", f"Megatron refuses these settings: {error}") from error
    chunks = get_mcore_model(config)
    if any(getattr(type(c), "_forward_output_layer", None) is not GPTModel._forward_output_layer for c in chunks):
        why = "its logits are not its output layer's alone"
        raise UnsupportedFamily(owner, str(hf_config.model_type), why, "train it with TransformersModel")
    if folder is not None:
        try:
            set_weights(config.bridge, chunks, SafetensorLazyLoader(str(folder)).get_state_dict())
        except (OSError, KeyError, RuntimeError, AssertionError) as error:
            raise ModelNotLoaded(folder, f"{type(error).__name__}: {error}") from error
    mark_experts(chunks)
    for chunk in chunks:
        chunk._forward_output_layer = _hidden  # logits are the engine's: at labelled tokens alone, never all at once
        chunk.train()
    return Built(chunks, config, config.bridge, hf_config, folder, vocabulary)


def mark_experts(chunks: list[Any]) -> None:
    """Experts are no copies, wherever they lie: without the mark, gradient norms leave out all but the first tensor rank's."""
    for module in (m for chunk in chunks for m in chunk.modules() if hasattr(m, "num_gemms")):
        for parameter in module.parameters(recurse=False):
            parameter.tensor_model_parallel = True


def set_weights(bridge: Any, chunks: list[Any], state: Mapping[str, Any], inner: str | None = None) -> None:
    """Set the weights of this rank from whole tensors under their plain names, of the model or of an adapter.

    Args:
        state: what each has is read by ``load()``, as mcore-bridge asks for one of a file.
    """
    bridge._peft_format, bridge._adapter_name = inner is not None, inner or "default"
    bridge._disable_tqdm, bridge._is_saving = True, False
    with torch.no_grad():
        for chunk in chunks:
            list(bridge._convert([chunk], dict(state), "base_model.model." if inner is not None else "", True, "Loading: "))


def _hidden(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    return hidden_states
