"""The families of the table of supported models: how to build a tiny model of each, and what is found out about it.

Used by the tests beside it and by ``tools/generate_models.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig

from twinkle_core.errors import PackingLeaks
from twinkle_core.processors.input import InputProcessor
from twinkle_transformers.model import TransformersModel

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """A row of the table.

    ``ids``: of models, as their hub has them. ``template``: what ``set_template`` takes. ``config``: a tiny model's.
    ``options``: what the constructor of TransformersModel needs beside ``model_id``. ``experts``: names of fused weights of
    experts. ``note``: what to know besides.
    """

    kind: str
    ids: str
    template: str
    config: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    task: str = "causal_lm"
    note: str = ""


def made(name: str, **changes: Any) -> Callable[[], Any]:
    """A config of transformers by the name of its class."""
    return lambda: getattr(transformers, name)(**{**SIZES, **changes})


def deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


def deepseek_v4() -> Any:
    sizes = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return transformers.DeepseekV4Config(
        **{**sizes, "num_key_value_heads": 1, "num_hidden_layers": 3}, head_dim=16, q_lora_rank=16, o_lora_rank=8, o_groups=2,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, hc_mult=2, sliding_window=8,
        layer_types=kinds, compress_rates={kinds[1]: 2, kinds[2]: 4}, mlp_layer_types=["hash_moe", "moe", "moe"],
        index_n_heads=2, index_head_dim=16, index_topk=2, partial_rotary_factor=0.5,
    )  # fmt: skip


def internlm2() -> Any:
    """Its class is known from its folder alone."""
    return None


SEEING = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


def qwen_vl(name: str, text: dict[str, Any], vision: dict[str, Any]) -> Callable[[], Any]:
    """A model of Qwen's that sees: three axes of positions, small towers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **text.pop("rope", {})}
    tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, **vision}
    words = {**SIZES, **text, "rope_parameters": rope}
    return lambda: getattr(transformers, name)(text_config=words, vision_config=tower, tie_word_embeddings=False, **SEEING)


def internvl() -> Any:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **SIZES}, vision_config={**tower, "image_size": (28, 28), "patch_size": (7, 7)},
        image_token_id=250, image_seq_length=4,
    )  # fmt: skip


