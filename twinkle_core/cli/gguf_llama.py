"""A Llama in a GGUF file to a folder of plain Hugging Face files, in fp32 (L0 at import; numpy, gguf, safetensors inside).

``transformers`` can read a GGUF file too. It parses the file's strings three times and builds a map of all names for each of
the model's submodules: 22 s for 135M parameters on 2 cores. This reads the file once (4 s), and the tensors are the same bit
for bit. It knows one architecture on purpose: ``llama`` with a byte-level BPE tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import errors

if TYPE_CHECKING:
    import numpy as np

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: ``tokenizer.ggml.token_type`` of a control token (``<|im_end|>``) and of one that users added
_CONTROL, _USER_DEFINED = 3, 4


def convert(source: Path, target: Path) -> None:
    """Write the model (``config.json``, ``generation_config.json``, ``model.safetensors`` in fp32) and its tokenizer.

    Args:
        source: a GGUF file of architecture ``llama``.
        target: an existing empty folder.

    Raises:
        UnsupportedGGUF: another architecture, tokenizer or tensor; nothing was written.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    for key, value in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if facts.get(key) != value:
            raise errors.UnsupportedGGUF(source, f"{key} is {facts.get(key)!r}, not {value!r}")
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    state = {}
    for tensor in reader.tensors:
        name, part = _plain_name(tensor.name, source)
        state[name] = _array(tensor, heads.get(part))
    tied = "lm_head.weight" not in state
    _write_json(target / "config.json", _config(facts, tied))
    _write_json(target / "generation_config.json", {k: v for k, v in _special_ids(facts).items() if v is not None})
    _write_tokenizer(target, facts)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})


def _plain_name(name: str, source: Path) -> tuple[str, str]:
    """``blk.3.attn_q.weight`` -> (``model.layers.3.self_attn.q_proj.weight``, ``attn_q``)."""
    pieces = name.split(".")
    if pieces[0] == "blk" and len(pieces) == 4 and pieces[2] in _BLOCK:
        return f"model.layers.{pieces[1]}.{_BLOCK[pieces[2]]}.{pieces[3]}", pieces[2]
    if len(pieces) == 2 and pieces[0] in _TOP:
        return f"{_TOP[pieces[0]]}.{pieces[1]}", pieces[0]
    raise errors.UnsupportedGGUF(source, f"tensor {name!r} has no place in a Llama")


def _array(tensor: Any, heads: int | None) -> np.ndarray[Any, Any]:
    """Dequantised to fp32, in the shape of ``torch.nn.Linear`` (out, in).

    llama.cpp stores the rows of q and k so that the two halves of a rotary pair are neighbours; transformers keeps the two
    halves of a head apart: (heads, D/2, 2) against (heads, 2, D/2).
    """
    import numpy as np
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if heads is not None:
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return np.ascontiguousarray(values)


def _special_ids(facts: dict[str, Any]) -> dict[str, int | None]:
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: facts.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in ids.items()}


def _config(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    width, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **_special_ids(facts),
    }


def _write_tokenizer(target: Path, facts: dict[str, Any]) -> None:
    """A byte-level BPE; the pre-tokenizer named ``smollm`` cuts digits apart before GPT-2's own pattern."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {key.removesuffix("_id"): tokens[i] for key, i in _special_ids(facts).items() if i is not None}
    unknown = facts.get("tokenizer.ggml.unknown_token_id")
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": facts["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": facts["llama.context_length"],
            **named,
            **({"unk_token": tokens[unknown]} if unknown is not None else {}),
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
