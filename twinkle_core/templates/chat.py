"""The template for models that bring a chat template of their own (L1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from twinkle_core.errors import NoChatTemplate, NoLabels, TemplateError
from twinkle_core.templates import manners, parse
from twinkle_core.templates.base import TextTemplate
from twinkle_core.templates.labels import Locator, Span
from twinkle_core.templates.messages import SHIELD, Style, Turn, normalise, refuse_media
from twinkle_core.templates.roles import Roles
from twinkle_core.templates.tools.forms import FORMS, schema_of
from twinkle_core.types import InputFeature, Message, Trajectory

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate(TextTemplate):
    """Encodes with the model's own chat template: rendered whole, tokenised once, labels by character offsets.

    What is trained: each assistant turn as the template renders it, its end token included; never a header, a generation
    prompt (a ``<think>`` in it neither), a tool's result, or anything that a user or system wrote. How a turn is found:
    ``labels.py``; templates with ``{% generation %}`` tags say it themselves.

    Old thoughts: most reasoning templates leave out the thoughts of turns before the last question. Such a turn is trained as
    it is shown, an answer without a thought; no ``<think>`` is put before it, and none in the prompt is trained.
    ``train_on="last"`` trains the turns after the last user's message only (all of a tool loop), which are shown exactly as at
    inference.

    Special tokens written out in a message's text become these tokens, as with the model's own tokenizer; in a user's text they
    are never trained.

    Args:
        model_id: a tokenizer, or where one is: ``hf://``, ``ms://``, a local folder.
        use_chat_template: False: plain text (``text`` of a row, or its messages' contents joined by line breaks), everything
            trained, the end token appended.
        max_length: most tokens of a row.
        truncation_strategy: for longer rows: ``raise``, ``left``, ``right``, ``split``, ``delete``; see ``truncate.to_rows``.
        default_system: a system message for conversations without one.
        enable_thinking: given to the chat template; False: thoughts (``reasoning_content``, ``<think>`` in the content) are
            left out, and the empty pair that such a prompt holds is masked. Right for data without thoughts: with True,
            templates that show an empty thought have it trained.
        train_on: ``all`` assistant turns, or the ``last`` ones.
        chat_template: a Jinja template to use in place of the tokenizer's.
        tool_format: how the model writes tool calls, for ``parse``: a name of ``tools/forms.py``. None: as the chat template
            writes them, if it does.
    """

    label = "chat"

    def __init__(
        self,
        model_id: Any,
        use_chat_template: bool = True,
        max_length: int = 8192,
        truncation_strategy: str = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        train_on: Literal["all", "last"] = "all",
        chat_template: str | None = None,
        tool_format: str | None = None,
    ) -> None:
        super().__init__(model_id, max_length, truncation_strategy, train_on)
        if tool_format is not None and tool_format not in FORMS:
            raise TemplateError.argument("tool_format", tool_format, f"one of {', '.join(map(repr, FORMS))}")
        self.use_chat_template = use_chat_template
        self.default_system = default_system
        self.enable_thinking = enable_thinking
        self.tool_format = tool_format
        self._manner = parse.Manner((self.tokenizer.eos_token or "",))
        if not use_chat_template:
            return
        if chat_template is None and not self.tokenizer.chat_template:
            raise NoChatTemplate(self.name)
        self.chat_template = chat_template
        self._ask_the_template()

    def _ask_the_template(self) -> None:
        """Find out by rendering what this chat template does."""
        source = self.chat_template or self.tokenizer.chat_template
        text = "\n".join(source.values()) if isinstance(source, Mapping) else str(source)
        self._tagged = bool(_GENERATION.search(text))
        self._surplus = ""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        special = list(self.tokenizer.all_special_tokens)
        self._roles = Roles(self._render, text, [*special, *added])
        locator = Locator(self._render, self._token_ends, special, [*special, *added], self.tokenizer.eos_token)
        self._locator, self._surplus, marker = locator, locator.surplus, locator.marker
        begun = locator.header.rstrip().endswith("<think>")
        ends = (locator.end, locator.stop, self.tokenizer.eos_token or "")
        key = manners.thought_key(self._render, marker, text)
        frame = manners.frame(self._render, marker, key, locator.header, locator.added, ends)
        manner = parse.Manner(ends, "</think>" in text, begun, frame)
        content, as_text, form = manners.call_style(self._render, marker, self._token_ends, manner)
        self._style = Style(
            thought=key,
            tags=key is None or "</think>" in text,
            shielded=key is None and self.enable_thinking and manners.cuts_thoughts(self._render, marker),
            call_content=content,
            text_arguments=as_text,
            system=manners.system_place(self._render, marker),
        )
        self._call_stop = locator.role_token(manners.call_stop(self._render, marker, self._style)) if locator.stop else ""
        self._manner = replace(manner, ends=(*manner.ends, self._call_stop))
        self.tool_format = self.tool_format or form

    # ------------------------------------------------------------------------------------------------ encoding

    def encode(
        self, trajectory: Trajectory, *, add_generation_prompt: bool = False
    ) -> InputFeature | list[InputFeature] | None:
        """One conversation to one row.

        Args:
            trajectory: ``messages`` and optionally ``tools``.
            add_generation_prompt: make a prompt that waits for the assistant: no labels, and the header at the end.

        Returns:
            ``input_ids``, aligned ``labels`` (not for a prompt), ``length``. A list of such rows with ``split``. None where
            ``delete`` drops it.

        Raises:
            TemplateError: not a conversation; one that the chat template refuses or changes beyond recognition (RowTooLong,
                NoLabels are kinds of it).
        """
        refuse_media(trajectory)
        if self.use_chat_template:
            ids, targets = self.tokenise(*self._written(trajectory, add_generation_prompt))
        else:
            ids = targets = self._plain(trajectory, complete=not add_generation_prompt)
            if not add_generation_prompt and len(ids) < 2 and self.truncation_strategy != "delete":
                raise NoLabels.short(len(ids))
        return self.prompt(ids) if add_generation_prompt else self.rows(ids, targets)

    def _written(self, trajectory: Mapping[str, Any], add_generation_prompt: bool) -> tuple[str, list[Span]]:
        """The text that is tokenised, and what of it the assistant wrote (nothing, in a prompt)."""
        messages, tools, silent = self._normalise(trajectory)
        if add_generation_prompt and messages[-1]["role"] == "assistant":
            raise TemplateError.prompt()
        text = self._shown(messages, tools, add_generation_prompt)
        if add_generation_prompt:
            self._locator.check_prompt(messages, tools, text)
            return text, []
        text, spans = self._stopped(messages, text, self._spans(messages, tools, text))
        return text, self._asked_for(messages, spans, silent)

    def render(self, trajectory: Trajectory, *, add_generation_prompt: bool = False) -> str:
        """The text that ``encode`` tokenises."""
        refuse_media(trajectory)
        if not self.use_chat_template:
            return self._plain_text(trajectory)
        messages, tools, _ = self._normalise(trajectory)
        return self._shown(messages, tools, add_generation_prompt)

    def _normalise(self, trajectory: Mapping[str, Any]) -> tuple[list[Turn], list[Any] | None, frozenset[int]]:
        messages, tools, silent = normalise(
            trajectory, default_system=self.default_system, enable_thinking=self.enable_thinking, style=self._style
        )
        self._roles.check(messages)
        return messages, tools, silent

    def _shown(self, messages: Sequence[Turn], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        """The rendering, unless the template wrote out the data structure of an image or the like, as Jinja does."""
        text = self._render(messages, tools, add_generation_prompt)
        for turn, message in enumerate(messages):
            parts = message["content"] if isinstance(message["content"], list) else []
            if any(repr(part) in text for part in parts):
                other = next((part for part in parts if part["type"] != "text"), parts[0])
                way = f"the chat template knows no parts like {other!r:.60}; it takes texts only"
                raise TemplateError.at(turn, message["role"], way)
        return text

    def _render(self, messages: Sequence[Turn], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        text = self._jinja(messages, tools, add_generation_prompt, tags=False)[0]
        return self._settled(text, messages, add_generation_prompt)

    def _settled(self, text: str, messages: Sequence[Turn], add_generation_prompt: bool) -> str:
        """What Jinja wrote, as the model sees it. Characters that stay keep their places."""
        if not add_generation_prompt and messages[-1]["role"] == "assistant":
            text = text.removesuffix(self._surplus)
        return text.replace(SHIELD, "</think>")

    def _jinja(
        self, messages: Sequence[Turn], tools: list[Any] | None, add_generation_prompt: bool, tags: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and with ``tags`` what ``{% generation %}`` marks. Not by the tokenizer's ``apply_chat_template``: of late
        that takes out a content of None, which some templates test for."""
        from jinja2.exceptions import TemplateError as JinjaError
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        try:
            texts, places = render(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(self.chat_template, tools),
                return_assistant_tokens_mask=tags,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=self.enable_thinking,
                thinking=self.enable_thinking,  # the same switch in DeepSeek's templates
                **self.tokenizer.special_tokens_map,
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError) as cause:
            raise TemplateError.rendering(cause) from cause
        return str(texts[0]), list(places[0]) if tags else []

    def _spans(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> list[Span]:
        if not any(m["role"] == "assistant" for m in messages):
            return []
        return self._tagged_spans(messages, tools, text) if self._tagged else self._locator.spans(messages, tools, text)

    def _asked_for(self, messages: Sequence[Turn], spans: list[Span], silent: frozenset[int]) -> list[Span]:
        """What ``train_on`` and the marks of messages leave to be trained."""
        first = self._locator.last_question(messages) + 1 if self.train_on == "last" else 0
        return self.unmarked([span for span in spans if span.turn >= first], silent)

    def _stopped(self, messages: Sequence[Turn], text: str, spans: list[Span]) -> tuple[str, list[Span]]:
        """Where the next role's token ends a turn, the last answer needs it as well, or the model would not learn to stop."""
        stop = (self._call_stop if "tool_calls" in messages[-1] else "") or self._locator.stop
        if not stop or not spans or messages[-1]["role"] != "assistant":
            return text, spans
        last = spans[-1]
        if text.endswith(stop, last.start, last.end):  # the template closes a call with it, whoever comes next
            return text, spans
        return text[: last.end] + stop, [*spans[:-1], Span(last.turn, last.start, last.end + len(stop))]

    def _tagged_spans(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> list[Span]:
        """What the template's ``{% generation %}`` tags mark, and the end token right after it."""
        self._locator.check(messages, tools, text)
        shown, places = self._jinja(messages, tools, False, tags=True)
        turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        if self._settled(shown, messages, False) != text:
            raise TemplateError.rendering("rendered twice, it writes two texts")
        if len(places) != len(turns):
            raise TemplateError.rendering(f"its generation tags mark {len(places)} places for {len(turns)} assistant turns")
        end = self._locator.end
        return [
            Span(turn, start, stop + len(end) if end and text.startswith(end, stop) else stop)
            for turn, (start, stop) in zip(turns, places, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------ tokens

    def _token_ends(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [end for _, end in encoded["offset_mapping"]]

    def _plain_text(self, row: Mapping[str, Any]) -> str:
        text = row.get("text") if isinstance(row, Mapping) else None
        if text is None:
            messages, tools, silent = normalise(row, default_system=None, enable_thinking=True, style=Style(thought=None))
            if any(messages[turn]["role"] == "assistant" for turn in silent):
                raise TemplateError.plain_marks()
            for turn, message in enumerate(messages):
                if "tool_calls" in message or not isinstance(message["content"], str):
                    raise TemplateError.plain_part(turn, message["role"], "a call" if "tool_calls" in message else "a part")
            if tools is not None:
                raise TemplateError.tools(len(tools))
            text = "\n".join(m["content"] for m in messages)
        if not isinstance(text, str):
            raise TemplateError.argument("text", text, "a plain-text row holds a text")
        return text

    def _plain(self, row: Mapping[str, Any], complete: bool) -> list[int]:
        text = self._plain_text(row)
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        written = bool(bos) and text.startswith(bos)
        ids: list[int] = self.tokenizer(text, add_special_tokens=not written, verbose=False)["input_ids"]
        return ids if not complete or eos is None or (ids and ids[-1] == eos) else [*ids, eos]

    def parse(self, text: str, tools: Sequence[Any] | None = None) -> Message:
        """A completion to an assistant message.

        Up to the end token; a thought (also one whose ``<think>`` was in the prompt, if the template has thoughts) goes to
        ``reasoning_content``, tool calls in the model's form (``tool_format``) to ``tool_calls`` with their arguments as a
        mapping, the rest to ``content``. What is no call from its first sign to its last is text. Never raises.

        Args:
            text: what the model wrote, special tokens included.
            tools: the conversation's, whose types tell ``"3"`` from ``3`` where the form has no quotes.
        """
        return parse.read(text, self._manner, self.tool_format, schema_of(tools or ()))
