"""Tool calls: what each form writes is read back, what is no call stays text, whatever the text is."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.templates.tools.forms import FORMS, schema_of


def call(name, arguments, **more):
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


def tagged(arguments, key, value):
    return "".join(f"{key.format(k)}{v if isinstance(v, str) else json.dumps(v)}{value}" for k, v in arguments.items())


#: how a model of each form writes one call; several are joined as its template does
WRITERS = {
    "hermes": lambda n, a: f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>",
    "qwen_xml": lambda n, a: (
        f"<tool_call>\n<function={n}>\n" + tagged(a, "<parameter={}>\n", "\n</parameter>\n") + "</function>\n</tool_call>"
    ),
    "glm_xml": lambda n, a: (
        f"<tool_call>{n}\n" + tagged(a, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>"
    ),
    "mistral": lambda n, a: "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a, "id": "abcdefgh1"}], ensure_ascii=False),
    "deepseek_v3": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "cohere": lambda n, a: (
        "<|START_ACTION|>[\n    "
        + json.dumps({"tool_call_id": "0", "tool_name": n, "parameters": a}, ensure_ascii=False)
        + "\n]<|END_ACTION|>"
    ),
    "llama3": lambda n, a: json.dumps({"name": n, "parameters": a}, ensure_ascii=False),
    "glm4": lambda n, a: f"{n}\n{json.dumps(a, ensure_ascii=False)}",
    "react": lambda n, a: f"Action: {n}\nAction Input: {json.dumps(a, ensure_ascii=False)}",
}
UNQUOTED = {"qwen_xml", "glm_xml"}
BESIDE = sorted(FORMS.keys() - {"llama3", "glm4"})  # the others are calls as a whole or not at all

ANY = st.characters(codec="utf-8", exclude_categories=("Cs",))
NAMES = st.text(st.sampled_from("abcXYZ_019-.é"), min_size=1, max_size=8)
TEXTS = st.text(st.sampled_from("\"'\\\n\t{}[]<>: ,a0é你👋") | ANY, max_size=10)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def test_each_form_has_a_writer_here():
    assert WRITERS.keys() == FORMS.keys()


@pytest.mark.parametrize("form", sorted(FORMS.keys() - UNQUOTED))
@settings(max_examples=80, deadline=None)
@given(name=NAMES, arguments=st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_is_read_back(form, name, arguments):
    rest, calls = FORMS[form](WRITERS[form](name, arguments), {})
    more = {"mistral": {"id": "abcdefgh1"}, "cohere": {"id": "0"}}.get(form, {})
    assert calls == [call(name, arguments, **more)]
    assert not rest.strip()


@pytest.mark.parametrize("form", sorted(UNQUOTED))
@settings(max_examples=80, deadline=None)
@given(name=NAMES, data=st.data())
def test_values_without_quotes_are_read_back_with_their_declared_types(form, name, data):
    """A text that is a number, or begins with a line break, is told by the schema and the closing tag alone."""
    texts = TEXTS.filter(lambda text: "</" not in text)
    arguments = data.draw(st.dictionaries(NAMES, texts | st.integers() | st.lists(st.booleans(), max_size=2), max_size=3))
    properties = {k: {"type": "string" if isinstance(v, str) else "array"} for k, v in arguments.items()}
    tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    rest, calls = FORMS[form](WRITERS[form](name, arguments), schema_of([tool]))
    assert calls == [call(name, arguments)]
    assert not rest.strip()


@pytest.mark.parametrize("form", sorted(UNQUOTED))
@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["string", "null"]}, "None", None),
        ({"oneOf": [{"type": "integer"}, {"anyOf": [{"type": "string"}]}]}, "3", "3"),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["boolean", "null"]}, "True", True),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "string"}, "null", "null"),
        ({"type": 7, "anyOf": "x", "enum": None}, "3", 3),
        ("string", "3", 3),
    ],
    ids=str,
)
def test_of_several_declared_types_a_text_is_one(form, declared, text, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": declared}}}}
    assert FORMS[form](WRITERS[form]("f", {"x": text}), schema_of([tool]))[1] == [call("f", {"x": value})]


def test_hermes_with_parameters_loses_none():
    """As Llama names the arguments; what has them under yet another name is no call without arguments."""

    def written(**more):
        return "<tool_call>\n" + json.dumps({"name": "f", **more}) + "\n</tool_call>"

    for how in ({"parameters": {"a": 1}}, {"arguments": {"a": 1}}, {"parameters": '{"a": 1}', "id": "x"}):
        assert FORMS["hermes"](written(**how), {}) == ("", [call("f", {"a": 1})])
    assert FORMS["hermes"](written(), {}) == ("", [call("f", {})])
    for how in ({"args": {"a": 1}}, {"arguments": {"a": 1}, "parameters": {"b": 1}}, {"parameters": None}):
        assert FORMS["hermes"](written(**how), {}) == (written(**how), [])


@pytest.mark.parametrize("form", BESIDE)
def test_words_before_a_call_are_the_rest(form):
    rest, calls = FORMS[form]("Let me see.\n" + WRITERS[form]("f", {"a": 1}), {})
    assert rest.strip() == "Let me see."
    assert [c["function"]["name"] for c in calls] == ["f"]


@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "glm_xml"])
def test_several_calls_keep_their_order_and_a_broken_one_stays_where_it_is(form):
    write = WRITERS[form]
    broken = write("b", {"x": 1})[: -len("</tool_call>")] + "oops</tool_call>"
    rest, calls = FORMS[form]("\n".join([write("a", {}), broken, write("c", {"y": [1]})]), {})
    assert calls == [call("a", {}), call("c", {"y": [1]})]
    assert rest.strip() == broken


def test_several_calls_of_llama_deepseek_and_mistral():
    two = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}'
    assert FORMS["llama3"](f"<|python_tag|>{two}", {}) == ("", [call("a", {}), call("b", {"x": 1})])
    frame = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
    assert FORMS["deepseek_v3"](frame.format(f"{one}\n{one}"), {}) == ("\n", [call("f", {}), call("f", {})])
    assert FORMS["deepseek_v3"]("<｜tool▁calls▁begin｜>" + one, {}) == ("", [call("f", {})]), "without the end that R1 forgets"
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": "{\\"x\\": 1}"}]'
    assert FORMS["mistral"](text, {}) == ("", [call("a", {}), call("b", {"x": 1})])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>\n{not json}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "{} and"}\n</tool_call>'),
        ("qwen_xml", "<tool_call>\n<function=f>\nwords\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>"),
        ("qwen_xml", "<function=f>\n</function>"),
        ("glm_xml", "<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>"),
        ("glm_xml", "<tool_call>f and g\n</tool_call>"),
        ("mistral", '[TOOL_CALLS] {"name": "f"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 5]'),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS] []"),
        ("llama3", '{"name": "Bern"}'),
        ("llama3", '{"name": "f", "parameters": {}} and so on'),
        ("llama3", '{"name": "f", "parameters": {}, "age": 5}'),
        ("glm4", '{"a": 1}'),
        ("glm4", "Here it is:\nall of it"),
        ("glm4", 'f\n{"a": 1}\nand more'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```<｜tool▁call▁end｜>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}"),
        ("react", "Action: f\nAction Input: Bern"),
        ("react", 'Action: f\nAction Input: {"a": 1}\nFinal Answer: x'),
        ("react", "I said Action: f\nAction Input: {}"),
    ],
)
def test_what_is_no_call_stays_text(form, text):
    assert FORMS[form](text, {}) == (text, [])


def test_react_stops_before_what_is_not_the_models_to_say():
    text = 'Thought: look\nAction: weather\nAction Input: {"city": "Bern"}\nObservation: sun'
    assert FORMS["react"](text, {}) == ("Thought: look\n", [call("weather", {"city": "Bern"})])


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "</function>",
            "<parameter=x>",
            "</parameter>",
            "<arg_key>",
            "</arg_key>",
        ),
        *(
            "<arg_value>",
            "</arg_value>",
            "[TOOL_CALLS]",
            '{"name": "f", "arguments": {}}',
            '{"name": "f", "parameters": ',
            "```",
        ),
        *(
            "<｜tool▁call▁begin｜>",
            "function<｜tool▁sep｜>f\n```json\n",
            "<｜tool▁call▁end｜>",
            "Action: f\nAction Input: ",
            "NaN",
        ),
        *("[" * 3000, "9" * 5000, '{"a":' * 2000, "{}", "\n", '"', "\\", "<think>", "</think>", ";", ",", "]", "\ud800"),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES | st.text(ANY, max_size=4), max_size=12).map("".join))
def test_no_text_makes_it_fail_and_none_is_lost_or_made_up(text):
    for form, parse in FORMS.items():
        rest, calls = parse(text, {})
        assert all(isinstance(c["function"]["arguments"], dict) and c["function"]["name"] for c in calls)
        assert calls or rest == text, form
        assert len(rest) <= len(text)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(
    "piece",
    [
        '<tool_call>{"',
        '<tool_call>{"a":[',
        "<tool_call><function=f><parameter=x>",
        "<tool_call>f<arg_key>x</arg_key><arg_value>",
        '[TOOL_CALLS][{"a":',
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
        "Action: \nAction Input:{",
        '{"name":"f","parameters":{}};',
        "<tool_call>" + " " * 20,
        "a\n",
    ],
)
def test_time_is_linear(form, piece):
    """Sixteen times the text takes sixteen times the processor's time, not 256 times. Others on the machine do not count."""

    def took(size):
        text, begun = piece * size, time.process_time()
        FORMS[form](text, {})
        return time.process_time() - begun

    took(100)
    small, large = min(took(2000) for _ in range(3)), min(took(32000) for _ in range(2))
    assert large < 0.05 or large < 80 * small, (small, large)
