"""Conversations checked and put into turns: the caller's messages to what is rendered."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_core.errors import TemplateError
from twinkle_core.templates.messages import NOT_READ, tools_of
from twinkle_dsml.releases import Release

#: role -> keys of which a message must have one: a misspelt 'content' would otherwise be an empty message
_SAYS = {
    "assistant": ("content", "reasoning_content", "reasoning", "tool_calls"),
    "system": ("content", "tools", "response_format"),
    "user": ("content", "content_blocks"),
}
#: key -> roles that write it: of another's message it would be lost
_WRITTEN_BY = {
    "tools": ("system", "developer"),
    "response_format": ("system", "developer"),
    "tool_calls": ("assistant",),
}


@dataclass(slots=True)
class Call:
    """A tool call: its name, and its arguments as parameters in order."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class Result:
    """A tool's result within a user's turn."""

    call_id: str
    text: str


@dataclass(slots=True)
class Turn:
    """A message as it is rendered. ``index``: its place in the caller's list; of several that became one turn, the first's."""

    role: str
    index: int
    text: str = ""
    blocks: list[str | Result] = field(default_factory=list)
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    task: str | None = None
    ends: bool = True
    tools: list[Any] = field(default_factory=list)
    response_format: Mapping[str, Any] | None = None
    emitted: bool = True  # False for context, which was encoded before


def turns_of(messages: Any, release: Release, *, emitted: bool = True) -> list[Turn]:
    """Messages as turns, each by itself.

    Raises:
        TemplateError: names the message and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TemplateError.shape(messages)
    return [_turn(index, message, release, emitted) for index, message in enumerate(messages)]


def _turn(index: int, message: Any, release: Release, emitted: bool) -> Turn:
    if not isinstance(message, Mapping):
        raise TemplateError.at(index, type(message).__name__, "it is not a mapping with 'role' and 'content'")
    role = _role(index, message, release)
    turn = Turn(role, index, task=_task(index, role, message, release), ends=not message.get("wo_eos"), emitted=emitted)
    content = message.get("content")
    if role == "user":
        turn.blocks = _blocks(index, message)
    elif role == "tool":
        turn.blocks = [Result(str(message.get("tool_call_id") or ""), _joined(index, role, content))]
    else:
        turn.text = _joined(index, role, content)
    if role in ("system", "developer"):
        turn.tools = _tools(index, role, message)
        turn.response_format = _response_format(index, role, message)
    if role == "developer" and not turn.text:
        raise TemplateError.at(index, role, "its 'content' is empty")
    if role == "assistant":
        turn.thought = _text(index, message, "reasoning_content", "reasoning")
        calls = _list(index, role, message, "tool_calls")
        turn.calls = [_call(index, call) for call in calls]
        turn.call_ids = [str(call.get("id") or "") if isinstance(call, Mapping) else "" for call in calls]
    return turn


def _role(index: int, message: Mapping[str, Any], release: Release) -> str:
    """The role of a message that says something, and nothing that its role does not write."""
    role = message.get("role")
    if not isinstance(role, str) or role not in release.roles:
        raise TemplateError.at(index, role, f"'role' must be one of {', '.join(sorted(release.roles))}")
    if message.get("function_call") is not None:
        raise TemplateError.old_call(index, role)
    keys = _SAYS.get(role, ("content",))
    silent = role == "assistant" and message.get("content") is None and not any(message.get(key) for key in keys)
    if silent or not any(key in message for key in keys):
        others = ", ".join(repr(key) for key in message if key not in ("role", "content"))
        raise TemplateError.at(index, role, f"it has no 'content'{others and f' (but {others})'}")
    lost = next((key for key, roles in _WRITTEN_BY.items() if role not in roles and message.get(key)), None)
    if lost:
        raise TemplateError.at(index, role, f"it has {lost!r}, which are for {' and '.join(_WRITTEN_BY[lost])} messages")
    return role


def _task(index: int, role: str, message: Mapping[str, Any], release: Release) -> str | None:
    task = message.get("task")
    if task is not None and (not isinstance(task, str) or task not in release.tasks):
        known = f"one of {', '.join(release.tasks)}" if release.tasks else f"left out: release {release.name} has none"
        raise TemplateError.at(index, role, f"'task' must be {known}, not {reprlib.repr(task)}")
    return task


def _response_format(index: int, role: str, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    given = message.get("response_format")
    if not given:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except NOT_READ as cause:
            raise TemplateError.at(index, role, f"'response_format' is not JSON: {cause}") from cause
    if not isinstance(given, Mapping):
        raise TemplateError.at(
            index, role, f"'response_format' is no schema (a mapping, or JSON text of one): {reprlib.repr(given)}"
        )
    return given


def _text(index: int, message: Mapping[str, Any], *keys: str) -> str:
    for key in keys:
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise TemplateError.at(index, message["role"], f"'{key}' is a {type(value).__name__}, not a text")
        if value:
            return str(value)
    return ""


def _list(index: int, role: str, message: Mapping[str, Any], key: str) -> list[Any]:
    value = message.get(key)
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TemplateError.at(index, role, f"'{key}' is a {type(value).__name__}, not a list")
    return list(value)


def _tools(index: int, role: str, message: Mapping[str, Any]) -> list[Any]:
    try:
        return tools_of(message) or []
    except TemplateError as cause:
        raise TemplateError.at(index, role, str(cause)) from cause


def _joined(index: int, role: str, content: Any) -> str:
    """A content as text: null is empty, parts are a blank line apart, a part that is no text is named."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(_parts(index, role, content))


