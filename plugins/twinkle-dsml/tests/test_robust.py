"""Broken completions: the strict parser has one error of its own, the lenient one none, and neither is slow."""

from __future__ import annotations

import json
import random
import time

import pytest

from twinkle_core.errors import BadCompletion
from twinkle_dsml.lenient import parse_lenient
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.render import render
from twinkle_dsml.stream import StreamParser
from twinkle_dsml.strict import parse_strict
from twinkle_dsml.testing import random_conversation
from twinkle_dsml.tokens import DSML, EOS, THINK, THINK_END

SIGNS = [
    EOS, THINK, THINK_END, DSML, f"<{DSML}", f"</{DSML}", f"<{DSML}tool_calls>\n", f"</{DSML}tool_calls>",
    f'<{DSML}invoke name="', f"</{DSML}invoke>\n", f'<{DSML}parameter name="', '" string="true">', '" string="false">',
    f"</{DSML}parameter>\n", "\n", "\n\n", '"', "<", "</", "｜", ">", "北", "\x00", " ", "{}", "null",
]  # fmt: skip


def completions(number):
    """What the assistant writes in a generated conversation, one turn after the other."""
    conversation = random_conversation(number, turns=2, words=8)
    made = render(conversation["messages"], tools=conversation["tools"], reasoning_effort="low")
    return [made.text[span.start : span.end] for span in made.spans]


def mutated(text, rng):
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(text))
        to = min(len(text), at + rng.choice([0, 1, 1, 3, 20, 200]))
        kind = rng.random()
        if kind < 0.35:
            text = text[:at] + text[to:]
        elif kind < 0.7:
            text = text[:at] + rng.choice(SIGNS) + text[to:]
        elif kind < 0.85:
            text = text[:at] + text[at:to] * 2 + text[to:]
        else:
            text = text[:at]
    return text


def check_mutations(count, seed):
    rng = random.Random(seed)
    originals = [text for number in range(20) for text in completions(number)]
    size, strict_time, lenient_time, refused = 0, 0.0, 0.0, 0
    for _ in range(count):
        text, thinking = mutated(rng.choice(originals), rng), rng.random() < 0.8
        size += len(text.encode())
        start = time.process_time()
        try:
            parse_strict(text, thinking=thinking)
        except BadCompletion as error:
            refused += 1
            assert 0 <= error.place <= len(text)
        middle = time.process_time()
        whole = parse_lenient(text, thinking=thinking)
        lenient_time += time.process_time() - middle
        strict_time += middle - start
        assert json.loads(json.dumps(whole)) == whole
        parser = StreamParser(thinking)
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parser.feed(text[begin:end])
        parser.finish()
        assert parser.message == whole, repr(text)
    assert count / 4 < refused < count, "the mutations are too mild or too wild"
    milliseconds = 1000 * max(strict_time, lenient_time) / (size / 1000)
    assert milliseconds < 1, f"{milliseconds:.3f} ms per kB"


def test_mutations():
    check_mutations(400, seed=1)


@pytest.mark.slow
def test_ten_thousand_mutations():
    check_mutations(10_000, seed=2)


def test_what_is_not_broken_is_read_alike():
    """Both parsers agree on it, but for line breaks at the ends of texts, which the lenient one leaves out."""
    for number in range(20):
        for text in completions(number):
            strict, lenient = parse_strict(text), parse_lenient(text)
            assert lenient["tool_calls"] == strict["tool_calls"]
            assert lenient["content"].strip("\n") == strict["content"].strip("\n")
            assert lenient["reasoning_content"].strip("\n") == strict["reasoning_content"].strip("\n")


ENDLESS = {
    "line breaks": "\n" * 200_000,
    "open brackets": "<" * 200_000,
    "a name without end": f'</think><{DSML}invoke name="f"><{DSML}parameter name="' + "x" * 200_000,
    "calls": f"</think>\n\n<{DSML}tool_calls>\n" + f'<{DSML}invoke name="f">\n\n</{DSML}invoke>\n' * 5_000,
    "parameters": f'</think>\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n'
    + "\n".join(f'<{DSML}parameter name="{n}" string="true">{n}</{DSML}parameter>' for n in range(3_000)),
    "quotes in a parameter": f'</think>\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="'
    + '" string="' * 20_000
    + f"</{DSML}parameter>",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_grows_with_the_length_alone(name):
    """The best of three: in a process that holds much, a collection of garbage takes longer than a parser."""
    text = ENDLESS[name]
    kilobytes = len(text.encode()) / 1000

    def took():
        start = time.process_time()
        with pytest.raises(BadCompletion):
            parse_strict(text)
        parse_lenient(text)
        return time.process_time() - start

    assert 1000 * min(took() for _ in range(3)) / kilobytes < 1
    parser = StreamParser()
    start = time.process_time()
    for letter in text[:100_000]:
        parser.feed(letter)
    parser.finish()
    assert 1000 * (time.process_time() - start) / 100 < 5, "one character at a time"


@pytest.mark.parametrize("release", ["v4-0731", "v4.1", "v3.2"])
def test_one_lenient_parser_reads_every_release(release):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "1", "y": [2]}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "r", "content": "c", "tool_calls": [call]},
    ]
    made = render(messages, release=RELEASES[release])
    text = made.text[made.spans[0].start : made.spans[0].end]
    assert parse_lenient(text) == parse_strict(text, release=RELEASES[release])
    assert parse_lenient(text)["tool_calls"] == [call]


def test_a_call_that_is_not_closed_before_the_next():
    first = f'<{DSML}invoke name="a">\n<{DSML}parameter name="x" string="true">1</{DSML}parameter>\n'
    calls = parse_lenient(f'</think>{first}<{DSML}invoke name="b">\n</{DSML}invoke>')["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [("a", '{"x": "1"}'), ("b", "{}")]
