"""Tool calls of Mistral up to v0.3 and Nemo (L1): ``[TOOL_CALLS] [{"name": "weather", "arguments": {…}, "id": "9 signs"}]``."""

from __future__ import annotations

from twinkle_core.templates.tools.scan import Schema, call, json_at, scan
from twinkle_core.types import ToolCall


def parse(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order. A list with anything else in it stays in the text."""
    return scan(text, "[TOOL_CALLS]", _read, schema)


def _read(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    value, end = json_at(text, at)
    items = value if isinstance(value, list) else []
    found = [call(i.get("name"), i.get("arguments"), i.get("id")) if isinstance(i, dict) else None for i in items]
    calls = [one for one in found if one is not None]
    return (calls if len(calls) == len(found) else []), end
