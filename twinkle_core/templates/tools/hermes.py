"""Tool calls as JSON between tags, as Hermes and Qwen2.5/3 write them (L1).

<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>
"""

from __future__ import annotations

import json
import re

from twinkle_core.types import ToolCall

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order. What only looks like a call stays in the text."""
    calls: list[ToolCall] = []
    rest: list[str] = []
    end = 0
    for match in _CALL.finditer(text):
        call = _call(match.group(1))
        if call is None:
            continue
        rest.append(text[end : match.start()])
        end = match.end()
        calls.append(call)
    return "".join([*rest, text[end:]]), calls


def _call(body: str) -> ToolCall | None:
    try:
        value = json.loads(body)
    except json.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    return {"type": "function", "function": {"name": value["name"], "arguments": {} if arguments is None else arguments}}
