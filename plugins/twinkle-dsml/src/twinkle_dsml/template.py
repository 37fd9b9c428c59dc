"""The templates: conversations in DeepSeek's own format to rows, completions back to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from twinkle_core.errors import TemplateError
from twinkle_core.templates.base import TextTemplate
from twinkle_core.templates.messages import refuse_media, tools_of, untrained
from twinkle_core.types import InputFeature, Message, Trajectory
from twinkle_dsml import releases
from twinkle_dsml.lenient import parse_lenient
from twinkle_dsml.readback import assert_readable
from twinkle_dsml.render import Rendering, render
from twinkle_dsml.stream import StreamParser
from twinkle_dsml.strict import parse_strict


class DSMLTemplate(TextTemplate):
    """DeepSeek V4 to the byte: the text that its own encoder writes, and labels on what the assistant writes itself.

    What is trained: the thought, the ``</think>`` that closes it, the answer, the tool calls, the end token. Not trained: the
    header with its ``<think>`` or ``</think>``, all that others wrote, and the ``</think>`` of a thought that there is none of.

    Old thoughts: without tools they are left out before the last question, as at inference. A message whose thought is left out
    is not trained: it would teach answers without a thought. ``drop_thinking=False`` shows and trains them all.

    An assistant's text that spells the format's own signs (``<think>`` in the content, a parameter that holds an end tag) could
    not be read back, and is refused.

    Args:
        model_id: a tokenizer of a V4 checkpoint, or where one is: ``hf://``, ``ms://``, a local folder.
        release: ``v4-preview``, ``v4-0731``, ``v4.1`` or ``v3.2``; None: the newest V4 with a V4 tokenizer, ``v4-0731``.
        max_length: most tokens of a row.
        truncation_strategy: for longer rows: ``raise``, ``left``, ``right``, ``split``, ``delete``; see ``truncate.to_rows``.
        default_system: a system message for conversations that do not begin with one.
        enable_thinking: False: chat mode, in which no thoughts are written.
        drop_thinking: leave out thoughts before the last question, unless there are tools.
        reasoning_effort: by release: ``low``, ``high``, ``max``; a number from 1 to 100 for ``v4.1``. None: what
            DeepSeek's server takes (``high`` for ``v4-0731`` and ``v4.1``).
        train_on: ``all`` assistant turns, or those after the ``last`` question.

    Raises:
        TemplateError: an argument is none of these, or the tokenizer lacks the release's special tokens.
    """

    label = "dsml"
    default_release: ClassVar[str] = "v4-0731"

    def __init__(
        self,
        model_id: Any,
        release: str | None = None,
        max_length: int = 8192,
        truncation_strategy: str = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        drop_thinking: bool = True,
        reasoning_effort: str | int | None = None,
        train_on: Literal["all", "last"] = "all",
    ) -> None:
        self.release = releases.get(self.default_release if release is None else release)
        if enable_thinking:
            self.release.effort(reasoning_effort)
        super().__init__(model_id, max_length, truncation_strategy, train_on)
        ids = {token: self.tokenizer.encode(token, add_special_tokens=False) for token in self.release.single}
        missing = [token for token, parts in ids.items() if len(parts) != 1]
        if missing:
            raise TemplateError.tokens(self.name, missing, self.release.name)
        if default_system is not None and not isinstance(default_system, str):
            raise TemplateError.argument("default_system", default_system, "a text, or None")
        self.default_system = default_system
        self.enable_thinking = enable_thinking
        self.drop_thinking = drop_thinking
        self.reasoning_effort = reasoning_effort

    def encode(
        self,
        trajectory: Trajectory,
        *,
        add_generation_prompt: bool = False,
        context: Sequence[Message] = (),
    ) -> InputFeature | list[InputFeature] | None:
        """One conversation to one row.

        Args:
            trajectory: ``messages`` and optionally ``tools``.
            add_generation_prompt: make a prompt that waits for the assistant: no labels.
            context: messages that were encoded before this row.

        Returns:
            ``input_ids``, aligned ``labels`` (not for a prompt), ``length``. A list of such rows with ``split``. None where
            ``delete`` drops it.

        Raises:
            TemplateError: not a conversation, or one that this format can't hold (RowTooLong, NoLabels are kinds of it).
        """
        rendered = self._rendered(trajectory, add_generation_prompt, context)
        if add_generation_prompt:
            return self.prompt(self.tokenise(rendered.text, [])[0])
        messages = trajectory["messages"]
        spans = rendered.spans
        if self.train_on == "last":
            asked = max((k for k, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1)
            spans = [span for span in spans if span.turn > asked]
        spans = self.unmarked(spans, untrained(messages))
        assert_readable(rendered, spans, release=self.release, thinking=self.enable_thinking)
        return self.rows(*self.tokenise(rendered.text, spans))

    def render(self, trajectory: Trajectory, *, add_generation_prompt: bool = False, context: Sequence[Message] = ()) -> str:
        """The text that ``encode`` tokenises.

        Where it waits for an answer it ends with the header, asked for or not, as DeepSeek's encoder has it.
        """
        return self._rendered(trajectory, add_generation_prompt, context).text

    def _rendered(self, trajectory: Any, waits: bool, context: Sequence[Message]) -> Rendering:
        refuse_media(trajectory)
        messages = trajectory.get("messages") if isinstance(trajectory, Mapping) else None
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise TemplateError.shape(trajectory)
        rendered = render(
            messages,
            tools=tools_of(trajectory),
            release=self.release,
            mode="thinking" if self.enable_thinking else "chat",
            drop_thinking=self.drop_thinking,
            reasoning_effort=self.reasoning_effort,
            context=context,
            default_system=self.default_system,
        )
        if waits:
            self._assert_waits([*context, *messages], len(messages))
        return rendered

    def _assert_waits(self, messages: Sequence[Message], count: int) -> None:
        """Raise TemplateError unless the text ends where the assistant goes on; the last ``count`` messages are not context."""
        asked = next((m for m in reversed(messages) if m["role"] != "latest_reminder"), messages[-1])
        if asked.get("task") or (asked["role"] == "assistant" and asked.get("wo_eos")):
            return
        if asked["role"] == "assistant":
            raise TemplateError.prompt()
        if asked["role"] not in (*self.release.answered, "tool"):
            way = f"release {self.release.name} has no header of the assistant after it; a prompt needs a question"
            raise TemplateError.at(count - 1, messages[-1]["role"], way)

    def parse(self, text: str, *, strict: bool = False) -> Message:
        """A completion to a message: ``role``, ``content``, ``reasoning_content``, ``tool_calls``, each always there.

        Args:
            text: what follows the header.
            strict: False: whatever is wrong with it, as :class:`StreamParser` reads it. True: it keeps the format, and ends
                with the end token.

        Raises:
            BadCompletion: with ``strict``; names the character.
        """
        if strict:
            return parse_strict(text, thinking=self.enable_thinking, release=self.release)
        return parse_lenient(text, thinking=self.enable_thinking)

    def stream_parser(self) -> StreamParser:
        """A parser for a completion that comes in pieces."""
        return StreamParser(self.enable_thinking)


DeepseekV4Template = DSMLTemplate


class DeepseekV32Template(DSMLTemplate):
    """DeepSeek V3.2 to the byte. Thoughts are shown after the last question only; there is no reasoning effort."""

    label = "deepseek_v3_2"
    default_release = "v3.2"
