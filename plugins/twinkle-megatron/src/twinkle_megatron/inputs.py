"""A collated batch as Megatron takes it: real tokens first, of a length that all ranks can share, each rank its part."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from twinkle_core.contracts.processor import Processor
from twinkle_core.errors import BadInputs
from twinkle_core.processors.input import AroundProcessor
from twinkle_core.train.session import Session
from twinkle_core.types import IGNORE_INDEX, InputFeature
from twinkle_megatron.parallel import Layout
from twinkle_megatron.zigzag import positions

#: fields that ``plan`` adds: where each row's tokens go, and the lengths of the rows of one sequence
ORDER, LENGTHS = "token_order", "packed_lengths"


class Planned(AroundProcessor):
    """A processor whose batches are planned.

    Args:
        processor: makes the batches.
        vocabulary, layout: see ``plan``.
    """

    def __init__(self, processor: Processor, vocabulary: int, layout: Layout) -> None:
        super().__init__(processor)
        self.vocabulary, self.layout = vocabulary, layout

    def collate(self, rows: Sequence[InputFeature]) -> InputFeature:
        return plan(self.processor.collate(rows), self.vocabulary, self.layout)


def planned(session: Session, rows: Any, vocabulary: int, layout: Layout) -> tuple[Session, Any]:
    """Session and rows such that core's ``prepare`` makes planned batches of them."""
    if isinstance(rows, Mapping):
        return session, plan(rows, vocabulary, layout)
    own, session = session.processor, copy.copy(session)
    assert own is not None
    session.processor = Planned(own, vocabulary, layout)
    return session, rows


def plan(batch: Mapping[str, Any], vocabulary: int, layout: Layout) -> InputFeature:
    """Look at a batch while it is on the CPU.

    Rows that are padded on the left are told apart from the right way round: causal attention then needs no mask, since what
    comes after a token does not reach it.

    Raises:
        BadInputs: ids beyond the vocabulary, several sequences of packed rows, packed rows under context parallelism.
    """
    found: dict[str, Any] = dict(batch)
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
        raise BadInputs("a Megatron language model reads 'input_ids' [B, T]")
    _within(ids, "input_ids", vocabulary)
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape and not labels.is_floating_point():
        _within(labels.masked_fill(labels == IGNORE_INDEX, 0), "labels", vocabulary)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        found[ORDER] = torch.argsort(mask.bool().logical_not().to(torch.int8), dim=1, stable=True)
    lengths = _packed(batch, ids, mask)
    if lengths is None:
        return found  # type: ignore[return-value]
    if layout.cp > 1:
        raise BadInputs("packed rows can't be split over context ranks here; use a processor with padding_free=False")
    if ids.shape[0] != 1:
        raise BadInputs(f"packed rows must be one sequence [1, T], and 'input_ids' is {list(ids.shape)}")
    found[LENGTHS] = lengths
    return found  # type: ignore[return-value]


def _within(ids: torch.Tensor, field: str, vocabulary: int) -> None:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise BadInputs(f"'{field}' is {ids.dtype}; give whole numbers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise BadInputs(f"'{field}' holds {bad}; a token id of this model is 0 to {vocabulary - 1}")


def _packed(batch: Mapping[str, Any], ids: torch.Tensor, mask: Any) -> list[int] | None:
    """Lengths of the rows that share one sequence."""
    if len(batch.get("seq_lens") or ()) > 1:
        return list(batch["seq_lens"])
    places = batch.get("position_ids")
    if not isinstance(places, torch.Tensor) or places.shape != ids.shape or ids.shape[1] < 2:
        return None
    real = mask.bool() if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    anew = (places[:, 1:] <= places[:, :-1]) & real[:, 1:] & real[:, :-1]
    if not bool(anew.any()):
        return None
    if ids.shape[0] != 1:
        return [0]  # refused by the caller
    starts = [0, *(anew[0].nonzero().squeeze(1) + 1).tolist(), ids.shape[1]]
    return [b - a for a, b in itertools.pairwise(starts)]


@dataclass
class Laid:
    """A batch laid out for this rank, and the ways there and back for what belongs to its tokens."""

    ids: torch.Tensor
    positions: torch.Tensor
    packed: Any
    rows: int  # of the caller, and their length
    length: int
    padded: tuple[int, int]  # rows and length as laid out
    order: torch.Tensor | None
    own: torch.Tensor | None  # of the padded positions, those of this context rank

    def out(self, x: torch.Tensor, fill: int = IGNORE_INDEX) -> torch.Tensor:
        """``[B, T]`` of the caller to the padded length, real tokens first."""
        x = x if self.order is None else x.gather(1, self.order)
        return F.pad(x, (0, self.padded[1] - self.length, 0, self.padded[0] - self.rows), value=fill)

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """This context rank's part of ``[B, padded]``."""
        return x if self.own is None else x.index_select(1, self.own)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, padded, …]`` to ``[B, T, …]`` where the caller's tokens are."""
        x = x[: self.rows, : self.length]
        if self.order is None:
            return x
        place = self.order.argsort(1)
        return x.gather(1, place.view(*place.shape, *[1] * (x.dim() - 2)).expand(*place.shape, *x.shape[2:]))


def size_of(inputs: Mapping[str, Any], layout: Layout) -> tuple[int, int]:
    """Rows and length that a batch has at least once it is laid out."""
    rows, length = inputs["input_ids"].shape
    return rows, -(-length // layout.multiple) * layout.multiple


def lay(inputs: Mapping[str, Any], layout: Layout, device: torch.device, size: tuple[int, int] | None = None) -> Laid:
    """A planned batch on the device, laid out for this rank. ``size``: rows and length, if not the least there can be."""
    ids: torch.Tensor = inputs["input_ids"]
    rows, length = ids.shape
    size = size or size_of(inputs, layout)
    own = None
    if layout.cp > 1:
        own = positions(parallel_state.get_context_parallel_rank(), layout.cp, size[1]).to(device)
    laid = Laid(ids, ids, None, rows, length, size, inputs.get(ORDER), own)
    lengths = inputs.get(LENGTHS)
    if lengths is not None:
        lengths = [*lengths, size[1] - length] if size[1] > length else list(lengths)
        cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        longest = max(lengths)
        laid.packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cuts, cu_seqlens_kv=cuts, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        places = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    else:
        places = torch.arange(size[1], device=device).expand(*size)
    laid.ids = laid.mine(laid.out(ids, 0)).contiguous()
    laid.positions = laid.mine(places).contiguous()
    return laid
