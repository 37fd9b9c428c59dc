"""The values that travel between the rooms: messages, rows, model outputs, losses. No third-party import (L0).

Letters used for shapes everywhere in this project:

==  =======================================================================
B   rows of a batch
T   tokens (positions) of a padded or packed row
V   vocabulary
D   hidden size
R   LoRA rank
P   preference pairs
G   members of a group (completions of one prompt, anchor + documents, ...)
==  =======================================================================

Labels are **aligned**: ``labels[t]`` is the token that ``logits[t]`` must predict, and -100 where nothing is trained. The
template shifts, once; nobody else does. So a row may be cut, packed or split over ranks anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch

#: The label of a position that is not trained.
IGNORE_INDEX = -100
#: Fields whose first axis runs over patches, pictures or videos, any number of them a row; named as transformers names them.
MEDIA_FIELDS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


class ToolCall(TypedDict, total=False):
    """One call of a tool, in OpenAI's form: ``{"id", "type": "function", "function": {"name", "arguments"}}``."""

    id: str
    type: str
    function: dict[str, Any]


class Message(TypedDict, total=False):
    """One turn. ``role`` is system, user, assistant, tool (or what the model's chat template knows besides)."""

    role: str
    content: Any  # str, or a list of parts ({"type": "text", ...}, {"type": "image"}) for multimodal templates
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str
    weight: float  # 0: this message of the assistant is not trained; so do ``loss`` and ``train``
    loss: bool
    train: bool


class Trajectory(TypedDict, total=False):
    """A conversation before encoding: what a preprocessor makes of a row of a data set."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    user_data: Any


class InputFeature(TypedDict, total=False):
    """A row after encoding (lists of length T), or a collated batch of rows (tensors ``[B, T]``).

    A packed batch has B = 1, ``attention_mask`` absent, ``position_ids`` that restart at 0 with each row, and ``seq_lens``.
    """

    input_ids: Any
    labels: Any  # aligned; see the module's text
    attention_mask: Any  # 1 real, 0 padding
    position_ids: Any
    length: int  # real tokens of one row
    seq_lens: list[int]  # packed batches only: the lengths of the rows in order; their sum is T
    mm_token_type_ids: Any  # 0 text, 1 image, 2 video
    pixel_values: Any  # these five: any number of entries a row, in a batch those of all rows one after the other
    image_grid_thw: Any
    pixel_values_videos: Any
    video_grid_thw: Any
    second_per_grid_ts: Any
    row_counts: dict[str, list[int]]  # batches only: how many entries of these fields each row has


class ModelOutput(dict):  # type: ignore[type-arg]
    """What an engine hands to losses, metrics and users: a dict whose known keys are attributes too, ``None`` when absent.

    ============  ==========  ======================================================================================
    logits        [B, T, V]   only when asked for
    logps         [B, T]      log p(labels[t]); 0 where the label is -100
    entropies     [B, T]      entropy (nats) of the next-token distribution; 0 where the label is -100
    predictions   [B, T]      argmax of the logits; -100 where the label is -100
    hidden        [B, T, D]   input of the output layer; ``output_layer`` is the module that makes logits of it
    embeddings    [B, D]      pooled, and normalised if the pooling head does
    values        [B, T]      of a value head; read it as ``outputs["values"]``: a dict has a method of that name
    aux_loss      scalar      a router's auxiliary loss
    loss          scalar      mean per item, detached
    num_items     scalar      what ``loss`` was divided by
    ============  ==========  ======================================================================================
    """

    KEYS = ("logits", "logps", "entropies", "predictions", "hidden", "output_layer", "embeddings", "values", "aux_loss",
            "loss", "num_items")  # fmt: skip

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        if key in ModelOutput.KEYS:
            return None
        raise AttributeError(f"ModelOutput has no '{key}'; it has {', '.join(self) or 'nothing'}")

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


@dataclass(slots=True)
class LossOutput:
    """A loss is a sum and what it is to be divided by, never a mean: the division happens once, when a window closes.

    ``sum``: scalar tensor with a graph. ``weight``: how many items (tokens, rows, groups, by the loss's scope) it is the sum
    of; a number or a scalar tensor without a graph. ``metrics``: numbers of the loss's own (clip share, rewards), each given
    as ``(sum, weight)`` so that they can be added over micro-batches and ranks.
    """

    sum: torch.Tensor
    weight: torch.Tensor | float
    metrics: dict[str, tuple[Any, Any]] | None = None
