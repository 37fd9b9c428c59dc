"""A small Llama with random weights and a tokenizer of its own, for a machine without a real model (L0 at import)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

#: ChatML, as most chat models of today have it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build(target: Path, texts: Iterable[str], *, hidden_size: int = 192, layers: int = 3, vocab_size: int = 1200) -> None:
    """Write model and tokenizer as plain Hugging Face files. The same texts give the same files.

    Args:
        target: an existing empty folder.
        texts: what the tokenizer's merges are learnt from; any other text can be written with it too, byte by byte.
        hidden_size, layers, vocab_size: about 2M parameters by default.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = _write_tokenizer(target, texts, vocab_size)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(target)


def _write_tokenizer(target: Path, texts: Iterable[str], vocab_size: int) -> int:
    """A byte-level BPE; returns the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()
