"""Tool calls as an agent's plain text, as ReAct prompts ask for it (L1); https://arxiv.org/abs/2210.03629.

Thought: I should look.
Action: weather
Action Input: {"city": "Bern"}
"""

from __future__ import annotations

import re

from twinkle_core.templates.tools.scan import Schema, blank, call, json_at
from twinkle_core.types import ToolCall

_ACTION = re.compile(r"^Action:([^\n]*)\nAction Input:", re.MULTILINE)


def parse(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The text before the action, and the call. Nothing may follow it but an observation, which is not the model's to write."""
    for action in _ACTION.finditer(text):
        arguments, end = json_at(text, action.end())
        found, end = call(action[1].strip(), arguments), blank(text, end)
        if found is not None and (end == len(text) or text.startswith("Observation:", end)):
            return text[: action.start()], [found]
    return text, []
