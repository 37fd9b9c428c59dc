"""Which roles a chat template knows (L1), found by rendering it with them and with one that nobody knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from twinkle_core.errors import TemplateError
from twinkle_core.names import closest
from twinkle_core.templates.messages import Turn

#: What every chat template is asked for; one that can't show such a message leaves it out or refuses it, which is told.
COMMON = ("system", "user", "assistant", "tool", "developer", "function")
#: Other words of data sets and model families for these.
_ALIASES = {
    "assistant": ("model", "bot", "chatbot", "gpt", "chatgpt", "ai", "llm"),
    "user": ("human", "prompter"),
}
_MEANT = {alias: role for role, aliases in _ALIASES.items() for alias in aliases}
_NOBODY = "qzrole"
_QUOTED = re.compile(r"(['\"])([^'\"\s]+)\1")


class Roles:
    """Refuses roles that the template does not know: they would be written as they stand, and never trained.

    Args:
        render: the template: (messages, tools, add_generation_prompt) -> text.
        source: its text: a role that stands in it in quotes is one.
        tokens: the tokenizer's added tokens: ``<|observation|>`` makes ``observation`` a role.
    """

    def __init__(
        self, render: Callable[[Sequence[Turn], list[Any] | None, bool], str], source: str, tokens: Iterable[str]
    ) -> None:
        self._render = render
        self._named = {re.sub(r"^\W+|\W+$", "", token) for token in tokens} | {w for _, w in _QUOTED.findall(source)}
        self._known: dict[str, bool] = dict.fromkeys(COMMON, True)

    def check(self, messages: Sequence[Turn]) -> None:
        """Raise TemplateError at the first message of a role that the template does not know."""
        for turn, message in enumerate(messages):
            role = message["role"]
            known = self._known.get(role)
            if known is None:
                known = self._known[role] = self._knows(role)
            if not known:
                word = role.strip().lower()
                meant = word if word in COMMON else _MEANT.get(word) or closest(word, COMMON)
                raise TemplateError.role(turn, role, meant, COMMON)

    def _knows(self, role: str) -> bool:
        word = role.strip().lower()
        if word in COMMON or _MEANT.get(word) == "assistant":  # another spelling; only 'assistant' itself is trained
            return False
        return role in self._named or any(self._differs(role, place) for place in range(3))

    def _differs(self, role: str, place: int) -> bool:
        """Whether the template treats a message of this role, at this place of a conversation, otherwise than anybody's."""

        def text(name: str) -> str | None:
            talk: list[Turn] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
            talk.insert(place, {"role": name, "content": "x"})
            try:
                return self._render(talk, None, False)
            except TemplateError:
                return None

        found, nobodys = text(role), text(_NOBODY)
        return found is not None and (nobodys is None or found != nobodys.replace(_NOBODY, role))
