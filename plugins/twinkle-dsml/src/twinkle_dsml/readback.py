"""Whether what is trained is read back as it was given; where it is not, the model would learn to write something else."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle_core.errors import BadCompletion, TemplateError
from twinkle_core.templates.labels import Span
from twinkle_core.types import Message
from twinkle_dsml.markup import to_json
from twinkle_dsml.messages import Turn
from twinkle_dsml.releases import Release
from twinkle_dsml.render import Rendering
from twinkle_dsml.strict import parse_strict
from twinkle_dsml.tokens import DSML, EOS


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
        same = {
            "reasoning_content": read["reasoning_content"] == thought,
            "content": read["content"] == turn.text,
            "tool_calls": _same_calls(read, turn) and not _misread(words, turn),
        }
        for field, equal in same.items():
            if not equal:
                raise TemplateError.unreadable(span.turn, field)


def _same_calls(read: Message, turn: Turn) -> bool:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in read["tool_calls"]]
    return calls == [(call.name, to_json(call.arguments)) for call in turn.calls]


def _misread(words: str, turn: Turn) -> bool:
    """Whether a server reads the calls otherwise than the strict parser: it stops at the first end token, a call's name ends at
    its first quote, a parameter's where ``string`` seems to follow, and a value at the first end of any tag."""
    if not turn.calls:
        return False
    tags = 1 + len(turn.calls) + sum(len(call.arguments) for call in turn.calls)
    if EOS in words.removesuffix(EOS) or words.count(f"</{DSML}") != tags:
        return True
    return any('"' in call.name or any('" string="' in key for key in call.arguments) for call in turn.calls)
