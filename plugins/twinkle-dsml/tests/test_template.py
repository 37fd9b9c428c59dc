"""The templates: names, arguments, messages in their forms, releases."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

from twinkle_core import registry
from twinkle_core.errors import TemplateError
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.render import render
from twinkle_dsml.template import DeepseekV4Template, DeepseekV32Template, DSMLTemplate
from twinkle_dsml.testing import random_conversation
from twinkle_dsml.tokens import DSML, EOS

USER, ASSISTANT, BOS = "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def calls(arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def chat(messages, **options):
    return render(messages, mode="chat", **options).text


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["dsml", "deepseek_v4", "DSMLTemplate", "DeepseekV4Template"])
def test_all_names_of_v4_are_one_class(name):
    assert registry.resolve("template", name) is DSMLTemplate is DeepseekV4Template


@pytest.mark.parametrize("name", ["deepseek_v3_2", "DeepseekV32Template"])
def test_names_of_v32(name):
    assert registry.resolve("template", name) is DeepseekV32Template


def test_users_import_it_from_the_facade():
    from twinkle.template import DSMLTemplate as public

    assert public is DSMLTemplate


def test_importing_the_template_imports_no_torch():
    code = "import sys, twinkle_dsml.template as t; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_data_set_takes_it_by_name(small):
    from twinkle.dataset import Dataset

    dataset = Dataset([{"messages": [user("q"), assistant("a", reasoning_content="r")]}])
    dataset.set_template("dsml", model_id=small, reasoning_effort="low")
    row = dataset.encode()[0]
    assert dataset.template.decode(row["labels"]) == f"r</think>a{EOS}"


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"release": "v5"}, "release='v5': one of 'v4-preview', 'v4-0731', 'v4.1', 'v3.2'"),
        ({"release": "v4-preview", "reasoning_effort": "low"}, "release v4-preview has 'high', 'max'"),
        ({"reasoning_effort": 50}, "release v4-0731 has 'low', 'high', 'xhigh', 'max'"),
        ({"release": "v4.1", "reasoning_effort": 101}, "or a number from 1 to 100"),
        ({"release": "v3.2", "reasoning_effort": "high"}, "no reasoning effort at all"),
        ({"max_length": 1}, "max_length=1"),
        ({"truncation_strategy": "middle"}, "truncation_strategy='middle'"),
        ({"default_system": ["S"], "reasoning_effort": "low"}, r"default_system=\['S'\]: a text"),
        ({"train_on": "first"}, "train_on='first'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(small, arguments, why):
    with pytest.raises(TemplateError, match=why):
        DSMLTemplate(small, **arguments)


def test_a_tokenizer_without_the_tokens_is_refused(tokenizer):
    from twinkle_core.testing.tokenizers import chatml_tokenizer

    with pytest.raises(TemplateError, match=r"no single token for .*<｜User｜>"):
        DSMLTemplate(chatml_tokenizer())
    with pytest.raises(TemplateError, match=r"no single token for <｜System｜>, which v4.1 writes"):
        DSMLTemplate(tokenizer, release="v4.1")


def test_efforts():
    question = [user("q")]
    said = {
        (name, effort): len(render(question, release=RELEASES[name], reasoning_effort=effort).text)
        for name in ("v4-preview", "v4-0731", "v4.1")
        for effort in (None, "high", "max")
    }
    bare = len(f"{BOS}{USER}q{ASSISTANT}<think>")
    assert said["v4-preview", None] == said["v4-preview", "high"] == bare
    assert said["v4-0731", None] == said["v4-0731", "high"] == said["v4-preview", "max"] == bare + 476
    assert said["v4-0731", "max"] == bare + 526
    text = render(question, release=RELEASES["v4.1"], reasoning_effort=37).text
    assert text.startswith(f"{BOS}<｜System｜>Reasoning Effort: 37 (range 1-100")
    assert chat(question, reasoning_effort="max") == f"{BOS}{USER}q{ASSISTANT}</think>"


def test_prompts(small):
    template = DSMLTemplate(small, reasoning_effort="low")
    row = template.encode({"messages": [user("q")]}, add_generation_prompt=True)
    assert "labels" not in row
    assert template.decode(row["input_ids"]) == f"{BOS}{USER}q{ASSISTANT}<think>"
    with pytest.raises(TemplateError, match="ends with the assistant"):
        template.encode({"messages": [user("q"), assistant("a")]}, add_generation_prompt=True)


@pytest.mark.parametrize("text", ["half \ud800", '{"x": "\\ud800"}'])
def test_half_a_character_is_refused(small, text):
    """JSON can spell it, so rows that are read without complaint may hold it in the arguments of a call."""
    message = calls(text) if "{" in text else assistant(text)
    template = DSMLTemplate(small, enable_thinking=False)
    assert "half a character" in template.check({"messages": [user("q"), message]})


@pytest.mark.parametrize(
    ("release", "messages", "waits"),
    [
        ("v4-0731", ["system"], False),
        ("v4-0731", ["user", "system"], False),
        ("v4-0731", ["latest_reminder"], False),
        ("v4-0731", ["assistant", "latest_reminder"], False),
        ("v4-0731", ["user", "latest_reminder"], True),
        ("v4-0731", ["developer"], True),
        ("v4-0731", ["user", "assistant", "tool"], True),
        ("v4.1", ["system"], True),
        ("v4.1", ["user", "assistant"], False),
        ("v3.2", ["system"], False),
    ],
)
def test_a_prompt_has_the_header_or_is_refused(small, release, messages, waits):
    template = DSMLTemplate(small, release=release, enable_thinking=False)
    trajectory = {"messages": [{"role": role, "content": "x"} for role in messages]}
    shown = template.render(trajectory).replace("<｜latest_reminder｜>x", "").endswith(f"{ASSISTANT}</think>")
    assert shown == waits
    if waits:
        assert template.encode(trajectory, add_generation_prompt=True)["input_ids"]
    else:
        with pytest.raises(TemplateError, match=r"a prompt needs a question|ends with the assistant"):
            template.encode(trajectory, add_generation_prompt=True)


def test_what_was_asked_in_the_context_is_answered(small):
    template = DSMLTemplate(small, enable_thinking=False)
    reminder = {"messages": [{"role": "latest_reminder", "content": "x"}]}
    assert template.encode(reminder, add_generation_prompt=True, context=[user("q")])["length"]


def test_default_system(small):
    template = DSMLTemplate(small, enable_thinking=False, default_system="S")
    assert template.render({"messages": [user("q")]}).startswith(f"{BOS}S{USER}")
    assert template.render({"messages": [{"role": "system", "content": "T"}, user("q")]}).startswith(f"{BOS}T{USER}")


def test_it_survives_pickling(small):
    template = DSMLTemplate(small, reasoning_effort="low")
    conversation = random_conversation(3)
    assert pickle.loads(pickle.dumps(template)).encode(conversation) == template.encode(conversation)


def test_parse(small):
    template = DSMLTemplate(small, reasoning_effort="low")
    assert template.parse("r</think>a")["content"] == "a"
    with pytest.raises(TemplateError, match="the end token"):
        template.parse("r</think>a", strict=True)
    parser = template.stream_parser()
    parser.feed("r</thi")
    parser.feed(f"nk>a{EOS}")
    assert parser.message == template.parse(f"r</think>a{EOS}", strict=True)
    assert DSMLTemplate(small, enable_thinking=False).parse("a")["content"] == "a"


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("hi", "not a mapping"),
        ({"content": "x"}, "'role' must be one of"),
        ({"role": "critic", "content": "x"}, "'role' must be one of"),
        ({"role": "user", "text": "x"}, r"no 'content' \(but 'text'\)"),
        ({"role": "user", "content": 3}, "'content' is a int"),
        ({"role": "user", "content": [{"type": "text"}]}, "has no text"),
        ({"role": "user", "content": "x", "task": "dance"}, "'task' must be one of"),
        ({"role": "user", "content_blocks": "x"}, "'content_blocks'"),
        ({"role": "assistant", "content": "x", "reasoning_content": 3}, "'reasoning_content' is a int"),
        ({"role": "assistant", "content": "x", "tool_calls": "f"}, "'tool_calls' is a str"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "a tool call needs"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "are no mapping"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": object()}}}]}, "is not JSON"),
        ({"role": "system", "content": "x", "tools": "f"}, "tools='f': not JSON"),
        ({"role": "system", "content": "x", "tools": ["f"]}, "a tool is {'function'"),
        ({"role": "system", "content": "x", "tools": [{"function": {"description": "no name"}}]}, "a tool is {'function'"),
        ({"role": "system", "content": "x", "response_format": "{"}, "'response_format' is not JSON"),
        ({"role": "system", "content": "x", "response_format": "[1]"}, "'response_format' is no schema"),
        ({"role": "developer", "content": ""}, "'content' is empty"),
        ({"role": "user", "content": "x", "task": ["query"]}, "'task' must be one of"),
        ({"role": "user", "content": "x", "tools": [TOOL]}, "it has 'tools', which are for system and developer messages"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "it has 'tool_calls', which are for assistant messages"),
        ({"role": "assistant", "content": None}, "it has no 'content'"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "'function_call' is the old form"),
        (calls({(1, 2): 1}), r"a parameter of tool call 'f' is named \(1, 2\)"),
        (calls({True: 1}), "a parameter of tool call 'f' is named True"),
        (calls("[" * 100_000), "the arguments of tool call 'f': .*recursion"),
        (calls('{"x": ' + "1" * 5000 + "}"), "the arguments of tool call 'f': .*digits"),
        (calls({"x": nested(100_000)}), "argument 'x'' is not JSON: .*recursion"),
    ],
)
def test_wrong_messages_are_refused_with_their_number(message, why):
    with pytest.raises(TemplateError, match=why) as caught:
        chat([user("q"), message])
    assert caught.value.turn == 1


@pytest.mark.parametrize("nonsense", [{}, {"messages": []}, {"messages": "hi"}, [], None])
def test_what_is_no_conversation(small, nonsense):
    with pytest.raises(TemplateError, match="needs 'messages'"):
        DSMLTemplate(small).encode(nonsense)


def test_arguments_as_text_and_as_mapping_are_the_same():
    arguments = {"city": "北京", "days": 3, "opts": {"a": [None]}}
    for form in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False), arguments):
        call = {"function": {"name": "f", "arguments": form}}
        text = chat([user("q"), assistant(None, tool_calls=[call])])
        assert f'<{DSML}parameter name="opts" string="false">{{"a": [null]}}</{DSML}parameter>' in text
        assert f'<{DSML}parameter name="city" string="true">北京</{DSML}parameter>' in text
    nothing = {"function": {"name": "f", "arguments": None}}
    assert f'name="f">\n\n</{DSML}invoke>' in chat([user("q"), assistant(None, tool_calls=[nothing])])


def test_a_thought_has_two_names():
    for key in ("reasoning_content", "reasoning"):
        assert render([user("q"), assistant("a", **{key: "r"})], reasoning_effort="low").text.endswith(
            f"<think>r</think>a{EOS}"
        )


def test_parts_of_a_content():
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, {"type": "text", "text": "two"}]
    assert chat([user(parts)]) == f"{BOS}{USER}one\n\n[Unsupported image_url]\n\ntwo{ASSISTANT}</think>"
    results = [{"type": "tool_result", "tool_use_id": "c", "content": parts}, {"type": "text", "text": "go on"}]
    wanted = "<tool_result>one\n\n[Unsupported image_url]\n\ntwo</tool_result>\n\ngo on"
    assert chat([{"role": "user", "content_blocks": results}]) == f"{BOS}{USER}{wanted}{ASSISTANT}</think>"


def test_tools_beside_the_messages_go_to_the_first_system_message():
    system = {"role": "system", "content": "S"}
    inside = chat([{**system, "tools": [TOOL]}, user("q")])
    assert chat([{**system, "tools": json.dumps([TOOL])}, user("q")]) == inside
    assert chat([system, user("q")], tools=[TOOL]) == inside
    assert chat([{**system, "tools": [TOOL]}, user("q")], tools=[TOOL]) == inside
    assert chat([user("q")], tools=[TOOL]) == inside.replace(f"{BOS}S", BOS)
    with pytest.raises(TemplateError, match="give them in one place"):
        chat([{**system, "tools": [TOOL]}, user("q")], tools=[{"function": {"name": "g"}}])


def test_tools_of_a_developers_message():
    message = {"role": "developer", "content": "D", "tools": [TOOL], "response_format": {"type": "object"}}
    text = chat([message])
    assert chat([{**message, "response_format": '{"type": "object"}'}]) == text
    assert text.startswith(f"{BOS}{USER}D\n\n## Tools") and text.endswith(f'{{"type": "object"}}{ASSISTANT}</think>')


def test_tools_of_the_context_keep_thoughts():
    context = [{"role": "system", "content": "S", "tools": [TOOL]}, user("q1"), assistant("a1", reasoning="r1"), user("q2")]
    text = render([assistant("a2", reasoning="r2"), user("q3")], context=context).text
    assert text == f"r2</think>a2{EOS}{USER}q3{ASSISTANT}<think>"


def test_results_join_the_turn_and_are_sorted():
    calls = [{"id": f"c{k}", "function": {"name": "f", "arguments": "{}"}} for k in range(2)]
    results = [{"role": "tool", "tool_call_id": f"c{k}", "content": f"r{k}"} for k in (1, 0)]
    text = chat([user("q"), assistant("", tool_calls=calls), *results, user("and?")])
    assert text.endswith(f"{USER}<tool_result>r0</tool_result>\n\n<tool_result>r1</tool_result>\n\nand?{ASSISTANT}</think>")


def test_a_user_after_a_task_begins_anew():
    text = chat([user("a", task="query"), user("b")])
    assert text == f"{BOS}{USER}a{USER}b{ASSISTANT}</think>"


# ------------------------------------------------------------------------------------------------ V3.2


def v32(messages, **options):
    return render(messages, release=RELEASES["v3.2"], **options).text


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
BLOCK = (
    f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="x" string="false">1</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}function_calls>"
)


def test_v32_results_have_a_block_of_their_own():
    loop = [assistant("", reasoning="r1", tool_calls=[CALL, CALL]), *[{"role": "tool", "content": c} for c in "ab"]]
    twice = BLOCK.replace(f"\n</{DSML}function_calls>", BLOCK.removeprefix(f"\n\n<{DSML}function_calls>"))
    results = "\n\n<function_results>\n<result>a</result>\n<result>b</result>\n</function_results>\n\n"
    asked = f"{BOS}{USER}q{ASSISTANT}<think>r1</think>{twice}{EOS}{results}<think>"
    assert v32([user("q"), *loop]) == asked
    old = f"{BOS}{USER}q{ASSISTANT}</think>{twice}{EOS}{results}</think>a{EOS}{USER}q2{ASSISTANT}<think>"
    assert v32([user("q"), *loop, assistant("a", reasoning="r2"), user("q2")]) == old
    assert v32([user("q"), *loop, assistant("a"), user("q2")], mode="chat") == old[: -len("<think>")] + "</think>"


def test_v32_developers():
    text = v32([{"role": "developer", "content": "D", "tools": [TOOL]}])
    assert text.startswith(f"{BOS}{USER}\n\n## Tools\n\nYou have access to a set of tools you can use")
    assert text.endswith(f"\n</functions>\n\n\n# The user's message is: D{ASSISTANT}<think>")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([user("q"), {"role": "tool", "content": "a"}], "result 1 of 0"),
        ([user("q"), assistant("", tool_calls=[CALL, CALL]), {"role": "tool", "content": "a"}], "only 1 of 2"),
        ([user("q"), assistant("a")], "no answer without a thought"),
        ([user("q", task="query"), assistant("a")], "'task' must be left out: release v3.2 has none"),
        ([user("q"), {"role": "latest_reminder", "content": "a"}], "'role' must be one of"),
    ],
)
def test_v32_refuses(messages, why):
    with pytest.raises(TemplateError, match=why):
        v32(messages)


def test_images_beside_the_messages_are_not_left_out_in_silence(small):
    template = DSMLTemplate(small)
    with pytest.raises(TemplateError, match="the row has 1 images, which this template does not show"):
        template.encode({"messages": [user("hi"), assistant("yo")], "images": ["a.png"]})
