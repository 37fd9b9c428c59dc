"""Qwen3: thoughts after the last question only; with thinking off an empty pair is part of the prompt."""

from __future__ import annotations

import pytest


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, call=None):
    made = {"tool_calls": [{"type": "function", "function": {"name": call[0], "arguments": call[1]}}]} if call else {}
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {}), **made}


def tool(text):
    return {"role": "tool", "content": text}


TALK = [user("hi"), assistant("yo", "r1"), user("ok"), assistant("go", "r2")]
INLINE = [user("hi"), assistant("<think>\nr1\n</think>\n\nyo"), user("ok"), assistant("<think>\nr2\n</think>\n\ngo")]
BEGINNING = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧\n<|im_start|>user\nok<|im_end|>\n"


@pytest.fixture(scope="module")
def template(build, qwen):
    return build(qwen, "qwen3")


@pytest.fixture(scope="module")
def quiet(build, qwen):
    return build(qwen, "qwen3", enable_thinking=False)


@pytest.mark.parametrize("talk", [TALK, INLINE])
def test_the_live_thought_is_trained_and_old_ones_are_not_there(template, marked, talk):
    expected = BEGINNING + "<|im_start|>assistant\n⟦<think>\nr2\n</think>\n\ngo<|im_end|>⟧\n"
    assert marked(template, talk) == expected


@pytest.mark.parametrize("talk", [TALK, INLINE, [user("hi"), assistant("yo"), user("ok"), assistant("go")]])
def test_with_thinking_off_the_empty_pair_is_prompt(quiet, marked, prompt, talk):
    assert marked(quiet, talk) == BEGINNING + "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦go<|im_end|>⟧\n"
    assert prompt(quiet, [user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_an_answer_without_a_thought_has_an_empty_one_that_the_model_writes(template, marked):
    shown = marked(template, [user("hi"), assistant("yo")])
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nyo<|im_end|>⟧\n"


def test_only_the_last_answer(build, qwen, marked):
    expected = BEGINNING.replace("⟦", "").replace("⟧", "") + "<|im_start|>assistant\n⟦<think>\nr2\n</think>\n\ngo<|im_end|>⟧\n"
    assert marked(build(qwen, "qwen3", train_on="last"), TALK) == expected


def test_the_prompt_leaves_the_thought_to_the_model(template, prompt):
    assert prompt(template, [{"role": "system", "content": "s"}, user("hi")]) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


WRAPPED = "<tool_response>\nsun\n</tool_response>"
LOOP = [
    user("w?"),
    assistant("", "ask", ("weather", {"city": "Bern"})),
    tool("sun"),
    assistant("", None, ("weather", {"city": "Genf"})),
    tool("rain"),
    assistant("Done.", "both"),
]


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_in_a_tool_loop_all_thoughts_are_kept_and_trained(build, qwen, marked, train_on):
    """A result is no question. An inner turn without a thought has no empty pair."""
    template = build(qwen, "qwen3", train_on=train_on)
    expected = (
        "<|im_start|>user\nw?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nask\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Genf"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nboth\n</think>\n\nDone.<|im_end|>⟧\n"
    )
    assert marked(template, LOOP) == expected


@pytest.mark.parametrize(("result", "question"), [(WRAPPED, False), (WRAPPED + "\n", True), (WRAPPED + " And?", True)])
def test_a_users_result_is_no_question_where_the_template_takes_it_for_none(build, qwen, marked, result, question):
    """The turns of ``train_on="last"`` begin where the template's thoughts do, to the character of its test."""
    talk = [user("w?"), LOOP[1], user(result), LOOP[5]]
    shown = marked(build(qwen, "qwen3", train_on="last"), talk)
    assert shown.count("⟦") == (1 if question else 2) and ("\nask\n" in shown) is not question


def test_declared_tools_follow_the_system_message(template, marked):
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    shown = marked(template, [{"role": "system", "content": "be kind"}, *LOOP], [weather])
    assert shown.startswith("<|im_start|>system\nbe kind\n\n# Tools\n\nYou may call")
    assert '<tools>\n{"type": "function", "function": {"name": "weather", "parameters": {}}}\n</tools>' in shown
    alone = marked(template, LOOP, [weather])
    assert alone.startswith("<|im_start|>system\n# Tools\n\nYou may call")


def test_a_completion_is_read_back(template):
    text = '<think>\nask\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
    assert template.parse(text) == LOOP[1]
