"""This data rank's rows to micro-batches on the device (L2)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.contracts.engine import Batch
from twinkle_core.errors import BadInputs, BadRow, EmptyBatch
from twinkle_core.train import micro
from twinkle_core.types import IGNORE_INDEX, InputFeature

if TYPE_CHECKING:
    from twinkle_core.contracts.loss import Loss
    from twinkle_core.contracts.processor import Processor

#: outputs that a loss reads token by token
TOKEN_NEEDS = frozenset({"logps", "entropies", "predictions", "hidden"})

Rows = Sequence[InputFeature] | InputFeature


def as_rows(inputs: Any) -> Rows:
    """Inputs as a list of rows, or as one collated batch: a single row becomes a list of one.

    Raises:
        BadInputs: neither rows nor a batch.
    """
    if micro.is_collated(inputs):
        return inputs  # type: ignore[no-any-return]
    if isinstance(inputs, Mapping):
        lead = inputs.get("input_ids", inputs.get("messages"))
        if isinstance(lead, (list, tuple)) and lead and isinstance(lead[0], (list, tuple)):
            raise BadInputs("'input_ids' is a list of lists: give a list of rows, or tensors [B, T]")
        return [inputs]  # type: ignore[list-item]
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
        raise BadInputs(f"got {type(inputs).__name__}; give a list of rows, one row, or a dict of tensors [B, T]")
    bad = next((i for i, row in enumerate(inputs) if not isinstance(row, Mapping)), None)
    if bad is not None:
        raise BadInputs(f"row {bad} is {type(inputs[bad]).__name__}, not a dict")
    return inputs


def fingerprint(rows: Rows, micro_batch_size: int | None, loss_args: Mapping[str, Any] | None = None) -> int:
    """A number below 2**32 by which ranks tell whether they were given the same ids and labels, to be cut alike, and the same
    loss arguments. What lies on a device is left out: to look at it would wait for it."""
    found = zlib.crc32(repr(micro_batch_size).encode())
    for name, value in sorted((loss_args or {}).items()):
        found = zlib.crc32(name.encode() + b"\0" + _plain(value), found)
    for row in [rows] if isinstance(rows, Mapping) else rows:
        for field in ("input_ids", "labels"):
            found = zlib.crc32(_content(row.get(field)), found)
    return found


def _plain(value: Any) -> bytes:
    """A loss argument that all ranks would describe alike: numbers and words, in lists, arrays and tensors. Of others, the
    type."""
    if isinstance(value, (list, tuple)):
        return b"\0".join(map(_plain, value))
    numbers = isinstance(value, torch.Tensor) or getattr(getattr(value, "dtype", None), "kind", "O") != "O"  # or numpy's
    if numbers or value is None or isinstance(value, (bool, int, float, str)):
        return _content(value)
    return type(value).__name__.encode()


def _content(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().flatten().view(torch.uint8).numpy() if value.device.type == "cpu" else None
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()


def count_rows(rows: Rows) -> int:
    """How many rows there are."""
    return micro.row_count(rows) if isinstance(rows, Mapping) else len(rows)


def check_length(rows: Rows, longest: int | None) -> None:
    """Raise BadRow if a row has more than ``longest`` tokens, padding not counted. Of a batch that is collated already, by its
    mask, or by the lengths that it was packed of."""
    if longest is None:
        return
    if isinstance(rows, Mapping):
        ids, mask = rows.get("input_ids"), rows.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            lengths = mask.sum(1).tolist()
        else:
            lengths = list(rows.get("seq_lens") or ([] if ids is None else [len(row) for row in ids]))
    else:
        lengths = [len(row.get("input_ids", ())) for row in rows]
    for number, length in enumerate(lengths):
        if length > longest:
            raise BadRow.field(number, "input_ids", f"has {length} tokens; this model takes at most {longest} (max_length)")


def to_device(batch: Mapping[str, Any], device: Any) -> InputFeature:
    """Tensors of a batch on the device. The caller's batch is not changed."""
    return {  # type: ignore[return-value]
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }


