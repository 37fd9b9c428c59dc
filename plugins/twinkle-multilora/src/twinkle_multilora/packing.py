"""Batches of several tenants as one sequence, and what was computed of it back in each batch's own layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_core.types import IGNORE_INDEX
from twinkle_multilora.pointwise import aligned

#: A matmul of fewer rows may be another kernel's, which sums in another order.
LEAST = 16
#: what a packed pass can do without
PACKABLE = frozenset({"input_ids", "attention_mask", "position_ids"})


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch without its padding.

    ``ids``, ``positions``, ``labels``: ``[n]``; ``lengths``: of its rows, together n; ``places`` ``[n]``: where each token is
    in the flattened batch; ``shape``: the batch's, ``[B, T]``.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    lengths: list[int]
    places: Tensor
    shape: torch.Size

    @property
    def count(self) -> int:
        """Tokens."""
        return int(self.ids.shape[0])

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """``[n, ...]`` as ``[B, T, ...]``; ``fill`` where there was padding."""
        whole = self.shape.numel()
        if whole != self.count:
            rest = values.shape[1:]
            values = values.new_full((whole, *rest), fill).index_copy(0, self.places, values)
        return values.view(*self.shape, *values.shape[1:])


def piece_of(inputs: Mapping[str, Any], takes: frozenset[str]) -> Piece | None:
    """A collated batch without its padding; None where it holds more than tokens.

    Args:
        takes: what the model's forward takes.
    """
    given = {key for key, value in inputs.items() if value is not None} & takes
    ids, mask, positions = (inputs.get(key) for key in ("input_ids", "attention_mask", "position_ids"))
    if not given <= PACKABLE or not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    if any(t is not None and (not isinstance(t, Tensor) or t.shape != ids.shape) for t in (mask, positions)):
        return None
    labels: Any = inputs.get("labels")
    if labels is None:
        labels = torch.full_like(ids, IGNORE_INDEX)
    if labels.shape != ids.shape or labels.is_floating_point():
        return None
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    lengths = inputs.get("seq_lens")
    if lengths is None:
        lengths = [ids.shape[1]] * ids.shape[0] if mask is None else mask.sum(1).tolist()
    elif mask is not None:
        return None
    flat = torch.arange(ids.numel(), device=ids.device)
    places = flat if mask is None else flat[mask.reshape(-1) != 0]
    if mask is not None and bool((labels[mask == 0] != IGNORE_INDEX).any()):  # trained all the same, in the plain model
        return None
    real = [int(n) for n in lengths if n]
    if not real or sum(real) != len(places):
        return None
    own_ids, own_positions, own_labels = (t.reshape(-1).index_select(0, places) for t in (ids, positions, labels))
    steps = torch.ones_like(own_positions[1:]).index_fill_(0, own_ids.new_tensor(real).cumsum(0)[:-1] - 1, 0).bool()
    if not bool((own_positions.diff() == 1)[steps].all()):  # a gap within a row looks like the beginning of another
        return None
    return Piece(own_ids, own_positions, own_labels, real, places, ids.shape)


@dataclass(frozen=True, slots=True)
class Pack:
    """Pieces one after the other: ``ids``, ``positions``, ``labels`` ``[1, N]``, and the ``lengths`` of all rows.

    N is at least ``LEAST``, and such that no function depends on it (``aligned``); ``filler`` tokens that are nobody's are the
    last row then.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    lengths: list[int]
    pieces: list[Piece]
    filler: int

    def parts(self, values: Tensor) -> list[Tensor]:
        """``[1, N, ...]`` cut into the pieces' tokens."""
        counts = [piece.count for piece in self.pieces]
        return list(torch.split(values[0], [*counts, self.filler]))[: len(counts)]


def pack(pieces: Sequence[Piece], widths: tuple[int, ...] = ()) -> Pack:
    """Put pieces one after the other.

    Args:
        widths: of functions whose numbers depend on their place.
    """
    count = sum(piece.count for piece in pieces)
    filler = aligned(max(count, LEAST), widths, torch.get_num_threads()) - count
    ids, labels = (torch.cat([getattr(p, name) for p in pieces]) for name in ("ids", "labels"))
    positions = torch.cat([p.positions for p in pieces])
    lengths = [n for piece in pieces for n in piece.lengths]
    if filler:
        ids = torch.cat([ids, ids.new_zeros(filler)])
        labels = torch.cat([labels, labels.new_full((filler,), IGNORE_INDEX)])
        positions = torch.cat([positions, torch.arange(filler, device=ids.device)])
        lengths.append(filler)
    return Pack(ids[None], positions[None], labels[None], lengths, list(pieces), filler)


def at_least(labels: Tensor) -> Tensor:
    """Labels with so many made up that ``LEAST`` or none are there; who reads must leave those out again."""
    known = int((labels != IGNORE_INDEX).sum())
    if not 0 < known < LEAST:
        return labels
    extra = (labels == IGNORE_INDEX).nonzero(as_tuple=True)
    filled = labels.clone()
    filled[tuple(axis[: LEAST - known] for axis in extra)] = 0
    return filled
