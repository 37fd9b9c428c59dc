"""Images and videos of a conversation (L1): where they are named, and how they are opened."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from twinkle_core.errors import BadMedia, NeedsLibrary

Kind = Literal["image", "video"]

#: kind -> what stands for one in a message's text, and the row's key of them
PLACEHOLDERS: dict[Kind, tuple[str, str]] = {"image": ("<image>", "images"), "video": ("<video>", "videos")}
#: types of parts, as they are written in data sets -> kind
_TYPES: dict[str, Kind] = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
#: keys of a part that may hold its source, most telling first
_SOURCES = ("path", "url", "bytes", "frames")


@dataclass(frozen=True, slots=True)
class Item:
    """One image or video of a conversation. ``where``: what messages call it; ``fps``: of a video's frames, if it is told."""

    kind: Kind
    source: Any
    where: str
    fps: float | None = None


@dataclass(slots=True)
class _Row:
    """The images and videos that a row has beside its messages, and how many of them were asked for."""

    given: dict[Kind, list[Any]]
    asked: dict[Kind, int] = field(default_factory=lambda: {"image": 0, "video": 0})

    def next(self, kind: Kind) -> tuple[Any, str]:
        number = self.asked[kind]
        self.asked[kind] += 1
        here = self.given[kind]
        return (here[number] if number < len(here) else None), f"{PLACEHOLDERS[kind][1]}[{number}]"


def take(row: Mapping[str, Any], placeholders: bool) -> tuple[dict[str, Any], list[Item]]:
    """A conversation whose parts say only where images and videos stand, and these in their order.

    Args:
        row: ``messages``, and ``images`` and ``videos`` for ``<image>`` and ``<video>`` in texts and for parts without a
            source. It is not changed.
        placeholders: whether ``<image>`` and ``<video>`` in a message's text stand for one. In a part's text they never do.

    Raises:
        BadMedia: more or fewer places than images or videos, or a part that names none.
    """
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return dict(row) if isinstance(row, Mapping) else row, []
    beside = _Row({kind: _listed(row.get(key), key) for kind, (_, key) in PLACEHOLDERS.items()})
    items: list[Item] = []
    told = [_message(turn, message, beside, placeholders, items) for turn, message in enumerate(messages)]
    for kind, (mark, key) in PLACEHOLDERS.items():
        if beside.asked[kind] != len(beside.given[kind]):
            raise BadMedia.count(kind, key, mark, beside.asked[kind], len(beside.given[kind]))
    kept = {name: value for name, value in row.items() if name not in ("images", "videos")}
    return {**kept, "messages": told}, items


def _listed(value: Any, key: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise BadMedia.beside(key, value)
    return list(value)


def _message(turn: int, message: Any, beside: _Row, placeholders: bool, items: list[Item]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        parts = list(_split(content)) if placeholders else []
        if len(parts) < 2 and not any(part["type"] != "text" for part in parts):
            return message
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = list(content)
    else:
        return message
    new: list[Any] = []
    for part in parts:
        kind = _TYPES.get(part.get("type", "")) if isinstance(part, Mapping) else None
        if kind is None:  # typed files give each part the keys of all, and a template may ask whether 'image' is one of them
            new.append({k: v for k, v in part.items() if v is not None or k == "text"} if isinstance(part, Mapping) else part)
            continue
        items.append(_item(turn, kind, part, beside))
        new.append({"type": kind})
    if message.get("role") == "assistant" and len(new) and not any(_says(part) for part in new):
        raise BadMedia.unsaid(turn)
    return {**message, "content": new}


def _says(part: Any) -> bool:
    return not isinstance(part, Mapping) or part.get("type") not in PLACEHOLDERS


def _split(text: str) -> Iterator[dict[str, Any]]:
    """A text cut at its placeholders; their white space stays."""
    rest = text
    while rest:
        found = [(at, kind, mark) for kind, (mark, _) in PLACEHOLDERS.items() if (at := rest.find(mark)) >= 0]
        if not found:
            yield {"type": "text", "text": rest}
            return
        at, kind, mark = min(found)
        if at:
            yield {"type": "text", "text": rest[:at]}
        yield {"type": kind}
        rest = rest[at + len(mark) :]


def _item(turn: int, kind: Kind, part: Mapping[str, Any], beside: _Row) -> Item:
    where = f"message {turn}, {kind}"
    source = next((part[key] for key in (kind, f"{kind}_url", *_SOURCES) if part.get(key) is not None), None)
    if isinstance(source, Mapping) and isinstance(source.get("url"), str):  # {"type": "image_url", "image_url": {"url": …}}
        source = source["url"]
    fps = part.get("fps")
    if source is None:
        source, name = beside.next(kind)
        where = f"message {turn}, {name}"
    if isinstance(source, Mapping) and kind == "video" and "frames" in source:
        source, fps = source["frames"], source.get("fps", fps)
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, (int, float)) or not fps > 0):
        raise BadMedia.here(where, f"fps={fps!r} is not a number above 0")
    return Item(kind, source, where, None if fps is None else float(fps))


# ---------------------------------------------------------------------------------------------------- opening


def pillow(what: str) -> Any:
    """The library of images.

    Raises:
        NeedsLibrary: it is not installed.
    """
    try:
        import PIL.Image
    except ImportError as cause:
        raise NeedsLibrary(what, "PIL", "twinkle-core[vision]", sys.prefix) from cause
    return PIL.Image


