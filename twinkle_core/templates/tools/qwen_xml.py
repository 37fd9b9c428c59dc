"""Tool calls as nested tags, as Qwen3.5 and Qwen3-Coder write them (L1).

    <tool_call>
    <function=weather>
    <parameter=city>
    Bern
    </parameter>
    </function>
    </tool_call>

The form does not say a parameter's type: where the tool's schema does not either, what reads as JSON is taken as that.
"""

from __future__ import annotations

import re
from typing import Any

from twinkle_core.templates.tools.scan import Schema, blank, call, scan, value_of
from twinkle_core.types import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_CLOSED = re.compile(r"\s*</function>\s*</tool_call>")
_END = "</parameter>"


def parse(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order. What only looks like a call stays in the text."""
    return scan(text, "<tool_call>", _read, schema)


def _read(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    function = _FUNCTION.match(text, at)
    if function is None:
        return [], blank(text, at)
    name, at = function[1], function.end()
    types = schema.get(name, {})
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, at)) is not None:
        end = text.find(_END, parameter.end())
        if end < 0:
            return [], len(text)
        arguments[parameter[1]] = value_of(text[parameter.end() : end].removesuffix("\n"), types.get(parameter[1], ()))
        at = end + len(_END)
    closed, found = _CLOSED.match(text, at), call(name, arguments)
    return ([found], closed.end()) if closed and found else ([], blank(text, at))
