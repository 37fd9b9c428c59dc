"""What the readers of tool calls share (L1).

A model's text may be anything, so a reader never raises, takes time linear in the text, and takes for a call only what is one
from its first sign to its last. All else stays in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from twinkle_core.types import ToolCall

#: tool -> parameter -> its JSON types, as a conversation's ``tools`` declare them
Schema = Mapping[str, Mapping[str, Collection[str]]]
#: (text, where to read, declared types) -> the calls there (empty if none), and where reading ended
Reader = Callable[[str, int, Schema], "tuple[list[ToolCall], int]"]

_BLANK = re.compile(r"\s*")
#: A sign of JSON that is cut off is no longer than this: ``\ud83d\udc4b``, with which the error comes at its beginning.
_LONGEST = 16


def scan(text: str, opening: str, read: Reader, schema: Schema) -> tuple[str, list[ToolCall]]:
    """Calls that begin with ``opening``: the text without them, and them in order.

    What ``read`` has looked at and refused is not looked at again, so the time is linear where that of ``read`` is.
    """
    calls: list[ToolCall] = []
    rest: list[str] = []
    kept, at = 0, text.find(opening)
    while at >= 0:
        found, end = read(text, at + len(opening), schema)
        if found:
            rest.append(text[kept:at])
            kept = end
            calls += found
        at = text.find(opening, end)
    return "".join([*rest, text[kept:]]), calls


def blank(text: str, at: int) -> int:
    """The first place from ``at`` on without white space."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON object or list at a place, after white space, and where it ends; (None, where it stops being JSON) if none is.

    Read in growing pieces: an error counts the lines before it, which from the beginning of a long text takes too long.
    """
    at = blank(text, at)
    if not text.startswith(("{", "["), at):
        return None, at
    size = 256
    while True:
        piece = text[at : at + size]
        try:
            value, end = _DECODER.raw_decode(piece)
            return value, at + end
        except json.JSONDecodeError as fault:
            cut = fault.pos > len(piece) - _LONGEST or fault.msg.startswith("Unterminated")
            if not cut or at + size >= len(text):
                return None, at + fault.pos
        except ValueError:  # NaN, a number of thousands of digits
            return None, at + 1
        except RecursionError:  # thousands of brackets
            return None, len(text)
        size *= 4


def call(name: Any, arguments: Any, identity: Any = None) -> ToolCall | None:
    """A call, or None where name or arguments are none. Arguments may be JSON text, as some models write them."""
    if isinstance(arguments, str):
        text = arguments
        arguments, end = json_at(text, 0) if text.strip() else ({}, len(text))
        arguments = None if text[end:].strip() else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    made: ToolCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": identity, **made} if isinstance(identity, str) else made


def value_of(text: str, declared: Collection[str] = ()) -> Any:
    """A value that a form writes without quotes. Where its type is not declared, what reads as JSON is taken as that; of
    several types a text comes before all others but null."""
    word = text.strip().lower()
    if "null" in declared and word in ("null", "none"):
        return None
    if "string" in declared:
        return text
    if "boolean" in declared and word in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(word)
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
