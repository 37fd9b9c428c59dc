"""Cutting a batch into micro-batches: only between groups, and everything that belongs to the rows alike (L2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadGroups, BadInputs
from twinkle_core.train.limits import check_count
from twinkle_core.types import IGNORE_INDEX, MEDIA_FIELDS, InputFeature

#: outputs with one value (or vector) for each token, and what a shorter row is filled up with when batches are joined
PER_TOKEN = {"logits": 0.0, "logps": 0.0, "entropies": 0.0, "predictions": IGNORE_INDEX, "hidden": 0.0, "values": 0.0}


_COUNTED = frozenset((*MEDIA_FIELDS, "row_counts"))


def is_collated(inputs: Any) -> bool:
    """Whether ``inputs`` is one collated batch: a mapping whose ``input_ids`` (or first tensor) has 2 or more axes."""
    if not isinstance(inputs, Mapping):
        return False
    lead = inputs.get("input_ids", inputs.get("labels"))
    if lead is None:
        lead = next((v for v in inputs.values() if isinstance(v, torch.Tensor)), None)
    return isinstance(lead, torch.Tensor) and lead.dim() >= 2


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether a collated batch holds its rows one after the other in one sequence."""
    return batch.get("seq_lens") is not None


def _lead(batch: Mapping[str, Any]) -> torch.Tensor:
    for key in ("input_ids", "labels", *batch):
        if isinstance(batch.get(key), torch.Tensor):
            return batch[key]  # type: ignore[no-any-return]
    raise BadInputs(f"no field of the batch is a tensor; it has {', '.join(batch) or 'nothing'}")


def row_count(batch: Mapping[str, Any]) -> int:
    """Rows of a collated batch."""
    return len(batch["seq_lens"]) if is_packed(batch) else int(_lead(batch).shape[0])


def cut_batch(batch: Mapping[str, Any], rows: range) -> InputFeature:
    """Rows of a collated batch as another collated batch: views, no copies."""
    if is_packed(batch):
        return _cut_packed(batch, rows)
    count = row_count(batch)
    if len(rows) == count:
        return dict(batch)  # type: ignore[return-value]
    part = _cut_media(batch, rows)
    for key, value in batch.items():
        if key in _COUNTED and "input_ids" in batch:
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            # multimodal rotary positions are [3 or 4, B, T]
            axis = 1 if key == "position_ids" and value.dim() == 3 else 0
            value = value.narrow(axis, rows.start, len(rows)) if value.shape[axis] == count else value
        elif isinstance(value, (list, tuple)) and len(value) == count:
            value = value[rows.start : rows.stop]
        part[key] = value
    return part  # type: ignore[return-value]


def _cut_media(batch: Mapping[str, Any], rows: range) -> dict[str, Any]:
    """Pixels and grids of these rows, found by how many entries each row has: a field without any is left out."""
    counts: dict[str, list[int]] = batch.get("row_counts") or {}
    part: dict[str, Any] = {}
    if "input_ids" not in batch:  # no tokens: pictures are rows, as any field
        return part
    for name in MEDIA_FIELDS:
        value = batch.get(name)
        if value is None:
            continue
        here = counts.get(name)
        if here is None or len(here) != row_count(batch) or sum(here) != len(value):
            raise BadInputs(
                f"'{name}' of a collated batch has {len(value)} entries for {row_count(batch)} rows, and nothing says whose "
                f"they are: give 'row_counts' {{'{name}': [entries of each row]}}, rows, or all in one micro-batch"
            )
        start = sum(here[: rows.start])
        if size := sum(here[rows.start : rows.stop]):
            part[name] = value[start : start + size]
    if part:
        part["row_counts"] = {name: list(counts[name][rows.start : rows.stop]) for name in part}
    return part


