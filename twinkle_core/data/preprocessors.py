"""Rows of well-known data sets to conversations (L1): callables row -> Trajectory, or None to drop the row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.templates.messages import DETAIL, MARKS, THOUGHTS
from twinkle_core.types import Message, Trajectory

Row = Mapping[str, Any]


class SelfCognitionProcessor:
    """Rows ``query``, ``response`` (or ``instruction``, ``output``) with ``{{NAME}}`` and ``{{AUTHOR}}`` to be filled in.

    Args:
        model_name: what the model is to call itself; two names are (Chinese, English), chosen by the row's ``tag`` (``zh`` or
            ``en``), or without one by whether the row has Chinese characters.
        model_author: who made it; two likewise.
        system: a system message put before each conversation.
    """

    def __init__(self, model_name: str | Sequence[str], model_author: str | Sequence[str], system: str | None = None) -> None:
        self.names = _pair("model_name", model_name)
        self.authors = _pair("model_author", model_author)
        self.system = system

    def __call__(self, row: Row) -> Trajectory:
        query = _text(self, row, ("query", "instruction"))
        response = _text(self, row, ("response", "output"))
        english = not _is_chinese(row, query + response)
        name, author = self.names[english], self.authors[english]
        texts = [t.replace("{{NAME}}", name).replace("{{AUTHOR}}", author) for t in (query, response)]
        return _conversation(self.system, ("user", texts[0]), ("assistant", texts[1]))


class AlpacaProcessor:
    """Rows ``instruction``, ``input`` (may be absent or empty), ``output``, and optionally ``system``, ``history`` (pairs),
    ``tools``, images and videos.

    Args:
        system: a system message for rows that bring none.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system

    def __call__(self, row: Row) -> Trajectory:
        instruction, output = _text(self, row, ("instruction",)), _text(self, row, ("output",))
        given = row.get("input") or ""
        question = f"{instruction}\n{given}" if given else instruction
        history = history_of(self, row)
        made = _conversation(row.get("system") or self.system, *history, ("user", question), ("assistant", output))
        return _with_tools(made, row, self)


class ShareGPTProcessor:
    """Rows ``conversations`` (or ``conversation``, ``messages``) of ``{"from", "value"}`` or ``{"role", "content"}``.

    The roles human, user, gpt, assistant, bing, chatgpt, system, tool, observation, function_call are known; a
    ``function_call``'s text ``{"name", "arguments"}`` becomes a tool call. ``system`` and ``tools`` of the row are taken, and
    of a turn the marks ``weight``, ``loss`` and ``train``, with which templates leave it untrained. A row whose ``system`` is
    another than that of its conversation is refused.

    Args:
        system: a system message for rows that bring none.
    """

    ROLES = {
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
        **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
        **dict.fromkeys(("function_call", "tool_call"), "function_call"),
        "system": "system",
    }

    def __init__(self, system: str | None = None) -> None:
        self.system = system

    def __call__(self, row: Row) -> Trajectory:
        turns = _first(self, row, ("conversations", "conversation", "messages"))
        if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
            raise DataError.value(_name(self), "the conversation", turns, "a list of turns")
        messages = [self._message(index, turn) for index, turn in enumerate(turns)]
        return _with_tools({"messages": _with_system(self, messages, row)}, row, self)

    def _message(self, index: int, turn: Any) -> Message:
        if not isinstance(turn, Mapping):
            raise DataError.value(_name(self), f"turn {index}", turn, "a mapping with 'from' and 'value'")
        role = turn.get("from", turn.get("role"))
        content = turn.get("value", turn.get("content"))
        if not isinstance(role, str) or role not in self.ROLES:
            raise DataError.value(_name(self), f"the role of turn {index}", role, f"one of {', '.join(self.ROLES)}")
        if content is None and not any(turn.get(key) for key in ("tool_calls", *THOUGHTS)):
            raise DataError.keys(f"{_name(self)}, turn {index},", ("value",), turn, "('content' would do too.)")
        if self.ROLES[role] != "function_call":
            return _tidy({**{k: v for k, v in turn.items() if k in _KEYS}, "role": self.ROLES[role], "content": content})
        call = _json(self, f"turn {index}", content)
        calls = call if isinstance(call, list) and call else [call]
        if not all(isinstance(c, Mapping) and isinstance(c.get("name"), str) for c in calls):
            raise DataError.value(_name(self), f"turn {index}", content, "a call {'name', 'arguments'}, or a list of them")
        marks = {key: turn[key] for key in MARKS if turn.get(key) is not None}
        made = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls], **marks}
        return made  # type: ignore[return-value]


