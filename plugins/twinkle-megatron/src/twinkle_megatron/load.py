"""From a Hugging Face folder or config to the chunks of a Megatron model on this rank."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge import ModelConfig, get_mcore_model
from mcore_bridge.config.parser import config_mapping
from mcore_bridge.model import GPTModel
from mcore_bridge.model.modules.gated_delta_net import GatedDeltaNet
from mcore_bridge.utils import SafetensorLazyLoader
from megatron.core import parallel_state
from safetensors import SafetensorError

from twinkle_core import hub
from twinkle_core import settings as environment
from twinkle_core.errors import BadArgument, BadLayout, HoldsAdapter, ModelNotLoaded, UnsupportedFamily, WrongArgument
from twinkle_core.names import closest
from twinkle_megatron.families import PROVEN, SEEING, WAY, family_of, made_anew, stays
from twinkle_megatron.parallel import Layout

#: settings of Megatron's that say which model it is. Files would be written with the model's own config, so that with another
#: one they would be another model's.
OF_MODEL = (
    *(config_mapping.keys() - {"attention_dropout"}),
    *("normalization", "layernorm_zero_centered_gamma", "gated_linear_unit", "activation_func", "quick_geglu"),
    *("glu_linear_offset", "softmax_scale", "softmax_type", "qk_l2_norm", "attention_output_gate", "multi_latent_attention"),
    *("no_rope_freq", "experimental_attention_variant", "window_attn_skip_freq", "position_embedding_type"),
    *("apply_residual_connection_post_layernorm", "rotary_percent", "rope_scaling", "attention_scaling", "mrope_section"),
    *("mrope_interleaved", "moe_shared_expert_gate", "moe_layer_freq", "moe_latent_size", "moe_apply_probs_on_input"),
    *("is_hybrid_model", "heterogeneous_block_specs", "task_type", "num_labels", "language_model_only", "mtp_num_layers"),
)
#: settings of Megatron's that have another home here: where to give them
ELSEWHERE = {
    **dict.fromkeys(OF_MODEL, "left out; the model's own config says it (config=…)"),
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
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if given.get(key):
            why = "0: Megatron adds a router's auxiliary loss by tokens, labelled or not, which a window's weight does not undo"
            raise BadArgument(key, given[key], f"{why}. TransformersModel trains what the model's config asks for of it")


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


@dataclasses.dataclass
class Built:
    """The model's part on this rank: its chunks are language models, ``wholes`` what mcore-bridge has around them."""

    chunks: list[Any]
    wholes: list[Any]
    config: Any
    bridge: Any
    hf_config: Any
    folder: Path | None
    vocabulary: int
    bare: bool = False  # whether its tensors are called as those of a model without an output layer


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
    if folder is None and family_of(hf_config) in SEEING:
        why = "its vision tower is not built here, and is written as it was read; without a folder there is none to write"
        raise UnsupportedFamily(owner, family_of(hf_config), why, "give model_id")
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
    with environment.without("NVTE_APPLY_QK_LAYER_SCALING"):  # mcore-bridge sets it under fp16, and other models trip over it
        config = _config(owner, values, settings, hf_config)
        wholes = get_mcore_model(config)
    chunks = [getattr(whole, "language_model", whole) for whole in wholes]
    if any(getattr(type(c), "_forward_output_layer", None) is not GPTModel._forward_output_layer for c in chunks):
        why = "its logits are not its output layer's alone"
        raise UnsupportedFamily(owner, family_of(hf_config), why, WAY)
    built = Built(chunks, wholes, config, config.bridge, hf_config, folder, vocabulary)
    if folder is not None:
        _read(owner, built, folder)
    mark_experts(chunks)
    mark_recurrent(chunks, layout.tp)
    for chunk in chunks:
        chunk._forward_output_layer = _hidden  # logits are the engine's: at labelled tokens alone, never all at once
        chunk.train()
    return built


