"""Rows to a batch: padded, or packed into one sequence without padding (L2).

Padding is found by position, never by a token's id: a padding id that is also the end token's must not hide the end token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from twinkle_core.contracts.processor import Processor
from twinkle_core.errors import BadRow
from twinkle_core.types import IGNORE_INDEX, MEDIA_FIELDS, InputFeature

_MAX_ID = 2**31 - 1  # what embedding kernels index with
_TOKEN_FIELDS = frozenset(("attention_mask", "position_ids"))  # one value a token, whatever their values
_NOT_CARRIED = frozenset(("length", "seq_lens", "row_counts", *MEDIA_FIELDS))  # said by the mask, or made anew


class AroundProcessor(Processor):
    """A processor that changes what another one makes, and is what that one is.

    Args:
        processor: makes the batches.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor, self.padding_side = processor, processor.padding_side

    @property
    def packs(self) -> bool:
        return self.processor.packs


class InputProcessor(Processor):
    """Collates encoded rows.

    Fields of a batch: ``input_ids`` and ``position_ids`` ``[B, T]`` int64; ``labels`` ``[B, T]`` (aligned, -100 in padding)
    where the rows have them; ``attention_mask`` ``[B, T]`` int64, 1 real and 0 padding (padded batches only). Of the rows'
    other fields, those with one number for each token are padded with 0, numbers and arrays of one shape are stacked to ``[B,
    …]``, and anything else becomes a list. Pixels, grids and times of images and videos (``MEDIA_FIELDS``), which a row may be
    without, are put one after the other over all rows, and ``row_counts`` says how many entries each row has. Labels that
    are one number a row, or floats (targets of a regression), are stacked, not padded.

    Args:
        padding_free: pack the rows into one sequence ``[1, T]`` with position ids that restart at 0 and ``seq_lens``, without
            an attention mask. The model's kernels must keep the rows apart: an all-ones mask would not.
        padding_side: ``right`` or ``left``; every per-token field is padded on the same side.
        pad_to_multiple_of: round T up to a multiple of it (padded batches only).
        pad_id: the token put into padding. It is masked out, so any id of the vocabulary will do.
    """

    def __init__(
        self,
        padding_free: bool = False,
        padding_side: Literal["right", "left"] = "right",
        pad_to_multiple_of: int | None = None,
        pad_id: int = 0,
    ) -> None:
        if not isinstance(padding_free, bool):
            raise BadRow.argument("padding_free", padding_free, "True or False")
        if padding_side not in ("right", "left"):
            raise BadRow.argument("padding_side", padding_side, "'right' or 'left'")
        if pad_to_multiple_of is not None and (not _is_whole(pad_to_multiple_of) or pad_to_multiple_of < 1):
            raise BadRow.argument("pad_to_multiple_of", pad_to_multiple_of, "a whole number from 1 up, or None")
        if padding_free and pad_to_multiple_of not in (None, 1):
            way = "padding_free=True pads nothing; leave one of them out"
            raise BadRow.argument("pad_to_multiple_of", pad_to_multiple_of, way)
        if not _is_whole(pad_id) or not 0 <= pad_id <= _MAX_ID:
            raise BadRow.argument("pad_id", pad_id, "a token id, a whole number from 0 up")
        self.padding_free = padding_free
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_id = pad_id

    @property
    def packs(self) -> bool:
        return self.padding_free

    def collate(self, rows: Sequence[InputFeature]) -> InputFeature:
        """Pad or pack ``rows``; see the class for the fields, and ``Processor.collate`` for the errors."""
        if not rows:
            raise BadRow.no_rows()
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise BadRow.kind(index, row)
        ids = [_ids(index, row) for index, row in enumerate(rows)]
        lengths = [int(x.numel()) for x in ids]
        pieces = [_pieces(index, row, n) for index, (row, n) in enumerate(zip(rows, lengths, strict=True))]
        names = _names(rows)
        tokens: dict[str, list[torch.Tensor]] = {"input_ids": ids}
        whole: dict[str, Any] = {}
        for name in names:
            _sort_field(name, rows, lengths, tokens, whole)
        if "position_ids" not in tokens:
            tokens["position_ids"] = [torch.cat([torch.arange(n) for n in piece]) for piece in pieces]
        if self.padding_free:
            _check_packed_labels(whole.get("labels"))
            batch = _pack(tokens, [n for piece in pieces for n in piece])
        else:
            packed = next((i for i, piece in enumerate(pieces) if len(piece) > 1), None)
            if packed is not None:
                raise BadRow.field(packed, "seq_lens", "says that the row is packed; use InputProcessor(padding_free=True)")
            batch = self._pad(tokens, lengths)
        batch.update(whole)
        batch.update(join_media(rows, [len(piece) for piece in pieces] if self.padding_free else None))
        return batch  # type: ignore[return-value]

    def _pad(self, tokens: Mapping[str, list[torch.Tensor]], lengths: Sequence[int]) -> dict[str, Any]:
        size, step = max(lengths), self.pad_to_multiple_of or 1
        size += -size % step
        fill = {"input_ids": self.pad_id, "labels": IGNORE_INDEX}
        batch: dict[str, Any] = {name: self._pad_field(rows, size, fill.get(name, 0)) for name, rows in tokens.items()}
        if "attention_mask" not in batch:
            batch["attention_mask"] = self._pad_field([torch.ones(n, dtype=torch.long) for n in lengths], size, 0)
        return batch

    def _pad_field(self, rows: Sequence[torch.Tensor], size: int, value: int) -> torch.Tensor:
        out = rows[0].new_full((len(rows), size, *rows[0].shape[1:]), value)
        for target, row in zip(out, rows, strict=True):
            n = row.shape[0]
            target[slice(size - n, size) if self.padding_side == "left" else slice(0, n)] = row
        return out


