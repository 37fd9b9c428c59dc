"""What templates that write text have in common: the tokenizer, rows, truncation, labels by character offsets (L1)."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from twinkle_core import hub
from twinkle_core.contracts.template import Template
from twinkle_core.errors import HoldsAdapter, NeedsLibrary, NoLabels, RowTooLong, TemplateError
from twinkle_core.templates import truncate
from twinkle_core.templates.labels import Span
from twinkle_core.types import IGNORE_INDEX, InputFeature, Trajectory

TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")


class TextTemplate(Template):
    """Renders a conversation whole, tokenises the text once, and places labels by character offsets.

    A subclass says how a conversation becomes text and which characters of it the assistant wrote, and calls ``tokenise`` and
    ``rows`` (or ``prompt``).

    Args:
        model_id: a tokenizer, or where one is: ``hf://``, ``ms://``, a local folder.
        max_length: most tokens of a row.
        truncation_strategy: for longer rows: ``raise``, ``left``, ``right``, ``split``, ``delete``; see ``truncate.to_rows``.
        train_on: ``all`` assistant turns, or the ``last`` ones.

    Raises:
        TemplateError: an argument is not one of these, or no tokenizer with offsets can be loaded.
    """

    label: ClassVar[str] = "text"  # the template's name in messages

    def __init__(
        self, model_id: Any, max_length: int, truncation_strategy: str, train_on: Literal["all", "last"] = "all"
    ) -> None:
        truncate.check_strategy(truncation_strategy)
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
            raise TemplateError.argument("max_length", max_length, "a whole number from 2 up (one token predicts another)")
        if train_on not in ("all", "last"):
            raise TemplateError.argument("train_on", train_on, "'all' or 'last'")
        self.tokenizer: Any = _load(model_id, self.label) if isinstance(model_id, (str, Path)) else model_id
        self.name = str(model_id) if isinstance(model_id, (str, Path)) else type(model_id).__name__
        if not getattr(self.tokenizer, "is_fast", False):
            raise TemplateError.slow(self.name)
        self.max_length = max_length
        self.truncation_strategy = truncation_strategy
        self.train_on = train_on
        self.dropped = 0  # conversations dropped by this object, in this process

    def tokenise(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Ids, and for each position its own token where it lies wholly in a span, else -100.

        No special tokens are added: the text has its beginning token already.

        Raises:
            TemplateError: the text holds a lone surrogate, which JSON can spell.
        """
        return self.labelled(self.encoded(text), spans)

    def encoded(self, text: str) -> Any:
        """The text's tokens and their places (``Encoding`` of the library tokenizers)."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        try:
            return backend.encode(text, add_special_tokens=False)
        except TypeError as cause:
            place = next((k for k, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
            if place is None:
                raise
            raise TemplateError.half_character(text[max(0, place - 20) : place + 20]) from cause

    @staticmethod
    def labelled(encoded: Any, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """See ``tokenise``."""
        ids: list[int] = encoded.ids
        targets = [IGNORE_INDEX] * len(ids)
        places = range(len(ids))

        def start(token: int) -> int:
            return int(encoded.token_to_chars(token)[0])

        for span in spans:
            first, last = bisect_left(places, span.start, key=start), bisect_left(places, span.end, key=start)
            while last > first and encoded.token_to_chars(last - 1)[1] > span.end:
                last -= 1
            targets[first:last] = ids[first:last]
        return ids, targets

    def unmarked(self, spans: list[Span], silent: Collection[int]) -> list[Span]:
        """Spans without those of messages that are marked not to be trained (``messages.untrained``).

        Raises:
            NoLabels: none is left, and ``delete`` does not drop such rows.
        """
        left = [span for span in spans if span.turn not in silent]
        if spans and not left and self.truncation_strategy != "delete":
            raise NoLabels.marked()
        return left

    def rows(
        self, ids: list[int], targets: list[int], whole: Sequence[tuple[int, int]] = ()
    ) -> InputFeature | list[InputFeature] | None:
        """What ``encode`` returns for training; see ``truncate.to_rows``."""
        rows = truncate.to_rows(ids, targets, self.max_length, self.truncation_strategy, whole)
        self.dropped += not rows
        if self.truncation_strategy == "split":
            return rows
        return rows[0] if rows else None

    def prompt(self, ids: list[int], whole: Sequence[tuple[int, int]] = ()) -> InputFeature | None:
        """What ``encode`` returns for a prompt; see ``truncate.prompt_row``."""
        row = truncate.prompt_row(ids, self.max_length, self.truncation_strategy, whole)
        self.dropped += row is None
        return row

    def encode_text(self, text: str) -> InputFeature | None:
        """One text as an encoder reads it: with the tokenizer's own special tokens, and nothing of a chat or of labels.

        Args:
            text: a longer one is cut at its end (``right``) or its beginning (``left``); special tokens around it stay.

        Returns:
            ``input_ids`` and ``length``; None where ``delete`` drops it.

        Raises:
            TemplateError: no text, or of no token. RowTooLong: strategies ``raise`` and ``split``.
        """
        if not isinstance(text, str):
            raise TemplateError.argument("text", text, "what is embedded is a text")
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        if not ids:
            raise TemplateError.argument("text", text, "it has no token")
        if len(ids) > self.max_length:
            if self.truncation_strategy == "delete":
                self.dropped += 1
                return None
            if self.truncation_strategy not in ("left", "right"):
                raise RowTooLong(len(ids), self.max_length, self.truncation_strategy)
            ids = self._cut(text)
        return {"input_ids": ids, "length": len(ids)}

    def _cut(self, text: str) -> list[int]:
        """The tokenizer knows which of its special tokens go where, so it cuts."""
        side, self.tokenizer.truncation_side = self.tokenizer.truncation_side, self.truncation_strategy
        try:
            ids: list[int] = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        finally:
            self.tokenizer.truncation_side = side
        return ids

    def check(self, trajectory: Trajectory) -> str | None:
        dropped = self.dropped
        try:
            self.encode(trajectory)
        except TemplateError as refusal:
            return str(refusal)
        finally:
            self.dropped = dropped
        return None

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        """Ids to text, without positions of -100 (so labels can be read too). ``kwargs``: of the tokenizer's ``decode``."""
        kept = [int(i) for i in ids if int(i) != IGNORE_INDEX]
        return str(self.tokenizer.decode(kept, **{"clean_up_tokenization_spaces": False, **kwargs}))


def _load(model_id: str | Path, label: str) -> Any:
    folder = hub.resolve(model_id, allow_patterns=TOKENIZER_FILES)
    try:
        from transformers import AutoTokenizer
    except ImportError as cause:
        raise NeedsLibrary(f"template '{label}'", "transformers", "twinkle-core[data]", sys.prefix) from cause
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as cause:
        if hub.holds_adapter(folder):
            raise HoldsAdapter(folder, hub.base_of_adapter(folder)) from cause
        raise TemplateError.tokenizer(model_id, str(cause).splitlines()[0] if str(cause) else repr(cause)) from cause
