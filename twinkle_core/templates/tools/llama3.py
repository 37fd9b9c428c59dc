"""Tool calls of Llama 3.1 and later (L1): the whole answer is JSON, ``{"name": "weather", "parameters": {"city": "Bern"}}``.

Several are parted by ``;``. A ``<|python_tag|>`` may stand before them.
"""

from __future__ import annotations

from twinkle_core.templates.tools.scan import Schema, blank, call, json_at
from twinkle_core.types import ToolCall

_KEYS = {"name", "parameters", "arguments", "type"}


def parse(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """Nothing is left of the text, or all of it."""
    body = text.strip().removeprefix("<|python_tag|>")
    calls: list[ToolCall] = []
    at = blank(body, 0)
    while True:
        value, at = json_at(body, at) if body.startswith("{", at) else (None, at)
        if not isinstance(value, dict) or not value.keys() <= _KEYS:
            return text, []
        found = call(value.get("name"), value.get("parameters", value.get("arguments")))
        if found is None:
            return text, []
        calls.append(found)
        at = blank(body, at)
        if at == len(body):
            return "", calls
        if body[at] != ";":
            return text, []
        at = blank(body, at + 1)