def join_media(rows: Sequence[Mapping[str, Any]], samples: Sequence[int] | None = None) -> dict[str, Any]:
    """``MEDIA_FIELDS`` of all rows, each one after the other, and ``row_counts``; nothing where no row has any.

    Args:
        samples: how many samples each row holds, of which the counts are then; a row of several says theirs itself.

    Raises:
        BadRow: values that are no arrays of one kind.
    """
    joined: dict[str, Any] = {}
    counts: dict[str, list[int]] = {}
    for name in MEDIA_FIELDS:
        parts: dict[int, torch.Tensor] = {}
        for index, row in enumerate(rows):
            if row.get(name) is not None:
                parts[index] = _entries(index, name, row[name])
        if not parts:
            continue
        first = next(iter(parts))
        for index, part in parts.items():
            if part.shape[1:] != parts[first].shape[1:]:
                way = f"has entries of shape {list(part.shape[1:])}, row {first} has {list(parts[first].shape[1:])}"
                raise BadRow.field(index, name, way)
        joined[name] = torch.cat(list(parts.values()))
        counts[name] = []
        for index, row in enumerate(rows):
            size = parts[index].shape[0] if index in parts else 0
            counts[name] += _counts(index, row, name, size, samples[index] if samples else 1)
    return {**joined, "row_counts": counts} if counts else {}


def _entries(index: int, name: str, value: Any) -> torch.Tensor:
    tensor = _tensor(index, name, value)
    if name == "pixel_values" and tensor.dim() == 3:  # one picture [3, H, W]
        tensor = tensor[None]
    if tensor.dim() == 0 or tensor.dtype == torch.bool:
        raise BadRow.field(index, name, f"is {list(tensor.shape)} of {tensor.dtype}; its first axis runs over its entries")
    if name.endswith("grid_thw"):
        if tensor.dim() != 2 or tensor.shape[1] != 3 or tensor.is_floating_point():
            raise BadRow.field(index, name, f"is {list(tensor.shape)} of {tensor.dtype}, not whole numbers [n, 3] (t, h, w)")
        return tensor.long()
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _counts(index: int, row: Mapping[str, Any], name: str, size: int, samples: int) -> list[int]:
    if samples == 1 or size == 0:
        return [size, *[0] * (samples - 1)]
    told = [int(n) for n in (row.get("row_counts") or {}).get(name, ())]
    if len(told) != samples or sum(told) != size:
        raise BadRow.field(index, "row_counts", f"says {told} for the {size} entries of {name!r} in {samples} packed samples")
    return told


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(index: int, row: Mapping[str, Any]) -> torch.Tensor:
    if row.get("input_ids") is None:
        raise BadRow.missing(index, "input_ids", row)
    ids = _tensor(index, "input_ids", row["input_ids"])
    if ids.numel() == 0:
        raise BadRow.field(index, "input_ids", "is empty")
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise BadRow.field(index, "input_ids", f"is not a flat list of whole numbers (shape {list(ids.shape)}, {ids.dtype})")
    low, high = ids.aminmax()
    if low < 0 or high > _MAX_ID:
        raise BadRow.field(index, "input_ids", f"holds {int(low if low < 0 else high)}, which is no token id")
    return ids.long()


def _tensor(index: int, field: str, value: Any) -> torch.Tensor:
    try:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as cause:
        raise BadRow.field(index, field, f"can't be made a tensor ({cause})") from cause


