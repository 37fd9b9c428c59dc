"""Llama 3 and 3.1: headers, a beginning token from template and tokenizer, calls as bare JSON."""

from __future__ import annotations

import pytest


def user(text):
    return {"role": "user", "content": text}


def assistant(text, call=None):
    made = {"tool_calls": [{"type": "function", "function": {"name": call[0], "arguments": call[1]}}]} if call else {}
    return {"role": "assistant", "content": text, **made}


def head(role):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


TALK = [user(" hi"), assistant("yo\n"), user("ok"), assistant(" go")]
SHOWN = (
    f"{head('user')}hi<|eot_id|>{head('assistant')}⟦yo<|eot_id|>⟧{head('user')}ok<|eot_id|>{head('assistant')}⟦go<|eot_id|>⟧"
)
BOS = "<|begin_of_text|>"
TODAY = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def template(build, llama3):
    return build(llama3, "llama3")


@pytest.fixture(scope="module")
def newer(build, llama3):
    return build(llama3, "llama3_1")


def test_a_header_after_the_last_answer_is_cut(template, marked, prompt):
    """Llama 3's template writes the next header whether a prompt was asked for or not."""
    assert marked(template, TALK) == BOS + SHOWN
    assert template.render({"messages": TALK}) == BOS + SHOWN.replace("⟦", "").replace("⟧", "")
    assert prompt(template, TALK[:3]) == BOS + SHOWN[: SHOWN.index("⟦go")].replace("⟦", "").replace("⟧", "")


def test_the_first_tokens_are_those_of_the_release(template):
    row = template.encode({"messages": [user("hi"), assistant("yo")]})
    assert row["input_ids"][:5] == [128000, 128006, 882, 128007, 271]
    assert row["input_ids"][-1] == 128009 == row["labels"][-2]


def test_newer_ones_always_have_a_system_message(newer, marked, prompt):
    assert marked(newer, TALK) == f"{BOS}{head('system')}{TODAY}<|eot_id|>{SHOWN}"
    told = [{"role": "system", "content": "be kind "}, *TALK]
    assert marked(newer, told) == f"{BOS}{head('system')}{TODAY}be kind<|eot_id|>{SHOWN}"
    assert (
        prompt(newer, told[:2]) == f"{BOS}{head('system')}{TODAY}be kind<|eot_id|>{head('user')}hi<|eot_id|>{head('assistant')}"
    )


def test_only_the_last_answer(build, llama3, marked):
    shown = marked(build(llama3, "llama3", train_on="last"), TALK)
    assert shown == BOS + SHOWN.replace("⟦yo<|eot_id|>⟧", "yo<|eot_id|>")


@pytest.mark.parametrize("nothing", ["", None])
def test_calls_are_trained_and_results_are_quoted(newer, marked, nothing):
    talk = [
        user("w?"),
        assistant(nothing, ("weather", {"city": "Bern"})),
        {"role": "tool", "content": 'say "sun"\n'},
        assistant("Sun."),
    ]
    expected = (
        f"{BOS}{head('system')}Environment: ipython\n{TODAY}<|eot_id|>{head('user')}"
        "Given the following functions, please respond "
        "with a JSON for a function call with its proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        "Do not use variables.\n\n"
        '{\n    "type": "function",\n    "function": {\n        "name": "weather"\n    }\n}\n\nw?<|eot_id|>'
        f'{head("assistant")}⟦{{"name": "weather", "parameters": {{"city": "Bern"}}}}<|eot_id|>⟧'
        f'{head("ipython")}"say \\"sun\\"\\n"<|eot_id|>{head("assistant")}⟦Sun.<|eot_id|>⟧'
    )
    assert marked(newer, talk, [TOOL]) == expected


def test_what_it_would_leave_out_is_refused(newer):
    with pytest.raises(ValueError, match=r"message 1 \(assistant\): .*leaves out its content"):
        newer.encode({"messages": [user("w?"), assistant("Let me see.", ("weather", {}))]})
    two = assistant("", ("weather", {}))
    two["tool_calls"] *= 2
    with pytest.raises(ValueError, match="only supports single tool-calls"):
        newer.encode({"messages": [user("w?"), two]})


def test_calls_are_read_back(newer):
    assert newer.tool_format == "llama3"
    text = '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>'
    assert newer.parse(text) == assistant("", ("weather", {"city": "Bern"}))
    assert newer.parse("See " + text) == assistant('See {"name": "weather", "parameters": {"city": "Bern"}}')


def test_tools_that_are_not_shown_are_refused(build, llama3):
    """Llama 3 itself knows no tools: they would be dropped in silence."""
    template = build(llama3, "llama3")
    for talk, prompt in ((TALK, False), (TALK[:-1], True)):
        with pytest.raises(ValueError, match=r"shows nothing of the row's 'tools' \(1\)"):
            template.encode({"messages": talk, "tools": [TOOL]}, add_generation_prompt=prompt)


def test_ipython_is_a_role_and_a_mistyped_one_is_not(newer, marked):
    """Results under the name that the template itself writes for them, as data sets have them."""
    call = assistant("", ("weather", {"city": "Bern"}))
    talk = [user("w?"), call, {"role": "tool", "content": "sun"}, assistant("Sun.")]
    expected = marked(newer, talk, [TOOL])
    talk[2] = {"role": "ipython", "content": "sun"}
    assert marked(newer, talk, [TOOL]) == expected
    talk[2] = {"role": "ipythn", "content": "sun"}
    with pytest.raises(ValueError, match=r"message 2 \(ipythn\): .*does not know the role"):
        newer.encode({"messages": talk})
