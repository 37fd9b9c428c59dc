"""From tokens to rows and back, padded or packed: sums over rows, and what comes beside a batch for each row or token (L2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle_core.errors import BadLossArgument, LabelsMissing, MissingArgument
from twinkle_core.processors.input import unpack
from twinkle_core.train.micro import is_packed, row_count
from twinkle_core.types import IGNORE_INDEX

TOKENS = "one number for each token: a tensor [B, T] as the labels, or for each row a list with one number a token (or a label)"
ROWS = "one number for each row"


def labelled(loss: str, inputs: Mapping[str, Any]) -> Tensor:
    """Where something is trained: bool, of the labels' shape.

    Raises:
        LabelsMissing
    """
    labels = inputs.get("labels")
    if labels is None:
        raise LabelsMissing(loss, sorted(inputs))
    return labels != IGNORE_INDEX  # type: ignore[no-any-return]


def row_numbers(inputs: Mapping[str, Any]) -> Tensor:
    """``[B, T]``: the row that a token belongs to."""
    labels: Tensor = inputs["labels"]
    if is_packed(inputs):
        lengths = torch.tensor(inputs["seq_lens"], device=labels.device)
        numbers = torch.arange(len(lengths), device=labels.device)
        return numbers.repeat_interleave(lengths, output_size=labels.numel()).view_as(labels)
    return torch.arange(labels.shape[0], device=labels.device)[:, None].expand_as(labels)


def row_sums(inputs: Mapping[str, Any], values: Tensor) -> Tensor:
    """``[B, T]`` summed over the tokens of each row: ``[rows]``. Mask what doesn't count to 0 first."""
    if not is_packed(inputs):
        return values.sum(1)
    return values.new_zeros(row_count(inputs)).index_add(0, row_numbers(inputs).flatten(), values.flatten())


def floats(values: Tensor) -> Tensor:
    """At least float32: sums over a row are not for fewer digits."""
    return values if values.dtype == torch.float64 else values.float()


def per_token(loss: str, name: str, value: Any, inputs: Mapping[str, Any], like: Tensor, *, of_rows: bool = False) -> Tensor:
    """A loss argument as one number for each token, without a graph; 0 where nothing is trained.

    Args:
        loss: who asks, for the error.
        value: numbers for each token (``[B, T]`` of the labels' shape; or for each row a list with one number for each of its
            tokens, or for each of those that have a label).
        inputs: the collated batch, padded or packed.
        like: gives dtype and device.
        of_rows: whether it may also be one number for each row (``[B]``), which all its tokens get. Not of log-probabilities,
            which are easily taken for the sums of rows.

    Raises:
        BadLossArgument, MissingArgument
    """
    mask, rows = labelled(loss, inputs), row_count(inputs)
    if value is None:
        raise MissingArgument(loss, [name])
    if _is_ragged(value):
        given = _from_lists(loss, name, value, inputs, mask)
    else:
        given = _tensor(loss, name, value, TOKENS)
        if of_rows and given.dim() == 1 and given.shape[0] == rows:
            given = given.to(mask.device)[row_numbers(inputs)]
        elif given.shape != mask.shape:
            why = f"its shape is {list(given.shape)}, the batch has {rows} rows and labels {list(mask.shape)}"
            raise BadLossArgument(loss, name, why, f"{TOKENS}; or {ROWS}" if of_rows else TOKENS)
    given = given.detach().to(like.device, like.dtype)
    return torch.where(mask, given, torch.zeros_like(given))


def per_row(loss: str, name: str, value: Any, inputs: Mapping[str, Any], like: Tensor) -> Tensor:
    """A loss argument as one number for each row, ``[rows]``, without a graph.

    Args: see ``per_token``; numbers for each token are refused.

    Raises:
        BadLossArgument, MissingArgument
    """
    if value is None:
        raise MissingArgument(loss, [name])
    rows = row_count(inputs)
    if _is_ragged(value):
        raise BadLossArgument(loss, name, "it is a list of lists", ROWS)
    given = _tensor(loss, name, value, ROWS)
    if given.shape != (rows,):
        raise BadLossArgument(loss, name, f"its shape is {list(given.shape)}, the batch has {rows} rows", ROWS)
    return given.detach().to(like.device, like.dtype)


