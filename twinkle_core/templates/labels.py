"""Which characters of a rendered conversation the assistant wrote (L1).

Templates rewrite: they drop old thoughts, trim, move the system message, quote tool results. So the rendering of a shorter
conversation need not be a prefix of the longer one's, and looking for a text in the rendering may find it in the wrong place.
Instead the conversation is rendered a second time with a mark in place of each text. What stands between the marks is the
template's own, and there the assistant's turns have clear bounds:

* a turn begins where the generation prompt of that place ends (rendered from the messages before it), so a header, and a
  ``<think>`` that is part of the prompt, are never trained; tags that the model has to write itself are;
* it ends with the end token, which is what the template writes after an assistant's text whatever follows. In a family without
  an end token of its own the next role's token ends the turn, and is trained where the model has to write it: a user's or a
  tool's, with which it stops. Before another message of the assistant or the system the template's token is not one
  with which it stops, so such a turn is trained without an end.

Then the marks are replaced by the texts one after the other, and the result must be the real rendering, character by
character. Whatever led to the bounds, they must follow one another, and no other role's header and no end token but the last
may lie within. What can't be reproduced so, or bounded so, is refused with the number of the turn. Nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import TemplateError
from twinkle_core.log import get_logger
from twinkle_core.templates.manners import Render, asks, common
from twinkle_core.templates.marks import Marker, Part, arguments_of, with_other_arguments
from twinkle_core.templates.messages import Turn, last_user

#: A thought that is none.
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")
#: A user's text that is a tool's result.
_RESULT = re.compile(r"(\s*<tool_response>).*(</tool_response>\s*)", re.DOTALL)

_CACHE_SIZE = 2048
#: Roles that no model hands over to by writing their token.
_NEVER_ASKED = frozenset({"assistant", "system", "developer"})


@dataclass(frozen=True, slots=True)
class Span:
    """What the assistant wrote in one turn: characters ``start`` to ``end`` of the rendering."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Bound:
    """A turn in the marked rendering: from ``head`` characters into the literal before mark ``first`` (counted in the
    rendering) to ``tail`` characters into the literal after mark ``last``."""

    turn: int
    first: int
    head: int
    last: int
    tail: int


@dataclass(frozen=True, slots=True)
class _Skeleton:
    literals: list[str]
    order: list[int]
    bounds: list[_Bound]