def _parts(index: int, role: str, content: Any) -> Iterable[str]:
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) and "type" in part for part in content):
        way = f"'content' is a {type(content).__name__}, not a text or a list of parts with 'type'"
        raise TemplateError.at(index, role, way)
    for part in content:
        if part["type"] != "text":
            yield f"[Unsupported {part['type']}]"
        elif isinstance(part.get("text"), str):
            yield part["text"]
        else:
            raise TemplateError.at(index, role, f"a part of type 'text' has no text: {reprlib.repr(part)}")


def _blocks(index: int, message: Mapping[str, Any]) -> list[str | Result]:
    content = message.get("content")
    given = message.get("content_blocks")
    if given is None:
        return [content or ""] if content is None or isinstance(content, str) else list(_parts(index, "user", content))
    if not isinstance(given, Sequence) or not all(isinstance(b, Mapping) and "type" in b for b in given):
        raise TemplateError.at(index, "user", "'content_blocks' is no list of blocks with 'type'")
    blocks: list[str | Result] = []
    for block in given:
        if block["type"] == "tool_result":
            text = _joined(index, "user", block.get("content"))
            blocks.append(Result(str(block.get("tool_use_id") or ""), text))
        else:
            blocks.extend(_parts(index, "user", [block]))
    return blocks


def _call(index: int, call: Any) -> Call:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        way = f"a tool call needs {{'function': {{'name', 'arguments'}}}}, not {reprlib.repr(call)}"
        raise TemplateError.at(index, "assistant", way)
    name, arguments = function["name"], function.get("arguments")
    if isinstance(arguments, str) and not arguments.strip():
        arguments = None  # what servers give for a call without any
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {"arguments": arguments}  # as the model's own encoder does
        except NOT_READ as cause:
            raise TemplateError.at(index, "assistant", f"the arguments of tool call '{name}': {cause}") from cause
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise TemplateError.at(
            index, "assistant", f"the arguments of tool call '{name}' are no mapping: {reprlib.repr(arguments)}"
        )
    odd = [key for key in arguments if not isinstance(key, str)]
    if odd:
        raise TemplateError.at(index, "assistant", f"a parameter of tool call '{name}' is named {odd[0]!r}, which is no text")
    return Call(name, arguments)


def place_tools(turns: list[Turn], tools: list[Any] | None) -> list[Turn]:
    """Tools that come beside the messages belong to the first system message; without one, to a new one before all else.

    Raises:
        TemplateError: that message has other tools of its own.
    """
    if not tools:
        return turns
    first = next((turn for turn in turns if turn.role == "system"), None)
    if first is None:
        return [Turn("system", -1, tools=tools, emitted=all(t.emitted for t in turns)), *turns]
    if first.tools and first.tools != tools:
        way = "it has 'tools', and the conversation has others; give them in one place"
        raise TemplateError.at(first.index, "system", way)
    first.tools = tools
    return turns


def merge(turns: Iterable[Turn]) -> list[Turn]:
    """Tool results and consecutive user messages as one user's turn each.

    A text whose predecessor has a task opens a turn of its own, so that the task stays where it is.
    """
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged else None
        joins = turn.role == "tool" or (turn.role == "user" and last is not None and last.task is None)
        if joins and last is not None and last.role == "user":
            last.blocks += turn.blocks
        else:
            if turn.role == "tool":
                turn.role, turn.task, turn.ends = "user", None, True
            merged.append(turn)
    return merged


def sort_results(turns: Iterable[Turn]) -> None:
    """Put the tool results of a turn into the order of the calls that they answer; texts between them stay where they are."""
    order: dict[str, int] = {}
    for turn in turns:
        if turn.calls:
            order = {call_id: place for place, call_id in enumerate(turn.call_ids) if call_id}
        places = [place for place, block in enumerate(turn.blocks) if isinstance(block, Result)]
        if len(places) < 2:
            continue
        results = [block for block in turn.blocks if isinstance(block, Result)]
        results.sort(key=lambda result: order.get(result.call_id, 0))
        for place, result in zip(places, results, strict=True):
            turn.blocks[place] = result
