"""Conversations whose texts are replaced by marks (L1), so that a rendering shows what the template itself writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_core.templates.messages import SHIELD, THOUGHTS, Turn

#: Tags that templates look for in a text; they stay as they are, and only what is between them is replaced.
_TAGS = re.compile(rf"({SHIELD}|</?think>|</?tool_call>|</?tool_response>)")


@dataclass(frozen=True, slots=True)
class Part:
    """A text of a conversation, which a mark stands for."""

    turn: int
    kind: Literal["content", "thought", "call"]
    value: str

    def forms(self) -> Iterator[str]:
        """How a template may write it: as it is, quoted as JSON, or trimmed where it is nothing but white space."""
        yield self.value
        if self.value.isspace():
            yield ""
        for ascii_ in (False, True):
            quoted = json.dumps(self.value, ensure_ascii=ascii_)[1:-1]
            if quoted != self.value:
                yield quoted


class Marker:
    """Makes and finds marks. Their only property is that no template changes them and no conversation holds them."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self._pattern = re.compile(rf"{nonce}(\d{{5}})z")

    def mark(self, number: int) -> str:
        return f"{self.nonce}{number:05d}z"

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The literal pieces around the marks of a rendering (one more than marks), and the marks' numbers."""
        pieces = self._pattern.split(text)
        return pieces[0::2], [int(number) for number in pieces[1::2]]

    def replace(self, messages: Sequence[Turn]) -> tuple[list[Turn], list[Part]]:
        """Messages with marks for texts, and what they stand for; mark k is ``parts[k]``.

        Kept as they are, since templates look at them: roles, tags, white space at a text's ends (a template may or may not
        trim it), texts that are empty, arguments of tool calls, all other keys. A call is marked by its name.
        """
        parts: list[Part] = []
        marked: list[Turn] = []
        for index, message in enumerate(messages):
            new = dict(message)
            for key in THOUGHTS:
                if isinstance(new.get(key), str):
                    new[key] = self._text(index, new[key], parts, thought=True)
            new["content"] = self._content(index, new["content"], parts)
            if "tool_calls" in new:
                new["tool_calls"] = [self._call(index, call, parts) for call in new["tool_calls"]]
            if message["role"] == "assistant" and not (parts and parts[-1].turn == index):  # nothing but white space or tags
                new["content"] = self._put(Part(index, "content", message["content"] or ""), parts)
            marked.append(new)
        return marked, parts

    def _put(self, part: Part, parts: list[Part]) -> str:
        parts.append(part)
        return self.mark(len(parts) - 1)

    def _content(self, index: int, content: Any, parts: list[Part]) -> Any:
        if isinstance(content, str):
            return self._text(index, content, parts)
        if isinstance(content, list):
            return [
                {**part, "text": self._text(index, part["text"], parts)} if isinstance(part.get("text"), str) else part
                for part in content
            ]
        return content

    def _text(self, index: int, text: str, parts: list[Part], thought: bool = False) -> str:
        if "<" not in text:
            return self._core(index, text, parts, "thought" if thought else "content")
        segments = _TAGS.split(text)
        last_thought = max((k for k, s in enumerate(segments) if s in ("</think>", SHIELD)), default=-1)
        return "".join(
            segment if k % 2 else self._core(index, segment, parts, "thought" if thought or k < last_thought else "content")
            for k, segment in enumerate(segments)
        )

    def _core(self, index: int, text: str, parts: list[Part], kind: Literal["content", "thought"]) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return f"{text[:start]}{self._put(Part(index, kind, core), parts)}{text[start + len(core) :]}"

    def _call(self, index: int, call: dict[str, Any], parts: list[Part]) -> dict[str, Any]:
        function = call.get("function", call)
        made = {**function, "name": self._put(Part(index, "call", function["name"]), parts)}
        return {**call, "function": made} if "function" in call else made


def arguments_of(message: Turn) -> str:
    """All arguments of a message's tool calls, as text to search in."""
    calls = message.get("tool_calls") or ()
    return "".join(json.dumps(call.get("function", call).get("arguments"), ensure_ascii=False) for call in calls)


def with_other_arguments(message: Turn) -> Turn:
    """A message whose last tool call is given other arguments."""
    *earlier, last = message["tool_calls"]
    function = last.get("function", last)
    given = function.get("arguments")
    other: Any = {} if given not in ({}, "{}") else {"key": 1}
    made = {**function, "arguments": json.dumps(other) if isinstance(given, str) else other}
    return {**message, "tool_calls": [*earlier, {**last, "function": made} if "function" in last else made]}
