"""What a collated batch must be for a transformers model: told on the CPU, before a kernel reads beside a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.processor import Processor
from twinkle_core.errors import BadInputs, BadRow, PackingLeaks
from twinkle_core.ops.token_logps import check_labels
from twinkle_core.processors.input import AroundProcessor
from twinkle_core.types import IGNORE_INDEX, InputFeature
from twinkle_transformers.tree import text_config, weight_of
from twinkle_transformers.vision import fit_media


class Fitted(AroundProcessor):
    """A processor, and something done to each batch that it makes.

    Args:
        processor: makes the batches.
        fit: gets a batch and the number of its first row.
    """

    def __init__(self, processor: Processor, fit: Callable[[InputFeature, int], InputFeature]) -> None:
        super().__init__(processor)
        self.fit, self.rows = fit, 0

    def collate(self, rows: Sequence[InputFeature]) -> InputFeature:
        first, self.rows = self.rows, self.rows + len(rows)
        return self.fit(self.processor.collate(rows), first)


def vocabulary_of(module: Any) -> int | None:
    """How many token ids the model can look up; None where it looks none up."""
    try:
        weight = weight_of(module.get_input_embeddings())
    except (AttributeError, NotImplementedError):  # a model may have no such thing
        return None
    return int(weight.shape[0]) if weight.dim() == 2 else None


def classes_of(module: Any) -> int | None:
    """How many labels the model tells apart: rows of its output layer, or what its classification head says."""
    try:
        return int(weight_of(module.get_output_embeddings()).shape[0])
    except (AttributeError, NotImplementedError):
        return getattr(module, "num_labels", None)


def reads_tokens(loss: Loss | None) -> bool:
    """Whether a loss takes labels for the ids of tokens or classes."""
    needs = loss.needs if loss is not None else frozenset()
    return bool(needs & {"logps", "entropies", "predictions", "hidden"}) or needs >= {"logits", "labels"}


def fit(module: Any, batch: Mapping[str, Any], loss: Loss | None, first: int = 0) -> InputFeature:
    """A batch as this model takes it: padding holds the model's own padding token, a packed sequence has no mask, positions
    are those of the images in it.

    Values are looked at where they are on the CPU alone: elsewhere one would wait for the device.

    Args:
        first: number of the first row, for error texts.

    Raises:
        BadInputs, BadLabels, BadRow, PackingLeaks
    """
    fitted: dict[str, Any] = dict(batch)
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool or (ids.shape[0] and not ids.shape[1]):
            raise BadInputs(f"'input_ids' is {list(ids.shape)} of {ids.dtype}; it must be whole numbers [B, T], T at least 1")
        size = vocabulary_of(module)
        fitted["input_ids"] = ids = _padded(module, ids, batch.get("attention_mask"), size)
        _within(batch, "input_ids", ids, size, first, f"a token id of this model is 0 to {(size or 0) - 1}")
        if labels is not None and reads_tokens(loss):
            per_row = isinstance(labels, torch.Tensor) and labels.shape == ids.shape[:1]
            check_labels(labels, labels.shape if per_row else ids.shape)
            count = classes_of(module)
            known = labels.masked_fill(labels == IGNORE_INDEX, 0) if _readable(labels) else labels
            way = f"a label of this model is 0 to {(count or 0) - 1}, or {IGNORE_INDEX} where nothing is trained"
            _within(batch, "labels", known, count, first, way)
    if packs(fitted):
        _without_mask(module, fitted)
        _with_positions(module, fitted)
    fit_media(module, fitted, first)
    return fitted  # type: ignore[return-value]


def packs(batch: Mapping[str, Any]) -> bool:
    """Whether several rows share one sequence: it is said, or positions begin anew between two real tokens."""
    if len(batch.get("seq_lens") or ()) > 1:
        return True
    positions: Any = batch.get("position_ids")
    mask: Any = batch.get("attention_mask")
    if not _readable(positions) or positions.dim() != 2 or (mask is not None and (not _readable(mask) or mask.dim() != 2)):
        return False
    again = positions[:, 1:] == 0
    if mask is not None and mask.shape[1] == positions.shape[1]:
        again = again & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(again.any())


def _readable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _without_mask(module: Any, batch: dict[str, Any]) -> None:
    """Kernels that keep rows apart by their positions do so only without a mask, and in one sequence."""
    name, ids = type(module).__name__, batch.get("input_ids")
    mask: Any = batch.get("attention_mask")
    if isinstance(ids, torch.Tensor) and ids.shape[0] > 1:
        why = f"positions begin anew inside the rows of a batch of {ids.shape[0]}; a packed batch is [1, T]"
        raise PackingLeaks(name, why, cure=True)
    if _readable(mask) and mask.dim() == 2:
        if not bool(mask.all()):
            why = "positions begin anew between tokens of a padded row, where a mask hides that from kernels"
            raise PackingLeaks(name, why, cure=True)
        del batch["attention_mask"]


def _with_positions(module: Any, batch: dict[str, Any]) -> None:
    """Positions that begin anew with each row, which is how kernels tell rows apart that are not computed one by one."""
    lengths, positions, ids = batch.get("seq_lens") or (), batch.get("position_ids"), batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or len(lengths) < 2 or sum(lengths) != ids.shape[1]:
        return
    if positions is None:
        batch["position_ids"] = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
    elif _readable(positions) and positions.dim() == 2 and getattr(text_config(module), "_attn_implementation", "") != "sdpa":
        starts = torch.tensor(lengths).cumsum(0)[:-1]
        if bool((positions[0, starts] == positions[0, starts - 1] + 1).any()):
            raise PackingLeaks(type(module).__name__, "positions go on from one packed row to the next", cure=True)


def _padded(module: Any, ids: torch.Tensor, mask: Any, size: int | None) -> torch.Tensor:
    """Padding as the model's own padding token: models that pool look for it, whatever the mask says."""
    pad = getattr(text_config(module), "pad_token_id", None)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not isinstance(pad, int) or not 0 <= pad < (size or 0):
        return ids
    if _readable(mask) and bool(mask.all()):
        return ids
    return ids.masked_fill((mask == 0).to(ids.device), pad)


def _within(batch: Mapping[str, Any], field: str, values: torch.Tensor, size: int | None, first: int, way: str) -> None:
    if size is None or not _readable(values) or values.numel() == 0:
        return
    low, high = values.aminmax()
    if int(low) >= 0 and int(high) < size:
        return
    where = ((values < 0) | (values >= size)).nonzero()[0].tolist()
    row, column = where[0], where[1] if len(where) > 1 else 0
    for length in batch.get("seq_lens") or ():
        if column < length:
            break
        row, column = row + 1, column - length
    raise BadRow.field(first + row, field, f"holds {int(values[tuple(where)])} at position {column}; {way}")