def _cut_packed(batch: Mapping[str, Any], rows: range) -> InputFeature:
    lengths = list(batch["seq_lens"])
    if len(rows) == len(lengths):
        return dict(batch)  # type: ignore[return-value]
    total = sum(lengths)
    start, stop = sum(lengths[: rows.start]), sum(lengths[: rows.stop])
    part = {**_cut_media(batch, rows), "seq_lens": lengths[rows.start : rows.stop]}
    for key, value in batch.items():
        if key == "seq_lens" or key in _COUNTED:
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            axis = next((i for i, size in enumerate(value.shape) if size == total and i > 0), None)
            if axis is None and value.shape[0] != len(lengths):
                raise BadInputs(f"field '{key}' {list(value.shape)} of a packed batch can't be cut; give rows instead")
            place = (axis, start, stop - start) if axis is not None else (0, rows.start, len(rows))
            value = value.narrow(*place)  # one value a token, or one a row
        part[key] = value
    return part  # type: ignore[return-value]


def group_sizes(loss: Loss | None, rows: Sequence[InputFeature] | Mapping[str, Any]) -> list[int]:
    """Sizes of the groups that must stay together, checked against the rows."""
    count = row_count(rows) if isinstance(rows, Mapping) else len(rows)
    if loss is None or type(loss).groups is Loss.groups:
        return [1] * count
    views = [cut_batch(rows, range(i, i + 1)) for i in range(count)] if isinstance(rows, Mapping) else rows
    sizes = list(loss.groups(views))
    if any(size < 1 for size in sizes) or sum(sizes) != count:
        raise BadGroups(type(loss).__name__, sizes, count)
    return sizes


def plan(sizes: Sequence[int], micro_batch_size: int | None) -> list[range]:
    """Consecutive rows of each micro-batch: as many whole groups as fit ``micro_batch_size`` rows, at least one.

    >>> plan([2, 2, 2], 4)
    [range(0, 4), range(4, 6)]
    """
    count = sum(sizes)
    if micro_batch_size is not None:
        check_count("micro_batch_size", micro_batch_size, least=1)
    if micro_batch_size is None or micro_batch_size >= count:
        return [range(count)] if count else []
    cuts: list[range] = []
    start = stop = 0
    for size in sizes:
        if stop > start and stop + size - start > micro_batch_size:
            cuts.append(range(start, stop))
            start = stop
        stop += size
    cuts.append(range(start, stop))
    return cuts


def of_rows(value: Any, count: int) -> bool:
    """Whether a loss argument has one entry for each row: a tensor, array or list of the rows' length."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) > 0 and shape[0] == count
    return isinstance(value, (list, tuple)) and len(value) == count


def cut_args(loss_args: Mapping[str, Any], rows: range, count: int, device: Any) -> dict[str, Any]:
    """The loss arguments of these rows, tensors on the device; what is not of the rows' length is passed whole."""
    part: dict[str, Any] = {}
    for key, value in loss_args.items():
        if len(rows) != count and of_rows(value, count):
            value = value[rows.start : rows.stop]
        part[key] = value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
    return part


def _pad_to(x: torch.Tensor, length: int, fill: float, left: bool) -> torch.Tensor:
    missing = length - x.shape[1]
    if missing == 0:
        return x
    pad = x.new_full((x.shape[0], missing, *x.shape[2:]), fill)
    return torch.cat([pad, x] if left else [x, pad], dim=1)


def join(parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], *, pad_left: bool = False) -> dict[str, Any]:
    """Outputs of micro-batches as those of one batch, in row order.

    Args:
        parts: (collated inputs, outputs) of each micro-batch. ``[B, T, …]`` fields are padded to the longest T; those of packed
            batches are put one after the other.
        pad_left: on which side rows were padded.
    """
    if len(parts) == 1:
        return dict(parts[0][1])
    packed = is_packed(parts[0][0])
    weights = [row_count(inputs) for inputs, _ in parts]
    joined: dict[str, Any] = {}
    for key in parts[0][1]:
        values = [output[key] for _, output in parts]
        if not isinstance(values[0], torch.Tensor):
            joined[key] = values[0]
        elif values[0].dim() == 0:  # a mean over rows
            joined[key] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        elif key in PER_TOKEN and packed:
            joined[key] = torch.cat(values, dim=1)
        elif key in PER_TOKEN:
            longest = max(v.shape[1] for v in values)
            joined[key] = torch.cat([_pad_to(v, longest, PER_TOKEN[key], pad_left) for v in values])
        else:
            joined[key] = torch.cat(values)
    return joined
