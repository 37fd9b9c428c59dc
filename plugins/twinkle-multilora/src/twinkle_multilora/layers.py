"""One linear layer of the base model with the slots of all tenants beside it, and which of them take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a batch that belong to one slot. ``slot`` None: to the base model alone."""

    slot: int | None
    rows: int


@dataclass(slots=True)
class Selection:
    """Whose weights take part in a forward. All layers of a model read the same one; the store alone writes it.

    ``active``: the slot of all rows; None: the base model alone. ``spans``: for a pass that several tenants share, which
    rows are whose, over the rows of the flattened input (``[..., D]`` as ``[N, D]``), in order; ``active`` has no say then.
    """

    active: int | None = None
    spans: Sequence[Span] | None = None


@dataclass(slots=True)
class Part:
    """What one tenant has in one layer: ``y += scaling * B A dropout(x)``.

    ``A`` ``[r, in]`` and ``B`` ``[out, r]`` are fp32 and lie in the layer's storage for the slot, contiguous each.
    """

    A: torch.nn.Parameter
    B: torch.nn.Parameter
    scaling: float
    dropout: float

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[0]


class SlotLinear(torch.nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """A frozen linear layer with room for ``max_loras`` adapters of rank ``max_r``.

    The storage is made once: ``flat_A`` ``[max_loras, max_r * in]`` and ``flat_B`` ``[max_loras, out * max_r]``, fp32, where
    the base layer's weight lives. A slot that is held has a ``Part`` in ``parts``, whose parameters have the tenant's own
    rank: its first ``r * in`` and ``out * r`` numbers. So slots of one rank can be seen stacked without a copy:
    ``flat_A[:, : r * in].view(max_loras, r, in)`` and ``flat_B[:, : out * r].view(max_loras, out, r)``.

    It is one of peft's tuner layers by its base class, so whatever looks through those sees the base layer.

    Args:
        base_layer: an ``nn.Linear``, or what computes like one.
        sizes: its inputs and outputs.
        selection: shared by all layers of the model.
        max_loras, max_r: see above.
    """

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(
        self, base_layer: torch.nn.Module, sizes: tuple[int, int], selection: Selection, max_loras: int, max_r: int
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = sizes
        self.selection = selection
        self.parts: dict[int, Part] = {}
        # parameters belong to the tree, for whoever counts, moves or wraps them; computing looks them up in ``parts``
        self.lora_A = torch.nn.ParameterDict()
        self.lora_B = torch.nn.ParameterDict()
        like: Any = base_layer.weight
        for name, size in (("flat_A", max_r * self.in_features), ("flat_B", self.out_features * max_r)):
            room = torch.zeros(max_loras, size, dtype=torch.float32, device=like.device)
            self.register_buffer(name, room, persistent=False)
        self.train(base_layer.training)

    # ------------------------------------------------------------------------------------------------ slots

    def fill(self, slot: int, name: str, A: torch.Tensor, B: torch.Tensor, *, scaling: float, dropout: float) -> None:
        """Give a slot to a tenant.

        Args:
            slot, name: which, and what its parameters are called in the tree.
            A, B: ``[r, in]`` and ``[out, r]``; copied.
            scaling: what ``B A x`` is multiplied by.
            dropout: the probability of a number of ``x`` to be left out in training.
        """
        a = self.flat_A[slot, : A.numel()].view(A.shape)
        b = self.flat_B[slot, : B.numel()].view(B.shape)
        with torch.no_grad():
            a.copy_(A)
            b.copy_(B)
        part = Part(torch.nn.Parameter(a), torch.nn.Parameter(b), scaling, dropout)
        self.lora_A[name], self.lora_B[name] = part.A, part.B
        self.parts[slot] = part

    def clear(self, slot: int, name: str) -> None:
        """Empty a slot: its numbers are zeros again, and nothing of the tenant stays."""
        self.parts.pop(slot, None)
        for held in (self.lora_A, self.lora_B):
            if name in held:
                del held[name]
        with torch.no_grad():
            self.flat_A[slot].zero_()
            self.flat_B[slot].zero_()

    # ------------------------------------------------------------------------------------------------ computing

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``, in the base layer's type."""
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        chosen = self.selection
        if chosen.spans is not None:
            return self._shared(x, result, chosen.spans)
        part = self.parts.get(chosen.active) if chosen.active is not None else None
        return result if part is None else (result + self._delta(x, part)).to(result.dtype)

    def _delta(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        x = x.to(part.A.dtype)
        if part.dropout and self.training:
            x = F.dropout(x, part.dropout)
        return F.linear(F.linear(x, part.A), part.B) * part.scaling

    def _shared(self, x: torch.Tensor, result: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Each span's rows with its own slot."""
        rows = x.reshape(-1, x.shape[-1]).split([span.rows for span in spans])
        outs = result.reshape(-1, result.shape[-1]).split([span.rows for span in spans])
        pieces = []
        for span, own, out in zip(spans, rows, outs, strict=True):
            part = self.parts.get(span.slot) if span.slot is not None else None
            pieces.append(out if part is None else (out + self._delta(own, part)).to(out.dtype))
        return torch.cat(pieces).view(result.shape)
