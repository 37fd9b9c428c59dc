"""Tool calls of the GLM family (L1).

GLM-4: the whole answer is a name and JSON on the next line. GLM-4.5 and later write tags:

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Bern</arg_value>
    </tool_call>

There a text has no quotes: where the tool's schema does not declare a type, what reads as JSON is taken as that.
"""

from __future__ import annotations

import re
from typing import Any

from twinkle_core.templates.tools.scan import Schema, blank, call, json_at, scan, value_of
from twinkle_core.types import ToolCall

_NAME = re.compile(r"\s*([^\s<>{}\[\]\"']+)[ \t]*\r?\n")
_TAGGED_NAME = re.compile(r"\s*([^\s<>]+)")
_KEY = re.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>")
_CLOSED = re.compile(r"\s*</tool_call>")
_END = "</arg_value>"


def parse_whole(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """GLM-4's form: nothing is left of the text, or all of it."""
    name = _NAME.match(text)
    if name is not None and text.startswith("{", blank(text, name.end())):
        arguments, end = json_at(text, name.end())
        found = call(name[1], arguments)
        if found is not None and not text[end:].strip():
            return "", [found]
    return text, []


def parse_tagged(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """GLM-4.5's form: the text without its calls, and the calls in order."""
    return scan(text, "<tool_call>", _read, schema)


def _read(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    named = _TAGGED_NAME.match(text, at)
    if named is None:
        return [], blank(text, at)
    name, at = named[1], named.end()
    types = schema.get(name, {})
    arguments: dict[str, Any] = {}
    while (key := _KEY.match(text, at)) is not None:
        end = text.find(_END, key.end())
        if end < 0:
            return [], len(text)
        arguments[key[1]] = value_of(text[key.end() : end], types.get(key[1], ()))
        at = end + len(_END)
    closed, found = _CLOSED.match(text, at), call(name, arguments)
    return ([found], closed.end()) if closed and found else ([], blank(text, at))