class Locator:
    """Finds the assistant's spans in renderings of one chat template.

    Args:
        render: the template.
        boundaries: text -> ends of its tokens, to keep a bound between tokens.
        special: the tokenizer's special tokens.
        added: these, and tokens that were added without being special.
        eos: the tokenizer's end token, if any.
    """

    def __init__(
        self,
        render: Render,
        boundaries: Callable[[str], Iterable[int]],
        special: Iterable[str],
        added: Iterable[str],
        eos: str | None,
        nonce: str = "qzTWNKzq",
    ) -> None:
        self._render = render
        self._boundaries = boundaries
        self.marker = Marker(nonce)
        self._special, self.added = _any_of(special), _any_of(added)
        self._skeletons: dict[str, _Skeleton] = {}
        self._prompts: dict[str, str] = {}
        self.surplus = self._last = ""
        self._complete: dict[str, bool] = {}
        self._asks: dict[str, bool] = {}
        self.end, self.stop, self.header, self.asker = self._probe(self.added, eos)

    def _probe(self, added: re.Pattern[str], eos: str | None) -> tuple[str, str, str, str]:
        """The end token of an assistant's turn ('' if there is none), the next role's token that stands for it then, the
        generation prompt after a user's turn, and what a user's turn begins with. Sets ``surplus``: the generation prompt that
        a template writes after the last answer too, asked for or not; and ``_last``: the end token that only the last one has.
        """
        mark = self.marker.mark
        talk: list[Turn] = [{"role": "user", "content": mark(0)}, {"role": "assistant", "content": mark(1)}]
        longer = [*talk, {"role": "user", "content": mark(2)}, {"role": "assistant", "content": mark(3)}]
        after = [self._after(self._render(t, None, False), 1) for t in (talk, longer)]
        closing = common(after)
        for match in (m for text in after for m in added.finditer(text)):
            if match.start() < len(closing) < match.end():  # two tokens that begin alike
                closing = closing[: match.start()]
        token = added.search(closing)
        if token is not None:
            end = token.group()
        elif eos and eos in closing:
            end = eos
        else:
            end = closing.rstrip()
        asked, told = (self._after(self._render(talk[:1], None, flag), 0) for flag in (True, False))
        ending = token.group() if token else ""
        if token is not None and eos and token.group() != eos and closing.startswith(eos, token.end()):
            end, ending = eos, f"{ending}{eos}"  # what closes the text is not what the model stops with
        over = after[0].removeprefix(ending)
        if asked == told and over.strip() and asked.endswith(over):
            self.surplus = over
            after[0] = after[0].removesuffix(over)
            end = end if token else ""
        if not end and eos and after[0].startswith(eos):
            self._last = eos
        role = None if end or self._special.search(after[0]) else self._special.search(after[1])
        if not end and not role and not self._special.search(after[0]):
            get_logger("templates").warning(
                "the chat template writes no special token after an answer, so the model can't learn where to stop"
            )
        asker = (after[1].partition(end)[2] if end else after[1]).strip()
        return end, role.group() if role else "", self.surplus or asked[len(common([asked, told])) :], asker

    def role_token(self, text: str) -> str:
        """The first special token in what stands between two turns, '' if there is none."""
        token = self._special.search(text)
        return token.group() if token else ""

    def _after(self, text: str, number: int) -> str:
        """What stands after a mark, up to the next one."""
        literals, order = self.marker.split(text)
        if number not in order:
            raise TemplateError.rendering("it leaves out a plain message of a user or an assistant")
        return literals[order.index(number) + 1]

    # ------------------------------------------------------------------------------------------------ one conversation

    def check(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> None:
        """For templates that say themselves what is trained: whether they show all that there is. ``spans`` does it, too.

        Raises:
            TemplateError: a message, thought or call that the template leaves out, or tools of which it shows nothing.
        """
        marker = self._marker_for(text)
        marked, parts = marker.replace(messages)
        key = json.dumps([marked, tools], default=repr)
        if key not in self._complete:
            shown = self._render(marked, tools, False)
            self._check_complete(messages, parts, marker.split(shown)[1])
            self.check_tools(tools, shown, marked)
            _remember(self._complete, key, True)

    def check_prompt(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> None:
        """Raise TemplateError where ``text``, the prompt after these messages, leaves out a message, a call or the tools.
        It may leave out thoughts."""
        marker = self._marker_for(text)
        marked, parts = marker.replace(messages)
        key = json.dumps([marked, tools, "prompt"], default=repr)
        if key not in self._complete:
            shown = self._render(marked, tools, True)
            self._check_present(messages, parts, set(marker.split(shown)[1]), len(messages))
            self.check_tools(tools, shown, marked, prompt=True)
            _remember(self._complete, key, True)

    def check_tools(self, tools: list[Any] | None, text: str, messages: Sequence[Turn], prompt: bool = False) -> None:
        """Raise TemplateError where ``text``, the rendering of the messages with these tools, shows nothing of them."""
        if tools and text == self._render(messages, None, prompt):
            raise TemplateError.tools(len(tools))

    def last_question(self, messages: Sequence[Turn]) -> int:
        """The index of the last user's message that is a question to the template, -1 if there is none.

        Of a user's ``<tool_response>`` it is found by rendering: where it does not end the thoughts of a tool loop, it is none.
        """
        while messages:
            at = last_user(messages)
            content = messages[at]["content"] if at >= 0 else None
            result = _RESULT.fullmatch(content) if isinstance(content, str) else None
            if result is None:
                return at
            key = json.dumps(result.groups())
            if key not in self._asks:
                _remember(self._asks, key, asks(self._render, self.marker, *result.groups()))
            if self._asks[key]:
                return at
            messages = messages[:at]
        return -1

    def spans(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> list[Span]:
        """The assistant's spans in ``text``, the rendering of ``messages``, in order.

        Raises:
            TemplateError: a turn whose place can't be told for certain, or a message that the template leaves out.
        """
        marker = self._marker_for(text)
        marked, parts = marker.replace(messages)
        key = json.dumps([marked, tools], default=repr)
        skeleton = self._skeletons.get(key)
        found = self._fit(skeleton, parts, text) if skeleton is not None else None
        if not isinstance(found, list):  # none yet, or made when the template wrote another date
            skeleton = self._analyse(marker, messages, marked, parts, tools)
            found = self._fit(skeleton, parts, text)
            if not isinstance(found, list):
                turn = min(found, len(messages) - 1)
                raise TemplateError.at(
                    turn,
                    messages[turn]["role"],
                    "the chat template changes its text, or what it writes around it, in a way that can't be followed. "
                    "Remove the message, or give a template with {% generation %} tags as chat_template=…",
                )
            _remember(self._skeletons, key, skeleton)
        return found

    def _marker_for(self, text: str) -> Marker:
        marker = self.marker
        while marker.nonce in text:  # a text about this very file
            marker = Marker(f"q{hashlib.sha256((marker.nonce + text).encode('utf-8', 'replace')).hexdigest()[:16]}z")
        return marker

    def _fit(self, skeleton: _Skeleton, parts: Sequence[Part], text: str) -> list[Span] | int:
        """Put the texts into the marked rendering. Gives the spans, or the turn at which the result is not the real one."""
        literals, order = skeleton.literals, skeleton.order
        if not text.startswith(literals[0]):
            return parts[order[0]].turn if order else 0
        starts, at = [0], len(literals[0])
        for place, (number, literal) in enumerate(zip(order, literals[1:], strict=True), 1):
            part, begun = parts[number], False
            for form in part.forms():
                if text.startswith(form, at):
                    if text.startswith(literal, at + len(form)):
                        break
                    begun = True
            else:  # where the text itself is right, what the template writes for the next one is not
                return parts[order[place]].turn if begun and place < len(order) else part.turn
            starts.append(at + len(form))
            at = starts[-1] + len(literal)
        if at != len(text):
            return parts[order[-1]].turn if order else 0
        return [Span(b.turn, starts[b.first] + b.head, starts[b.last + 1] + b.tail) for b in skeleton.bounds]

    # ------------------------------------------------------------------------------------------------ the marked rendering

    def _analyse(
        self, marker: Marker, messages: Sequence[Turn], marked: Sequence[Turn], parts: Sequence[Part], tools: list[Any] | None
    ) -> _Skeleton:
        shown = self._render(marked, tools, False)
        literals, order = marker.split(shown)
        self._check_complete(messages, parts, order)
        self.check_tools(tools, shown, marked)
        bounds: list[_Bound] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            places = [k for k, number in enumerate(order) if parts[number].turn == turn]
            first, last = places[0], places[-1]
            if places != list(range(first, last + 1)):
                raise TemplateError.at(turn, "assistant", "the chat template mixes its text with another message's")
            head = self._head(marker, turn, marked, tools, literals[first], order[first - 1] if first else None)
            if turn < self.last_question(messages):  # its thought was left out: an empty one is not what the model wrote
                empty = _EMPTY_THOUGHT.match(literals[first], head)
                head = empty.end() if empty else head
            follower = messages[turn + 1]["role"] if turn + 1 < len(messages) else ""
            tail = self._tail(turn, message, literals[last + 1], follower, final=last + 1 == len(order))
            if not self.end and "tool_calls" in message:
                self._check_arguments(marker, turn, last, literals[last + 1], tail, marked, tools)
            bound = _Bound(turn, first, head, last, tail)
            self._check_bound(bound, bounds[-1] if bounds else None, literals)
            bounds.append(bound)
        return _Skeleton(literals, order, bounds)

    def _check_arguments(
        self,
        marker: Marker,
        turn: int,
        last: int,
        literal: str,
        tail: int,
        marked: Sequence[Turn],
        tools: list[Any] | None,
    ) -> None:
        """Raise TemplateError where a turn would end before its last call does: what other arguments change lies after it."""
        changed = list(marked)
        changed[turn] = with_other_arguments(marked[turn])
        try:
            other = marker.split(self._render(changed, tools, False))[0]
        except TemplateError:  # of a template that is choosy about arguments nothing can be asked
            return
        if last + 1 < len(other) and other[last + 1][:tail] == literal[:tail] and other[last + 1] != literal:
            way = "the chat template writes its tool call's arguments after the token that would end it"
            raise TemplateError.at(turn, "assistant", way)

    def _check_bound(self, bound: _Bound, earlier: _Bound | None, literals: Sequence[str]) -> None:
        """What holds for every turn of every template: nothing that another role's turn consists of lies within."""
        begin, stop = (bound.first, bound.head), (bound.last + 1, bound.tail)
        if not (earlier is None or (earlier.last + 1, earlier.tail) <= begin) or begin > stop:
            raise TemplateError.at(bound.turn, "assistant", "the chat template writes it into another turn")
        written = [*literals[bound.first : bound.last + 1], literals[bound.last + 1][: bound.tail]]
        written[0] = written[0][bound.head :]
        inside = "\0".join(written)  # a text stands at each of these
        closing = self.end or self.stop
        pieces = inside.removesuffix(closing).split(closing) if closing else [inside]
        # Some families write a thought and the answer as two messages of the assistant.
        header = self.header.strip()
        foreign = any(not header or not piece.lstrip().startswith(header) for piece in pieces[1:])
        if foreign or (self.asker and self.asker in inside.removesuffix(closing)):
            raise TemplateError.at(
                bound.turn, "assistant", "the chat template (or a tool call's arguments) puts another turn's beginning into it"
            )

    def _check_complete(self, messages: Sequence[Turn], parts: Sequence[Part], order: Sequence[int]) -> None:
        """Nothing may be missing but the thoughts of turns before the last question."""
        present = set(order)
        if len(present) != len(order):
            turn = next(parts[n].turn for n in order if order.count(n) > 1)
            raise TemplateError.at(turn, messages[turn]["role"], "the chat template writes its text twice")
        self._check_present(messages, parts, present, self.last_question(messages))

    def _check_present(self, messages: Sequence[Turn], parts: Sequence[Part], present: set[int], asked: int) -> None:
        """``asked``: thoughts of turns before it may be missing."""
        for number, part in enumerate(parts):
            if number in present or (part.kind == "thought" and part.turn < asked):
                continue
            what = {"content": "content", "thought": "thought", "call": "tool call"}[part.kind]
            raise TemplateError.at(
                part.turn,
                messages[part.turn]["role"],
                f"the chat template leaves out its {what}; what the model does not see can't be trained. Move or remove it.",
            )
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and not any(parts[number].turn == turn for number in present):
                raise TemplateError.at(turn, "assistant", "the chat template shows nothing of it")

    def _head(
        self, marker: Marker, turn: int, marked: Sequence[Turn], tools: list[Any] | None, literal: str, before: int | None
    ) -> int:
        """How much of the literal before a turn's first text is prompt."""
        prompt = self._prompt(marker, turn, marked, tools, before)
        if prompt is None:  # nothing comes before: there is no prompt to ask the template for
            at = literal.rfind(self.header) if self.header else -1
            if at < 0:
                raise TemplateError.at(
                    turn, "assistant", "no user comes before it, and the template has no header. Begin with a user"
                )
            return at + len(self.header)
        same = len(common([prompt, literal]))
        if same < len(prompt):  # an old turn without the thought that the prompt begins: back to the end of a token
            same = max((end for end in self._boundaries(prompt) if end <= same), default=0)
            floor = len(prompt) - len(self.header) if self.header and prompt.endswith(self.header) else 0
            if same <= floor or (self.end and self.end in prompt[same:]):  # it differs before the last header already
                way = "the chat template writes another header than its generation prompt. Cut the conversation before it, or "
                raise TemplateError.at(
                    turn, "assistant", f"{way}give a template with {{% generation %}} tags as chat_template=…"
                )
        return same

    def _prompt(
        self, marker: Marker, turn: int, marked: Sequence[Turn], tools: list[Any] | None, before: int | None
    ) -> str | None:
        """The end of the prompt for a turn, from mark ``before`` on."""
        past = list(marked[:turn])  # with the calls' own arguments: they may be all that stands between the mark and here
        if not any(m["role"] not in ("system", "developer") for m in past):
            return None
        key = json.dumps([past, tools, before], default=repr)
        if key not in self._prompts:
            literals, order = marker.split(self._render(past, tools, True))
            if before is None:
                prompt = literals[0]
            elif before in order:
                prompt = literals[order.index(before) + 1]
            else:
                raise TemplateError.at(turn, "assistant", "the chat template writes the messages before it in another order")
            _remember(self._prompts, key, prompt)
        return self._prompts[key]

    def _tail(self, turn: int, message: Turn, literal: str, follower: str, final: bool) -> int:
        """How much of the literal after a turn's last text belongs to the turn. ``follower``: the role of the next message."""
        given = arguments_of(message)
        if self.end:
            if self.end in given:
                raise TemplateError.at(turn, "assistant", f"a tool call's arguments hold the end token {self.end!r}")
            at = literal.find(self.end)
            if at < 0:
                raise TemplateError.at(turn, "assistant", f"the chat template writes no end token {self.end!r} after it")
            return at + len(self.end)
        held = self._special.search(given)
        if held is not None:
            way = f"a tool call's arguments hold {held.group()!r}, and such a token is what ends a turn here"
            raise TemplateError.at(turn, "assistant", way)
        token = self._special.search(literal)  # the next role's token is what the model stops with
        if token is not None:
            if final and literal[token.end() :].strip():
                way = f"the chat template writes more after the token {token.group()!r}, so what ends it can't be told"
                raise TemplateError.at(turn, "assistant", way)
            stops = follower not in _NEVER_ASKED or token.group() == self.stop
            if self._last and "tool_calls" not in message:  # gpt-oss writes <|end|> where the model wrote <|return|>
                stops = token.group() == self._last
            return token.end() if stops else token.start()
        if final:
            return len(literal.rstrip())
        if "tool_calls" in message:
            raise TemplateError.at(turn, "assistant", "the chat template does not show where its tool call ends")
        return 0


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    words = sorted((re.escape(token) for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(words) if words else r"(?!)")


def _remember(cache: dict[str, Any], key: str, value: Any) -> None:
    """Data sets have few shapes of conversations; one with many must not fill the memory."""
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[key] = value
