"""Completions to messages (L1): up to the end token, the thought apart, tool calls by the model's form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twinkle_core.templates.tools.forms import FORMS
from twinkle_core.templates.tools.scan import Schema
from twinkle_core.types import Message


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model answers.

    Attributes:
        ends: tokens that end its turn.
        thinks: it may end a thought that its prompt began.
        begun: its prompt has begun a thought.
    """

    ends: tuple[str, ...] = ()
    thinks: bool = False
    begun: bool = False


def read(text: str, manner: Manner, form: str | None, schema: Schema) -> Message:
    """An assistant's message. Where ``form`` is None, what looks like a call is text."""
    end = min((at for at in (text.find(token) for token in manner.ends if token) if at >= 0), default=len(text))
    text = text[:end]
    message: Message = {"role": "assistant", "content": ""}
    before, closed, after = text.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    calls = FORMS[form](text, schema)[1] if form and manner.begun and not closed and not opened else []
    begun = manner.begun and not closed and not calls  # a call ends a thought as well
    if opened or begun or (closed and manner.thinks):  # a thought that was cut off has no answer
        thought = before.lstrip().removeprefix("<think>").strip()
        text = after
        if thought:
            message["reasoning_content"] = thought
    if form:
        text, calls = FORMS[form](text, schema)
    message["content"] = text.strip()
    if calls:
        message["tool_calls"] = calls
    return message


def reads_back(text: str, manner: Manner, name: str, arguments: dict[str, str]) -> Iterable[str]:
    """The forms by which ``text`` is this call, and nothing but it."""
    for form in FORMS:
        message = read(text, manner, form, {})
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if calls == [{"name": name, "arguments": arguments}] and not message["content"]:
            yield form
