"""Tool calls as nested tags, as Qwen3.5 writes them (L1).

    <tool_call>
    <function=weather>
    <parameter=city>
    Bern
    </parameter>
    </function>
    </tool_call>

The form does not say a parameter's type: what reads as a JSON number, boolean, null, list or object is taken as one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from twinkle_core.types import ToolCall

_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order."""
    calls: list[ToolCall] = []
    for match in _CALL.finditer(text):
        arguments = {name: _value(value) for name, value in _PARAMETER.findall(match.group(2))}
        calls.append({"type": "function", "function": {"name": match.group(1), "arguments": arguments}})
    return _CALL.sub("", text) if calls else text, calls


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
