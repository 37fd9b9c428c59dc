"""Whether what is trained is read back as it was given; where it is not, the model would learn to write something else."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle_core.errors import BadCompletion, TemplateError
from twinkle_core.templates.labels import Span
from twinkle_dsml.markup import to_json
from twinkle_dsml.releases import Release
from twinkle_dsml.render import Rendering
from twinkle_dsml.strict import parse_strict
from twinkle_dsml.tokens import EOS


def assert_readable(made: Rendering, spans: Iterable[Span], *, release: Release, thinking: bool) -> None:
    """Read spans of a rendering strictly, and compare with the message that each is of.

    Args:
        made: the rendering.
        spans: what is trained in it.
        release: whose format it is.
        thinking: whether thoughts were written.

    Raises:
        TemplateError: names the message, and the place or field that differs.
    """
    for span in spans:
        turn = made.turns[span.turn]
        words = made.text[span.start : span.end]
        thought = turn.thought if thinking else ""
        try:
            read = parse_strict(words if turn.ends else words + EOS, thinking=bool(thought), release=release)
        except BadCompletion as cause:
            raise TemplateError.at(span.turn, "assistant", f"it can't be read back once it is written: {cause}") from cause
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in read["tool_calls"]]
        same = {
            "reasoning_content": read["reasoning_content"] == thought,
            "content": read["content"] == turn.text,
            "tool_calls": calls == [(call.name, to_json(call.arguments)) for call in turn.calls],
        }
        for field, equal in same.items():
            if not equal:
                raise TemplateError.unreadable(span.turn, field)
