"""That a template loses nothing of what was said (L2)."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from twinkle_core.errors import TwinkleError
from twinkle_core.isolation import attempt
from twinkle_core.testing.suites.base import Suite, capability
from twinkle_core.testing.suites.spans import row_of, rows_of, spoken, talk


class TemplateText(Suite):
    """What everybody said is in the row, or the conversation is refused."""

    kind: ClassVar[str] = "template"
    keeps_edges: ClassVar[bool] = True

    def test_decoding_gives_the_text_back(self, template: Any, conversations: Any) -> None:
        """``decode(encode(x)["input_ids"])`` holds what everybody said."""
        for number, conversation in enumerate(conversations):
            text = template.decode(row_of(template, conversation)["input_ids"])
            for turn, message in enumerate(conversation["messages"]):
                assert message["content"] in text, (
                    f"conversation {number}, message {turn} ({message['role']}): {message['content']!r} is not in what "
                    f"decode() makes of the ids: {text!r}"
                )

    @capability("keeps_edges")
    def test_spaces_are_kept(self, template: Any) -> None:
        """Spaces and line breaks around what is said belong to it (leave ``keeps_edges`` off where the format trims)."""
        for said in ("  two before", "two after  ", "\n\nlines before", "a line after\n"):
            for user, assistant in ((said, "Yes."), ("Is it?", said)):
                text = template.decode(row_of(template, talk(user=user, assistant=assistant))["input_ids"])
                assert said in text, f"{said!r} is not in what decode() makes of the ids: {text!r}"

    def test_other_roles_are_shown_or_refused(self, template: Any) -> None:
        """What a tool returned, or an unknown role said: in the text, or a TemplateError; never left out in silence."""
        for role in ("tool", "narrator"):
            conversation = talk(user="How warm?", assistant="I look.", **{role: "It is 18 degrees"}, assistant2="18.")
            got = attempt(lambda c=conversation: rows_of(template.encode(c)))  # type: ignore[misc]
            if isinstance(got.error, TwinkleError):
                continue
            assert got.error is None, f"encode() fails on a message of the role '{role}': {got.why}"
            text = template.decode((got.value or [{"input_ids": []}])[0]["input_ids"])
            assert "It is 18 degrees" in text, (
                f"what '{role}' said is not in the row: {text!r}. Show it, or raise twinkle_core.errors.TemplateError"
            )

    def test_a_prompt_shows_what_was_said_or_is_refused(self, template: Any) -> None:
        """Of a tool loop that waits for its answer: the call and its result. A policy is asked what its rows say."""
        call = {"type": "function", "id": "call00001", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
        said = [
            {"role": "user", "content": "How warm?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "18 degrees", "tool_call_id": "call00001"},
        ]
        got = attempt(lambda: template.encode({"messages": copy.deepcopy(said)}, add_generation_prompt=True))
        if isinstance(got.error, TwinkleError):
            return
        assert got.error is None, f"encode() of a prompt after a tool's result fails with {got.why}"
        text = template.decode(rows_of(got.value)[0]["input_ids"]) if got.value else "get_weather 18 degrees"
        lost = [word for word in ("get_weather", "18 degrees") if word not in text]
        assert not lost, f"{lost} of {said} is not in the prompt {text!r}. Show it, or raise twinkle_core.errors.TemplateError"

    def test_what_is_said_is_shown_or_refused(self, template: Any) -> None:
        """Messages one after the other of one role, texts in parts, a message that says nothing, a call of a tool."""
        for conversation, words, never in spoken():
            got = attempt(lambda c=conversation: rows_of(template.encode(copy.deepcopy(c))))  # type: ignore[misc]
            if isinstance(got.error, TwinkleError):
                continue
            assert got.error is None, f"encode({conversation}) fails with {got.why}: raise twinkle_core.errors.TemplateError"
            text = template.decode((got.value or [{"input_ids": []}])[0]["input_ids"])
            lost = [word for word in words if word not in text]
            assert not lost, (
                f"{lost[0]!r} of {conversation['messages']} is not in the row: {text!r}. Show it, or raise "
                "twinkle_core.errors.TemplateError"
            )
            made = [word for word in never if word in text]
            assert not made, (
                f"of {conversation['messages']} the row makes {text!r}: {made[0]!r} is Python's, nobody said it. Take the "
                "texts, or raise twinkle_core.errors.TemplateError"
            )
