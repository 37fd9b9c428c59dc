"""Rows that are too long, in every family: what is left is a piece of the whole row, and no end is invented."""

from __future__ import annotations

import pytest

from twinkle_core.errors import NoLabels, RowTooLong

FAMILIES = {
    "qwen2_5": ("qwen", {"<|im_end|>"}),
    "qwen3": ("qwen", {"<|im_end|>"}),
    "qwen3_5": ("qwen35", {"<|im_end|>"}),
    "llama3": ("llama3", {"<|eot_id|>"}),
    "llama3_1": ("llama3", {"<|eot_id|>"}),
    "mistral_v3": ("mistral", {"</s>"}),
    "glm4": ("glm", {"<|user|>", "<|endoftext|>"}),
    "glm4_6": ("glm", {"<|user|>", "<|endoftext|>"}),
    "internlm2_5": ("internlm", {"<|im_end|>", "</s>"}),
    "yi": ("yi", {"<|im_end|>", "<|endoftext|>"}),
    "deepseek_v3": ("deepseek", {"<｜end▁of▁sentence｜>"}),
    "deepseek_r1": ("deepseek", {"<｜end▁of▁sentence｜>"}),
}
BYTES = {
    "glm": (
        {t: 90 + k for k, t in enumerate(("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"))},
        "<|endoftext|>",
    ),
    "internlm": ({"<s>": 1, "<|im_end|>": 92542, "<|im_start|>": 92543}, "</s>"),
    "yi": ({"<|im_start|>": 6, "<|im_end|>": 7}, "<|endoftext|>"),
}
TALK = {
    "messages": [
        {"role": "user", "content": "hi 你好, who are you?"},
        {"role": "assistant", "content": "I am a model, 模型, and I answer questions of any kind at some length."},
    ]
}


@pytest.fixture(params=FAMILIES)
def family(request, build, of_bytes):
    """(options -> template, ids that end an answer)"""
    kind, ends = FAMILIES[request.param]
    if kind in BYTES:
        special, eos = BYTES[kind]
        names = {"bos_token": "<s>"} if "<s>" in special else {}
        tokenizer = of_bytes({**special, eos: 2}, eos_token=eos, **names)
    else:
        tokenizer = request.getfixturevalue(kind)
    ids = {tokenizer.convert_tokens_to_ids(token) for token in ends}
    assert None not in ids
    return lambda **options: build(tokenizer, request.param, **options), ids


def test_right_keeps_the_beginning_and_invents_no_end(family):
    make, ends = family
    whole = make().encode(TALK)
    trained = [k for k, label in enumerate(whole["labels"]) if label != -100]
    assert whole["labels"][trained[-1]] in ends, "an answer ends with its end token"
    limit = trained[-1] - 2
    row = make(max_length=limit, truncation_strategy="right").encode(TALK)
    assert row["input_ids"] == whole["input_ids"][:limit]
    assert row["labels"] == [*whole["labels"][: limit - 1], -100]
    assert not ends & set(row["labels"]) and any(label != -100 for label in row["labels"])


def test_left_keeps_the_end(family):
    make, ends = family
    whole = make().encode(TALK)
    limit = whole["length"] - 5
    row = make(max_length=limit, truncation_strategy="left").encode(TALK)
    assert row["input_ids"] == whole["input_ids"][5:] and row["labels"] == whole["labels"][5:]
    assert ends & set(row["labels"])


def test_split_loses_no_label(family):
    make, _ = family
    whole = make().encode(TALK)
    pieces = make(max_length=7, truncation_strategy="split").encode(TALK)
    assert [t for p in pieces for t in p["labels"] if t != -100] == [t for t in whole["labels"] if t != -100]
    assert all(p["length"] <= 7 for p in pieces)


def test_labels_that_all_vanish_are_told(family):
    make, _ = family
    whole = make().encode(TALK)
    first = next(k for k, label in enumerate(whole["labels"]) if label != -100)
    short = make(max_length=first + 1, truncation_strategy="right")
    with pytest.raises(NoLabels, match="'right'"):
        short.encode(TALK)
    assert "no trained token is left" in short.check(TALK)
    with pytest.raises(RowTooLong):
        make(max_length=first + 1).encode(TALK)
    dropping = make(max_length=first + 1, truncation_strategy="delete")
    assert dropping.encode(TALK) is None and dropping.dropped == 1