def sums_of(loss: str, name: str, value: Any, inputs: Mapping[str, Any], like: Tensor) -> Tensor:
    """A loss argument as the sum over the labelled tokens of each row, ``[rows]``: of numbers for each token, or as it is.

    Args: see ``per_token``; one number a row is the sum already.

    Raises:
        BadLossArgument, MissingArgument
    """
    flat = value is not None and not _is_ragged(value) and _tensor(loss, name, value, TOKENS).dim() == 1
    if flat:
        return per_row(loss, name, value, inputs, like)
    return row_sums(inputs, per_token(loss, name, value, inputs, like))


def _is_ragged(value: Any) -> bool:
    """Whether it is a list (tuple) whose entries have entries of their own."""
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(v, (list, tuple)) or getattr(v, "shape", ()) != () for v in value)


def _tensor(loss: str, name: str, value: Any, wanted: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise BadLossArgument(loss, name, f"it can't be made a tensor ({cause})", wanted) from cause


def _from_lists(loss: str, name: str, value: Sequence[Any], inputs: Mapping[str, Any], mask: Tensor) -> Tensor:
    """One list a row, each as long as the row, or as its labels are many (what a sampler gives of a completion)."""
    rows = row_count(inputs)
    if len(value) != rows:
        raise BadLossArgument(loss, name, f"it has {len(value)} lists, and the batch {rows} rows", TOKENS)
    spots = unpack(inputs, torch.arange(mask.numel(), device=mask.device).view_as(mask))
    flat, trained = torch.zeros(mask.numel(), dtype=torch.float64, device="cpu"), mask.flatten().cpu()
    for number, (one, at) in enumerate(zip(value, spots, strict=True)):
        given, at = _tensor(loss, name, one, TOKENS).detach().cpu().double(), at.cpu()
        labels = at[trained[at]]
        whole = torch.arange(mask.shape[1]) + number * mask.shape[1] if not is_packed(inputs) else at
        place = next((p for p in (at, labels, whole) if given.shape == p.shape), None)
        if place is None:
            why = f"for row {number} it has shape {list(given.shape)}; the row has {len(at)} tokens, {len(labels)} with a label"
            raise BadLossArgument(loss, name, why, TOKENS)
        flat[place] = given
    return flat.view(mask.shape)


def per_token_vectors(loss: str, name: str, value: Any, inputs: Mapping[str, Any]) -> Tensor:
    """A loss argument with some numbers for each token, those of the labelled tokens in order: ``[N, K]``, without a graph.

    Args:
        value: ``[B, T, K]``, or for each row ``[n, K]`` with n its tokens, or those of them that have a label.

    Raises:
        BadLossArgument
    """
    mask, rows = labelled(loss, inputs), row_count(inputs)
    wanted = "a tensor [B, T, K], or for each row a list with K numbers for each of its tokens (or labels)"
    if isinstance(value, (list, tuple)):
        if len(value) != rows:
            raise BadLossArgument(loss, name, f"it has {len(value)} entries, and the batch {rows} rows", wanted)
        parts = []
        for number, (one, trained) in enumerate(zip(value, unpack(inputs, mask), strict=True)):
            given = _tensor(loss, name, one, wanted).detach()
            if given.dim() != 2 or len(given) not in (len(trained), int(trained.sum())):
                why = f"for row {number} it has shape {list(given.shape)}; the row has {len(trained)} tokens"
                raise BadLossArgument(loss, name, why, wanted)
            parts.append(given[trained.to(given.device)] if len(given) == len(trained) else given)
        return torch.cat(parts)
    given = _tensor(loss, name, value, wanted).detach()
    if given.dim() != 3 or given.shape[:2] != mask.shape:
        raise BadLossArgument(loss, name, f"its shape is {list(given.shape)}, the labels have {list(mask.shape)}", wanted)
    return given[mask.to(given.device)]
