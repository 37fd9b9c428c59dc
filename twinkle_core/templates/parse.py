"""Completions to messages (L1): up to the end token, the thought apart, tool calls by the model's form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twinkle_core.templates.tools.forms import FORMS
from twinkle_core.templates.tools.scan import Schema
from twinkle_core.types import Message


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens around a thought and around an answer of a model that writes others than ``<think>``; '' where none are.

    Attributes:
        before_thought, after_thought: around a thought. Without the first its prompt has begun it.
        header: may stand before an answer that comes after a thought.
        before, after: around the answer.
    """

    before_thought: str = ""
    after_thought: str = ""
    header: str = ""
    before: str = ""
    after: str = ""

    def thought(self, text: str) -> tuple[str, str]:
        """The thought, and what comes after it: nothing, where it was cut off."""
        thoughts: list[str] = []
        text = text.strip()
        while self.after_thought and text.startswith(self.before_thought):
            if not self.before_thought and (thoughts or (self.before and text.startswith(self.before))):
                break
            thought, closed, text = text.removeprefix(self.before_thought).partition(self.after_thought)
            thoughts.append(thought.strip())
            text = text.removeprefix(self.header).strip() if closed else ""
        return "\n".join(filter(None, thoughts)), text

    def answer(self, text: str) -> str:
        """An answer without the tokens around it."""
        if not self.before or not text.startswith(self.before):
            return text
        before, _, after = text.removeprefix(self.before).partition(self.after or "\0")
        return before + after


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model answers.

    Attributes:
        ends: tokens that end its turn.
        thinks: it may end a thought that its prompt began.
        begun: its prompt has begun a thought.
        frame: what it writes in place of ``<think>``, and around an answer.
    """

    ends: tuple[str, ...] = ()
    thinks: bool = False
    begun: bool = False
    frame: Frame = Frame()


def read(text: str, manner: Manner, form: str | None, schema: Schema) -> Message:
    """An assistant's message. Where ``form`` is None, what looks like a call is text."""
    both = manner.frame.after_thought in manner.ends  # one token ends a thought and a turn
    thought, text = manner.frame.thought(text if both else _cut(text, manner))
    text = manner.frame.answer(_cut(text, manner))
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


def _cut(text: str, manner: Manner) -> str:
    """Up to the token that ends the turn."""
    return text[: min((at for at in (text.find(token) for token in manner.ends if token) if at >= 0), default=len(text))]


def reads_back(text: str, manner: Manner, name: str, arguments: dict[str, str]) -> Iterable[str]:
    """The forms by which ``text`` is this call, and nothing but it."""
    for form in FORMS:
        message = read(text, manner, form, {})
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if calls == [{"name": name, "arguments": arguments}] and not message["content"]:
            yield form
