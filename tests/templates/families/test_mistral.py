"""Mistral v0.3, beside mistral-common, which is the model's own way from conversations to ids."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for n, a, i in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def tool(text, call):
    return {"role": "tool", "content": text, "tool_call_id": call}


def system(text):
    return {"role": "system", "content": text}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
TALK = [user("hi"), assistant(" yo\n"), user("ok"), assistant("go")]
LOOP = [
    user("w?"),
    assistant("", ("weather", {"city": "Bern"}, "abcdefgh1"), ("weather", {"city": "Genève"}, "abcdefgh2")),
    tool('{"sky": "sun"}', "abcdefgh1"),
    tool("7", "abcdefgh2"),
    assistant("Sun."),
]


@pytest.fixture(scope="module")
def template(build, mistral):
    return build(mistral, "mistral_v3")


@pytest.fixture(scope="module")
def oracle():
    """(messages, tools) -> ids, by mistral-common."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    data = Path(find_spec("mistral_common").origin).parent / "data"
    file = data / "mistral_instruct_tokenizer_240323.model.v3"
    tokenizer = MistralTokenizer.from_file(str(file), mode=ValidationMode.finetuning)
    serving = MistralTokenizer.from_file(str(file))

    def ids(talk, tools=None):
        form = []
        for message in talk:
            calls = [
                {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
                for c in message.get("tool_calls", ())
            ]
            form.append({**message, **({"tool_calls": calls} if calls else {})})
        request = ChatCompletionRequest.from_openai(messages=form, tools=tools)
        made = tokenizer if talk[-1]["role"] == "assistant" else serving
        return made.encode_chat_completion(request).tokens

    return ids


def test_answers_are_trained_with_the_space_before_them(template, marked, prompt):
    assert marked(template, TALK) == "<s>[INST] hi[/INST]⟦ yo</s>⟧[INST] ok[/INST]⟦ go</s>⟧"
    assert prompt(template, TALK[:3]) == "<s>[INST] hi[/INST] yo</s>[INST] ok[/INST]"


def test_a_system_message_goes_before_the_last_question(template, build, mistral, marked, prompt):
    """The template drops it where the conversation ends with an answer, as all training data does."""
    expected = "<s>[INST] hi[/INST]⟦ yo</s>⟧[INST] be kind\n\nok[/INST]⟦ go</s>⟧"
    assert marked(template, [system("be kind"), *TALK]) == expected
    assert marked(build(mistral, "mistral_v3", default_system="be kind"), TALK) == expected
    asked = prompt(template, [system("be kind"), *TALK[:3]])
    assert asked == "<s>[INST] hi[/INST] yo</s>[INST] be kind\n\nok[/INST]"


def test_only_the_last_answer(build, mistral, marked):
    shown = marked(build(mistral, "mistral_v3", train_on="last"), TALK)
    assert shown == "<s>[INST] hi[/INST] yo</s>[INST] ok[/INST]⟦ go</s>⟧"


@pytest.mark.parametrize("nothing", ["", None])
def test_calls_are_trained_and_results_are_not(template, marked, nothing):
    talk = [LOOP[0], {**LOOP[1], "content": nothing}, *LOOP[2:]]
    expected = (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}}}}][/AVAILABLE_TOOLS][INST] w?[/INST]'
        '⟦[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "abcdefgh1"}, '
        '{"name": "weather", "arguments": {"city": "Genève"}, "id": "abcdefgh2"}]</s>⟧'
        '[TOOL_RESULTS] {"content": {"sky": "sun"}, "call_id": "abcdefgh1"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": 7, "call_id": "abcdefgh2"}[/TOOL_RESULTS]⟦ Sun.</s>⟧'
    )
    assert marked(template, talk, [TOOL]) == expected


TRIMMED = [user("hi"), assistant("yo"), *TALK[2:]]  # the template trims answers, mistral-common does not


@pytest.mark.parametrize(
    "talk",
    [
        TRIMMED,
        TRIMMED[:3],
        [system("be kind"), *TRIMMED],
        [system("be kind"), *TRIMMED[:3]],
        [user("你好  wörld 👋🏽\n\n x"), assistant("```py\nx = 1\n```\nend."), user("\tok "), assistant("1 2  3")],
    ],
)
def test_ids_are_those_of_mistral_common(template, oracle, talk):
    row = template.encode({"messages": talk}, add_generation_prompt=talk[-1]["role"] == "user")
    assert row["input_ids"] == oracle(talk)


def test_ids_of_a_tool_loop_are_those_of_mistral_common(template, oracle):
    row = template.encode({"messages": LOOP, "tools": [TOOL]})
    assert row["input_ids"] == oracle(LOOP, [TOOL])


def test_a_call_needs_an_id_of_nine(template):
    with pytest.raises(ValueError, match="length 9"):
        template.encode({"messages": [LOOP[0], assistant("", ("weather", {}, "1"))]})


def test_calls_are_read_back(template):
    text = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "abcdefgh1"}]</s>'
    assert template.tool_format == "mistral"
    assert template.parse(text) == assistant("", ("weather", {"city": "Bern"}, "abcdefgh1"))
