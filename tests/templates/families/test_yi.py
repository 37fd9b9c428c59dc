"""Yi: the header of an answer is part of the question; a system message without tags."""

from __future__ import annotations

import pytest

SPECIAL = {"<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}


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
    return of_bytes(SPECIAL, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def template(build, tokenizer):
    return build(tokenizer, "yi")


def test_the_header_is_not_trained(template, marked, prompt):
    assert marked(template, TALK) == SHOWN
    assert prompt(template, TALK[:1]) == "<|im_start|>user\nhi 你<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_message_has_no_tags(build, tokenizer, template, marked):
    assert marked(template, [{"role": "system", "content": "be kind"}, *TALK]) == "be kind" + SHOWN
    assert marked(build(tokenizer, "yi", default_system="be kind"), TALK) == "be kind" + SHOWN


def test_only_the_last_answer(build, tokenizer, marked):
    shown = marked(build(tokenizer, "yi", train_on="last"), TALK)
    assert shown == SHOWN.replace("⟦yo 👋🏽<|im_end|>⟧", "yo 👋🏽<|im_end|>")


def test_what_it_drops_is_refused(template):
    with pytest.raises(ValueError, match=r"message 2 \(tool\): .*leaves out its content"):
        template.encode({"messages": [user("w?"), assistant("look"), {"role": "tool", "content": "sun"}, assistant("Sun.")]})
    with pytest.raises(ValueError, match=r"message 0 \(assistant\): no user comes before it"):
        template.encode({"messages": [assistant("hello"), *TALK]})
