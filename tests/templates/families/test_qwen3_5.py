"""Qwen3.5: the prompt begins the thought; texts are trimmed; calls are written in tags."""

from __future__ import annotations

import pytest


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, *calls):
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    told = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": text, **told, **({"tool_calls": made} if made else {})}


def tool(text):
    return {"role": "tool", "content": text}


TALK = [user(" hi "), assistant("yo", "r1"), user("ok"), assistant(" go\n", "r2")]
BEGINNING = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧\n<|im_start|>user\nok<|im_end|>\n"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"zip": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def template(build, qwen35):
    return build(qwen35, "qwen3_5")


def test_the_thought_is_trained_but_not_its_beginning(template, marked, prompt):
    expected = BEGINNING + "<|im_start|>assistant\n<think>\n⟦r2\n</think>\n\ngo<|im_end|>⟧\n"
    assert marked(template, TALK) == expected
    inline = [user("hi"), assistant("<think>\nr1\n</think>\n\nyo"), user("ok"), assistant("<think>\nr2\n</think>\n\ngo")]
    assert marked(template, inline) == expected
    assert prompt(template, TALK[:1]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_with_thinking_off_the_empty_pair_is_prompt(build, qwen35, marked, prompt):
    quiet = build(qwen35, "qwen3_5", enable_thinking=False)
    assert marked(quiet, TALK) == BEGINNING + "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦go<|im_end|>⟧\n"
    assert prompt(quiet, TALK[:1]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_only_the_last_answer(build, qwen35, marked):
    shown = marked(build(qwen35, "qwen3_5", train_on="last"), TALK)
    assert shown.count("⟦") == 1 and shown.endswith("<think>\n⟦r2\n</think>\n\ngo<|im_end|>⟧\n")


def test_a_tool_loop_keeps_its_thoughts(template, marked):
    talk = [
        user("w?"),
        assistant("Well.", "ask", ("weather", {"zip": "3000", "days": 3, "more": {"a": [1]}}), ("weather", {})),
        tool(" sun "),
        tool("rain"),
        assistant("Done."),
    ]
    expected = (
        "<|im_start|>user\nw?<|im_end|>\n<|im_start|>assistant\n<think>\n⟦ask\n</think>\n\nWell.\n\n"
        "<tool_call>\n<function=weather>\n<parameter=zip>\n3000\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=more>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=weather>\n</function>\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        # two line breaks are one token, half of it prompt
        "<|im_start|>assistant\n<think>\n\n⟦</think>\n\nDone.<|im_end|>⟧\n"
    )
    assert marked(template, talk) == expected


@pytest.mark.parametrize(("after", "question"), [("", False), (" \n", False), (" And?", True)])
def test_a_users_result_is_no_question_where_the_template_takes_it_for_none(build, qwen35, marked, after, question):
    """It trims before it looks."""
    talk = [user("w?"), assistant("", "ask", ("weather", {})), user(f"<tool_response>\nsun\n</tool_response>{after}")]
    shown = marked(build(qwen35, "qwen3_5", train_on="last"), [*talk, assistant("Done.", "both")])
    assert shown.count("⟦") == (1 if question else 2) and ("ask\n" in shown) is not question


def test_declared_tools_come_before_the_system_message(template, marked):
    shown = marked(template, [{"role": "system", "content": " be kind "}, *TALK], [WEATHER])
    assert shown.startswith("<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n{")
    assert "</IMPORTANT>\n\nbe kind<|im_end|>\n<|im_start|>user\nhi" in shown


def test_a_declared_text_stays_a_text(template):
    """The form has no quotes: ``3000`` is a number unless the tool says otherwise."""
    text = "ask\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=zip>\n3000\n</parameter>\n</function>\n</tool_call>"
    assert template.tool_format == "qwen_xml"
    assert template.parse(text) == assistant("", "ask", ("weather", {"zip": 3000}))
    assert template.parse(text, tools=[WEATHER]) == assistant("", "ask", ("weather", {"zip": "3000"}))


def test_a_thought_that_was_cut_off_is_no_answer(template):
    assert template.parse("I should first") == assistant("", "I should first")
    assert template.parse("so\n</think>\n\nyes<|im_end|>") == assistant("yes", "so")


def test_what_the_template_refuses_is_told(template):
    with pytest.raises(ValueError, match=r"refuses this conversation: System message must be at the beginning"):
        template.encode({"messages": [*TALK, {"role": "system", "content": "s"}, user("x"), assistant("y")]})
