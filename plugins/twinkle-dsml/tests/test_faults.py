"""Types of a call's arguments, there and back."""

from __future__ import annotations

import json
import re

import pytest

from twinkle_dsml.template import DSMLTemplate
from twinkle_dsml.tokens import EOS

USER = {"role": "user", "content": "?"}


def answer(small, arguments):
    """What the assistant is taught to write for a call, and what is read from it."""
    function = {"name": "f"} if arguments is ... else {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    template = DSMLTemplate(small, enable_thinking=False)
    text = template.decode(template.encode({"messages": [USER, call]})["labels"])
    (call,) = template.parse(text)["tool_calls"]
    assert call["function"]["name"] == "f"
    return text, json.loads(call["function"]["arguments"])


def test_B26_types_of_parameters_survive(small):
    """Texts are marked as such, whatever they look like; and read as what they are marked as."""
    given = {"city": "SF", "days": 3, "zip": "00123", "ok": True, "n": None, "q": "3"}
    text, read = answer(small, given)
    assert dict(re.findall(r'parameter name="(\w+)" string="(\w+)"', text)) == {
        "city": "true", "zip": "true", "q": "true", "days": "false", "ok": "false", "n": "false",
    }  # fmt: skip
    assert read == given and {k: type(v) for k, v in read.items()} == {k: type(v) for k, v in given.items()}


@pytest.mark.parametrize("arguments", [None, "", ...], ids=["none", "empty", "absent"])
def test_B26_a_call_without_arguments_has_no_parameters(small, arguments):
    text, read = answer(small, arguments)
    assert "parameter" not in text and read == {}


def test_B26_text_that_only_looks_like_a_tag_is_text(small):
    message = DSMLTemplate(small, enable_thinking=False).parse("2 < 3" + EOS)
    assert message["content"] == "2 < 3" and not message.get("tool_calls")
    value = {"text": "one\ntwo </x>"}
    assert answer(small, value)[1] == value
