"""Tool calls of Cohere's Command R7B and later (L1).

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Bern"}}
]<|END_ACTION|>
"""

from __future__ import annotations

from twinkle_core.templates.tools.scan import Schema, blank, call, json_at, scan
from twinkle_core.types import ToolCall

_CLOSING = "<|END_ACTION|>"


def parse(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order. A list with anything else in it stays in the text."""
    return scan(text, "<|START_ACTION|>", _read, schema)


def _read(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    value, end = json_at(text, at)
    items = value if isinstance(value, list) else []
    found = [
        call(i.get("tool_name"), i.get("parameters"), i.get("tool_call_id")) if isinstance(i, dict) else None for i in items
    ]
    calls = [one for one in found if one is not None]
    end = blank(text, end)
    if not calls or len(calls) != len(found) or not text.startswith(_CLOSING, end):
        return [], end
    return calls, end + len(_CLOSING)
