"""What chat templates do differently from one another, found by rendering small conversations (L1).

No table of families: a new model's template is asked the same questions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from twinkle_core.errors import TemplateError
from twinkle_core.templates.marks import Marker
from twinkle_core.templates.messages import SHIELD, THOUGHTS, Style, Turn
from twinkle_core.templates.parse import Frame, Manner, reads_back

#: (messages, tools, add_generation_prompt) -> text
Render = Callable[[Sequence[Turn], "list[Any] | None", bool], str]

#: Some templates ask for an id of nine letters and digits.
_ID = "call00001"


def common(texts: Sequence[str]) -> str:
    """What both texts begin with."""
    size = next((k for k, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return texts[0][:size]


def system_place(render: Render, marker: Marker) -> tuple[Literal["first", "last"], str] | None:
    """Where the system message goes, if the template shows it in prompts only and drops or refuses it beside an answer.

    None: it shows it (or never does, and then says so where there is one).
    """
    told, asked, said, more = (marker.mark(k) for k in range(4))
    talk: list[Turn] = [_turn("system", told), _turn("user", asked), _turn("assistant", said)]
    if told in (_attempt(render, talk, False) or ""):
        return None
    literals, order = marker.split(_attempt(render, [*talk, _turn("user", more)], True) or "")
    for where, number in (("last", 3), ("first", 1)):
        if [0, number] in [order[k : k + 2] for k in range(len(order))]:
            return ("last" if where == "last" else "first"), literals[order.index(0) + 1]
    return None


def cuts_thoughts(render: Render, marker: Marker) -> bool:
    """Whether it cuts a thought even off the answer being given, and would show it after its prompt if it did not know it."""
    asked, thought, said = (marker.mark(k) for k in range(3))
    question = [_turn("user", asked)]
    known = _attempt(render, [*question, _turn("assistant", f"<think>\n{thought}\n</think>\n\n{said}")], False)
    hidden = _attempt(render, [*question, _turn("assistant", f"<think>\n{thought}\n{SHIELD}\n\n{said}")], False)
    prompt = _attempt(render, question, True)
    if known is None or hidden is None or prompt is None or thought in known:
        return False
    return hidden.startswith(prompt + thought)


def thought_key(render: Render, marker: Marker, source: str) -> str | None:
    """The key of ``THOUGHTS`` under which it takes a thought and shows it; None if it knows none."""
    asked, thought, said = (marker.mark(k) for k in range(3))
    for key in THOUGHTS:
        answer, call = {**_turn("assistant", said), key: thought}, {**_called("f", {}, ""), key: thought}
        if any(thought in (_attempt(render, [_turn("user", asked), told], False) or "") for told in (answer, call)):
            return key
    return THOUGHTS[0] if THOUGHTS[0] in source else None


def frame(render: Render, marker: Marker, key: str | None, header: str, tokens: re.Pattern[str], ends: Sequence[str]) -> Frame:
    """The tokens that it writes around a thought and around an answer; of ``<think>`` it says nothing."""
    asked, thought, said = (marker.mark(k) for k in range(3))
    prompt = _attempt(render, [_turn("user", asked)], True) or asked

    def around(told: Turn, *numbers: int) -> list[str] | None:
        """What stands before, between and after these marks of a turn, up to the token that ends it."""
        text = _attempt(render, [_turn("user", asked), told], False) or ""
        literals, order = marker.split(text.removeprefix(prompt))
        if not text.startswith(prompt) or order != list(numbers):
            return None
        last = min((at for at in (literals[-1].find(end) for end in ends if end) if at >= 0), default=len(literals[-1]))
        return [*literals[:-1], literals[-1][:last]]

    def told(text: str) -> str:
        return text.strip() if tokens.search(text) and "</think>" not in text else ""

    opening, closing = map(told, around(_turn("assistant", said), 2) or ("", ""))
    for answer in (_turn("assistant", said), _called(said, {}, ""), _called(said, "{}", "")) if key else ():
        found = around({**answer, str(key): thought}, 1, 2)
        end = tokens.search(told(found[1])) if found else None
        if found is None or end is None:
            continue
        if "tool_calls" not in answer:  # an answer without a thought may have an empty one
            opening, closing = told(found[1].partition(end.group())[2].removeprefix(header)), told(found[2])
        return Frame(found[0].strip(), end.group(), header, opening, closing)
    return Frame("", "", header, opening, closing)


def asks(render: Render, marker: Marker, opening: str, closing: str) -> bool:
    """Whether a user's text between these tags of a result is a question: one before which thoughts are left out."""
    question, thought, said, text = (marker.mark(k) for k in range(4))
    inline = _turn("assistant", f"<think>\n{thought}\n</think>\n\n{said}")

    def shows(told: Turn, then: str) -> bool:
        talk = [_turn("user", question), told, _turn("user", then), _turn("assistant", marker.mark(4))]
        return thought in (_attempt(render, talk, False) or "")

    apart = {**_turn("assistant", said), **dict.fromkeys(THOUGHTS, thought)}
    return not any(shows(told, f"{opening}{text}{closing}") and not shows(told, text) for told in (apart, inline))


def call_style(
    render: Render, marker: Marker, boundaries: Callable[[str], Iterable[int]], manner: Manner
) -> tuple[str | None, bool, str | None]:
    """How it takes a call without words: its content, whether arguments are JSON text; and the form in which it writes one."""
    asked, name, value = (marker.mark(k) for k in range(3))
    question = [_turn("user", asked)]
    prompt = _attempt(render, question, True) or ""
    found: tuple[str | None, bool, str | None] | None = None
    for content in ("", None):
        for as_text in (False, True):
            arguments = {"key": value}
            text = _attempt(render, [*question, _called(name, json.dumps(arguments) if as_text else arguments, content)], False)
            if text is None or text.count(name) != 1 or value not in text:
                continue
            shown = text[_same(prompt, text, boundaries) :]
            form = next(iter(reads_back(shown, manner, name, arguments)), None)
            if form is not None:
                return content, as_text, form
            found = found or (content, as_text, None)
    return found or ("", False, None)


def call_stop(render: Render, marker: Marker, style: Style) -> str:
    """What stands between a call and a tool's result; '' if that can't be rendered."""
    name, result = marker.mark(1), marker.mark(2)
    call = _called(name, "{}" if style.text_arguments else {}, style.call_content)
    talk = [_turn("user", marker.mark(0)), call, {**_turn("tool", result), "tool_call_id": _ID}]
    literals, order = marker.split(_attempt(render, talk, False) or "")
    return literals[2] if order == [0, 1, 2] else ""


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _called(name: str, arguments: Any, content: str | None) -> Turn:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": _ID, "type": "function", "function": function}]}


def _attempt(render: Render, messages: Sequence[Turn], prompt: bool) -> str | None:
    try:
        return render(messages, None, prompt)
    except TemplateError:
        return None


def _same(prompt: str, text: str, boundaries: Callable[[str], Iterable[int]]) -> int:
    """How much of the prompt ``text`` begins with, in whole tokens."""
    same = len(common([prompt, text]))
    return same if same == len(prompt) else max((end for end in boundaries(prompt) if end <= same), default=0)
