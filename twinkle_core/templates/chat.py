"""The template for models that bring a chat template of their own (L1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from twinkle_core.errors import NoChatTemplate, NoLabels, TemplateError
from twinkle_core.templates.base import TextTemplate
from twinkle_core.templates.labels import Locator, Span
from twinkle_core.templates.messages import Turn, normalise
from twinkle_core.templates.roles import Roles
from twinkle_core.templates.tools import hermes, qwen_xml
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
    ) -> None:
        super().__init__(model_id, max_length, truncation_strategy, train_on)
        self.use_chat_template = use_chat_template
        self.default_system = default_system
        self.enable_thinking = enable_thinking
        self._thinks = False  # whether the model may end a thought that its prompt began
        if not use_chat_template:
            return
        if chat_template is None and not self.tokenizer.chat_template:
            raise NoChatTemplate(self.name)
        self.chat_template = chat_template
        source = chat_template or self.tokenizer.chat_template
        text = "\n".join(source.values()) if isinstance(source, Mapping) else str(source)
        self._inline_thoughts = "reasoning_content" not in text
        self._thinks = "</think>" in text
        self._tagged = bool(_GENERATION.search(text))
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        special = list(self.tokenizer.all_special_tokens)
        self._roles = Roles(self._render, text, [*special, *added])
        self._locator = Locator(self._render, self._token_ends, special, [*special, *added], self.tokenizer.eos_token)

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
        if not self.use_chat_template:
            ids = self._plain(trajectory, complete=not add_generation_prompt)
            if not add_generation_prompt and len(ids) < 2 and self.truncation_strategy != "delete":
                raise NoLabels.short(len(ids))
            targets = ids
        else:
            messages, tools = self._normalise(trajectory)
            if add_generation_prompt and messages[-1]["role"] == "assistant":
                raise TemplateError.prompt()
            text = self._shown(messages, tools, add_generation_prompt)
            if not add_generation_prompt:
                spans = self._spans(messages, tools, text)
                text, spans = self._stopped(messages, text, spans)
            else:
                spans = []
            ids, targets = self.tokenise(text, spans)
        return self.prompt(ids) if add_generation_prompt else self.rows(ids, targets)

    def render(self, trajectory: Trajectory, *, add_generation_prompt: bool = False) -> str:
        """The text that ``encode`` tokenises."""
        if not self.use_chat_template:
            return self._plain_text(trajectory)
        messages, tools = self._normalise(trajectory)
        return self._shown(messages, tools, add_generation_prompt)

    def _normalise(self, trajectory: Mapping[str, Any]) -> tuple[list[Turn], list[Any] | None]:
        messages, tools = normalise(
            trajectory,
            default_system=self.default_system,
            enable_thinking=self.enable_thinking,
            inline_thoughts=self._inline_thoughts,
        )
        self._roles.check(messages)
        return messages, tools

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
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=self.enable_thinking,
                thinking=self.enable_thinking,  # the same switch in DeepSeek's templates
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError) as cause:
            raise TemplateError.rendering(cause) from cause
        return str(text)

    def _spans(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> list[Span]:
        if not any(m["role"] == "assistant" for m in messages):
            return []
        spans = self._tagged_spans(messages, tools, text) if self._tagged else self._locator.spans(messages, tools, text)
        if self.train_on == "last":
            asked = max((k for k, m in enumerate(messages) if m["role"] == "user"), default=-1)
            spans = [span for span in spans if span.turn > asked]
        return spans

    def _stopped(self, messages: Sequence[Turn], text: str, spans: list[Span]) -> tuple[str, list[Span]]:
        """Where the next role's token ends a turn, the last answer needs it as well, or the model would not learn to stop."""
        stop = self._locator.stop
        if not stop or not spans or messages[-1]["role"] != "assistant":
            return text, spans
        last = spans[-1]
        return text[: last.end] + stop, [*spans[:-1], Span(last.turn, last.start, last.end + len(stop))]

    def _tagged_spans(self, messages: Sequence[Turn], tools: list[Any] | None, text: str) -> list[Span]:
        """What the template's ``{% generation %}`` tags mark, and the end token right after it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._locator.check(messages, tools, text)
        render: Any = render_jinja_template
        texts, places = render(
            conversations=[list(messages)],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(self.chat_template, tools),
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            enable_thinking=self.enable_thinking,
            thinking=self.enable_thinking,
            **self.tokenizer.special_tokens_map,
        )
        turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        if texts[0] != text:
            raise TemplateError.rendering("rendered twice, it writes two texts")
        if len(places[0]) != len(turns):
            raise TemplateError.rendering(f"its generation tags mark {len(places[0])} places for {len(turns)} assistant turns")
        end = self._locator.end
        return [
            Span(turn, start, stop + len(end) if end and text.startswith(end, stop) else stop)
            for turn, (start, stop) in zip(turns, places[0], strict=True)
        ]

    # ------------------------------------------------------------------------------------------------ tokens

    def _token_ends(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [end for _, end in encoded["offset_mapping"]]

    def _plain_text(self, row: Mapping[str, Any]) -> str:
        text = row.get("text") if isinstance(row, Mapping) else None
        if text is None:
            messages, _ = normalise(row, default_system=None, enable_thinking=True, inline_thoughts=True)
            text = "\n".join(m["content"] for m in messages if isinstance(m["content"], str))
        if not isinstance(text, str):
            raise TemplateError.argument("text", text, "a plain-text row holds a text")
        return text

    def _plain(self, row: Mapping[str, Any], complete: bool) -> list[int]:
        text = self._plain_text(row)
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        written = bool(bos) and text.startswith(bos)
        ids: list[int] = self.tokenizer(text, add_special_tokens=not written, verbose=False)["input_ids"]
        return ids if not complete or eos is None or (ids and ids[-1] == eos) else [*ids, eos]

    def parse(self, text: str) -> Message:
        """A completion to an assistant message.

        Up to the end token; a thought (also one whose ``<think>`` was in the prompt, if the template has thoughts) goes to
        ``reasoning_content``, tool calls in the form of Hermes and Qwen to ``tool_calls``, the rest to ``content``.
        """
        end = self._locator.end if self.use_chat_template else self.tokenizer.eos_token
        for token in (end, self.tokenizer.eos_token):
            if token:
                text = text.partition(token)[0]
        message: Message = {"role": "assistant", "content": ""}
        before, closed, after = text.partition("</think>")
        opened = before.lstrip().startswith("<think>")
        if opened or (closed and self._thinks):  # a thought that was cut off has no answer
            thought = before.lstrip().removeprefix("<think>").strip()
            text = after
            if thought:
                message["reasoning_content"] = thought
        calls = []
        for form in (hermes, qwen_xml):
            text, found = form.parse(text)
            calls += found
        message["content"] = text.strip()
        if calls:
            message["tool_calls"] = calls
        return message
