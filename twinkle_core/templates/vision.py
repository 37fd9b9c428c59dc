"""The template for models that see images and videos (L1): Qwen2.5-VL, Qwen3-VL, Qwen3.5, InternVL and their like."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from twinkle_core import hub
from twinkle_core.errors import BadMedia
from twinkle_core.templates import multimodal, truncate
from twinkle_core.templates.base import TOKENIZER_FILES
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.templates.labels import Span
from twinkle_core.templates.media import Item, take
from twinkle_core.templates.messages import refuse_media
from twinkle_core.templates.multimodal import Pixels, Place
from twinkle_core.types import IGNORE_INDEX, InputFeature, Trajectory


class VisionTemplate(ChatTemplate):
    """Encodes conversations with images and videos, by the model's own chat template and processor.

    Where they stand: a part ``{"type": "image", "image": SOURCE}`` (or ``video``; also ``path``, ``url``, ``bytes``,
    ``image_url`` as in OpenAI's form) in a message's list of parts; or ``<image>`` and ``<video>`` in a message's text, for
    the row's ``images`` and ``videos`` in this order. A source is a path, the bytes of a file, a ``data:`` address or a PIL
    picture; of a video a path, bytes, an array ``[T, H, W, 3]`` or a list of pictures (``fps`` beside it: frames a second).

    The rendering has one token for each; it is replaced by as many as the processor counts patches, before anything is
    tokenised. Labels are placed as in ``ChatTemplate``; no token of an image or video is ever trained, nor the times of a
    video's frames, whoever's message they stand in.

    Rows have, besides ``input_ids``, ``labels`` and ``length``, where there are images or videos: ``pixel_values``,
    ``image_grid_thw`` and for videos ``pixel_values_videos``, ``video_grid_thw``, ``second_per_grid_ts``, as the model's
    processor makes them (arrays whose first axis runs over patches, images or videos, not over rows); and
    ``mm_token_type_ids`` (0 text, 1 image, 2 video a token) for models that want it.

    A longer row is never cut inside an image or video: ``left`` and ``right`` drop one that the cut would go through, and all
    beyond it, with their pixels; ``split`` refuses a row that has any.

    Args:
        model_id: where the model's files are (``hf://``, ``ms://``, a local folder), or a processor of transformers'.
        placeholders: whether ``<image>`` and ``<video>`` in a message's text stand for images and videos. In the text of a
            part they are always text.
        use_chat_template, max_length, truncation_strategy, default_system, enable_thinking, train_on, chat_template,
            tool_format: see ``ChatTemplate``. Plain text has no images.

    Raises:
        BadMedia: the model has no processor of images. NeedsLibrary: Pillow or transformers. And what ``ChatTemplate`` raises.
    """

    label = "vision"

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
        placeholders: bool = True,
    ) -> None:
        truncate.check_strategy(truncation_strategy)
        known = isinstance(model_id, (str, Path))
        folder = hub.resolve(model_id, allow_patterns=TOKENIZER_FILES) if known else None
        self.processor: Any = multimodal.load(Path(folder), model_id) if folder is not None else model_id
        if getattr(self.processor, "tokenizer", None) is None or getattr(self.processor, "image_processor", None) is None:
            raise BadMedia.no_processor(type(model_id).__name__, "it is no processor of transformers' with images.")
        self._pixels = Pixels(self.processor)
        self.placeholders = placeholders
        super().__init__(
            self.processor.tokenizer,
            use_chat_template,
            max_length,
            truncation_strategy,
            default_system,
            enable_thinking,
            train_on,
            chat_template or multimodal.chat_template_of(self.processor),
            tool_format,
        )
        if known:
            self.name = str(model_id)

    def encode(
        self, trajectory: Trajectory, *, add_generation_prompt: bool = False
    ) -> InputFeature | list[InputFeature] | None:
        """One conversation to one row; see the class, and ``ChatTemplate.encode`` for arguments and errors.

        Raises:
            BadMedia: an image or video that can't be read, or more or fewer places than there are of them.
        """
        told, items = self._taken(trajectory)
        if not self.use_chat_template:
            return self._typed(super().encode(told, add_generation_prompt=add_generation_prompt))  # type: ignore[arg-type]
        text, spans = self._written(told, add_generation_prompt)
        text, places, fields = self._pixels.read(text, items)
        encoded = self.encoded(text)
        ids, targets = self.labelled(encoded, _moved(spans, places))
        targets = [IGNORE_INDEX if token in self._pixels.ids else target for token, target in zip(ids, targets, strict=True)]
        whole = [self._tokens_of(place, encoded) for place in places]
        if places and self.truncation_strategy == "split" and not add_generation_prompt and len(ids) > self.max_length:
            raise BadMedia.no_split(len(ids), self.max_length)
        made = self.prompt(ids, whole) if add_generation_prompt else self.rows(ids, targets, whole)
        for row in _listed(made):
            row.update(self._kept(ids, places, whole, fields))  # type: ignore[typeddict-item]
        return self._typed(made)

    def render(self, trajectory: Trajectory, *, add_generation_prompt: bool = False) -> str:
        """The text that ``encode`` tokenises, with a token for each patch of an image."""
        told, items = self._taken(trajectory)
        text = super().render(told, add_generation_prompt=add_generation_prompt)  # type: ignore[arg-type]
        return self._pixels.read(text, items)[0] if self.use_chat_template else text

    def _taken(self, trajectory: Mapping[str, Any]) -> tuple[dict[str, Any], list[Item]]:
        """The conversation without its images and videos, and these."""
        refuse_media(trajectory, ("audios",))
        told, items = take(trajectory, self.placeholders and self.use_chat_template)
        if items and not self.use_chat_template:
            raise BadMedia.here(items[0].where, "plain text (use_chat_template=False) has no images or videos")
        for turn, message in enumerate(told.get("messages") or () if self.use_chat_template else ()):
            word = next((w for text in _texts(message) for w in self._pixels.tokens.values() if w in text), None)
            if word is not None:
                raise BadMedia.token(turn, message.get("role"), word)
        return told, items

    def _tokens_of(self, place: Place, encoded: Any) -> tuple[int, int]:
        """The range of a place's tokens, with the tokens that open and close it."""
        ids = encoded.ids

        def start(token: int) -> int:
            return int(encoded.token_to_chars(token)[0])

        first, last = (bisect_left(range(len(ids)), at, key=start) for at in (place.start, place.end))
        if first > 0 and ids[first - 1] in self._pixels.opening:
            first -= 1
        if last < len(ids) and ids[last] in self._pixels.closing:
            last += 1
        return first, last

    def _kept(
        self, ids: Sequence[int], places: Sequence[Place], whole: Sequence[tuple[int, int]], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The fields of the images and videos that truncation left in the row."""
        keep = truncate.kept(len(ids), self.max_length, self.truncation_strategy, whole)
        stays = [keep.start <= first and last <= keep.stop for first, last in whole]
        if all(stays):
            return dict(fields)
        sizes = [sum(token in self._pixels.padding for token in ids[first:last]) for first, last in whole]
        return self._pixels.part(fields, [place.kind for place in places], sizes, stays)

    def _typed(self, made: InputFeature | list[InputFeature] | None) -> InputFeature | list[InputFeature] | None:
        if self._pixels.typed:
            for row in _listed(made):
                row["mm_token_type_ids"] = self._pixels.token_types(row["input_ids"])
        return made

    def save_pretrained(self, folder: str) -> None:
        """Write tokenizer and processor as transformers reads them, beside a model's weights."""
        multimodal.save(self.processor, folder)


def _listed(made: InputFeature | list[InputFeature] | None) -> list[InputFeature]:
    return [] if made is None else made if isinstance(made, list) else [made]


def _moved(spans: Sequence[Span], places: Sequence[Place]) -> list[Span]:
    """Spans of the text before its placeholders were replaced as spans of the text after it, without the replacements."""

    def after(at: int) -> int:
        return at + sum((p.end - p.start) - (p.stop - p.begin) for p in places if p.stop <= at)

    moved: list[Span] = []
    for span in spans:
        start, end = after(span.start), after(span.end)
        for place in places:
            if start <= place.start and place.end <= end:
                moved.append(Span(span.turn, start, place.start))
                start = place.end
        moved.append(Span(span.turn, start, end))
    return moved


def _texts(message: Any) -> list[str]:
    """All that somebody wrote in a message, tool calls as text too."""
    if not isinstance(message, Mapping):
        return []
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts += [message.get("reasoning_content"), repr(message.get("tool_calls") or "")]
    return [text for text in texts if isinstance(text, str)]
