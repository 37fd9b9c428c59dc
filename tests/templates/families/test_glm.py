"""GLM-4 and GLM-4.6: no end token of its own, the next role's token ends a turn."""

from __future__ import annotations

import pytest

SPECIAL = {
    "<|endoftext|>": 151329,
    "[gMASK]": 151331,
    "<sop>": 151333,
    "<|system|>": 151335,
    "<|user|>": 151336,
    "<|assistant|>": 151337,
    "<|observation|>": 151338,
    "<think>": 151350,
    "</think>": 151351,
    "<tool_call>": 151352,
    "</tool_call>": 151353,
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, *calls):
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    told = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": text, **told, **({"tool_calls": made} if made else {})}


def tool(text):
    return {"role": "tool", "content": text}


TALK = [user("hi 你"), assistant("yo 👋🏽"), user("ok"), assistant("go")]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(of_bytes):
    return of_bytes(SPECIAL, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def template(build, tokenizer):
    return build(tokenizer, "glm4")


@pytest.fixture(scope="module")
def thinking(build, tokenizer):
    return build(tokenizer, "glm4_6")


def test_the_next_roles_token_is_what_an_answer_stops_with(template, marked, prompt):
    """Also after the last answer, where the template writes none; the line break is the model's to write."""
    assert marked(template, TALK) == (
        "[gMASK]<sop><|user|>\nhi 你<|assistant|>⟦\nyo 👋🏽<|user|>⟧\nok<|assistant|>⟦\ngo<|user|>⟧"
    )
    assert prompt(template, [{"role": "system", "content": "s"}, user("hi")]) == (
        "[gMASK]<sop><|system|>\ns<|user|>\nhi<|assistant|>"
    )


def test_a_line_break_of_the_prompt_is_not_trained(build, tokenizer, marked, template):
    """Older templates ask with ``<|assistant|>⏎``."""
    from twinkle_core.templates.chat import ChatTemplate

    older = ChatTemplate(
        tokenizer, chat_template=template.chat_template.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>\\n' }}")
    )
    assert marked(older, TALK[:2]) == "[gMASK]<sop><|user|>\nhi 你<|assistant|>\n⟦yo 👋🏽<|user|>⟧"


def test_only_the_last_answer(build, tokenizer, marked):
    shown = marked(build(tokenizer, "glm4", train_on="last"), TALK)
    assert shown == "[gMASK]<sop><|user|>\nhi 你<|assistant|>\nyo 👋🏽<|user|>\nok<|assistant|>⟦\ngo<|user|>⟧"


def test_a_call_stops_with_the_observation(template, marked):
    """Inside a conversation and at its end: after a call it is not the user's turn."""
    talk = [user("w?"), assistant("", None, ("weather", {"city": "Bern"})), tool("sun"), assistant("Sun.")]
    shown = marked(template, talk, [TOOL])
    assert shown.startswith("[gMASK]<sop><|system|>\n你是一个名为 ChatGLM 的人工智能助手。")
    call = '<|user|>\nw?<|assistant|>⟦weather\n{"city": "Bern"}<|observation|>⟧'
    assert shown.endswith(f"{call}\nsun<|assistant|>⟦\nSun.<|user|>⟧")
    assert marked(template, talk[:2], [TOOL]).endswith(call)


def test_glm4_calls_are_read_back(template):
    assert template.tool_format == "glm4"
    assert template.parse('weather\n{"city": "Bern"}<|observation|>') == assistant("", None, ("weather", {"city": "Bern"}))
    assert template.parse("\nFine.<|user|>\nw?") == assistant("Fine.")


def test_old_thoughts_are_not_trained_as_empty_ones(thinking, marked, prompt):
    """The template writes an empty pair before every old answer; the model did not, so it is no target."""
    talk = [user("hi"), assistant("yo", "r1"), user("ok"), assistant("go", "r2")]
    assert marked(thinking, talk) == (
        "[gMASK]<sop><|user|>\nhi<|assistant|>\n<think></think>⟦\nyo<|user|>⟧\nok<|assistant|>⟦\n<think>r2</think>\ngo<|user|>⟧"
    )
    assert prompt(thinking, talk[:1]) == "[gMASK]<sop><|user|>\nhi<|assistant|>"


def test_with_thinking_off_the_question_says_so_and_the_pair_is_prompt(build, tokenizer, marked, prompt):
    quiet = build(tokenizer, "glm4_6", enable_thinking=False)
    talk = [user("hi"), assistant("yo", "r1"), user("ok"), assistant("go", "r2")]
    assert marked(quiet, talk) == (
        "[gMASK]<sop><|user|>\nhi/nothink<|assistant|>\n<think></think>⟦\nyo<|user|>⟧\nok/nothink<|assistant|>\n<think></think>"
        "⟦\ngo<|user|>⟧"
    )
    assert prompt(quiet, talk[:1]) == "[gMASK]<sop><|user|>\nhi/nothink<|assistant|>\n<think></think>"


@pytest.mark.parametrize("nothing", ["", None])
def test_calls_in_tags(thinking, marked, nothing):
    """A content of None must not be written as the word."""
    talk = [
        user("w?"),
        assistant(nothing, "ask", ("weather", {"city": "Bern", "days": 3}), ("weather", {})),
        tool("sun"),
        tool("rain"),
        assistant("Done."),
    ]
    assert marked(thinking, talk).removeprefix("[gMASK]<sop>") == (
        "<|user|>\nw?<|assistant|>⟦\n<think>ask</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>weather\n</tool_call><|observation|>⟧"
        "\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        "<|assistant|>⟦\n<think></think>\nDone.<|user|>⟧"
    )


def test_a_users_result_is_a_question_to_a_template_that_has_no_other_word_for_it(build, tokenizer, marked):
    talk = [
        user("w?"),
        assistant("", "ask", ("weather", {})),
        user("<tool_response>\nsun\n</tool_response>"),
        assistant("Done."),
    ]
    shown = marked(build(tokenizer, "glm4_6", train_on="last"), talk)
    assert shown.count("⟦") == 1 and "ask" not in shown


def test_calls_in_tags_are_read_back(thinking):
    text = (
        "\n<think>ask</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
        "<|observation|>"
    )
    assert thinking.tool_format == "glm_xml"
    assert thinking.parse(text) == assistant("", "ask", ("weather", {"city": "Bern"}))


def test_ids(template):
    row = template.encode({"messages": TALK[:2]})
    assert row["input_ids"][:3] == [151331, 151333, 151336] and row["input_ids"][-1] == 151336 == row["labels"][-2]


def test_observation_is_a_role_and_a_mistyped_one_is_not(template, marked):
    """Results under the name of the family's own token, as data sets have them."""
    talk = [user("w?"), assistant("", None, ("weather", {"city": "Bern"})), tool("sun"), assistant("Sun.")]
    expected = marked(template, talk, [TOOL])
    talk[2] = {"role": "observation", "content": "sun"}
    assert marked(template, talk, [TOOL]) == expected
    talk[2] = {"role": "observatoin", "content": "sun"}
    with pytest.raises(ValueError, match=r"message 2 \(observatoin\): .*does not know the role"):
        template.encode({"messages": talk})
