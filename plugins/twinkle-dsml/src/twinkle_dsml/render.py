"""A conversation to text, with the characters that the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_core.errors import TemplateError
from twinkle_core.templates.labels import Span
from twinkle_dsml import messages as prepare
from twinkle_dsml import render_v32
from twinkle_dsml.markup import additions, write_calls
from twinkle_dsml.messages import Result, Turn
from twinkle_dsml.pieces import Piece
from twinkle_dsml.releases import RELEASES, Release
from twinkle_dsml.tokens import ASSISTANT, BOS, EOS, REMINDER, THINK, THINK_END, USER

Mode = Literal["thinking", "chat"]


@dataclass(frozen=True, slots=True)
class Rendering:
    """``text``; where in it the assistant's own words are: ``spans``, in order, by index of the message; and the assistant's
    messages by that index, as they were understood."""

    text: str
    spans: list[Span]
    turns: Mapping[int, Turn]


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: list[Any] | None = None,
    release: Release = RELEASES["v4-0731"],
    mode: Mode = "thinking",
    drop_thinking: bool = True,
    reasoning_effort: str | int | None = None,
    context: Sequence[Mapping[str, Any]] = (),
    add_bos: bool = True,
    default_system: str | None = None,
) -> Rendering:
    """The text of a conversation as the release's own encoder writes it.

    A conversation that waits for an answer ends with the assistant's header. Spans are what a message of the assistant writes
    itself: its thought and the ``</think>`` that closes it, its text, its tool calls and the end token; not the header, whose
    ``<think>`` or ``</think>`` is part of the prompt, nor the ``</think>`` of a thought that there is none of. A message whose
    thought is left out has no span in thinking mode: it would be trained as what it is not, an answer without a thought.

    Args:
        messages: see the page "DeepSeek V4" for the fields. Not changed.
        tools: those that come beside the messages; they go to the first system message.
        release: see ``releases.RELEASES``.
        mode: ``chat``: no thoughts.
        drop_thinking: leave out thoughts before the last question; tools anywhere switch it off.
        reasoning_effort: as the release knows it.
        context: messages that were encoded before. They are not written, and nor is the beginning token.
        add_bos: False: no beginning token.
        default_system: a system message for conversations without one at their beginning.

    Raises:
        TemplateError: names the message and what is wrong with it.
    """
    if mode not in ("thinking", "chat"):
        raise TemplateError.argument("mode", mode, "'thinking' or 'chat'")
    before = prepare.turns_of(context, release, emitted=False)
    turns = [*before, *prepare.turns_of(messages, release)]
    if default_system is not None and not before and (not turns or turns[0].role != "system"):
        turns.insert(0, Turn("system", -1, default_system))
    turns = prepare.place_tools(turns, tools)
    effort = release.effort(reasoning_effort) if mode == "thinking" else ""
    pieces = LAYOUTS[release.layout](turns, release, mode == "thinking", drop_thinking, effort)
    if add_bos and not before:
        pieces.insert(0, Piece(BOS))
    return Rendering(*_assemble(pieces), {turn.index: turn for turn in turns if turn.emitted and turn.role == "assistant"})


def _assemble(pieces: list[Piece]) -> tuple[str, list[Span]]:
    spans: list[Span] = []
    texts: list[str] = []
    place = 0
    for piece in pieces:
        if not piece.text:
            continue
        texts.append(piece.text)
        end = place + len(piece.text)
        if piece.turn is not None:
            spans.append(Span(piece.turn, place, end))
        place = end
    return "".join(texts), spans


# ---------------------------------------------------------------------------------------------------- V4 and V4.1


def _v4(turns: list[Turn], release: Release, thinking: bool, drop_thinking: bool, effort: str) -> list[Piece]:
    tooled = any(turn.tools for turn in turns)
    context = prepare.merge(turn for turn in turns if not turn.emitted)
    turns = [*context, *prepare.merge(turn for turn in turns if turn.emitted)]
    prepare.sort_results(turns)
    drop = thinking and drop_thinking and not tooled
    asked = _last_question(turns)
    if drop:
        turns = [turn for k, turn in enumerate(turns) if k >= asked or turn.role != "developer"]
        asked = _last_question(turns)
    pieces: list[Piece] = []
    for k, turn in enumerate(turns):
        if not turn.emitted:
            continue
        if k == 0 and effort:
            pieces.append(Piece(release.system_mark + effort))
        shown = thinking and (not drop or k > asked) and not (k and turns[k - 1].task)
        if k == 0 and turn.role == "assistant" and "assistant" in release.answered:
            pieces.append(Piece(ASSISTANT + (THINK if shown else THINK_END)))
        pieces += _WRITERS[turn.role](turn, release, _Place(k == 0 and bool(effort), thinking, shown))
        following = turns[k + 1].role if k + 1 < len(turns) else None
        if following is None or following in release.answers:
            pieces.append(Piece(_transition(turn, release, following, thinking, thinking and (not drop or k >= asked))))
    return pieces


@dataclass(frozen=True, slots=True)
class _Place:
    """Whether the mark of a system message stands already; whether thoughts are written at all; whether this turn's is."""

    marked: bool
    thinking: bool
    shown: bool


def _last_question(turns: Sequence[Turn]) -> int:
    return max((k for k, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _transition(turn: Turn, release: Release, following: str | None, thinking: bool, thinks: bool) -> str:
    """What stands between a message and the assistant's: the token of a task, the header, or nothing."""
    if turn.task is not None and turn.task != "action":
        return release.tasks[turn.task]
    if turn.task is not None:
        return ASSISTANT + (THINK if thinking else THINK_END) + release.tasks[turn.task]
    if turn.role in release.answered and not (turn.role == "assistant" and following is None):
        return ASSISTANT + (THINK if thinks else THINK_END)
    return ""


def _system(turn: Turn, release: Release, place: _Place) -> list[Piece]:
    return [Piece(("" if place.marked else release.system_mark) + turn.text + additions(turn, release))]


def _developer(turn: Turn, release: Release, place: _Place) -> list[Piece]:
    return [Piece(USER + turn.text + additions(turn, release))]


def _user(turn: Turn, release: Release, place: _Place) -> list[Piece]:
    texts = (f"<tool_result>{b.text}</tool_result>" if isinstance(b, Result) else b for b in turn.blocks)
    return [Piece(USER + "\n\n".join(texts))]


def _reminder(turn: Turn, release: Release, place: _Place) -> list[Piece]:
    return [Piece(REMINDER + turn.text)]


def _assistant(turn: Turn, release: Release, place: _Place) -> list[Piece]:
    words = turn.text + write_calls(turn, release.tags) + (EOS if turn.ends else "")
    if place.shown and turn.thought:
        return [Piece(turn.thought + THINK_END + words, turn.index)]
    trained = None if place.thinking and turn.thought else turn.index
    return [Piece(THINK_END if place.shown else ""), Piece(words, trained)]


_WRITERS: Mapping[str, Callable[[Turn, Release, _Place], list[Piece]]] = {
    "system": _system,
    "developer": _developer,
    "user": _user,
    "latest_reminder": _reminder,
    "assistant": _assistant,
}

#: layout -> (turns, release, thinking, drop_thinking, effort's text) -> pieces
LAYOUTS: Mapping[str, Callable[[list[Turn], Release, bool, bool, str], list[Piece]]] = {
    "v4": _v4,
    "v3.2": render_v32.pieces,
}
