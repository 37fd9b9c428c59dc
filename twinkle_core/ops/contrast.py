"""Rows in groups of an anchor, its positive and its negatives (L2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinkle_core.errors import BadLabels, LabelsMissing
from twinkle_core.types import IGNORE_INDEX

WANTED = "one label a row: 1 for the first row of a group (the anchor), 0 for those after it (the positive, then negatives)"


def sizes_of(marks: Sequence[int]) -> list[int]:
    """Sizes of groups, of the rows' labels.

    Raises:
        BadLabels: the first row begins no group, or a group is an anchor without a positive.
    """
    starts = [i for i, mark in enumerate(marks) if mark == 1]
    if marks and (not starts or starts[0] != 0):
        raise BadLabels("row 0 begins no group", WANTED)
    strange = next((i for i, mark in enumerate(marks) if mark not in (0, 1)), None)
    if strange is not None:
        raise BadLabels(f"row {strange} has {marks[strange]}", WANTED)
    sizes = [stop - start for start, stop in pairwise([*starts, len(marks)])]
    if 1 in sizes:
        raise BadLabels(f"the group at row {starts[sizes.index(1)]} is an anchor without a positive", WANTED)
    return sizes


def mark_of(owner: str, row: Mapping[str, Any]) -> int:
    """The label of a row, which is one number.

    Raises:
        LabelsMissing, BadLabels
    """
    if row.get("labels") is None:
        raise LabelsMissing(owner, sorted(row))
    (mark,) = _marks(torch.as_tensor(row["labels"]).reshape(1, -1))
    return mark


class Groups(NamedTuple):
    """A batch in parts, in the order of its rows.

    ``anchors`` ``[G, D]``; ``documents`` ``[N, D]``, positives and negatives; ``owner`` ``[N]``, the group of each document;
    ``positive`` ``[G]``, which document is the group's positive.
    """

    anchors: Tensor
    documents: Tensor
    owner: Tensor
    positive: Tensor


def grouped(owner: str, inputs: Mapping[str, Any], embeddings: Tensor, negatives: int | None = None) -> Groups:
    """A batch's embeddings by their part in a group. A batch of rows whose labels are all -100 has no group.

    Args:
        owner: who asks, for the error.
        embeddings: ``[B, D]``.
        negatives: how many of a group's negatives are kept at most, the first ones; None: all.

    Raises:
        LabelsMissing, BadLabels
    """
    labels = inputs.get("labels")
    if labels is None:
        raise LabelsMissing(owner, sorted(inputs))
    labels = torch.as_tensor(labels)
    nothing = bool((labels == IGNORE_INDEX).all())
    sizes = [] if nothing else sizes_of(_marks(labels.reshape(labels.shape[0], -1)))
    if not nothing and len(embeddings) != sum(sizes):
        raise BadLabels(f"there are {sum(sizes)}, and {len(embeddings)} embeddings", WANTED)
    first: list[int] = []
    at: list[int] = []
    number: list[int] = []
    positive: list[int] = []
    row = 0
    for group, size in enumerate(sizes):
        kept = size if negatives is None else min(size, 2 + negatives)
        first.append(row)
        positive.append(len(at))
        at += range(row + 1, row + kept)
        number += [group] * (kept - 1)
        row += size

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=embeddings.device)

    return Groups(embeddings[index(first)], embeddings[index(at)], index(number), index(positive))


def _marks(labels: Tensor) -> list[int]:
    if labels.dim() != 2 or labels.shape[1] != 1 or labels.is_floating_point():
        raise BadLabels(f"a row's labels are {list(labels.shape[1:])} values of {labels.dtype}", WANTED)
    return labels.flatten().tolist()
