"""A completion to a message while it is written, whatever it is cut into, and whatever is wrong with it.

The parser is a state machine over the text. Each state looks for its signs; what stands before a sign is the state's own: a
thought, an answer, a value, or nothing. Only the end of the text that may be the beginning of a sign is held back, so the work
is linear, and the result does not depend on where the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Literal, NamedTuple

from twinkle_core.types import Message, ToolCall
from twinkle_dsml.markup import to_json
from twinkle_dsml.releases import RELEASES
from twinkle_dsml.tokens import DSML, EOS, THINK_END

_OPEN, _CLOSE = f"<{DSML}", f"</{DSML}"
_BLOCK_ENDS = tuple(sorted({f"{release.tags.closed(release.tags.block)}>" for release in RELEASES.values()}))
_INVOKE, _PARAMETER, _NAMED = 'invoke name="', 'parameter name="', '" string="'


class Delta(NamedTuple):
    """A piece of the message: of its thought, of its answer, a call that begins (its name), or a call's arguments (JSON text).

    ``call``: which call of the message, from 0; for calls and arguments.
    """

    kind: Literal["thought", "content", "call", "arguments"]
    text: str
    call: int | None = None


class _State(IntEnum):
    THOUGHT = auto()
    CONTENT = auto()
    BLOCK = auto()  # between calls
    NAME = auto()  # of a call
    CALL = auto()  # between parameters
    KEY = auto()  # a parameter's name
    KIND = auto()  # true or false: whether it is a text
    TEXT = auto()  # a value that is a text
    JSON = auto()  # another value
    DONE = auto()


def _pattern(*signs: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted((*signs, EOS), key=len, reverse=True))))


#: state -> the signs that it ends with
_SIGNS = {
    _State.THOUGHT: _pattern(THINK_END, _OPEN),
    _State.CONTENT: _pattern(THINK_END, _OPEN),
    _State.BLOCK: _pattern(_INVOKE, *_BLOCK_ENDS),
    _State.NAME: _pattern('"'),
    _State.CALL: _pattern(_INVOKE, _PARAMETER, _CLOSE),
    _State.KEY: _pattern(_NAMED),
    _State.KIND: _pattern('true">', 'false">'),
    _State.TEXT: _pattern(_CLOSE),
    _State.JSON: _pattern(_CLOSE),
}
_LONGEST = max(map(len, (EOS, THINK_END, _OPEN, _CLOSE, _INVOKE, _PARAMETER, _NAMED, *_BLOCK_ENDS)))
#: states whose text is given on at once; their signs begin with '<'
_FLOWS = {state: state in (_State.THOUGHT, _State.CONTENT, _State.TEXT, _State.JSON) for state in _State}
_BEGINNINGS = frozenset(sign[:n] for sign in (EOS, THINK_END, _OPEN, _CLOSE) for n in range(1, len(sign)))


class StreamParser:
    """Takes a completion piece by piece. Never raises; of broken markup it keeps what a server would::

        parser = StreamParser()
        for chunk in chunks:
            for delta in parser.feed(chunk):
                ...
        parser.finish()
        parser.message

    Line breaks at the beginning of thought and answer, before ``</think>`` and before calls are the format's, not the
    message's. Calls need not be in a block, nor a block be closed; a thought may end with a call. A stray ``</think>`` is left
    out, as are stray tags between calls. What follows the block is not read, nor what follows the end token. Of a call that is
    cut off its name and the beginning of its arguments are kept, so these need not be JSON.

    Args:
        thinking: whether the prompt ended with ``<think>``.
    """

    def __init__(self, thinking: bool = True) -> None:
        self._state = _State.THOUGHT if thinking else _State.CONTENT
        self._buffer = ""
        self._at = 0
        self._breaks = 0  # line breaks that are the message's only if text follows
        self._leading = True
        self._first = True  # no parameter of the call is written yet
        self._name: list[str] = []
        self._parts: dict[str, list[str]] = {"thought": [], "content": []}
        self._calls: list[tuple[str, list[str]]] = []
        self._deltas: list[Delta] = []
        self._enter: dict[_State, Callable[[str], None]] = {
            _State.THOUGHT: self._after_thought,
            _State.CONTENT: self._after_content,
            _State.BLOCK: self._after_block,
            _State.NAME: self._after_name,
            _State.CALL: self._after_call,
            _State.KEY: self._after_key,
            _State.KIND: self._after_kind,
            _State.TEXT: self._after_value,
            _State.JSON: self._after_value,
        }

    def feed(self, text: str) -> list[Delta]:
        """What a further piece of the completion adds to the message."""
        if self._state is _State.DONE:
            return []
        if "<" not in text and self._at == len(self._buffer) and _FLOWS[self._state]:
            self._words(text)  # the most of a stream: no sign begins here
        else:
            self._buffer = self._buffer[self._at :] + text
            self._at = 0
            self._read()
        return self._given()

    def finish(self) -> list[Delta]:
        """What was held back. The parser takes no more."""
        if self._state is not _State.DONE:
            self._words(self._buffer[self._at :])
            self._end()
        return self._given()

    @property
    def message(self) -> Message:
        """The message as far as it is read: ``role``, ``content``, ``reasoning_content``, ``tool_calls``, each always there."""
        calls: list[ToolCall] = [
            {"type": "function", "function": {"name": name, "arguments": "".join(parts)}} for name, parts in self._calls
        ]
        return {
            "role": "assistant",
            "content": "".join(self._parts["content"]),
            "reasoning_content": "".join(self._parts["thought"]),
            "tool_calls": calls,
        }

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """As servers name it."""
        return "tool_calls" if self._calls else "stop"

    # ------------------------------------------------------------------------------------------------ reading

    def _read(self) -> None:
        while self._state is not _State.DONE:
            match = _SIGNS[self._state].search(self._buffer, self._at)
            if match is None:
                held = self._held()
                self._words(self._buffer[self._at : held])
                self._at = held
                return
            self._words(self._buffer[self._at : match.start()])
            self._at = match.end()
            if match.group() == EOS:
                self._end()
            else:
                self._enter[self._state](match.group())

    def _held(self) -> int:
        """From where on the buffer may be the beginning of a sign."""
        size = len(self._buffer)
        floor = max(self._at, size - _LONGEST + 1)
        if not _FLOWS[self._state]:
            return floor
        place = self._buffer.rfind("<", floor)
        return place if place >= 0 and self._buffer[place:] in _BEGINNINGS else size

    def _words(self, text: str) -> None:
        """Text of the state; in states that have none it is left out."""
        if not text:
            return
        if self._state is _State.THOUGHT:
            self._say("thought", text)
        elif self._state is _State.CONTENT:
            self._say("content", text)
        elif self._state is _State.TEXT:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._state is _State.JSON:
            self._argue(text)
        elif self._state in (_State.NAME, _State.KEY):
            self._name.append(text)

    def _say(self, kind: Literal["thought", "content"], text: str) -> None:
        if self._leading:
            text = text.lstrip("\n")
            self._leading = not text
        said = text.rstrip("\n")
        breaks = len(text) - len(said)
        if said:
            if self._breaks:
                said = "\n" * self._breaks + said
                self._breaks = 0
            self._parts[kind].append(said)
            self._deltas.append(Delta(kind, said))
        self._breaks += breaks

    def _keep_breaks(self, kind: Literal["thought", "content"]) -> None:
        if self._breaks:
            breaks, self._breaks = "\n" * self._breaks, 0
            self._parts[kind].append(breaks)
            self._deltas.append(Delta(kind, breaks))

    def _argue(self, text: str) -> None:
        self._calls[-1][1].append(text)
        self._deltas.append(Delta("arguments", text, len(self._calls) - 1))

    def _given(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _end(self) -> None:
        """The text is over: line breaks at its end are the message's, and a parameter's name that is not closed is kept."""
        self._keep_breaks("thought" if self._state is _State.THOUGHT else "content")
        if self._state is _State.KEY:
            self._argue(("{" if self._first else ", ") + '"' + self._taken())
        self._state = _State.DONE

    # ------------------------------------------------------------------------------------------------ after a sign

    def _after_thought(self, sign: str) -> None:
        self._breaks = 0
        self._leading = True
        self._state = _State.CONTENT if sign == THINK_END else _State.BLOCK

    def _after_content(self, sign: str) -> None:
        if sign == THINK_END:  # a stray one
            self._keep_breaks("content")
            self._leading = False
            return
        self._breaks = 0
        self._state = _State.BLOCK

    def _after_block(self, sign: str) -> None:
        self._state = _State.NAME if sign == _INVOKE else _State.DONE

    def _after_name(self, sign: str) -> None:
        name = self._taken()
        self._calls.append((name, []))
        self._deltas.append(Delta("call", name, len(self._calls) - 1))
        self._first = True
        self._state = _State.CALL

    def _after_call(self, sign: str) -> None:
        if sign == _PARAMETER:
            self._state = _State.KEY
            return
        self._argue("{}" if self._first else "}")  # also where the next call begins before this one is closed
        self._state = _State.NAME if sign == _INVOKE else _State.BLOCK
        if sign == _CLOSE:
            self._at -= len(sign)  # it may be the block's

    def _after_key(self, sign: str) -> None:
        self._argue(("{" if self._first else ", ") + to_json(self._taken()) + ": ")
        self._first = False
        self._state = _State.KIND

    def _after_kind(self, sign: str) -> None:
        self._state = _State.TEXT if sign.startswith("true") else _State.JSON
        if self._state is _State.TEXT:
            self._argue('"')

    def _after_value(self, sign: str) -> None:
        if self._state is _State.TEXT:
            self._argue('"')
        self._state = _State.CALL

    def _taken(self) -> str:
        name = "".join(self._name)
        self._name.clear()
        return name
