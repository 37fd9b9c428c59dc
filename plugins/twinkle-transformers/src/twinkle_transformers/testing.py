"""Tiny models for tests: a Llama and a BERT with toy tokenizers, and one linear layer that can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**changes: Any) -> Any:
    """A Llama of 2 layers, 32 wide, with the toy tokenizer's vocabulary."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**sizes, **changes})


def byte_tokenizer(marks: list[str]) -> Any:
    """The backend of a tokenizer with these special tokens, numbered from 0, and one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*marks, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks)
    return backend


def tiny_tokenizer() -> Any:
    """Bytes as tokens, and the marks of a chat: ``<|endoftext|>`` 0, ``<|im_end|>`` 1, ``<|im_start|>`` 2."""
    from transformers import PreTrainedTokenizerFast

    marks = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    backend = byte_tokenizer(marks)
    make: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    tokenizer = make(tokenizer_object=backend, eos_token=marks[1], pad_token=marks[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_tiny_llama(folder: Path | str, *, seed: int = 0, **changes: Any) -> Path:
    """A model folder as a hub would give it: random weights (fp32), config, tokenizer with chat template."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(tiny_config(**changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def write_tiny_bert(folder: Path | str, *, seed: int = 0, **changes: Any) -> Path:
    """An encoder's folder as a hub would give it: a BERT of 2 layers, 32 wide, with random weights; bytes as tokens, and
    ``[CLS] … [SEP]`` around a text."""
    from tokenizers import processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    marks = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    backend = byte_tokenizer(list(marks.values()))
    template: Any = processors.TemplateProcessing
    backend.post_processor = template(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    sizes = {
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertModel(BertConfig(**{**sizes, **changes})).save_pretrained(folder)
    make: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    make(tokenizer_object=backend, **marks).save_pretrained(folder)
    return Path(folder)


class ToyLConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Config of ToyL: the start value of its weight."""

    model_type = "twinkle_toy_l"

    def __init__(self, weight: float = 2.0, **kwargs: Any) -> None:
        self.weight = weight
        super().__init__(**kwargs)


class ToyL(PreTrainedModel):  # type: ignore[no-untyped-call]
    """``logits [B, T, 1] = weight * input_ids``: small enough to know every gradient."""

    config_class = ToyLConfig

    def __init__(self, config: ToyLConfig) -> None:
        super().__init__(config)
        self.lin = torch.nn.Linear(1, 1, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.lin.weight.fill_(config.weight)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The weight comes from the config."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lin(input_ids[..., None].to(self.lin.weight.dtype)))
