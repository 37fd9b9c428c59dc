"""Tools, schemas and calls as text: what all layouts write alike."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.errors import TemplateError
from twinkle_dsml.messages import Call, Turn
from twinkle_dsml.releases import Release, Tags
from twinkle_dsml.tokens import RESPONSE_FORMAT


def to_json(value: Any) -> str:
    """A value as the format writes it: one line, a space after comma and colon, all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)


def additions(turn: Turn, release: Release) -> str:
    """What stands after the text of a system's or developer's message: its tools and the format of the answer.

    Raises:
        TemplateError: a tool has no name, or is not JSON.
    """
    added = ""
    if turn.tools:
        before, after = release.tools
        added += "\n\n" + before + "\n".join(_schema(turn, tool) for tool in turn.tools) + after
    if turn.response_format:
        added += "\n\n" + RESPONSE_FORMAT + _checked(turn, "response_format", turn.response_format)
    return added


def _schema(turn: Turn, tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise TemplateError.at(turn.index, turn.role, f"a tool is {{'function': {{'name', …}}}}, not {reprlib.repr(tool)}")
    return _checked(turn, "tools", function)


def _checked(turn: Turn, what: str, value: Any) -> str:
    try:
        return to_json(value)
    except (TypeError, ValueError, RecursionError) as cause:
        raise TemplateError.at(turn.index, turn.role, f"'{what}' is not JSON: {cause}") from cause


def write_calls(turn: Turn, tags: Tags) -> str:
    """The block of a turn's tool calls, with the blank line before it; nothing where there are none."""
    if not turn.calls:
        return ""
    invokes = "\n".join(_invoke(turn, call, tags) for call in turn.calls)
    return f"\n\n{tags.opened(tags.block)}>\n{invokes}\n{tags.closed(tags.block)}>"


def _invoke(turn: Turn, call: Call, tags: Tags) -> str:
    parameters = "\n".join(_parameter(turn, str(key), value, tags) for key, value in call.arguments.items())
    return f'{tags.opened(tags.invoke)} name="{call.name}">\n{parameters}\n{tags.closed(tags.invoke)}>'


def _parameter(turn: Turn, key: str, value: Any, tags: Tags) -> str:
    if isinstance(value, str):
        kind, text = "true", value
    else:
        kind, text = "false", _checked(turn, f"argument '{key}'", value)
    return f'{tags.opened(tags.parameter)} name="{key}" string="{kind}">{text}{tags.closed(tags.parameter)}>'


def read_arguments(parameters: Sequence[tuple[str, bool, str]]) -> str:
    """Parameters (name, whether it is a text, value) as the JSON text of a call's arguments. Values that are no text are taken
    as they stand."""
    written = (f"{to_json(name)}: {to_json(value) if text else value}" for name, text, value in parameters)
    return "{" + ", ".join(written) + "}"
