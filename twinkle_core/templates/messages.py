"""Conversations made ready for a chat template (L1): checked, and in the one form that templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_core.errors import TemplateError

#: A message as the chat template sees it.
Turn = dict[str, Any]

#: Stands for ``</think>`` in a template that cuts what is before it; who renders puts the tag back. As long as the tag, so that
#: places in the text stay.
SHIELD = "</thin\u2060>"

#: What ``json.loads`` raises: the text is no JSON, has a number of more digits than Python reads, or is nested too deep.
NOT_READ = (ValueError, RecursionError)

#: Keys under which data sets and chat templates have a thought; the first is ours.
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought")
#: Keys with which data sets of OpenAI's, ms-swift's and axolotl's form say of one message whether it is trained.
MARKS = ("weight", "loss", "train")
#: axolotl's marks of parts of a message, which are refused.
DETAIL = "train_detail"

_INLINE_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Style:
    """The form in which a chat template takes a conversation. ``manners.py`` finds it by rendering.

    Attributes:
        thought: the key of ``THOUGHTS`` under which it takes one. None: it knows none, and thoughts are written
            ``<think>…</think>`` before the content.
        tags: it may know ``<think>…</think>``. If not, a thought that a content begins with is put under its key.
        shielded: it cuts off thoughts even of the answer that is being given, so their end must be hidden from it.
        call_content: the content of a tool call without words. Some templates write "None" for None, others leave the calls
            out where there is a content.
        text_arguments: the arguments of calls as JSON text, not as a mapping.
        system: it has no place for a system message beside an answer: ("first" or "last", what comes between), the user's
            message that holds it.
    """

    thought: str | None = THOUGHTS[0]
    tags: bool = True
    shielded: bool = False
    call_content: str | None = ""
    text_arguments: bool = False
    system: tuple[Literal["first", "last"], str] | None = None


def normalise(
    trajectory: Mapping[str, Any], *, default_system: str | None, enable_thinking: bool, style: Style
) -> tuple[list[Turn], list[Any] | None, frozenset[int]]:
    """Messages and tools of a conversation, checked, and which of these messages are marked not to be trained; the caller's
    objects are not changed.

    * Keys of a message that are None are taken out, except ``content``, which templates test for none.
    * An answer is empty where its ``content`` says so (""), not where there is none.
    * A list of text parts becomes one text.
    * ``arguments`` of tool calls given as JSON text become a mapping: templates would quote the text once more.
    * Marks of what is trained (``MARKS``) are not shown to the template.
    * Without ``enable_thinking`` no thought is shown to the template.
    * The rest as the template's ``style`` needs it.

    Raises:
        TemplateError: names the message and what is wrong with it.
    """
    messages = trajectory.get("messages") if isinstance(trajectory, Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TemplateError.shape(trajectory)
    turns = [_turn(index, message, enable_thinking, style) for index, message in enumerate(messages)]
    if style.shielded:
        _shield(turns)
    if default_system is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": default_system})
    if style.system is not None:
        turns = _folded(turns, *style.system)
    unmarked = [{key: value for key, value in turn.items() if key not in MARKS} for turn in turns]
    return unmarked, tools_of(trajectory), untrained(turns)


def untrained(messages: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """The indices of messages that are marked not to be trained.

    Raises:
        TemplateError: a mark that is neither yes nor no, two that differ, or one that asks for another than the assistant.
    """
    return frozenset(index for index, message in enumerate(messages) if not _trained(index, message))


def _trained(index: int, message: Mapping[str, Any]) -> bool:
    given = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (int, float)) or value not in (0, 1):
            way = f"{key!r} is {value!r:.40}; it says whether the message is trained, by 0 or 1 (or false or true)"
            raise TemplateError.at(index, message.get("role"), way)
    if len({bool(value) for value in given.values()}) > 1:
        told = " and ".join(f"{key!r}: {value!r}" for key, value in given.items())
        raise TemplateError.at(index, message.get("role"), f"it is marked to be trained, and not to be: {told}")
    if message.get(DETAIL):
        way = f"{DETAIL!r} marks parts of it, and a message is trained whole or not at all"
        raise TemplateError.at(index, message.get("role"), way)
    wanted = any(given.values())
    if wanted and message.get("role") != "assistant":
        marks = ", ".join(map(repr, given))
        way = f"it is marked to be trained ({marks}), and only the assistant's messages are. Remove the mark"
        raise TemplateError.at(index, message.get("role"), way)
    return wanted or not given


def last_user(turns: Sequence[Turn]) -> int:
    """The index of the last user's message, -1 if there is none."""
    return max((k for k, turn in enumerate(turns) if turn["role"] == "user"), default=-1)


def _shield(turns: Sequence[Turn]) -> None:
    """Hide the end of the thoughts after the last question, which the model must see to learn from."""
    for turn in turns[last_user(turns) + 1 :]:
        thought = _INLINE_THOUGHT.match(turn["content"]) if isinstance(turn["content"], str) else None
        if turn["role"] == "assistant" and thought is not None:
            turn["content"] = f"<think>\n{thought[1].strip(chr(10))}\n{SHIELD}\n\n{turn['content'][thought.end() :]}"


