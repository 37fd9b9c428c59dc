"""Tool calls as JSON between tags, as Hermes and Qwen2.5/3 write them (L1).

<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>

``parameters`` in place of ``arguments``, as Llama writes them, is read as well.
"""

from __future__ import annotations

from typing import Any

from twinkle_core.templates.tools.scan import Schema, blank, call, json_at, scan
from twinkle_core.types import ToolCall

_CLOSING = "</tool_call>"


def parse(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order. What only looks like a call stays in the text."""
    return scan(text, "<tool_call>", _read, schema)


def _read(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    value, end = json_at(text, at)
    if not isinstance(value, dict):
        return [], end
    end = blank(text, end)
    found = call(value.get("name"), _arguments(value))
    if found is None or not text.startswith(_CLOSING, end):
        return [], end
    return [found], end + len(_CLOSING)


def _arguments(value: dict[str, Any]) -> Any:
    """None where it can't be told what the arguments are: they must not be lost."""
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if given:
        return given[0] if len(given) == 1 else None
    return {} if value.keys() <= {"name", "id", "type"} else None