def _config(owner: str, values: dict[str, Any], settings: Mapping[str, Any], hf_config: Any) -> Any:
    """Megatron's own, or whose fault it is that there is none: the settings', the family's or the layout's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "full scope is deprecated")  # of a default that mcore-bridge sets
            return ModelConfig(**values)
    except (AssertionError, ValueError, TypeError) as error:
        refused = error
    for key, value in settings.items():
        with contextlib.suppress(UnsupportedFamily, BadLayout):
            _config(owner, {k: v for k, v in values.items() if k != key}, {}, hf_config)
            raise BadArgument(key, value, f"another one; Megatron says: {refused}") from refused
    if family_of(hf_config) not in PROVEN:  # its own settings may be what is refused
        raise UnsupportedFamily(owner, family_of(hf_config), f"Megatron-Core refuses it: {refused}", WAY) from refused
    raise BadLayout(owner, f"Megatron refuses these settings: {refused}") from refused


class _Noted:
    """A tensor of a file that notes that it was read."""

    def __init__(self, lazy: Any, key: str, read: set[str]) -> None:
        self._lazy, self._key, self._read = lazy, key, read

    def load(self) -> torch.Tensor:
        self._read.add(self._key)
        return self._lazy.load()  # type: ignore[no-any-return]


def _read(owner: str, built: Built, folder: Path) -> None:
    """Set the weights from a folder, all of whose tensors must have a place on some rank."""
    read: set[str] = set()
    state: dict[str, Any] = {}
    failed: Exception | None = None
    try:
        state = SafetensorLazyLoader(str(folder)).get_state_dict()
        built.bare = "embed_tokens.weight" in state
        set_weights(built, {key: _Noted(lazy, key, read) for key, lazy in state.items()})
    except (OSError, KeyError, RuntimeError, AssertionError, SafetensorError) as error:
        failed = error  # others may have read all of theirs
    why = None if failed is None else f"{type(failed).__name__}: {failed}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (read, why))
    if failed is not None:
        lacks = " (a tensor that its config asks for is not in its files)" if isinstance(failed, KeyError) else ""
        raise ModelNotLoaded(folder, f"{why}{lacks}") from failed
    if elsewhere := next(((rank, text) for rank, (_, text) in enumerate(told) if text is not None), None):
        raise ModelNotLoaded(folder, f"rank {elsewhere[0]} could not read its part: {elsewhere[1]}")
    config, seen = built.hf_config, set[str]().union(*(keys for keys, _ in told))
    left = sorted(k for k in state.keys() - seen if not (stays(config, k) or made_anew(config, k)))
    if left:
        why = f"'{left[0]}' has no place in the model that mcore-bridge makes ({len(left)} of {len(state)} tensors have none)"
        raise UnsupportedFamily(owner, family_of(config), why, WAY)


def mark_experts(chunks: list[Any]) -> None:
    """Experts are no copies, wherever they lie: without the mark, gradient norms leave out all but the first tensor rank's."""
    for module in (m for chunk in chunks for m in chunk.modules() if hasattr(m, "num_gemms")):
        for parameter in module.parameters(recurse=False):
            parameter.tensor_model_parallel = True


def mark_recurrent(chunks: list[Any], tensor_ranks: int) -> None:
    """Norms of linear attention whose gradients mcore-bridge leaves to chance under tensor parallelism.

    The output's norm is of heads that lie on several ranks, so each has a part of its gradient. The input's is taken of whole
    sequences, also where these are split between layers: each rank has all of its gradient, and it must not be added up.
    """
    if tensor_ranks == 1:
        return
    for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, GatedDeltaNet)):
        for parameter in module.out_norm.parameters():
            parameter.sequence_parallel = False
            parameter.register_hook(_over_tensor_ranks)
        module.in_proj.layer_norm_weight.sequence_parallel = False


def _over_tensor_ranks(gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.contiguous().clone()
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total


def set_weights(built: Built, state: Mapping[str, Any], inner: str | None = None) -> None:
    """Set the weights of this rank from whole tensors under their plain names, of the model or of an adapter.

    Args:
        state: what each has is read by ``load()``, as mcore-bridge asks for one of a file.
    """
    bridge, prefix = built.bridge, "base_model.model." if inner is not None else ""
    bridge._peft_format, bridge._adapter_name = inner is not None, inner or "default"
    bridge._disable_tqdm, bridge._is_saving = True, False
    if built.bare and inner is None:
        state = {f"model.{key}": value for key, value in state.items()}
    with torch.no_grad():
        for whole in built.wholes:
            list(bridge._convert([whole], dict(state), prefix, True, "Loading: "))


def _hidden(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    return hidden_states
