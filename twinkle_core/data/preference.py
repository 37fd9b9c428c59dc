"""Rows of data sets with a preferred and a refused answer, to pairs of conversations (L1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.data.preprocessors import ShareGPTProcessor, history_of
from twinkle_core.errors import DataError
from twinkle_core.types import Trajectory

Row = Mapping[str, Any]
#: keys of the better and the worse answer; a data set has one of these pairs
ANSWERS = (
    ("chosen", "rejected"),
    ("response", "rejected_response"),
    ("messages", "rejected_messages"),
    ("messages", "rejected_response"),
)
#: keys of what both answer
PROMPTS = ("prompt", "messages", "conversations", "question", "query", "instruction")
CARRIED = ("tools", "images", "videos", "audios")


class PreferenceProcessor:
    """Rows with two answers to ``{"positive": conversation, "negative": conversation}``: for DPO, SimPO, ORPO, CPO.

    The answers are ``chosen`` and ``rejected`` (or ``response`` and ``rejected_response``; ``messages`` and
    ``rejected_messages`` or ``rejected_response``). An answer is a text, a message, or a list of messages; such a list may hold
    the whole conversation. What they answer is ``prompt``, ``question``, ``query`` or ``instruction`` (with ``input``), a text
    or a list of messages, or ``messages`` or ``conversations``. Messages may be ``{"role", "content"}`` or ``{"from",
    "value"}``. ``history`` (pairs of a question and its answer) comes before a text. ``system``, ``tools`` and media of the row
    go to both. A row whose answers are alike is dropped.

    Of a prompt beside whole conversations nothing is lost: what they lack of it (a system message, earlier turns) is put before
    them, and one that asks something else is refused.

    Encode with ``train_on="last"``, so that the answers alone have labels.

    Args:
        system: a system message for rows that bring none.
    """

    def __init__(self, system: str | None = None) -> None:
        self._conversation = ShareGPTProcessor(system)

    def __call__(self, row: Row) -> dict[str, Trajectory] | None:
        """One pair."""
        keys = self._answers(row)
        carried = {key: row[key] for key in (*CARRIED, "system") if row.get(key) is not None}
        pair = [self._conversation({**carried, "conversations": self._turns(row, key, keys)}) for key in keys]
        prompts = [_prompt(self, one["messages"]) for one in pair]
        if prompts[0] != prompts[1]:
            raise DataError.value(_name(self), "what the refused answer follows", prompts[1], "what the preferred one follows")
        return None if pair[0] == pair[1] else {"positive": pair[0], "negative": pair[1]}

    def _answers(self, row: Row) -> tuple[str, str]:
        for better, worse in ANSWERS:
            if row.get(better) is not None and row.get(worse) is not None:
                return better, worse
        raise DataError.keys(_name(self), ANSWERS[0], row, f"({' or '.join(map(repr, ANSWERS[1]))} would do too.)")

    def _turns(self, row: Row, key: str, answers: Sequence[str]) -> list[Any]:
        """The whole conversation of one answer."""
        answer = row[key]
        if isinstance(answer, Sequence) and not isinstance(answer, str):
            turns = list(answer)
            if turns and isinstance(turns[0], Mapping) and not _is_assistant(turns[0]):
                return self._with_prompt(row, turns, key, answers)
        elif isinstance(answer, Mapping):
            turns = [answer]
        elif isinstance(answer, str):
            turns = [{"role": "assistant", "content": answer}]
        else:
            raise DataError.value(_name(self), "an answer", answer, "a text, a message or a list of messages")
        prompt = next((key for key in PROMPTS if row.get(key) is not None), None)
        if prompt is None:
            others = f"({' or '.join(map(repr, PROMPTS[1:]))} would do too.)"
            raise DataError.keys(_name(self), PROMPTS[:1], row, others)
        return [*self._asked(row, prompt), *turns]

    def _asked(self, row: Row, key: str) -> list[Any]:
        """The turns that a prompt says, with those before it."""
        asked, more = row[key], row.get("input")
        history = [{"role": role, "content": text} for role, text in history_of(self, row)]
        if isinstance(asked, str):
            text = f"{asked}\n{more}" if more and key == "instruction" else asked
            return [*history, {"role": "user", "content": text}]
        if not isinstance(asked, Sequence) or not asked:
            raise DataError.value(_name(self), repr(key), asked, "a text or a list of messages")
        if history:
            raise DataError.value(_name(self), "'history'", row["history"], f"empty beside a conversation in {key!r}")
        turns = list(asked)
        while turns and isinstance(turns[-1], Mapping) and _is_assistant(turns[-1]):
            turns.pop()  # the preferred answer, which some data sets put here as well
        return turns

    def _with_prompt(self, row: Row, turns: list[Any], key: str, answers: Sequence[str]) -> list[Any]:
        """A whole conversation, with what the row's prompt and history say before it."""
        prompt = next((name for name in PROMPTS if name not in answers and row.get(name) is not None), None)
        history = [{"role": role, "content": text} for role, text in history_of(self, row)]
        asked = self._asked(row, prompt) if prompt is not None else history
        said, there = [_said(turn) for turn in asked], [_said(turn) for turn in turns]
        if prompt is not None and isinstance(row[prompt], str) and not history and said[0] in there:
            return turns  # a question of the conversation, which need not be its first
        own = 0 if said and said[0][0] == "system" else next((k for k, (role, _) in enumerate(there) if role != "system"), 0)
        apart = prompt is None or all(role == "system" for role, _ in said)  # it may be all that the conversation lacks
        for before in range(len(said) + 1):
            rest = said[before:]
            if there[own : own + len(rest)] == rest and (rest or apart):
                return [*turns[:own], *asked[:before], *turns[own:]]
        way = f"what the conversation in {key!r} begins with. Remove the one that is wrong"
        raise DataError.value(_name(self), repr(prompt), row[str(prompt)], way)


def _name(processor: object) -> str:
    return type(processor).__name__


def _is_assistant(turn: Row) -> bool:
    return ShareGPTProcessor.ROLES.get(turn.get("from", turn.get("role"))) in ("assistant", "function_call")


def _said(turn: Any) -> tuple[Any, Any]:
    """The role and the words of a turn, in whichever form it is."""
    if not isinstance(turn, Mapping):
        return None, turn
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    words = content.strip() if isinstance(content, str) else content
    return (ShareGPTProcessor.ROLES.get(role, role) if isinstance(role, str) else role), words


def _prompt(processor: object, messages: Sequence[Row]) -> list[Any]:
    """The messages up to the last that is not the assistant's. After it, both conversations answer."""
    last = max((k for k, m in enumerate(messages) if m["role"] in ("user", "system")), default=-1)
    if last == len(messages) - 1:
        raise DataError.value(_name(processor), "the conversation", list(messages), "one that ends with an answer")
    return list(messages[: last + 1])