def _folded(turns: list[Turn], where: str, between: str) -> list[Turn]:
    """The conversation with its system message put before a user's text."""
    asking = [k for k, turn in enumerate(turns) if turn["role"] == "user" and isinstance(turn["content"], str)]
    if turns[0]["role"] != "system" or not isinstance(turns[0]["content"], str) or not asking:
        return turns
    place = asking[0] if where == "first" else asking[-1]
    told = {**turns[place], "content": f"{turns[0]['content']}{between}{turns[place]['content']}"}
    return [*turns[1:place], told, *turns[place + 1 :]]


def _turn(index: int, message: Any, enable_thinking: bool, style: Style) -> Turn:
    if not isinstance(message, Mapping):
        raise TemplateError.at(index, type(message).__name__, "it is not a mapping with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError.at(index, role, "'role' must be a text such as 'user'")
    turn: Turn = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "function_call" in turn:
        raise TemplateError.old_call(index, role)
    turn["content"] = _content(index, role, turn)
    if "tool_calls" in turn:
        if not isinstance(turn["tool_calls"], Sequence) or isinstance(turn["tool_calls"], str):
            raise TemplateError.at(index, role, f"'tool_calls' is a {type(turn['tool_calls']).__name__}, not a list of calls")
        turn["tool_calls"] = [_call(index, role, call, style.text_arguments) for call in turn["tool_calls"]]
        if not turn["tool_calls"]:
            del turn["tool_calls"]
    if role == "assistant":
        _thought(index, turn, enable_thinking, style)
        if "tool_calls" in turn and not turn["content"]:
            turn["content"] = style.call_content
    return turn


def _content(index: int, role: str, turn: Turn) -> Any:
    content = turn.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        said = role == "assistant" and any(turn.get(key) for key in ("tool_calls", *THOUGHTS))
        if not said:
            others = ", ".join(repr(key) for key in turn if key not in ("role", "content"))
            raise TemplateError.at(index, role, f"it has no 'content'{others and f' (but {others})'}")
        return ""
    if isinstance(content, Sequence) and content and all(isinstance(p, Mapping) and "type" in p for p in content):
        wrong = next((p for p in content if p["type"] == "text" and not isinstance(p.get("text"), str)), None)
        if wrong is not None:
            raise TemplateError.at(index, role, f"a part of type 'text' has no text: {wrong!r:.80}")
        if all(part["type"] == "text" for part in content):
            return "".join(part["text"] for part in content)
        return [dict(part) for part in content]
    what = f"'content' is a {type(content).__name__}" if content or not isinstance(content, list) else "'content' is empty"
    raise TemplateError.at(index, role, f"{what}, not a text or a list of parts with 'type'")


def _call(index: int, role: str, call: Any, as_text: bool) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise TemplateError.at(index, role, f"a tool call needs {{'function': {{'name', 'arguments'}}}}, not {call!r:.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except NOT_READ as cause:
            way = f"the arguments of tool call '{function['name']}' are not JSON ({cause})"
            raise TemplateError.at(index, role, way) from cause
        arguments = parsed
    if not isinstance(arguments, Mapping) and arguments is not None:
        way = f"the arguments of tool call '{function['name']}' are no mapping: {arguments!r:.80}"
        raise TemplateError.at(index, role, way)
    given = dict(arguments or {})
    made = {**function, "arguments": json.dumps(given, ensure_ascii=False) if as_text else given}
    return {**call, "function": made} if "function" in call else made


def _thought(index: int, turn: Turn, enable_thinking: bool, style: Style) -> None:
    given = {key: turn.pop(key) for key in THOUGHTS if key == THOUGHTS[0] or isinstance(turn.get(key), str) if key in turn}
    thought = given.get(THOUGHTS[0])
    if thought is not None and not isinstance(thought, str):
        raise TemplateError.at(index, "assistant", f"'reasoning_content' is a {type(thought).__name__}, not a text")
    told = {key: text for key, text in given.items() if text and text.strip()}
    if len({text.strip() for text in told.values()}) > 1:
        way = f"it has a thought twice, in {' and in '.join(map(repr, told))}. Keep one of them"
        raise TemplateError.at(index, "assistant", way)
    thought = next(iter(told.values()), None)
    written = _INLINE_THOUGHT.match(turn["content"]) if isinstance(turn["content"], str) else None
    if thought is not None and written is not None and written[1].strip() and enable_thinking:
        way = f"it has a thought twice, in {next(iter(told))!r} and as <think>…</think> in its 'content'. Keep one of them"
        raise TemplateError.at(index, "assistant", way)
    if written is not None and not (enable_thinking and style.tags):
        turn["content"] = turn["content"][written.end() :]
        thought = thought or written[1].strip() or None
    if not enable_thinking or thought is None:
        return
    if style.thought is None:
        turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
    else:
        turn[style.thought] = thought


def refuse_media(trajectory: Mapping[str, Any], fields: Sequence[str] = ("images", "videos", "audios")) -> None:
    """For templates that would leave them out in silence.

    Raises:
        TemplateError: the row has images, videos or audios beside its messages.
    """
    for field in fields:
        if isinstance(trajectory, Mapping) and (given := trajectory.get(field)):
            raise TemplateError.unseen(field, len(given) if hasattr(given, "__len__") else 1)


def tools_of(trajectory: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a conversation, which may be given as JSON text; None where it has none.

    Raises:
        TemplateError: they are no list.
    """
    tools = trajectory.get("tools")
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except NOT_READ as cause:
            raise TemplateError.argument("tools", tools[:80], f"not JSON ({cause})") from cause
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise TemplateError.argument("tools", tools, "a list of function schemas")
    return list(tools)
