"""One linear layer of the base model with the slots of all tenants beside it, and which of them take part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from twinkle_core.ops.chunks import is_plain
from twinkle_core.ops.lora_linear import Dropout, Lora, dropout_seed, lora_linear_many, one_type


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a batch that belong to one slot. ``slot`` None: to the base model alone.

    ``forward``: which of the slot's training forwards it is, for its dropout.
    """

    slot: int | None
    rows: int
    forward: int = 0


@dataclass(frozen=True, slots=True)
class Taking:
    """Whose weights take part in a forward.

    ``active``: the slot of all rows, and ``forward`` which of its training forwards it is; None: the base model alone.
    ``spans``: for a pass that several tenants share, which rows are whose, over the rows of the flattened input (``[..., D]``
    as ``[N, D]``), in order; ``active`` has no say then. ``apart``: the base layer's matmul is one for each span.
    """

    active: int | None = None
    forward: int = 0
    spans: Sequence[Span] | None = None
    apart: bool = False

    def over(self, rows: int) -> Sequence[Span]:
        """Whose each of so many rows is."""
        return [Span(self.active, rows, self.forward)] if self.spans is None else self.spans


@dataclass(slots=True)
class Selection:
    """What takes part now. All layers of a model read the same one; the store, and graphs that are gone back through, write it.

    ``lean``: adapters are added in place where that is exact.
    """

    now: Taking = Taking()
    lean: bool = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """On leaving, what takes part is what did before."""
        found = self.now
        try:
            yield
        finally:
            self.now = found

    def remembered(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, an output of a forward. Whenever its graph is gone back through, what takes part now does so again: layers
        whose activations are computed a second time then see whose rows they have, and draw the masks that they drew, whatever
        forwards came in between. Who goes back keeps what was (``kept``)."""
        return _Remembered.apply(x, self) if x.requires_grad else x  # type: ignore[no-untyped-call]


class _Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, selection: Selection) -> torch.Tensor:
        ctx.selection, ctx.taking = selection, selection.now
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.selection.now = ctx.taking
        return gradient, None


@dataclass(slots=True)
class Draws:
    """Where a tenant's dropout comes from: its own numbers, never the process's generator, which others draw from.

    A mask is a function of the tenant's seed, the number of its training forward, and the layer. So it is the same in any
    company, and again where activations are computed a second time in backward.
    """

    seed: int
    passes: int = 0  # training forwards begun
    rank: int = 0  # which share of the rows this is; each has masks of its own

    def mask(self, layer: int, forward: int) -> int:
        """The seed of a layer's mask in a forward."""
        return dropout_seed(self.seed, forward, layer, *([self.rank] if self.rank else ()))


@dataclass(slots=True)
class Part:
    """What one tenant has in one layer: ``y += scaling * B A dropout(x)``.

    ``A`` ``[r, in]`` and ``B`` ``[out, r]`` are fp32 and lie in the layer's storage for the slot, contiguous each.
    """

    A: torch.nn.Parameter
    B: torch.nn.Parameter
    scaling: float
    dropout: float
    draws: Draws

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[0]


class InForward(torch.nn.Module):
    """An output layer with slots, for a loss that calls it itself, and again in backward: it computes what it would have in the
    forward that it was handed out by."""

    def __init__(self, layer: torch.nn.Module, selection: Selection) -> None:
        super().__init__()
        self.layer, self.selection, self.taking = layer, selection, selection.now

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits."""
        with self.selection.kept():
            self.selection.now = self.taking
            return self.layer(hidden)  # type: ignore[no-any-return]


class SlotLinear(torch.nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """A frozen linear layer with room for ``max_loras`` adapters of rank ``max_r``.

    The storage is made once: ``flat_A`` ``[max_loras, max_r * in]`` and ``flat_B`` ``[max_loras, out * max_r]``, fp32, where
    the base layer's weight lives. A slot that is held has a ``Part`` in ``parts``, whose parameters have the tenant's own
    rank: its first ``r * in`` and ``out * r`` numbers. So slots of one rank can be seen stacked without a copy:
    ``flat_A[:, : r * in].view(max_loras, r, in)`` and ``flat_B[:, : out * r].view(max_loras, out, r)``. (Changes of the
    storage and of each parameter are counted apart: let a graph keep parameters, or copies, never the storage.)

    It is one of peft's tuner layers by its base class, so whatever looks through those sees the base layer.

    Args:
        base_layer: an ``nn.Linear``, or what computes like one.
        sizes: its inputs and outputs.
        selection: shared by all layers of the model.
        max_loras, max_r: see above.
        number: which of the model's layers it is.
    """

    adapter_layer_names = ("lora_A", "lora_B")
    flat_A: torch.Tensor
    flat_B: torch.Tensor

    def __init__(
        self,
        base_layer: torch.nn.Module,
        sizes: tuple[int, int],
        selection: Selection,
        max_loras: int,
        max_r: int,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = sizes
        self.selection, self.number = selection, number
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

    def fill(
        self, slot: int, name: str, A: torch.Tensor, B: torch.Tensor, *, scaling: float, dropout: float, draws: Draws
    ) -> None:
        """Give a slot to a tenant.

        Args:
            slot, name: which, and what its parameters are called in the tree.
            A, B: ``[r, in]`` and ``[out, r]``; copied.
            scaling: what ``B A x`` is multiplied by.
            dropout: the probability of a number of ``x`` to be left out in training; ``draws``: which ones.
        """
        a = self.flat_A[slot, : A.numel()].view(A.shape)
        b = self.flat_B[slot, : B.numel()].view(B.shape)
        with torch.no_grad():
            a.copy_(A)
            b.copy_(B)
        # ``data``: views would share one count of changes, and a tenant's update would spoil the graphs of all others
        part = Part(torch.nn.Parameter(a.data), torch.nn.Parameter(b.data), scaling, dropout, draws)
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
        taking = self.selection.now
        spans = taking.over(x.numel() // self.in_features)
        adapters = [self._lora(span) for span in spans]
        base: Any = self.base_layer
        lean = self.selection.lean and is_plain(base) and not args and not kwargs
        lean = lean and one_type(x, base.weight, *(lora.a for lora in adapters if lora))
        if lean and (taking.spans is not None or adapters[0] is not None):
            return lora_linear_many(x, base.weight, base.bias, [s.rows for s in spans], adapters, apart=taking.apart)
        result: torch.Tensor = base(x, *args, **kwargs)
        return result if not any(adapters) else self._added(x, result, [s.rows for s in spans], adapters)

    def _lora(self, span: Span) -> Lora | None:
        part = self.parts.get(span.slot) if span.slot is not None else None
        if part is None:
            return None
        drop = None
        if part.dropout and self.training:
            drop = Dropout(part.dropout, part.draws.mask(self.number, span.forward))
        return Lora(part.A, part.B, part.scaling, drop)

    @staticmethod
    def _added(x: torch.Tensor, result: torch.Tensor, rows: Sequence[int], adapters: Sequence[Lora | None]) -> torch.Tensor:
        """Each span's rows with its own adapter, beside a base layer that is more than a linear layer."""
        pieces = []
        parts = zip(torch.split(x.reshape(-1, x.shape[-1]), list(rows)), adapters, strict=True)
        for (own, lora), out in zip(parts, torch.split(result.reshape(-1, result.shape[-1]), list(rows)), strict=True):
            if lora is not None:
                out = (out + lora(own.to(lora.a.dtype))).to(out.dtype)
            pieces.append(out)
        return torch.cat(pieces).view(result.shape)
