"""A completion to a message, where it keeps its format to the letter; else an error that names the place."""

from __future__ import annotations

import re
from functools import lru_cache

from twinkle_core.errors import BadCompletion
from twinkle_core.types import Message, ToolCall
from twinkle_dsml.markup import read_arguments
from twinkle_dsml.releases import RELEASES, Release, Tags
from twinkle_dsml.tokens import EOS, RESERVED, THINK_END

_INVOKE = re.compile(r'\s*name="(.*?)">\n\n?', re.DOTALL)
_PARAMETER = re.compile(r' name="(.*?)" string="(true|false)">(.*)', re.DOTALL)
_RESERVED = re.compile("|".join(map(re.escape, RESERVED)))


def parse_strict(text: str, *, thinking: bool = True, release: Release = RELEASES["v4-0731"]) -> Message:
    """A completion to the assistant's message.

    Args:
        text: what follows the assistant's header, up to and including the end token.
        thinking: whether the header ends with ``<think>``.
        release: whose tags.

    Returns:
        ``role``, ``content``, ``reasoning_content`` and ``tool_calls``, each always there. ``arguments`` of calls are JSON
        text, in which values that are no text stand as they were written; so they are JSON only if the model wrote JSON.

    Raises:
        BadCompletion: names the character and what should stand there.
    """
    reader = _Reader(text, release.tags)
    thought = reader.thought() if thinking else ""
    content = reader.content()
    calls = reader.calls() if reader.in_block else []
    if reader.at < len(text):
        raise BadCompletion.at_character(text, reader.at, "nothing may follow the end token")
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls}


class _Reader:
    """``at``: how far the text is read."""

    def __init__(self, text: str, tags: Tags) -> None:
        self.text = text
        self.tags = tags
        self.at = 0
        self.in_block = False
        self._stops = _stops(tags)

    def thought(self) -> str:
        words, stop = self._until("thought", f"the thought is not closed by {THINK_END}")
        if stop != THINK_END:
            raise self._wrong(f"the thought is not closed by {THINK_END}", back=len(stop))
        return self._plain(words, len(stop), "thought")

    def content(self) -> str:
        words, stop = self._until("content", f"the end token {EOS} is missing")
        self.in_block = stop != EOS
        return self._plain(words, len(stop), "content")

    def calls(self) -> list[ToolCall]:
        calls: list[ToolCall] = []
        while True:
            stop = self._tag_ends("block", f"'{self.tags.opened(self.tags.invoke)}' or the end of the block")
            if stop == self.tags.closed(self.tags.block) + ">":
                break
            calls.append(self._call())
        if self.at < len(self.text):
            if not self.text.startswith(EOS, self.at):
                raise self._wrong(f"only the end token {EOS} may follow the tool calls")
            self.at += len(EOS)
        return calls

    def _call(self) -> ToolCall:
        place = self.at
        header, stop = self._until("invoke", f"'{self.tags.closed(self.tags.invoke)}' is missing")
        match = _INVOKE.fullmatch(header)
        if match is None:
            raise BadCompletion.at_character(self.text, place, 'a call begins with name="…"> and a line break')
        parameters: dict[str, tuple[str, bool, str]] = {}
        while stop == self.tags.opened(self.tags.parameter):
            name, is_text, value = self._parameter(parameters)
            parameters[name] = (name, is_text, value)
            stop = self._tag_ends("invoke", "another parameter or the end of the call")
        arguments = read_arguments(list(parameters.values()))
        return {"type": "function", "function": {"name": match.group(1), "arguments": arguments}}

    def _parameter(self, before: dict[str, tuple[str, bool, str]]) -> tuple[str, bool, str]:
        place = self.at
        body, _ = self._until("parameter", f"'{self.tags.closed(self.tags.parameter)}' is missing")
        match = _PARAMETER.fullmatch(body)
        if match is None:
            raise BadCompletion.at_character(self.text, place, 'a parameter begins with name="…" string="true|false">')
        name, kind, value = match.groups()
        if name in before:
            raise BadCompletion.at_character(self.text, place, f"the call has a second parameter {name!r}")
        return name, kind == "true", value

    def _tag_ends(self, kind: str, expected: str) -> str:
        """The next tag, before which only the end of the last one may stand."""
        place = self.at
        between, stop = self._until(kind, f"expected {expected}")
        if between != ">\n":
            raise BadCompletion.at_character(self.text, place, f"expected '>', a line break and {expected}")
        return stop

    def _until(self, kind: str, missing: str) -> tuple[str, str]:
        """The text up to the next stop of a kind, and that stop; reads past it."""
        match = self._stops[kind].search(self.text, self.at)
        if match is None:
            raise self._wrong(missing)
        words = self.text[self.at : match.start()]
        self.at = match.end()
        return words, match.group()

    def _plain(self, words: str, stop: int, what: str) -> str:
        match = _RESERVED.search(words)
        if match is not None:
            place = self.at - stop - len(words) + match.start()
            raise BadCompletion.at_character(self.text, place, f"{match.group()!r} may not stand in the {what}")
        return words

    def _wrong(self, cause: str, back: int = 0) -> BadCompletion:
        return BadCompletion.at_character(self.text, self.at - back, cause)


@lru_cache
def _stops(tags: Tags) -> dict[str, re.Pattern[str]]:
    opened = "\n\n" + tags.opened(tags.block)
    stops = {
        "thought": (THINK_END, opened),
        "content": (EOS, opened),
        "block": (tags.opened(tags.invoke), tags.closed(tags.block) + ">"),
        "invoke": (tags.opened(tags.parameter), tags.closed(tags.invoke)),
        "parameter": (tags.closed(tags.parameter),),
    }
    return {kind: re.compile("|".join(map(re.escape, words))) for kind, words in stops.items()}