def dummy_row(like: InputFeature | None = None) -> InputFeature:
    """A row without a label, for a rank that got none: a copy of ``like``, or the shortest row there is."""
    if like is None:
        return {"input_ids": [0, 0], "labels": [IGNORE_INDEX, IGNORE_INDEX], "length": 2}
    row = dict(like)
    row["labels"] = [IGNORE_INDEX] * len(like["input_ids"])
    return row  # type: ignore[return-value]


def completed(prompt: Mapping[str, Any], completion: Sequence[int]) -> InputFeature:
    """Prompt and completion as a row to train on: aligned labels on the completion alone."""
    ids = torch.as_tensor(prompt["input_ids"]).flatten()
    if prompt.get("attention_mask") is not None:
        ids = ids[torch.as_tensor(prompt["attention_mask"]).flatten().bool()]
    before: list[int] = ids.tolist()
    labels = [*[IGNORE_INDEX] * (len(before) - 1), *completion, IGNORE_INDEX]
    return {"input_ids": [*before, *completion], "labels": labels, "length": len(labels)}


def check_batch(batch: Mapping[str, Any], loss: Loss | None) -> None:
    """Shapes and types of a collated batch, whoever collated it. Looks at no value: that would wait for a device.

    Raises:
        BadInputs: ids that are no ids, no tokens, or labels that a loss over tokens would read at the wrong places.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 2 or not _is_whole(ids):
            raise BadInputs(f"'input_ids' {list(ids.shape)} ({ids.dtype}) are no token ids [B, T]")
        if ids.numel() == 0:
            raise BadInputs(f"'input_ids' {list(ids.shape)} hold no token")
    if labels is None or loss is None or not loss.needs & TOKEN_NEEDS:
        return
    if not isinstance(labels, torch.Tensor):
        raise BadInputs(f"'labels' are no numbers but {type(labels).__name__} (the first is {_first(labels)!r})")
    # one label a row is a class of the row: whether the model has such a head is for the engine to say
    fits = not isinstance(ids, torch.Tensor) or labels.shape in (ids.shape, ids.shape[:1])
    if not _is_whole(labels) or not fits:
        here = f" for 'input_ids' {list(ids.shape)}" if isinstance(ids, torch.Tensor) else ""
        raise BadInputs(
            f"'labels' {list(labels.shape)} ({labels.dtype}){here}: the loss reads one token id for each token, -100 where "
            f"nothing is trained (for other targets set_loss('mse') or a function)"
        )


def with_wide_ids(batch: InputFeature) -> InputFeature:
    """Ids and labels in a type that tables can be read with: someone who collates by himself may keep ids of few values in few
    bytes. The caller's batch is not changed."""
    narrow = {
        key: value.long()
        for key in ("input_ids", "labels")
        if isinstance(value := batch.get(key), torch.Tensor) and _is_whole(value) and value.dtype != torch.int64
    }
    return {**batch, **narrow} if narrow else batch  # type: ignore[typeddict-item]


