"""The format's reference cases, byte for byte: what DeepSeek's encoder and parsers give for an input."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from twinkle_core.errors import BadCompletion, TemplateError
from twinkle_dsml import tokens
from twinkle_dsml.lenient import parse_lenient
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.render import render
from twinkle_dsml.stream import StreamParser
from twinkle_dsml.strict import parse_strict

DATA = Path(__file__).parent / "data"
VECTORS = [json.loads(line) for line in (DATA / "vectors.jsonl").read_text(encoding="utf-8").splitlines()]
ENCODE = [v for v in VECTORS if v["kind"] == "encode"]
PARSE = [v for v in VECTORS if v["kind"] == "parse"]
STRINGS = json.loads((DATA / "strings.json").read_text(encoding="utf-8"))
#: the one case in which the reference's lenient parser is known to be wrong: it cuts a name at its first space
CUT_NAME = "p16_key_with_spaces_unicode"


def by_id(vector):
    return vector["id"]


def rendered(v, **changes):
    options = {
        "tools": v["tools"],
        "release": RELEASES[v["release"]],
        "mode": v["thinking_mode"],
        "drop_thinking": v["drop_thinking"],
        "reasoning_effort": v["reasoning_effort"],
        "context": v["context"] or (),
        "add_bos": v["add_default_bos_token"],
    }
    return render(v["messages"], **{**options, **changes})


def test_all_cases_are_there():
    assert len(VECTORS) == 69
    assert len(ENCODE) + len(PARSE) == 69


@pytest.mark.parametrize("v", [v for v in ENCODE if v["expected"] is not None], ids=by_id)
def test_encode(v):
    before = json.dumps(v["messages"])
    assert rendered(v).text == v["expected"]
    assert json.dumps(v["messages"]) == before, "the caller's messages are changed"


@pytest.mark.parametrize("v", [v for v in ENCODE if v["expected"] is None], ids=by_id)
def test_encode_refuses(v):
    with pytest.raises(TemplateError):
        rendered(v)


@pytest.mark.parametrize("v", [v for v in ENCODE if v["tools"] and v["tools_placed_on"] == "messages[0]"], ids=by_id)
def test_tools_on_the_message_itself_are_the_same(v):
    first, *others = v["messages"]
    assert rendered({**v, "messages": [{**first, "tools": v["tools"]}, *others]}, tools=None).text == v["expected"]


@pytest.mark.parametrize("v", [v for v in PARSE if v["expected"] is not None], ids=by_id)
def test_parse_strict(v):
    assert parse_strict(v["text"], thinking=v["thinking_mode"] == "thinking", release=RELEASES[v["release"]]) == v["expected"]


@pytest.mark.parametrize("v", [v for v in PARSE if v["expected"] is None], ids=by_id)
def test_parse_strict_refuses_and_names_the_place(v):
    with pytest.raises(BadCompletion, match=r"^character \d+") as caught:
        parse_strict(v["text"], thinking=v["thinking_mode"] == "thinking", release=RELEASES[v["release"]])
    assert 0 <= caught.value.place <= len(v["text"])


def lenient_expected(v):
    if v["id"] == CUT_NAME:
        return v["expected"]
    given = v["lenient_expected"]
    calls = [{"type": "function", "function": call} for call in given["tool_calls"]]
    return {
        "role": "assistant",
        "content": given["content"],
        "reasoning_content": given["reasoning_content"],
        "tool_calls": calls,
    }


@pytest.mark.parametrize("v", PARSE, ids=by_id)
def test_parse_lenient(v):
    assert parse_lenient(v["text"], thinking=v["thinking_mode"] == "thinking") == lenient_expected(v)


@pytest.mark.parametrize("v", PARSE, ids=by_id)
def test_finish_reason(v):
    parser = StreamParser(v["thinking_mode"] == "thinking")
    parser.feed(v["text"])
    parser.finish()
    assert parser.finish_reason == v["lenient_expected"]["finish_reason"]


def streamed(pieces, thinking):
    parser = StreamParser(thinking)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return parser, [*deltas, *parser.finish()]


@pytest.mark.parametrize("v", PARSE, ids=by_id)
def test_a_stream_is_the_same_wherever_it_is_cut(v):
    text, thinking = v["text"], v["thinking_mode"] == "thinking"
    whole = parse_lenient(text, thinking=thinking)
    for cut in range(len(text) + 1):
        parser, _ = streamed([text[:cut], text[cut:]], thinking)
        assert parser.message == whole, repr(text[:cut])
    for size in (1, 2, 3, 7):
        parser, deltas = streamed([text[at : at + size] for at in range(0, len(text), size)], thinking)
        assert parser.message == whole, size
        assert put_together(deltas) == whole, "the deltas are not the message"


def put_together(deltas):
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        if delta.kind == "call":
            assert delta.call == len(message["tool_calls"])
            message["tool_calls"].append({"type": "function", "function": {"name": delta.text, "arguments": ""}})
        elif delta.kind == "arguments":
            message["tool_calls"][delta.call]["function"]["arguments"] += delta.text
        else:
            message["reasoning_content" if delta.kind == "thought" else "content"] += delta.text
    return message


# ------------------------------------------------------------------------------------------------ exact texts


def exact_texts():
    preview, later = RELEASES["v4-preview"], RELEASES["v4-0731"]
    return {
        "bos": tokens.BOS,
        "eos": tokens.EOS,
        "user": tokens.USER,
        "assistant": tokens.ASSISTANT,
        "think_start": tokens.THINK,
        "think_end": tokens.THINK_END,
        "dsml": tokens.DSML,
        "latest_reminder": tokens.REMINDER,
        "tools_header": preview.tools[0],
        "tools_footer": preview.tools[1],
        "response_format_prefix": tokens.RESPONSE_FORMAT,
        "effort_absolute_maximum": preview.efforts["max"],
        "effort_beyond_maximum": later.efforts["max"],
    }


@pytest.mark.parametrize(("name", "text"), exact_texts().items())
def test_texts_are_exact(name, text):
    assert len(text) == STRINGS["length"][name]
    assert hashlib.sha256(text.encode()).hexdigest() == STRINGS["sha256"][name]


def test_task_tokens():
    assert STRINGS["tasks"] == tokens.TASKS


def test_ids_of_special_tokens(tokenizer):
    ours = [*exact_texts().values(), *tokens.TASKS.values()]
    known = {text: number for text, number in STRINGS["token_ids"].items() if text in ours}
    assert len(known) == 14
    for text, number in known.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [number]
