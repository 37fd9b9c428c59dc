"""The layout of V3.2: tool results have a block of their own, and every question is followed by the assistant's header."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle_core.errors import TemplateError
from twinkle_dsml.markup import additions, write_calls
from twinkle_dsml.messages import Result, Turn
from twinkle_dsml.pieces import Piece
from twinkle_dsml.releases import Release
from twinkle_dsml.tokens import ASSISTANT, EOS, THINK, THINK_END, USER

_QUESTIONS = ("user", "developer")


def pieces(turns: list[Turn], release: Release, thinking: bool, drop_thinking: bool, effort: str) -> list[Piece]:
    """Thoughts are shown after the last question only, whatever ``drop_thinking`` is; it decides on old developer messages.

    Raises:
        TemplateError: tool results without calls, fewer or more of them than calls; in thinking mode an answer that has neither
            a thought nor calls.
    """
    asked = _last_question(turns)
    if thinking and drop_thinking:
        turns = [turn for k, turn in enumerate(turns) if k >= asked or turn.role != "developer"]
        asked = _last_question(turns)
    made: list[Piece] = []
    for k, turn in enumerate(turns):
        written = _write(turns, k, release, thinking, asked)
        made += written if turn.emitted else []
    return made


def _last_question(turns: Sequence[Turn]) -> int:
    return max((k for k, turn in enumerate(turns) if turn.role in _QUESTIONS), default=-1)


def _write(turns: list[Turn], k: int, release: Release, thinking: bool, asked: int) -> list[Piece]:
    turn = turns[k]
    if turn.role == "system":
        return [Piece(turn.text + additions(turn, release))]
    if turn.role == "tool":
        return [Piece(_result(turns, k, THINK if thinking and k >= asked else THINK_END))]
    if turn.role == "assistant":
        return _assistant(turn, release, thinking, thinking and k > asked)
    if turn.role == "developer":
        words = f"{additions(turn, release)}\n\n# The user's message is: {turn.text}"
    else:
        words = "\n\n".join(block.text if isinstance(block, Result) else block for block in turn.blocks)
    return [Piece(USER + words + ASSISTANT + (THINK if thinking and k == asked else THINK_END))]


def _assistant(turn: Turn, release: Release, thinking: bool, shown: bool) -> list[Piece]:
    words = turn.text + write_calls(turn, release.tags) + (EOS if turn.ends else "")
    if shown and not turn.thought and not turn.calls:
        way = "V3.2 has no answer without a thought in thinking mode; give 'reasoning_content', or set enable_thinking=False"
        raise TemplateError.at(turn.index, "assistant", way)
    if shown and turn.thought:
        return [Piece(turn.thought + THINK_END + words, turn.index)]
    trained = None if thinking and turn.thought else turn.index
    return [Piece(THINK_END if shown else ""), Piece(words, trained)]


def _result(turns: list[Turn], k: int, think: str) -> str:
    """One result: the first of a call's opens the block, the last closes it and is followed by ``think``."""
    turn = turns[k]
    caller = next((j for j in range(k - 1, -1, -1) if turns[j].role != "tool"), None)
    calls = turns[caller].calls if caller is not None else []
    number = k - (caller if caller is not None else k)
    if number > len(calls):
        raise TemplateError.at(turn.index, "tool", f"it is result {number} of {len(calls)} tool calls")
    text = "".join(block.text for block in turn.blocks if isinstance(block, Result))
    last_of_run = k + 1 == len(turns) or turns[k + 1].role != "tool"
    if last_of_run and number < len(calls):
        raise TemplateError.at(turn.index, "tool", f"only {number} of {len(calls)} tool calls have a result")
    opening = "\n\n<function_results>" if number == 1 else ""
    closing = f"\n</function_results>\n\n{think}" if number == len(calls) else ""
    return f"{opening}\n<result>{text}</result>{closing}"
