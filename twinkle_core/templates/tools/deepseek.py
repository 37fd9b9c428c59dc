"""Tool calls of DeepSeek (L1).

V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments as a fenced block of JSON, V3.1 ``NAME<｜tool▁sep｜>{…}``;
each call between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``, all of them between ``<｜tool▁calls▁begin｜>`` and
``<｜tool▁calls▁end｜>``, the last of which R1's own format forgets after a single call.
"""

from __future__ import annotations

import re

from twinkle_core.templates.tools.scan import Schema, blank, call, json_at, scan
from twinkle_core.types import ToolCall

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_FENCED = re.compile(r"\s*function<｜tool▁sep｜>([^\n<]+)\n```json\n")
_BARE = re.compile(r"\s*([^\s<]+)<｜tool▁sep｜>")
_FENCE = re.compile(r"\s*```")


def parse_fenced(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The form of V3 and R1: the text without its calls, and the calls in order."""
    return _without_frame(*scan(text, _BEGIN, _fenced, schema))


def parse_bare(text: str, schema: Schema) -> tuple[str, list[ToolCall]]:
    """The form of V3.1: the text without its calls, and the calls in order."""
    return _without_frame(*scan(text, _BEGIN, _bare, schema))


def _without_frame(rest: str, calls: list[ToolCall]) -> tuple[str, list[ToolCall]]:
    for tag in _AROUND if calls else ():
        rest = rest.replace(tag, "")
    return rest, calls


def _fenced(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    return _read(text, at, _FENCED, _FENCE)


def _bare(text: str, at: int, schema: Schema) -> tuple[list[ToolCall], int]:
    return _read(text, at, _BARE, None)


def _read(text: str, at: int, head: re.Pattern[str], fence: re.Pattern[str] | None) -> tuple[list[ToolCall], int]:
    name = head.match(text, at)
    if name is None:
        return [], blank(text, at)
    arguments, at = json_at(text, name.end())
    if fence is not None:
        closed = fence.match(text, at)
        if closed is None:
            return [], at
        at = closed.end()
    at = blank(text, at)
    found = call(name[1].strip(), arguments)
    return ([found], at + len(_END)) if found and text.startswith(_END, at) else ([], at)
