"""A small tokenizer with the special tokens of V4, for tests and examples without a hub. It is built in a moment."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from twinkle_core.types import Trajectory
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.tokens import ASSISTANT, BOS, DSML, EOS, REMINDER, SYSTEM, TASKS, THINK, THINK_END, USER

_PAD = "<｜▁pad▁｜>"
_SPECIAL = (BOS, EOS, _PAD)
_ADDED = (SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML, REMINDER, *TASKS.values())


def tiny_tokenizer(size: int = 1024) -> Any:
    """Bytes, merged where the format's own texts have them often; ids 0 to 2 begin, end and pad. As in V4's tokenizer only
    these count as special, and the other marks are added tokens.

    Args:
        size: tokens of the vocabulary, without the added ones.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for release in RELEASES.values() for text in (*release.tools, *release.efforts.values())]
    markup = (
        'invoke name="weather">\nparameter name="city" string="true">{"name": "description": "parameters": "type": "object"}'
    )
    backend.train_from_iterator([text.replace(DSML, "") for text in [*texts, *[markup] * 8]], trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED])
    make: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    return make(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=_PAD)


def write_tiny_v4(folder: Path | str, *, seed: int = 0, **changes: Any) -> Path:
    """A model folder as a hub would give it: a DeepSeek V4 of two small layers with random weights (fp32), and its tokenizer.

    Args:
        folder: where to; made if needed.
        seed: of the weights.
        changes: fields of the config.
    """
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "max_position_embeddings": 2048,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "mlp_layer_types": ["moe", "moe"],
        "hc_mult": 2,
        "sliding_window": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 16,
        "hc_sinkhorn_iters": 4,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.05,
    }
    torch.manual_seed(seed)
    make: Any = DeepseekV4ForCausalLM
    model = make(DeepseekV4Config(**{**sizes, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


_WORDS = "a the fox, dog. 北京 weather is 22°C; größer 𝒳 🚀 <tag> x<y && 'q' \"z\" {1: [2]} | ```py 2>&1 None \\ \\n"
_BREAKS = ["\n", "\n\n", "\t"]
_KEYS = ("city", "days", "shipping address", "数量", "opts")


def random_conversation(seed: int, *, turns: int = 3, words: int = 12) -> Trajectory:
    """A conversation in thinking mode with tools: several scripts, line breaks, quotes, and users who write the format's signs.

    Args:
        seed: equal seeds give equal conversations.
        turns: questions; an answer may take tool calls and their results before it.
        words: about how long a text is.
    """
    rng = random.Random(seed)

    def said() -> str:
        return " ".join(rng.choices([*_WORDS.split(), *_BREAKS], k=rng.randint(words // 2, words * 3 // 2)))

    values: list[Any] = [1, -1.5, True, None, [1, "二"], {"k": {"x": [None]}}]
    tools = [{"type": "function", "function": {"name": f"tool_{k}", "description": said(), "parameters": {}}} for k in range(2)]
    messages: list[Any] = [{"role": "system", "content": said()}]
    for _ in range(turns):
        noise = rng.choice(["", f"<{DSML}tool_calls>", f"{EOS}{ASSISTANT}{THINK}", f"</{DSML}invoke>"])
        messages.append({"role": "user", "content": said() + noise})
        for _ in range(rng.randint(0, 2)):
            calls = []
            for k in range(rng.randint(1, 3)):
                arguments = {key: rng.choice([said(), *values]) for key in rng.sample(_KEYS, rng.randint(0, 3))}
                function = {"name": f"tool_{rng.randint(0, 1)}", "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": f"call_{len(messages)}_{k}", "type": "function", "function": function})
            text = rng.choice(["", said().strip()])
            messages.append({"role": "assistant", "content": text, "reasoning_content": said(), "tool_calls": calls})
            results = [{"role": "tool", "tool_call_id": call["id"], "content": said()} for call in calls]
            messages += rng.sample(results, len(results))
        messages.append({"role": "assistant", "content": said(), "reasoning_content": said()})
    return {"messages": messages, "tools": tools}
