"""Against DeepSeek's own renderer and stream parser, ``deepseek-recipe``, where it and the published encoder agree.

It differs from the encoder, and so from this template, in these: it always opens a turn for the assistant; joins V4's system
messages with a blank line; puts a reminder before the header; normalises tools; writes no empty line for a call without
arguments in V4; sorts the calls of a message by their ids in V4, where the encoder keeps them as given; leaves out empty texts
of users; shows thoughts of the history in V4's chat mode; and its parser cuts a parameter's name at the first space.
"""

from __future__ import annotations

import itertools
import json
import random

import deepseek_recipe as recipe
import pytest

from twinkle_dsml.releases import RELEASES
from twinkle_dsml.render import render
from twinkle_dsml.stream import StreamParser
from twinkle_dsml.testing import random_conversation
from twinkle_dsml.tokens import DSML, EOS

ENCODINGS = {"v4-0731": recipe.DeepseekV4Encoding, "v4.1": recipe.DeepseekV41Encoding}


def theirs(messages, tools):
    """A conversation in recipe's classes."""
    made = []
    for message in messages:
        content, role = message["content"] or "", message["role"]
        if role == "assistant":
            calls = [
                recipe.ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
                for c in message.get("tool_calls") or []
            ]
            made.append(recipe.AssistantMessage(content, message.get("reasoning_content"), calls or None))
        elif role == "tool":
            made.append(recipe.ToolMessage(content, message["tool_call_id"]))
        else:
            made.append({"system": recipe.SystemMessage, "user": recipe.UserMessage}[role](content))
    functions = [tool["function"] for tool in tools]
    return made, [recipe.ToolDefinition(f["name"], f["description"], f["parameters"]) for f in functions]


@pytest.mark.parametrize("release", list(ENCODINGS))
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("effort", ["low", "high", "max", None])
def test_rendering(release, thinking, effort):
    for seed in range(25):
        conversation = random_conversation(seed, turns=1 + seed % 3)
        messages, tools = conversation["messages"], conversation["tools"] if seed % 2 else []
        for message in messages:
            if not thinking:
                message.pop("reasoning_content", None)
            for call in message.get("tool_calls") or []:
                if call["function"]["arguments"] == "{}":
                    call["function"]["arguments"] = '{"x": 1}'
        messages.append({"role": "user", "content": "and?"})
        said, defined = theirs(messages, tools)
        asked = recipe.Conversation(said, thinking_mode=thinking, tools=defined, reasoning_effort=effort)
        mine = render(
            messages,
            tools=tools,
            release=RELEASES[release],
            mode="thinking" if thinking else "chat",
            reasoning_effort=effort,
        )
        assert mine.text == ENCODINGS[release]().render_conversation(asked).prompt


@pytest.mark.parametrize("release", list(ENCODINGS))
def test_calls_stand_as_given_and_results_as_the_calls(release):
    """V4's encoder of theirs sorts calls by id; with ids in order of the calls it is the same text."""

    def talk(ids):
        calls = [
            {"id": name, "type": "function", "function": {"name": f"f{k}", "arguments": '{"x": 1}'}}
            for k, name in enumerate(ids)
        ]
        results = [{"role": "tool", "tool_call_id": name, "content": f"r{k}"} for k, name in enumerate(ids)]
        asked = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": calls}
        return [{"role": "user", "content": "q"}, asked, *reversed(results)]

    made = [render(talk(ids), release=RELEASES[release], reasoning_effort="low").text for ids in (["9", "10"], ["a", "b"])]
    asked = recipe.Conversation(theirs(talk(["a", "b"]), [])[0], thinking_mode=True, reasoning_effort="low")
    assert made[0] == made[1] == ENCODINGS[release]().render_conversation(asked).prompt


SEQUENCES = [
    roles
    for size in range(1, 5)
    for roles in itertools.product(["system", "user", "assistant", "latest_reminder"], repeat=size)
    if roles[-1] == "user" and ("latest_reminder", "latest_reminder") not in itertools.pairwise(roles)
]


@pytest.mark.parametrize("thinking", [True, False])
def test_any_order_of_roles_in_v41(thinking):
    """System messages in the middle, reminders, answers without a question: there every answer has its header."""
    makers = {"system": recipe.SystemMessage, "user": recipe.UserMessage, "latest_reminder": recipe.LatestReminderMessage}
    for roles in SEQUENCES:
        mine, theirs = [], []
        for k, role in enumerate(roles):
            content, thought = f"{role}{k}", f"thought{k}" if role == "assistant" else None
            mine.append({"role": role, "content": content, "reasoning_content": thought})
            theirs.append(recipe.AssistantMessage(content, thought) if thought else makers[role](content))
        wanted = recipe.DeepseekV41Encoding().render_conversation(recipe.Conversation(theirs, thinking_mode=thinking)).prompt
        made = render(mine, release=RELEASES["v4.1"], mode="thinking" if thinking else "chat")
        assert made.text == wanted, roles