SEES = {"model_cls": "AutoModelForImageTextToText"}
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FAMILIES = {
    "Qwen3.5": Family(
        "language", "`Qwen/Qwen3.5-4B`", "chat", made("Qwen3_5TextConfig", **LINEAR, tie_word_embeddings=True),
        note="three of four layers are recurrent (gated delta rule)",
    ),
    "Qwen3.5 MoE": Family(
        "language", "`Qwen/Qwen3.5-35B-A3B`", "chat", made("Qwen3_5MoeTextConfig", **LINEAR, **EXPERTS), experts=FUSED,
        note="as Qwen3.5",
    ),
    "Qwen2.5": Family("language", "`Qwen/Qwen2.5-7B-Instruct`", "chat", made("Qwen2Config", tie_word_embeddings=True)),
    "DeepSeek V4": Family(
        "language", "`deepseek-ai/DeepSeek-V4`", "dsml", deepseek_v4, experts=FUSED,
        note="its own format: [twinkle-dsml](dsml.md); the first layers choose experts by a table",
    ),
    "DeepSeek V3, R1": Family(
        "language", "`deepseek-ai/DeepSeek-R1`", "chat", deepseek_v3, experts=FUSED,
        note="its router is balanced by a bias, not by a loss",
    ),
    "Llama 3": Family(
        "language", "`meta-llama/Llama-3.3-70B-Instruct`", "chat",
        made("LlamaConfig", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    ),
    "Mistral": Family(
        "language", "`mistralai/Mistral-7B-Instruct-v0.3`", "chat", made("MistralConfig", sliding_window=None, head_dim=8),
    ),
    "Yi": Family("language", "`01-ai/Yi-1.5-34B-Chat`", "chat", made("LlamaConfig", rms_norm_eps=1e-6), note="a Llama"),
    "GLM-4": Family(
        "language", "`THUDM/glm-4-9b-chat-hf`", "chat",
        made("GlmConfig", head_dim=8, attention_bias=True, partial_rotary_factor=0.5),
        note="the repository with `-hf`; gate and up projection are one layer",
    ),
    "InternLM2.5": Family(
        "language", "`internlm/internlm2_5-7b-chat`", "chat", internlm2, options={"trust_remote_code": True},
        note="queries, keys and values are one layer; runs the code of its repository",
    ),
    "Qwen3.5 VL": Family(
        "vision", "`Qwen/Qwen3.5-4B`", "vision",
        qwen_vl("Qwen3_5Config", {**LINEAR, "rope": {"mrope_interleaved": True, "partial_rotary_factor": 1.0}},
                {"num_position_embeddings": 64}),
        options=SEES, note="Qwen3.5's repositories hold both; this class sees",
    ),
    "Qwen2.5 VL": Family(
        "vision", "`Qwen/Qwen2.5-VL-7B-Instruct`", "vision",
        qwen_vl("Qwen2_5_VLConfig", {}, {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}),
        options=SEES,
    ),
    "InternVL": Family(
        "vision", "`OpenGVLab/InternVL3-8B-hf`", "vision", internvl, options=SEES,
        note="the repositories with `-hf`, which transformers has",
    ),
    "Qwen3 Embedding": Family(
        "embedding", "`Qwen/Qwen3-Embedding-0.6B`", "", made("Qwen3Config", head_dim=8, tie_word_embeddings=True),
        options={"model_cls": "AutoModel"}, task="embedding", note="pools the last token",
    ),
    "GTE, BERT": Family(
        "embedding", "`thenlper/gte-large-zh`", "",
        lambda: transformers.BertConfig(**{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "bos_token_id")},
                                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        options={"model_cls": "AutoModel"}, task="embedding", note="pools the first token or the mean",
    ),
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """A folder as a hub would give it: random weights, a config, code where the family brings its own."""
    family = FAMILIES[name]
    config = family.config()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if config is None:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / "internlm2.py", folder / "modeling_internlm2.py")
            code = {"AutoConfig": "InternLM2Config", "AutoModelForCausalLM": "InternLM2ForCausalLM"}
            auto = {key: f"modeling_internlm2.{cls}" for key, cls in code.items()}
            (folder / "config.json").write_text(json.dumps(
                {"model_type": "internlm2", "auto_map": auto, "initializer_range": 0.2, "eos_token_id": 1, "pad_token_id": 0}
            ))  # fmt: skip
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
            transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
            return folder
        cls = getattr(transformers, family.options.get("model_cls", "AutoModelForCausalLM"))
        cls.from_config(config).save_pretrained(folder)
    return folder


def load(name: str, folder: Path, **changes: Any) -> TransformersModel:
    return TransformersModel(model_id=folder, mixed_precision="no", **FAMILIES[name].options, **changes)


def rows(*lengths: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(2)
    made = [torch.randint(3, 250, (n,), generator=g).tolist() for n in lengths]
    return [{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in made]


def facts(name: str, folder: Path) -> dict[str, str]:
    """What is found out by loading and asking a model: its row of the table."""
    family = FAMILIES[name]
    m = load(name, folder)
    given = ", ".join(f"`{k}={v!r}`" for k, v in family.options.items()) or "nothing"
    m.add_adapter_to_model("a", LoraConfig(r=2, target_modules="all-linear"))
    found = {
        "class": f"`{type(m.module).__name__}`",
        "options": given,
        "packing": packing(m),
        "targets": ", ".join(f"`{t}`" for t in m.adapters.describe("a")["targets"].split(", ")),
        "experts": "with `target_parameters`" if family.experts else "none",
        "router": router(m),
    }
    m.remove_adapter("a")
    return found


COLUMNS = (
    *("family", "models", "class", "beside `model_id`", "template", "packing", "`all-linear` reaches", "experts"),
    *("router's loss", "besides"),
)


def cells(name: str, found: dict[str, str]) -> list[str]:
    """A row of the table."""
    family = FAMILIES[name]
    template = f"`{family.template}`" if family.template else "none"
    middle = [found["class"], found["options"], template, found["packing"], found["targets"], found["experts"], found["router"]]
    return [name, family.ids, *middle, family.note or "–"]


def packing(m: TransformersModel) -> str:
    """Whether packed rows keep apart."""
    m.set_processor(InputProcessor(padding_free=True), adapter_name="")
    try:
        m.engine.prepare(m._resolved(m.sessions[""]), rows(5, 3))  # asks the model once
    except PackingLeaks as error:
        return "refused: its layers carry a state" if "carry a state" in str(error) else "refused"
    finally:
        m.set_processor(InputProcessor(), adapter_name="")
    return "yes"


def router(m: TransformersModel) -> str:
    """What a model says of a loss of its router."""
    coefficient = getattr(m.module.config.get_text_config(), "router_aux_loss_coef", None)
    return f"`output_router_logits=True`, × {coefficient:g}" if coefficient else "none"