class MessagesProcessor:
    """Rows that hold ``messages`` in the chat format already. Keys that a typed file filled with None are taken out. ``system``
    of the row is taken; one that is another than that of the messages is refused.

    Args:
        system: a system message for rows that bring none.
        key: the row's key of the messages.
    """

    def __init__(self, system: str | None = None, key: str = "messages") -> None:
        self.system = system
        self.key = key

    def __call__(self, row: Row) -> Trajectory:
        messages = _first(self, row, (self.key,))
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise DataError.value(_name(self), repr(self.key), messages, "a list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not message.get("role"):
                raise DataError.value(_name(self), f"message {index}", message, "a mapping with 'role' and 'content'")
        return _with_tools({"messages": _with_system(self, [_tidy(m) for m in messages], row)}, row, self)


#: of a turn; ``function_call`` for templates to refuse it, as they do everywhere
_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "function_call", "name", *THOUGHTS, *MARKS, DETAIL))
_CARRIED = ("images", "videos", "audios", "user_data")


def _name(processor: object) -> str:
    return type(processor).__name__


def _first(processor: object, row: Row, keys: Sequence[str]) -> Any:
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    others = f"({' or '.join(map(repr, keys[1:]))} would do too.)" if keys[1:] else ""
    raise DataError.keys(_name(processor), keys[:1], row, others)


def _text(processor: object, row: Row, keys: Sequence[str]) -> str:
    value = _first(processor, row, keys)
    if not isinstance(value, str):
        raise DataError.value(_name(processor), repr(keys[0]), value, "text")
    return value


def _pair(name: str, value: str | Sequence[str]) -> tuple[str, str]:
    pair = (value, value) if isinstance(value, str) else tuple(value)
    if len(pair) != 2 or not all(isinstance(v, str) and v for v in pair):
        raise DataError.argument(name, value, "a name, or two: (Chinese, English)")
    return pair[0], pair[1]


def history_of(processor: object, row: Row) -> list[tuple[str, str]]:
    """The turns before a row's question, (role, text), of its ``history``: pairs of a question and its answer."""
    pairs = row.get("history") or ()
    for pair in pairs if isinstance(pairs, Sequence) else [pairs]:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or [type(turn) for turn in pair] != [str, str]:
            raise DataError.value(_name(processor), "a turn of 'history'", pair, "two texts, a question and its answer")
    return [(role, turn) for pair in pairs for role, turn in zip(("user", "assistant"), pair, strict=True)]


def _is_chinese(row: Row, text: str) -> bool:
    tag = str(row.get("tag") or "").lower()
    return tag == "zh" if tag in ("zh", "en") else any("\u4e00" <= c <= "\u9fff" for c in text)


def _conversation(system: str | None, *turns: tuple[str, str]) -> Trajectory:
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return {"messages": before + [{"role": role, "content": content} for role, content in turns]}


def _with_system(processor: ShareGPTProcessor | MessagesProcessor, messages: list[Message], row: Row) -> list[Message]:
    """The conversation with its row's system message before it, else with the processor's."""
    given = row.get("system")
    if messages[0]["role"] != "system":
        told = given or processor.system
        return [{"role": "system", "content": told}, *messages] if told else messages
    own = messages[0].get("content")
    if given and str(given).strip() != str(own).strip():
        ways = f"the same as the conversation's own system message, which is {own!r:.80} (or remove one of the two)"
        raise DataError.value(_name(processor), "'system'", given, ways)
    return messages


def _tidy(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in message.items() if value is not None or key == "content"}  # type: ignore[return-value]


def _json(processor: object, where: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as cause:
        raise DataError.value(_name(processor), where, value, f"JSON ({cause})") from cause


def _with_tools(trajectory: Trajectory, row: Row, processor: object) -> Trajectory:
    tools = _json(processor, "'tools'", row.get("tools") or None)
    if tools:
        trajectory["tools"] = tools
    for key in _CARRIED:
        if row.get(key) is not None:
            trajectory[key] = row[key]  # type: ignore[literal-required]
    return trajectory
