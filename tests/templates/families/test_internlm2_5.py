"""InternLM2.5: ChatML after a beginning token."""

from __future__ import annotations

import pytest

SPECIAL = {"<s>": 1, "</s>": 2, "<|im_end|>": 92542, "<|im_start|>": 92543}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TALK = [user("hi 你"), assistant("yo 👋🏽"), user("ok"), assistant(" go\n")]
SHOWN = (
    "<|im_start|>user\nhi 你<|im_end|>\n<|im_start|>assistant\n⟦yo 👋🏽<|im_end|>⟧\n"
    "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n⟦ go\n<|im_end|>⟧\n"
)


@pytest.fixture(scope="module")
def tokenizer(of_bytes):
    return of_bytes(SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def template(build, tokenizer):
    return build(tokenizer, "internlm2_5")


def test_the_end_of_a_turn_is_trained_not_the_tokenizers_end(template, marked, prompt):
    assert marked(template, TALK) == "<s>" + SHOWN
    row = template.encode({"messages": TALK})
    assert row["input_ids"][:2] == [1, 92543]
    assert row["labels"].count(92542) == 2 and 2 not in row["labels"]
    assert prompt(template, TALK[:1]) == "<s><|im_start|>user\nhi 你<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_message(build, tokenizer, template, marked):
    told = "<s><|im_start|>system\nbe kind<|im_end|>\n" + SHOWN
    assert marked(template, [{"role": "system", "content": "be kind"}, *TALK]) == told
    assert marked(build(tokenizer, "internlm2_5", default_system="be kind"), TALK) == told


def test_only_the_last_answer(build, tokenizer, marked):
    shown = marked(build(tokenizer, "internlm2_5", train_on="last"), TALK)
    assert shown == "<s>" + SHOWN.replace("⟦yo 👋🏽<|im_end|>⟧", "yo 👋🏽<|im_end|>")


def test_a_tools_result_is_a_turn_of_its_own_and_calls_are_refused(template, marked):
    talk = [user("w?"), assistant("look"), {"role": "tool", "content": "sun"}, assistant("Sun.")]
    assert marked(template, talk).endswith("<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n⟦Sun.<|im_end|>⟧\n")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(ValueError, match=r"message 1 \(assistant\): .*leaves out its tool call"):
        template.encode({"messages": [user("w?"), {**assistant(""), "tool_calls": [call]}]})


def test_without_a_form_of_calls_what_looks_like_one_is_text(template):
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert template.tool_format is None
    assert template.parse(text + "<|im_end|>") == assistant(text)
