"""Transformers' own processor of a model: what makes pixels and counts their tokens (L1)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core import hub
from twinkle_core.errors import BadMedia, HoldsAdapter, NeedsLibrary
from twinkle_core.templates.media import Item, Kind, open_image, open_video, pillow
from twinkle_core.types import MEDIA_FIELDS

#: What processors call the tokens that open and close an image; Qwen's have no name in some of them.
_OPENING = ("vision_start_token", "start_image_token")
_CLOSING = ("vision_end_token", "end_image_token")
_QWEN = ("<|vision_start|>", "<|vision_end|>")


@dataclass(frozen=True, slots=True)
class Place:
    """The tokens of one image or video in a text: characters ``start`` to ``end`` of it once the placeholder is replaced;
    ``begin`` and ``stop``: those of the placeholder itself, before."""

    kind: Kind
    begin: int
    stop: int
    start: int
    end: int


def load(folder: Path, name: object) -> Any:
    """The processor of a model's folder. Without torchvision it is put together without its part for videos.

    Raises:
        BadMedia: the model has none. NeedsLibrary: a library that it needs.
    """
    pillow("template 'vision'")
    try:
        import transformers
    except ImportError as cause:
        raise NeedsLibrary("template 'vision'", "transformers", "twinkle-core[vision]", sys.prefix) from cause
    try:
        if has_video():
            auto: Any = transformers.AutoProcessor
            made = auto.from_pretrained(str(folder))
        else:
            made = _without_video(_class_of(folder), folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as cause:
        if hub.holds_adapter(folder):
            raise HoldsAdapter(folder, hub.base_of_adapter(folder)) from cause
        raise BadMedia.no_processor(name, str(cause).splitlines()[0] if str(cause) else repr(cause)) from cause
    if getattr(made, "image_processor", None) is None:
        raise BadMedia.no_processor(name, f"it has {type(made).__name__}, which takes no images.")
    return made


def has_video() -> bool:
    """Whether transformers can process videos here: it needs torchvision for that."""
    from transformers import utils

    return bool(utils.is_torchvision_available())  # type: ignore[attr-defined]


def _class_of(folder: Path) -> type[Any]:
    import transformers
    from transformers.models.auto import processing_auto

    model_type = transformers.AutoConfig.from_pretrained(str(folder)).model_type
    name = processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type)  # type: ignore[attr-defined]
    if name is None:
        raise ValueError(f"transformers knows no processor for models of type '{model_type}'.")
    return getattr(transformers, name)  # type: ignore[no-any-return]


def without_video(cls: type[Any]) -> type[Any]:
    """A processor's class that takes None for its part for videos. Transformers asks for the type of each part, and of this
    one it has none without torchvision."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else cls.check_argument_for_proper_class(self, name, argument)

    def reduced(self: Any) -> Any:  # pickled by the class that a module holds
        return _unpickled, (cls, self.__dict__)

    own = {"check_argument_for_proper_class": check, "__reduce__": reduced, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _unpickled(cls: type[Any], state: Mapping[str, Any]) -> Any:
    made = object.__new__(without_video(cls))
    made.__dict__.update(state)
    return made


def _without_video(cls: type[Any], folder: Path) -> Any:
    import transformers

    told, _ = cls.get_processor_dict(str(folder))
    images: Any = transformers.AutoImageProcessor
    parts = {
        "image_processor": images.from_pretrained(str(folder)),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(str(folder)),
    }
    wanted = cls.get_attributes()
    return without_video(cls).from_args_and_dict([parts.get(name) for name in wanted], told)


def save(processor: Any, folder: str) -> None:
    """Write what ``load`` and transformers read. A processor's own ``save_pretrained`` can't leave a part out."""
    parts = (getattr(processor, name, None) for name in ("tokenizer", "image_processor", "video_processor"))
    for part in parts:
        if part is not None:
            part.save_pretrained(folder)
    told: dict[str, Any] = {"processor_class": type(processor).__name__}
    for name in inspect.signature(type(processor).__init__).parameters:
        if isinstance(value := getattr(processor, name, None), (int, float, bool)):
            told[name] = value
    Path(folder, "processor_config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    template = chat_template_of(processor)
    if template is not None:
        Path(folder, "chat_template.jinja").write_text(template, encoding="utf-8")


def chat_template_of(processor: Any) -> str | None:
    """A processor's own chat template, which shows images where its tokenizer's may not."""
    template = getattr(processor, "chat_template", None)
    return template if isinstance(template, str) else None


class Pixels:
    """Asks a processor for the pixels of images and videos, and for the texts that stand for them.

    Args:
        processor: transformers' processor of the model.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        tokenizer = processor.tokenizer
        self.tokens: dict[Kind, str] = {
            kind: token for kind in ("image", "video") if (token := getattr(processor, f"{kind}_token", None)) is not None
        }
        vocabulary = tokenizer.get_vocab()

        def ids(attributes: Sequence[str], *more: str) -> frozenset[int]:
            words = [*(getattr(processor, name, None) for name in attributes), *more]
            return frozenset(vocabulary[word] for word in words if word in vocabulary)

        self.opening, self.closing = ids(_OPENING, _QWEN[0]), ids(_CLOSING, _QWEN[1])
        numbered = (getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video"))
        self.padding = frozenset(number for number in numbered if number is not None)  # one a patch
        self.ids = self.padding | self.opening | self.closing | ids((), *self.tokens.values())  # never trained
        self.typed = bool(getattr(processor, "return_mm_token_type_ids", False))

    def token_types(self, ids: Sequence[int]) -> list[int]:
        """0 text, 1 image, 2 video, for each token."""
        return self.processor.create_mm_token_type_ids([list(ids)])[0]  # type: ignore[no-any-return]

    def read(self, text: str, items: Sequence[Item]) -> tuple[str, list[Place], dict[str, Any]]:
        """A rendered conversation with its images and videos.

        Returns:
            The text with one token for each patch of a picture; where these are; the fields of the row that hold pixels.

        Raises:
            BadMedia: an item can't be used, or the text has other places than there are items. NeedsLibrary
        """
        for kind, token in self.tokens.items():
            given = sum(item.kind == kind for item in items)
            if text.count(token) != given:
                raise BadMedia.shown_otherwise(kind, text.count(token), given)
        if not items:
            return text, [], {}
        self._check_order(text, items)
        asked: dict[str, Any] = {}
        images = [open_image(item.source, item.where) for item in items if item.kind == "image"]
        if images:
            asked["images"] = images
        videos = [item for item in items if item.kind == "video"]
        timeless = None
        if videos:
            asked |= self._videos(videos)
            clips = zip(videos, asked["video_metadata"], strict=True)
            timeless = next((item.where for item, known in clips if known.fps is None), None)  # the processor may fill it in
        if images and videos:  # some join the two, which must be of one kind then
            asked["images_kwargs"] = {"return_tensors": "pt"}
        try:
            # the text's own tokens are made by the template, which needs the places of its characters
            made = self.processor(
                text=[text], return_text_replacement_offsets=True, text_kwargs={"add_special_tokens": False}, **asked
            )
        except (ValueError, TypeError, ZeroDivisionError) as cause:
            raise BadMedia.processor(cause) from cause
        if timeless is not None and ("second_per_grid_ts" in made or hasattr(self.processor, "_calculate_timestamps")):
            raise BadMedia.no_times(timeless)
        swaps = made.get("text_replacement_offsets")
        if swaps is None or len(swaps[0]) != len(items):
            raise BadMedia.no_places(type(self.processor).__name__)
        places, whole, at = [], [], 0
        for swap in swaps[0]:
            (begin, stop), (start, end) = swap["span"], swap["new_span"]
            places.append(Place(swap["type"], begin, stop, start, end))
            whole += [text[at:begin], swap["replacement"]]
            at = stop
        fields = {name: _array(made[name]) for name in MEDIA_FIELDS if made.get(name) is not None}
        return "".join([*whole, text[at:]]), places, fields

    @staticmethod
    def part(fields: Mapping[str, Any], kinds: Sequence[Kind], sizes: Sequence[int], stays: Sequence[bool]) -> dict[str, Any]:
        """The entries of the images and videos that stay.

        Args:
            fields: of all of them.
            kinds, sizes: what each is, and how many tokens it has; a field's entries are the same number for each token, or
                one for each item.
        """
        import numpy as np

        mixed = "pixel_values_videos" not in fields  # some put the frames of videos among the images
        left: dict[str, Any] = {}
        for name, value in fields.items():
            kind = "video" if "video" in name or name == "second_per_grid_ts" else "image"
            mine = [k for k, other in enumerate(kinds) if other == kind or (mixed and name == "pixel_values")]
            total = sum(sizes[k] for k in mine)
            single = len(value) == len(mine) and not name.startswith("pixel")
            counts = [1 if single else len(value) * sizes[k] // total for k in mine]
            part = value[np.repeat([stays[k] for k in mine], counts)]
            if len(part):
                left[name] = part
        return left

    def _check_order(self, text: str, items: Sequence[Item]) -> None:
        """The n-th place gets the n-th item: a template that writes images before texts could change their order."""
        marks = sorted((at, kind) for kind, token in self.tokens.items() for at in _all(text, token))
        if [kind for _, kind in marks] != [item.kind for item in items]:
            kind = next(item.kind for (_, mark), item in zip(marks, items, strict=True) if mark != item.kind)
            raise BadMedia.processor(f"the chat template moves a {kind} to another place")

    def _videos(self, items: Sequence[Item]) -> dict[str, Any]:
        part = getattr(self.processor, "video_processor", None)
        if part is None:
            raise NeedsLibrary("a conversation with videos", "torchvision", "twinkle-core[video]", sys.prefix)
        sample = part.sample_frames if getattr(part, "do_sample_frames", False) else None
        opened = [open_video(item.source, item.where, item.fps, sample) for item in items]
        return {
            "videos": [frames for frames, _ in opened],
            "video_metadata": [metadata for _, metadata in opened],
            "videos_kwargs": {"do_sample_frames": False},
        }


def _all(text: str, token: str) -> list[int]:
    found, at = [], text.find(token)
    while at >= 0:
        found.append(at)
        at = text.find(token, at + len(token))
    return found


def _array(value: Any) -> Any:
    """Numbers of a processor as an array of numpy's, whatever it makes them as."""
    import numpy as np

    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array