def _is_whole(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _first(values: Any) -> Any:
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
    return values


def cuts(rows: Rows, loss: Loss | None, micro_batch_size: int | None) -> list[range]:
    """Which rows go into which micro-batch. Pure; ranks compare the lengths before they prepare."""
    return micro.plan(micro.group_sizes(loss, rows), micro_batch_size)


def by_token(args: Mapping[str, Any]) -> bool:
    """Whether some loss argument may have a number for each token."""
    return any(getattr(value, "ndim", 0) > 1 for value in args.values())


def width_of(inputs: Mapping[str, Any]) -> int:
    """Places that a collated batch has labels for; 0 where it has none for each token."""
    labels = inputs.get("labels")
    return labels.shape[1] if getattr(labels, "ndim", 0) > 1 else 0  # type: ignore[union-attr]


def fit_args(
    args: Mapping[str, Any], lengths: Sequence[int], widest: int, cut: range, inputs: Mapping[str, Any], *, left: bool = False
) -> dict[str, Any]:
    """Loss arguments with one number for each token of all rows, as an output of ``forward_only`` over them is, made as wide
    as one micro-batch: a part of the rows may be padded to fewer tokens, and packed rows are a part of the sequence. Wider ones
    may have zeros beyond (these rows were a part of more); of another width they stay as they are, for the loss to refuse.

    Args:
        lengths: tokens of all rows.
        widest: ``width_of`` the widest micro-batch of them, which all rows together are padded to.
        inputs: the collated micro-batch of the rows in ``cut``.
        left: whether rows are padded on the left.
    """
    width = width_of(inputs)
    if not width:
        return dict(args)
    start, total = sum(lengths[: cut.start]), sum(lengths)
    fitted = dict(args)
    for key, value in args.items():
        if getattr(value, "ndim", 0) < 2:
            continue
        if micro.is_packed(inputs) and value.shape[0] == 1 and value.shape[1] == total:
            fitted[key] = value[:, start : start + width]
        elif not micro.is_packed(inputs) and value.shape[0] == len(lengths) and value.shape[1] >= widest:
            beyond = value[:, : value.shape[1] - widest] if left else value[:, widest:]
            if not beyond.shape[1] or not beyond.any():
                fitted[key] = value[:, value.shape[1] - width :] if left else value[:, :width]
    return fitted


def _lengths(rows: Rows) -> list[int] | None:
    """Tokens of each row; None for a padded batch, whose parts are as wide as it is."""
    if not isinstance(rows, Mapping):
        return [len(row["input_ids"]) for row in rows]
    return list(rows["seq_lens"]) if micro.is_packed(rows) else None


def prepare(
    rows: Rows,
    *,
    device: Any,
    processor: Processor,
    loss: Loss | None = None,
    micro_batch_size: int | None = None,
    loss_args: Mapping[str, Any] | None = None,
) -> list[Batch]:
    """Cut rows into micro-batches between groups, collate them, move them to the device. No rows: no batches.

    Args:
        rows: encoded rows, or one collated batch (padded ``[B, T]``, or packed with ``seq_lens``), which is sliced.
        processor: collates rows; a collated batch passes it by.
        loss: whose groups must stay together.
        micro_batch_size: rows of a micro-batch at most (a larger group stays whole); None: all in one.
        loss_args: arguments of the loss; tensors, arrays and lists of the rows' length are cut alike.

    Raises:
        BadInputs: see ``check_batch``.
    """
    count = count_rows(rows)
    args = dict(loss_args or {})
    batches: list[Batch] = []
    lengths = _lengths(rows) if by_token(args) else None
    planned = []
    for cut in cuts(rows, loss, micro_batch_size):
        if isinstance(rows, Mapping):
            inputs = micro.cut_batch(rows, cut)
        else:
            inputs = processor.collate(rows[cut.start : cut.stop])
        check_batch(inputs, loss)
        planned.append((cut, with_wide_ids(inputs)))
    left, widest = processor.padding_side == "left", max((width_of(inputs) for _, inputs in planned), default=0)
    for cut, inputs in planned:
        fitted = args if lengths is None else fit_args(args, lengths, widest, cut, inputs, left=left)
        batches.append(Batch(to_device(inputs, device), cut, micro.cut_args(fitted, cut, count, device)))
    return batches


def fill(batches: Sequence[Batch], count: int, rows: Rows, processor: Processor, device: Any) -> list[Batch]:
    """As many micro-batches as all data ranks have agreed on: a rank that has fewer takes part with a row without labels.

    Raises:
        EmptyBatch: no rank has rows.
    """
    if not count:
        raise EmptyBatch
    like = None if isinstance(rows, Mapping) or not rows else rows[0]
    filled = list(batches)
    while len(filled) < count:
        filled.append(Batch(to_device(processor.collate([dummy_row(like)]), device), range(0), {}, dummy=True))
    return filled