def open_image(source: Any, where: str) -> Any:
    """A picture in RGB, upright (as its camera's note says), from a path, the bytes of a file, ``{"bytes", "path"}`` as
    Hugging Face's data sets have them, a ``data:`` address, or a picture of Pillow's.

    Raises:
        BadMedia: there is none, it can't be read, or it is something else. NeedsLibrary: Pillow.
    """
    images = pillow("a template with images")
    from PIL import ImageOps, UnidentifiedImageError

    source = _inner(source)
    try:
        if isinstance(source, images.Image):
            picture = source
        elif isinstance(source, (bytes, bytearray, memoryview)):
            picture = images.open(io.BytesIO(bytes(source)))
        elif isinstance(source, (str, Path)):
            picture = images.open(local(source, where))
        else:
            raise BadMedia.kind("image", where, source)
        return ImageOps.exif_transpose(picture).convert("RGB")
    except (UnidentifiedImageError, images.DecompressionBombError, OSError, SyntaxError, ValueError, EOFError) as cause:
        if isinstance(cause, BadMedia):
            raise
        raise BadMedia.unopened("image", where, source, cause) from cause


def _inner(source: Any) -> Any:
    """What Hugging Face's ``Image`` and ``Video`` columns hold undecoded."""
    if isinstance(source, Mapping) and ("bytes" in source or "path" in source):
        return source["bytes"] if source.get("bytes") is not None else source.get("path")
    return source


def local(source: str | Path, where: str) -> Any:
    """The path of a file that is there, or the bytes of a ``data:`` address as a file.

    Raises:
        BadMedia: it is not there, or somewhere else: nothing is fetched from a network while rows are encoded.
    """
    text = os.fspath(source)
    if text.startswith("data:"):
        try:
            return io.BytesIO(base64.b64decode(text.partition(",")[2], validate=True))
        except (binascii.Error, ValueError) as cause:
            raise BadMedia.here(where, f"{text[:40]!r}… is not base64 ({cause})") from cause
    scheme = urlparse(text).scheme.lower()
    if scheme == "file":
        text = unquote(urlparse(text).path)
    elif scheme in ("http", "https", "ftp", "s3", "gs", "hf", "ms", "oss"):
        raise BadMedia.remote(where, text)
    path = Path(text).expanduser()
    if not path.is_file():
        raise BadMedia.missing(where, text)
    return path


def open_video(source: Any, where: str, fps: float | None, sample: Any) -> tuple[Any, Any]:
    """Frames of a video, ``[T, H, W, 3]`` of whole numbers to 255, and what is known of their times (``VideoMetadata``).

    Args:
        source: a list of frames, each as for ``open_image``, an array ``[T, H, W, 3]``, or a file's path or bytes. Frames are
            taken as they are; of a file those that ``sample`` chooses.
        fps: how many of the frames are shown in a second; None: not known.
        sample: metadata of a file -> the indices of its frames; None: all.

    Raises:
        BadMedia: there is none, it can't be read, or frames of several sizes. NeedsLibrary: a decoder, for a file.
    """
    import numpy as np
    from transformers.video_utils import VideoMetadata

    source = _inner(source)
    if isinstance(source, (str, Path, bytes, bytearray, memoryview)):
        return _decoded(source, where, sample)
    if isinstance(source, np.ndarray):
        frames = source
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
            raise BadMedia.here(where, f"an array {list(frames.shape)} of {frames.dtype} is no frames [T, H, W, 3] of uint8")
    elif isinstance(source, (list, tuple)) and source:
        pictures = [np.asarray(open_image(frame, f"{where}, frame {k}")) for k, frame in enumerate(source)]
        odd = next((k for k, picture in enumerate(pictures) if picture.shape != pictures[0].shape), None)
        if odd is not None:
            size, first = (f"{p.shape[1]}x{p.shape[0]}" for p in (pictures[odd], pictures[0]))
            raise BadMedia.here(where, f"frame {odd} is {size}, frame 0 is {first}; frames of a video have one size")
        frames = np.stack(pictures)
    else:
        raise BadMedia.kind("video", where, source)
    count = len(frames)
    duration = None if fps is None else count / fps
    return frames, VideoMetadata(total_num_frames=count, fps=fps, duration=duration, frames_indices=list(range(count)))


#: libraries that read files of videos -> what transformers calls them
_DECODERS = {"av": "pyav", "torchcodec": "torchcodec", "decord": "decord", "cv2": "opencv"}


def _decoded(source: Any, where: str, sample: Any) -> tuple[Any, Any]:
    from transformers import video_utils

    read: Any = video_utils.load_video
    backend = next((name for library, name in _DECODERS.items() if find_spec(library)), None)
    if backend is None:
        raise NeedsLibrary("a video given as a file", "av", "twinkle-core[video]", sys.prefix)
    place = io.BytesIO(bytes(source)) if isinstance(source, (bytes, bytearray, memoryview)) else local(source, where)
    with contextlib.ExitStack() as stack:
        if isinstance(place, io.BytesIO):  # not every decoder reads from memory
            file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".video"))
            file.write(place.getvalue())
            file.flush()
            place = Path(file.name)
        try:
            choose = (lambda metadata, **_: sample(metadata=metadata)) if sample is not None else None
            frames, metadata = read(str(place), backend=backend, sample_indices_fn=choose)
        except (OSError, ValueError, RuntimeError, TypeError, LookupError, ImportError) as cause:
            raise BadMedia.unopened("video", where, source, cause) from cause
    return frames, metadata
