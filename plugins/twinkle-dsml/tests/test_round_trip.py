"""What is written is read back: over generated conversations, in all releases."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_dsml.lenient import parse_lenient
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.render import render
from twinkle_dsml.strict import parse_strict
from twinkle_dsml.tokens import ASSISTANT, DSML, EOS, RESERVED, THINK, THINK_END

SIGNS = [
    DSML,
    EOS,
    THINK,
    THINK_END,
    ASSISTANT,
    f"<{DSML}tool_calls>\n",
    "</tool_result>",
    "\n\n",
    '"',
    '" string="true">',
    "\\n",
]


def free(text):
    """Whether a text may be what the assistant says."""
    return not any(sign in text for sign in RESERVED)


def texts(signs):
    return st.lists(st.one_of(st.text(max_size=12), st.sampled_from(signs)), max_size=6).map("".join)


anything = texts(SIGNS)
own = texts([sign for sign in SIGNS if free(sign)]).filter(free)
thought = own.filter(bool)
value = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), own),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(own, inner, max_size=3)),
    max_leaves=6,
)
key = st.text(min_size=1, max_size=8).filter(lambda text: '" string="' not in text and DSML not in text)
name = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,12}", fullmatch=True)


@st.composite
def calls(draw):
    made = []
    for number in range(draw(st.integers(1, 3))):
        arguments = draw(st.dictionaries(key, value, max_size=3))
        function = {"name": draw(name), "arguments": json.dumps(arguments, ensure_ascii=draw(st.booleans()))}
        made.append({"id": f"c{number}", "type": "function", "function": function})
    return made


@st.composite
def conversations(draw):
    """Each question may be answered by way of a tool; users write whatever they like, the format's signs too."""
    messages = [{"role": "system", "content": draw(anything)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(anything)})
        if draw(st.booleans()):
            called = draw(calls())
            messages.append(
                {"role": "assistant", "content": draw(own), "reasoning_content": draw(thought), "tool_calls": called}
            )
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": draw(anything)} for c in called]
        messages.append({"role": "assistant", "content": draw(own), "reasoning_content": draw(thought)})
    return messages


def compared(message):
    called = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    return message["content"], message.get("reasoning_content", ""), called


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.mark.parametrize("release", ["v4-0731", "v4.1"])
@settings(max_examples=120, deadline=None)
@given(messages=conversations())
def test_every_message_of_the_assistant_is_read_back(release, messages):
    made = render(messages, tools=TOOLS, release=RELEASES[release])
    said = [(k, m) for k, m in enumerate(messages) if m["role"] == "assistant"]
    assert [span.turn for span in made.spans] == [k for k, _ in said]
    for span, (_, message) in zip(made.spans, said, strict=True):
        text = made.text[span.start : span.end]
        assert compared(parse_strict(text, release=RELEASES[release])) == compared(message)
        assert compared(parse_lenient(text))[2] == compared(message)[2]


@settings(max_examples=60, deadline=None)
@given(messages=conversations())
def test_in_chat_mode_too(messages):
    made = render(messages, tools=TOOLS, mode="chat")
    said = [m for m in messages if m["role"] == "assistant"]
    for span, message in zip(made.spans, said, strict=True):
        read = parse_strict(made.text[span.start : span.end], thinking=False)
        assert compared(read) == compared({**message, "reasoning_content": ""})


@settings(max_examples=60, deadline=None)
@given(messages=conversations(), data=st.data())
def test_a_conversation_goes_on_where_it_was_left(messages, data):
    """The text of the first messages, and that of the others with these as context, are the text of all."""
    cuts = [k for k in range(1, len(messages)) if messages[k - 1]["role"] == "assistant" and messages[k]["role"] == "user"]
    if not cuts:
        return
    cut = data.draw(st.sampled_from(cuts))
    options = {"drop_thinking": False, "reasoning_effort": "max"}
    first = render(messages[:cut], **options).text
    assert first + render(messages[cut:], context=messages[:cut], **options).text == render(messages, **options).text
