"""Qwen2.5: ChatML with a default system message, tools as JSON, no beginning token."""

from __future__ import annotations

import json

import pytest

DEFAULT = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
DECLARED = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def tool(text):
    return {"role": "tool", "content": text}


TALK = [user("hi 你"), assistant("yo 👋🏽"), user("ok"), assistant(" go\n")]
SHOWN = (
    "<|im_start|>user\nhi 你<|im_end|>\n<|im_start|>assistant\n⟦yo 👋🏽<|im_end|>⟧\n"
    "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n⟦ go\n<|im_end|>⟧\n"
)


@pytest.fixture(scope="module")
def template(build, qwen):
    return build(qwen, "qwen2_5")


def test_answers_and_their_end_tokens_are_trained(template, marked):
    assert marked(template, TALK) == DEFAULT + SHOWN


def test_a_system_message_takes_the_place_of_the_default(template, marked, build, qwen):
    told = "<|im_start|>system\nbe kind<|im_end|>\n" + SHOWN
    assert marked(template, [{"role": "system", "content": "be kind"}, *TALK]) == told
    assert marked(build(qwen, "qwen2_5", default_system="be kind"), TALK) == told


def test_only_the_last_answer(build, qwen, marked):
    shown = SHOWN.replace("⟦yo 👋🏽<|im_end|>⟧", "yo 👋🏽<|im_end|>")
    assert marked(build(qwen, "qwen2_5", train_on="last"), TALK) == DEFAULT + shown


def test_the_prompt_is_what_comes_before_the_answer(template, prompt):
    assert prompt(template, TALK[:1]) == DEFAULT + "<|im_start|>user\nhi 你<|im_end|>\n<|im_start|>assistant\n"


def test_calls_are_trained_and_results_are_not(template, marked):
    talk = [
        user("w?"),
        assistant("Let me see.", ("weather", {"city": "Bern"}), ("weather", '{"city": "Genève", "days": [1, 2]}')),
        tool("sun"),
        tool("rain"),
        assistant("Sun and rain."),
    ]
    expected = (
        DEFAULT.removesuffix("<|im_end|>\n") + DECLARED + "<|im_start|>user\nw?<|im_end|>\n<|im_start|>assistant\n"
        '⟦Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève", "days": [1, 2]}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦Sun and rain.<|im_end|>⟧\n"
    )
    assert marked(template, talk, [TOOL]) == expected


@pytest.mark.parametrize("nothing", ["", None])
def test_a_call_without_words_begins_after_the_header(template, marked, nothing):
    """The header's line break is one with the call's in the text, and prompt."""
    talk = [user("w?"), assistant(nothing, ("weather", {})), tool("sun"), assistant("Sun.")]
    expected = '<|im_start|>assistant\n⟦<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>⟧\n'
    assert expected in marked(template, talk, [TOOL])


def test_calls_are_read_back(template):
    text = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
    assert template.tool_format == "hermes"
    assert template.parse(text) == {**assistant("Well.", ("weather", {"city": "Bern"}))}


def test_ids(template, qwen):
    """145: ``<|im_end|>``, which is trained; 8: no beginning token anywhere."""
    row = template.encode({"messages": TALK[:2]})
    assert row["input_ids"][0] == 151644 and qwen.bos_token_id is None
    assert [t for t in row["labels"] if t != -100][-1] == 151645
    assert json.loads(json.dumps(row)) == row
