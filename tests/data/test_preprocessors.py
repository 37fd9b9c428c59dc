"""Rows of known data sets to conversations."""

from __future__ import annotations

import pytest

from twinkle_core.data.dataset import Dataset
from twinkle_core.data.preprocessors import AlpacaProcessor, MessagesProcessor, SelfCognitionProcessor, ShareGPTProcessor
from twinkle_core.errors import DataError, TemplateError
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing.tokenizers import chatml_tokenizer


def test_self_cognition_fills_in_the_names():
    process = SelfCognitionProcessor(("小星", "Twinkle"), ("我们", "the team"))
    assert process({"query": "Who are you?", "response": "{{NAME}} by {{AUTHOR}}, {{NAME}}."})["messages"] == [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Twinkle by the team, Twinkle."},
    ]
    assert process({"query": "你是谁？", "response": "{{AUTHOR}}的{{NAME}}"})["messages"][1]["content"] == "我们的小星"
    assert process({"query": "?", "response": "{{NAME}}", "tag": "zh"})["messages"][1]["content"] == "小星"
    assert SelfCognitionProcessor("A", "B")({"query": "你", "response": "{{NAME}}{{AUTHOR}}"})["messages"][1]["content"] == "AB"
    with pytest.raises(DataError, match="model_name"):
        SelfCognitionProcessor(("a", "b", "c"), "x")


def test_alpaca():
    process = AlpacaProcessor(system="s")
    assert process({"instruction": "add", "input": "1 2", "output": "3", "history": [["a", "b"]]})["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "add\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    assert AlpacaProcessor()({"instruction": "x", "input": "", "output": "y"})["messages"][0]["content"] == "x"


@pytest.mark.parametrize("form", [("from", "value"), ("role", "content")])
def test_sharegpt_in_both_forms(form):
    role, content = form
    turns = [{role: "human", content: "hi"}, {role: "gpt", content: "yo"}]
    made = ShareGPTProcessor()({"conversations": turns, "system": "s", "tools": '[{"name": "f"}]'})
    assert made == {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yo"},
        ],
        "tools": [{"name": "f"}],
    }


def test_sharegpt_calls_tools():
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "five"},
    ]
    messages = ShareGPTProcessor()({"conversations": turns})["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_messages_lose_what_a_typed_file_filled_in():
    row = {
        "messages": [
            {"role": "user", "content": "hi", "tool_calls": None},
            {"role": "assistant", "content": "yo", "tool_calls": None},
        ],
        "tools": None,
        "user_data": {"answer": 3},
    }
    assert MessagesProcessor()(row) == {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        "user_data": {"answer": 3},
    }


@pytest.mark.parametrize(
    ("process", "row", "text"),
    [
        (
            SelfCognitionProcessor("a", "b"),
            {"q": "x"},
            "SelfCognitionProcessor needs 'query' .* this row has 'q'. .'instruction'",
        ),
        (AlpacaProcessor(), {"instruction": "x"}, "AlpacaProcessor needs 'output'"),
        (
            AlpacaProcessor(),
            {"instruction": "x", "output": None},
            r"needs 'output' .* this row has 'instruction', 'output' \(None\)",
        ),
        (AlpacaProcessor(), {"instruction": 5, "output": "x"}, "'instruction' is 5, not text"),
        (ShareGPTProcessor(), {}, "ShareGPTProcessor needs 'conversations' in each row; this row has nothing"),
        (ShareGPTProcessor(), {"conversations": [{"from": "alien", "value": "x"}]}, "the role of turn 0 is 'alien'"),
        (ShareGPTProcessor(), {"conversations": [{"from": "function_call", "value": "x{"}]}, "turn 0 is 'x{', not JSON"),
        (ShareGPTProcessor(), {"conversations": [{"from": [1], "value": "x"}]}, "the role of turn 0 is"),
        (
            ShareGPTProcessor(),
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "text": "y"}]},
            "turn 1, needs 'value' .* this row has 'from', 'text'. .'content' would do too",
        ),
        (ShareGPTProcessor(), {"conversations": [{"from": "function_call", "value": "[1]"}]}, "turn 0 is '.1.', not a call"),
        (AlpacaProcessor(), {"instruction": "x", "output": "y", "history": ["x"]}, "a turn of 'history' is 'x', not two texts"),
        (AlpacaProcessor(), {"instruction": "x", "output": "y", "history": [["x", None]]}, "a turn of 'history' is .*None"),
        (MessagesProcessor(), {"messages": "hi"}, "'messages' is 'hi', not a list"),
        (MessagesProcessor(), {"messages": [{"content": "x"}]}, "message 0 is"),
    ],
)
def test_what_is_missing_is_named(process, row, text):
    with pytest.raises(DataError, match=text):
        process(row)


@pytest.mark.parametrize("name", ["sharegpt", "messages"])
def test_two_system_messages_of_a_row(name):
    """Of two that differ one would be left out in silence; the error says which row has them."""
    own, asked = {"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}

    def row(messages, **more):
        return {("conversations" if name == "sharegpt" else "messages"): messages, **more}

    def first(given):
        dataset = Dataset([row([asked]), given])
        dataset.map(name, system="default")
        return dataset[1]["messages"][0]["content"], len(dataset[1]["messages"])

    assert first(row([asked])) == ("default", 2)
    assert first(row([asked], system="be kind")) == ("be kind", 2)
    assert first(row([own, asked])) == ("be brief", 2)
    assert first(row([own, asked], system=" be brief\n")) == ("be brief", 2)
    assert first(row([own, asked], system=None)) == ("be brief", 2)
    told = r"[Rr]ow 1[\s\S]*'system' is 'be kind', not the same as the conversation's own system message, which is 'be brief'"
    with pytest.raises(DataError, match=told):
        first(row([own, asked], system="be kind"))


def test_what_a_row_has_beside_its_texts_is_kept():
    row = {"instruction": "i", "output": "o", "images": ["a.png"], "tools": '[{"name": "f"}]'}
    made = AlpacaProcessor()(row)
    assert made["images"] == ["a.png"] and made["tools"] == [{"name": "f"}] and len(made["messages"]) == 2


def test_an_old_call_of_a_turn_reaches_the_template_which_refuses_it():
    turn = {"role": "assistant", "content": "I look.", "function_call": {"name": "f", "arguments": "{}"}}
    made = ShareGPTProcessor()({"messages": [{"role": "user", "content": "q"}, turn]})
    with pytest.raises(TemplateError, match="'function_call' is the old form of a call"):
        ChatTemplate(chatml_tokenizer()).encode(made)