def _pieces(index: int, row: Mapping[str, Any], length: int) -> list[int]:
    """Lengths of the samples in one row: itself, or what a PackingDataset put into it."""
    lens = row.get("seq_lens")
    if lens is None:
        return [length]
    pieces = [int(n) for n in lens]
    if sum(pieces) != length or min(pieces) < 1:
        raise BadRow.field(index, "seq_lens", f"is {pieces}, which does not add up to the {length} tokens of 'input_ids'")
    return pieces


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields besides ``input_ids``; each must be in all rows. A value of None counts as absent."""
    present = [{name for name, value in row.items() if value is not None} for row in rows]
    names = dict.fromkeys(name for row, has in zip(rows, present, strict=True) for name in row if name in has)
    for name in names:
        for index, has in enumerate(present):
            if name not in has and name not in _NOT_CARRIED:
                other = next(i for i, h in enumerate(present) if name in h)
                raise BadRow.field(index, name, f"is missing, but row {other} has it")
    return [name for name in names if name not in _NOT_CARRIED and name != "input_ids"]


def _sort_field(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    tokens: dict[str, list[torch.Tensor]],
    whole: dict[str, Any],
) -> None:
    """Put one field of all rows where it belongs: values a token (``tokens``) or a row (``whole``)."""
    values = [row[name] for row in rows]
    if not all(_is_numeric(v) for v in values):
        whole[name] = values
        return
    tensors = [_tensor(index, name, value) for index, value in enumerate(values)]
    flags = [index for index, t in enumerate(tensors) if t.dtype == torch.bool and t.dim()]
    if name == "labels" and flags:
        raise BadRow.field(flags[0], name, "holds True and False; a label is a token id, or -100 where nothing is trained")
    per_token = [t.dim() >= 1 and t.shape[0] == n for t, n in zip(tensors, lengths, strict=True)]
    if name == "labels" and not (any(t.is_floating_point() for t in tensors) or all(t.dim() == 0 for t in tensors)):
        must = True
    else:
        must = name in _TOKEN_FIELDS
    if must and not all(per_token):
        index = per_token.index(False)
        raise BadRow.length(index, name, tensors[index].shape[0] if tensors[index].dim() else 1, lengths[index])
    if must or (name != "labels" and all(per_token)):
        tensors = [t.long() if name == "labels" or name in _TOKEN_FIELDS else t for t in tensors]
        _same(name, [t.shape[1:] for t in tensors], "values of shape")
        tokens[name] = tensors
    else:
        _same(name, [t.shape for t in tensors], "shape")
        whole[name] = torch.stack(tensors)


def _check_packed_labels(labels: Any) -> None:
    """Labels that are no token labels are stacked, and have no place in one sequence of all rows."""
    if isinstance(labels, torch.Tensor) and labels.dim() > 1:
        way = f"is {labels.dtype}, one row of {list(labels.shape[1:])} values; packed rows have whole numbers, one a token"
        raise BadRow.field(0, "labels", f"{way} (or use padding_free=False)")


def _same(name: str, shapes: Sequence[torch.Size], what: str) -> None:
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise BadRow.field(index, name, f"has {what} {list(shape)}, row 0 has {list(shapes[0])}; they can't be stacked")


def _is_numeric(value: Any) -> bool:
    """Numbers, arrays, and (nested) lists that begin with a number."""
    while isinstance(value, (list, tuple)):
        if not value:
            return False
        value = value[0]
    return isinstance(value, (int, float, torch.Tensor)) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _pack(tokens: Mapping[str, list[torch.Tensor]], seq_lens: list[int]) -> dict[str, Any]:
    for index, mask in enumerate(tokens.get("attention_mask", ())):
        if not bool(mask.all()):
            raise BadRow.field(index, "attention_mask", "has zeros: the row is padded, which a packed sequence must not be")
    batch: dict[str, Any] = {name: torch.cat(rows).unsqueeze(0) for name, rows in tokens.items() if name != "attention_mask"}
    batch["seq_lens"] = seq_lens
    return batch


def row_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Real tokens of each row of a collated batch, in order.

    A packed batch says it in ``seq_lens``; without them each 0 in ``position_ids`` starts a row (never a fall of the positions:
    a row of one token would be merged with its neighbour).
    """
    if batch.get("seq_lens") is not None:
        return [int(n) for n in batch["seq_lens"]]
    mask = batch.get("attention_mask")
    if mask is not None:
        return [int(n) for n in mask.sum(-1)]
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    if positions is None or ids.shape[0] > 1:
        return [int(ids.shape[1])] * int(ids.shape[0])
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], positions.numel()], strict=True)]


def unpack(batch: Mapping[str, Any], values: torch.Tensor) -> list[torch.Tensor]:
    """Per-token values of a collated batch back to rows, without padding.

    Args:
        batch: what ``collate`` made.
        values: ``[B, T, …]`` of the batch, or ``[1, T, …]`` of a packed one.

    Returns:
        One tensor ``[n, …]`` for each row, in the order of the rows.
    """
    mask = batch.get("attention_mask")
    if mask is not None and batch.get("seq_lens") is None:
        return [row[keep.to(row.device, torch.bool)] for row, keep in zip(values, mask, strict=True)]
    lengths = row_lengths(batch)
    flat = values.reshape(-1, *values.shape[2:])
    return list(torch.split(flat, lengths))
