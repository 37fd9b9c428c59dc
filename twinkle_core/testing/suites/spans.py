"""Conversations for the suite of templates, and where their messages stand among the tokens of their rows (L2)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.types import IGNORE_INDEX, Trajectory

_HALF = "\ufffd"  # what a decoder shows for a sign of which not all tokens are there yet


@dataclass(frozen=True, slots=True)
class Answered:
    """A conversation cut after one of its answers: the row, and where the tokens of it stand in its text.

    Attributes:
        number, turn: which conversation, and the place of the answer in it.
        starts, stops: of each token, in ``text``.
        trained: for each token, whether it is a target.
        prompt, prompt_text: the row that waits for this answer.
    """

    number: int
    turn: int
    messages: Sequence[Any]
    ids: list[int]
    text: str
    starts: list[int]
    stops: list[int]
    trained: list[bool]
    prompt: list[int]
    prompt_text: str

    @property
    def place(self) -> str:
        """For messages of a test."""
        return f"conversation {self.number}, answer in message {self.turn}"

    def tokens(self, turn: int) -> range | None:
        """The tokens that hold any of what a message says; None where its text is not to be found as it is."""
        words = self.messages[turn]["content"]
        at = self.text.find(words)
        if not words or at < 0:
            return None
        held = [t for t, start in enumerate(self.starts) if start < at + len(words) and self.stops[t] > at]
        return range(held[0], held[-1] + 1) if held else None

    def shown(self, tokens: Sequence[int]) -> str:
        """Their text."""
        return repr("".join(self.text[self.starts[t] : self.stops[t]] for t in tokens))


def answered(template: Any, conversations: Sequence[Trajectory]) -> Iterator[Answered]:
    """Each conversation cut after each of its answers, so that the answer is what a prompt waits for."""
    for number, conversation in enumerate(conversations):
        for turn, message in enumerate(conversation["messages"]):
            if message["role"] != "assistant":
                continue
            messages = conversation["messages"][: turn + 1]
            whole, asked = (copy.deepcopy({**conversation, "messages": m}) for m in (messages, messages[:-1]))
            row, prompt = template.encode(whole), template.encode(asked, add_generation_prompt=True)
            ids = list(row["input_ids"])
            prefixes = [template.decode(ids[:end]) for end in range(len(ids) + 1)]
            edges = [len(text.rstrip(_HALF)) for text in prefixes]
            stops = [edge + text.endswith(_HALF) for edge, text in zip(edges[1:], prefixes[1:], strict=True)]
            trained = [False, *(label != IGNORE_INDEX for label in row["labels"][:-1])]
            yield Answered(
                number, turn, messages, ids, prefixes[-1], edges[:-1], stops, trained,
                list(prompt["input_ids"]), template.decode(prompt["input_ids"]),
            )  # fmt: skip


def talk(**turns: str) -> Trajectory:
    """A message for each role; ``user2`` is the user's second."""
    return {"messages": [{"role": role.rstrip("234"), "content": text} for role, text in turns.items()]}


def oddities() -> list[Any]:
    """Conversations that few templates take: which, is theirs to say."""
    hi, ok = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ok"}
    messages: list[list[Any]] = [
        [],
        [hi],
        [ok, hi],
        [hi, ok, ok],
        [hi, hi, ok],
        [hi, {"role": "assistant", "content": ""}],
        [hi, {"role": "assistant", "content": None}],
        [hi, {"role": "assistant"}],
        [hi, {"content": "Ok"}],
        [hi, ok, {"role": "system", "content": "Late"}],
        [hi, {"role": "narrator", "content": "They speak."}, ok],
        [hi, ok, {"role": "tool", "content": "18"}, ok],
        [hi, "Ok"],
    ]
    return [{"messages": each} for each in messages]


def spoken() -> list[tuple[Any, list[str], list[str]]]:
    """Conversations, the words of each that a row must hold, and what no row may hold."""
    hi, ok = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good evening"}
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    said = {"role": "assistant", "content": "And goodbye"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Good evening"}]}
    cases: list[tuple[list[Any], list[str], list[str]]] = [
        ([hi, ok, said], ["Good evening", "And goodbye"], []),
        (
            [{"role": "user", "content": "One question"}, {"role": "user", "content": "Another"}, ok],
            ["One question", "Another"],
            [],
        ),
        ([hi, parts], ["Good evening"], ["'type'"]),
        ([hi, {"role": "assistant", "content": None}], [], ["None"]),
        ([hi, {"role": "assistant"}], [], ["None"]),
        ([hi, {"role": "assistant", "content": "I look", "tool_calls": [call]}], ["get_weather"], []),
    ]
    return [({"messages": messages}, words, never) for messages, words, never in cases]


def rows_of(encoded: Any) -> list[Any]:
    """What ``encode`` gave, as a list."""
    return encoded if isinstance(encoded, list) else [] if encoded is None else [encoded]


def row_of(template: Any, conversation: Any) -> Any:
    """The one row of a short conversation."""
    rows = rows_of(template.encode(copy.deepcopy(conversation)))
    assert len(rows) == 1, (
        f"a short conversation gives {len(rows)} rows, not one; build it with a max_length that lets it through"
    )
    return rows[0]


def trained_text(template: Any, row: Any) -> str:
    """The text of the labels, stretches apart."""
    texts, stretch = [], list[int]()
    for label in [*row["labels"], IGNORE_INDEX]:
        if label != IGNORE_INDEX:
            stretch.append(label)
        elif stretch:
            texts.append(template.decode(stretch))
            stretch = []
    return " | ".join(texts)
