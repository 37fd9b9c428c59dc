"""A whole completion to a message, whatever is wrong with it."""

from __future__ import annotations

from twinkle_core.types import Message
from twinkle_dsml.stream import StreamParser


def parse_lenient(text: str, *, thinking: bool = True) -> Message:
    """What :class:`StreamParser` makes of the text. Never raises. Takes the tags of every release."""
    parser = StreamParser(thinking)
    parser.feed(text)
    parser.finish()
    return parser.message
