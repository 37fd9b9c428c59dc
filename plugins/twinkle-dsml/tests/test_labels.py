"""What is trained, with V4's own tokenizer: exactly what the assistant wrote, end token included."""

from __future__ import annotations

import json

import pytest

from twinkle_core.errors import NoLabels, RowTooLong, TemplateError
from twinkle_core.types import IGNORE_INDEX
from twinkle_dsml.render import render
from twinkle_dsml.template import DeepseekV32Template, DSMLTemplate
from twinkle_dsml.testing import random_conversation
from twinkle_dsml.tokens import DSML, EOS


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, thought=None, **more):
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {}), **more}


def call(name, arguments, number=0):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


def trained(template, row):
    """The trained text, one piece for each run of trained tokens."""
    targets = [IGNORE_INDEX, *row["labels"][:-1]]
    assert row["labels"][-1] == IGNORE_INDEX
    runs, last = [], -2
    for place, token in enumerate(targets):
        assert token in (IGNORE_INDEX, row["input_ids"][place])
        if token != IGNORE_INDEX:
            if place != last + 1:
                runs.append([])
            runs[-1].append(token)
            last = place
    return [template.decode(run) for run in runs]


def written(message):
    """What an assistant's message is in V4's format, put together by hand."""
    thought = message.get("reasoning_content")
    text = f"{thought}</think>{message['content']}" if thought else message["content"]
    calls = message.get("tool_calls") or []
    if calls:
        text += f"\n\n<{DSML}tool_calls>"
        for made in calls:
            text += f'\n<{DSML}invoke name="{made["function"]["name"]}">\n'
            parameters = []
            for key, value in json.loads(made["function"]["arguments"]).items():
                kind = "true" if isinstance(value, str) else "false"
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                parameters.append(f'<{DSML}parameter name="{key}" string="{kind}">{shown}</{DSML}parameter>')
            text += "\n".join(parameters) + f"\n</{DSML}invoke>"
        text += f"\n</{DSML}tool_calls>"
    return text + EOS


@pytest.mark.parametrize("seed", range(50))
def test_the_trained_text_is_what_the_assistant_wrote(tokenizer, seed):
    conversation = random_conversation(seed)
    template = DSMLTemplate(tokenizer, reasoning_effort="low")
    row = template.encode(conversation)
    said = [written(m) for m in conversation["messages"] if m["role"] == "assistant"]
    assert trained(template, row) == said
    assert template.decode(row["input_ids"]) == template.render(conversation), "the row is not the text"


def test_ids_are_those_of_the_whole_text(tokenizer):
    """A full stop and the line breaks before a block are one token, whoever wrote them."""
    template = DSMLTemplate(tokenizer, reasoning_effort="low")
    conversation = {"messages": [user("q"), assistant("x.", "r", tool_calls=[call("f", {})])], "tools": TOOLS}
    row = template.encode(conversation)
    assert row["input_ids"] == tokenizer(template.render(conversation), add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(".\n\n", add_special_tokens=False)[0] in row["labels"]
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])


MIXED = [user("q1"), assistant("a1", "r1"), user("q2"), assistant("a2"), user("q3"), assistant("a3", "r3")]


def test_a_thinking_turn_is_trained_as_one_or_not_at_all(small):
    """Without tools old thoughts are left out; their answers would be trained as answers without a thought."""
    template = DSMLTemplate(small, reasoning_effort="low")
    assert trained(template, template.encode({"messages": MIXED})) == [f"a2{EOS}", f"r3</think>a3{EOS}"]
    keeping = DSMLTemplate(small, reasoning_effort="low", drop_thinking=False)
    assert trained(keeping, keeping.encode({"messages": MIXED})) == [f"r1</think>a1{EOS}", f"a2{EOS}", f"r3</think>a3{EOS}"]
    tooled = {"messages": MIXED, "tools": TOOLS}
    assert trained(template, template.encode(tooled)) == trained(keeping, keeping.encode(tooled))
    chat = DSMLTemplate(small, enable_thinking=False)
    assert trained(chat, chat.encode({"messages": MIXED})) == [f"a1{EOS}", f"a2{EOS}", f"a3{EOS}"]
    last = DSMLTemplate(small, reasoning_effort="low", drop_thinking=False, train_on="last")
    assert trained(last, last.encode({"messages": MIXED})) == [f"r3</think>a3{EOS}"]


def test_a_marked_answer_is_not_trained(small):
    template = DSMLTemplate(small, enable_thinking=False)
    for mark in ({"weight": 0}, {"loss": False}, {"train": False}):
        marked = {"messages": [{**m, **mark} if m["content"] == "a2" else m for m in MIXED]}
        row = template.encode(marked)
        assert row["input_ids"] == template.encode({"messages": MIXED})["input_ids"]
        assert trained(template, row) == [f"a1{EOS}", f"a3{EOS}"]
    with pytest.raises(TemplateError, match="every assistant turn"):
        template.encode({"messages": [user("q"), assistant("a", weight=0)]})


def test_the_end_of_a_thought_that_there_is_none_of_is_not_trained(small):
    template = DSMLTemplate(small, reasoning_effort="low")
    conversation = {"messages": [user("q"), assistant("a")]}
    assert "<think></think>a" in template.render(conversation)
    assert trained(template, template.encode(conversation)) == [f"a{EOS}"]


def test_all_of_a_tool_loop_is_the_last_turn(small):
    loop = [assistant("", "r1", tool_calls=[call("f", {"x": 1})]), {"role": "tool", "tool_call_id": "c0", "content": "1"}]
    messages = [user("q0"), assistant("a0", "r0"), user("q"), *loop, assistant("a", "r2")]
    template = DSMLTemplate(small, reasoning_effort="low", train_on="last")
    pieces = trained(template, template.encode({"messages": messages, "tools": TOOLS}))
    assert [piece.split("</think>")[0] for piece in pieces] == ["r1", "r2"]