def their_parse(text, thinking):
    request = recipe.ConversationRequest(
        recipe.Conversation([recipe.UserMessage("q")], thinking_mode=thinking), recipe.ModelVersion.DeepseekV4Pro
    )
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    processor = recipe.StreamProcessor(generator, recipe.ParsingOptions(thinking_initial_stage=stage))
    chunks = processor.push(recipe.InferenceChunk.ready())
    chunks += processor.push(recipe.InferenceChunk.text(text.partition(EOS)[0], 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)) + processor.finish()
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            reason = choice.get("finish_reason") or reason
            for key in ("content", "reasoning_content"):
                message[key] += choice["delta"].get(key) or ""
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"type": "function", "function": {"name": "", "arguments": ""}})
                for key, value in call["function"].items():
                    message["tool_calls"][call["index"]]["function"][key] += value or ""
    return message, reason


def my_parse(text, thinking):
    parser = StreamParser(thinking)
    parser.feed(text)
    parser.finish()
    return parser.message, parser.finish_reason


def call_of(name):
    return f'<{DSML}invoke name="{name}">\n<{DSML}parameter name="x" string="true">1</{DSML}parameter>\n</{DSML}invoke>\n'


PARAMETER = f'<{DSML}parameter name="y" string="true">2</{DSML}parameter>'
STRAY = [f"</{DSML}parameter>", f"</{DSML}invoke>", f"</{DSML}", f"</{DSML}x>", "x", f"<{DSML}tool_calls>", PARAMETER]


@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_tag_loses_no_call(stray):
    """Before, between and within calls; only the block's own end tag ends it."""
    within = call_of("b").replace(f"</{DSML}invoke>", f"{stray}\n</{DSML}invoke>")
    for middle in (f"{stray}\n" + call_of("a"), call_of("a") + f"{stray}\n", call_of("a") + within):
        text = f"r</think>\n\n<{DSML}tool_calls>\n{middle}{call_of('c')}</{DSML}tool_calls>{call_of('d')}"
        read = my_parse(text, True)
        assert read == their_parse(text, True)
        parser = StreamParser()
        for letter in text:
            parser.feed(letter)
        parser.finish()
        assert parser.message == read[0]


@pytest.mark.parametrize("last", [call_of("a"), call_of("a").replace(f"</{DSML}invoke>\n", "")])
def test_the_blocks_end_ends_it(last):
    """Whether or not the last call is closed. Theirs goes on after a call that is not."""
    block = f"r</think>\n\n<{DSML}tool_calls>\n{last}</{DSML}tool_calls>"
    for after in ("", "text", call_of("b"), f"\n\n<{DSML}tool_calls>\n{call_of('b')}</{DSML}tool_calls>"):
        assert my_parse(block + after, True) == their_parse(block, True)


def test_parsing():
    """Whole completions, completions cut off inside a text or a value, and stray signs and line breaks."""
    rng = random.Random(0)
    compared = 0
    for seed in range(60):
        conversation = random_conversation(seed, turns=1, words=8)
        made = render(conversation["messages"], tools=conversation["tools"], reasoning_effort="low")
        for span in made.spans:
            text = made.text[span.start : span.end].replace("shipping address", "shipping_address")
            assert my_parse(text, True) == their_parse(text, True)
            for _ in range(4):
                words = text.partition(f"<{DSML}")[0]
                places = [k for k in range(len(words) + 1) if "<" not in words[max(0, k - 7) : k]]
                at = rng.choice(places)  # not within a sign: after one that only begins theirs keeps a line break too many
                stray = rng.choice(["", "\n", "\n\n", "</think>", "\n</think>\n", "<think>", f"<{DSML}x"])
                changed = text[:at] + stray + text[at:]
                thinking = rng.random() < 0.7
                assert my_parse(changed, thinking) == their_parse(changed, thinking), repr(changed)
                cut = text[: rng.randint(0, len(text))]
                if not cut.rpartition("<")[2].startswith((f"{DSML}parameter", f"{DSML}invoke", "/")) or "</think>" not in cut:
                    assert my_parse(cut, True) == their_parse(cut, True), repr(cut)
                compared += 1
    assert compared > 300