def test_an_answer_without_end_is_trained_without_one(small):
    template = DSMLTemplate(small, reasoning_effort="low")
    row = template.encode({"messages": [user("write"), assistant("def ", "r", wo_eos=True)]})
    assert trained(template, row) == ["r</think>def "]
    going_on = template.encode({"messages": [user("write"), assistant("def ", "r", wo_eos=True)]}, add_generation_prompt=True)
    assert template.decode(going_on["input_ids"]).endswith("r</think>def ")


def test_context_is_neither_written_nor_trained(small):
    template = DSMLTemplate(small, enable_thinking=False)
    row = template.encode({"messages": [user("q2"), assistant("a2")]}, context=[user("q1"), assistant("a1")])
    assert template.decode(row["input_ids"]) == f"<｜User｜>q2<｜Assistant｜></think>a2{EOS}"
    assert trained(template, row) == [f"a2{EOS}"]


def test_tasks_are_the_prompts(small):
    template = DSMLTemplate(small, enable_thinking=False)
    titled = [user("q"), assistant("a", task="title"), assistant("A title")]
    assert trained(template, template.encode({"messages": titled})) == [f"a{EOS}", f"A title{EOS}"]
    searched = [user("find x", task="query"), assistant("x")]
    assert template.render({"messages": searched}).endswith(f"find x<｜query｜>x{EOS}")
    assert trained(template, template.encode({"messages": searched})) == [f"x{EOS}"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (assistant("<think>r</think>a"), "may not stand in the content"),
        (assistant(f"a{EOS}b", "r"), "may not stand|nothing may follow"),
        (assistant("a", "r1</think>r2"), "may not stand|another 'reasoning_content'"),
        (assistant(f"a\n\n<{DSML}tool_calls>", "r"), "can't be read back"),
        (assistant("", "r", tool_calls=[call("f", {"x": f"</{DSML}parameter>"})]), "can't be read back"),
        (assistant("", "r", tool_calls=[call("f", {'a" string="true">b': "c"})]), "another 'tool_calls'"),
        (assistant("", "r", tool_calls=[call("f", {"x": f"a{EOS}b"})]), "another 'tool_calls'"),
        (assistant("", "r", tool_calls=[call("f", {f"a{EOS}b": 1})], wo_eos=True), "another 'tool_calls'"),
        (assistant("", "r", tool_calls=[call("f", {"x": f"a</{DSML}b"})]), "another 'tool_calls'"),
        (assistant("", "r", tool_calls=[call("f", {'a" string="b': 1})]), "another 'tool_calls'"),
        (assistant("", "r", tool_calls=[call('f"', {})]), "another 'tool_calls'"),
        (assistant("", "r", tool_calls=[call(f"f{EOS}", {})]), "another 'tool_calls'"),
    ],
)
def test_what_could_not_be_read_back_is_refused_with_its_turn(small, message, why):
    template = DSMLTemplate(small, reasoning_effort="low")
    with pytest.raises(TemplateError, match=rf"^message 1 \(assistant\): .*({why})") as caught:
        template.encode({"messages": [user("q"), message], "tools": TOOLS})
    assert caught.value.turn == 1
    assert template.check({"messages": [user("q"), message], "tools": TOOLS}) == str(caught.value)


def test_users_may_write_what_they_like(small):
    template = DSMLTemplate(small, reasoning_effort="low")
    words = f"{EOS}<｜Assistant｜><think></think>\n\n<{DSML}tool_calls>"
    row = template.encode({"messages": [user(words), assistant("a", "r")]})
    assert trained(template, row) == [f"r</think>a{EOS}"]


def test_rows_that_are_too_long(small):
    conversation = {"messages": [user("q " * 40), assistant("a " * 40)]}
    whole = DSMLTemplate(small, enable_thinking=False).encode(conversation)
    with pytest.raises(RowTooLong):
        DSMLTemplate(small, enable_thinking=False, max_length=20).encode(conversation)
    pieces = DSMLTemplate(small, enable_thinking=False, max_length=20, truncation_strategy="split").encode(conversation)
    labels = [y for piece in pieces for y in piece["labels"] if y != IGNORE_INDEX]
    assert labels == [y for y in whole["labels"] if y != IGNORE_INDEX]
    dropping = DSMLTemplate(small, enable_thinking=False, max_length=20, truncation_strategy="delete")
    assert dropping.encode(conversation) is None and dropping.dropped == 1


def test_nothing_to_train_is_an_error(small):
    with pytest.raises(NoLabels):
        DSMLTemplate(small, reasoning_effort="low").encode({"messages": [user("q")]})


def test_v32_trains_its_own_form(small):
    template = DeepseekV32Template(small)
    loop = [assistant("", "r1", tool_calls=[call("f", {"x": 1})]), {"role": "tool", "tool_call_id": "c0", "content": "1"}]
    row = template.encode({"messages": [user("q"), *loop, assistant("a", "r2")], "tools": TOOLS})
    first, second = trained(template, row)
    assert first.startswith(f"r1</think>\n\n<{DSML}function_calls>\n<{DSML}invoke") and first.endswith(EOS)
    assert second == f"r2</think>a{EOS}"


def test_a_span_is_the_same_text_that_is_rendered(tokenizer):
    conversation = random_conversation(99)
    made = render(conversation["messages"], tools=conversation["tools"], reasoning_effort="max")
    assert DSMLTemplate(tokenizer, reasoning_effort="max").render(conversation) == made.text
