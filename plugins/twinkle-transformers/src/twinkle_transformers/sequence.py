"""Long rows shared by ranks (Ulysses): each computes a part of the sequence, and in attention some heads of the whole.

Source of the method: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from twinkle_core.errors import BadLayout, NotComputed
from twinkle_core.types import IGNORE_INDEX, ModelOutput
from twinkle_transformers.inputs import packs

#: the name of ``attention`` among transformers' implementations, and of the argument that models hand on to it
ULYSSES, WORD = "twinkle_ulysses", "twinkle_sequence"
#: outputs with one value for each token, which are put together again
BY_TOKEN = ("logits", "logps", "entropies", "predictions", "values")
_WAY = "where ulysses_size shares rows; leave ulysses_size at 1"


class Whole:
    """What attention must know of the whole sequence of one micro-batch.

    Args:
        group: the ranks that share it.
        hides: ``[B, T]``, False where padding is; None: nowhere.
        rows: ``[B, T]``, the number of the packed row that a token belongs to; None: one row.
    """

    def __init__(self, group: Any, hides: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        self.group, self.hides, self.rows = group, hides, rows
        self.calls = 0
        self._masks: dict[tuple[bool, int | None], torch.Tensor | None] = {}

    def mask(self, length: int, device: torch.device, causal: bool, window: int | None) -> torch.Tensor | None:
        """``[B or 1, 1, T, T]``, True where a token is seen; None where that is what comes before, or all."""
        window = window if window is not None and window < length else None
        if self.hides is None and self.rows is None and window is None:
            return None
        if (causal, window) not in self._masks:
            at = torch.arange(length, device=device)
            seen = torch.ones(1, length, length, dtype=torch.bool, device=device)
            if causal:
                seen = seen & (at[:, None] >= at)
            if window is not None:
                seen = seen & (at[:, None] - at < window)
            if self.hides is not None:
                seen = seen & self.hides[:, None, :].bool()
            if self.rows is not None:
                seen = seen & (self.rows[:, :, None] == self.rows[:, None, :])
            seen = seen | torch.eye(length, dtype=torch.bool, device=device)  # a token that saw nothing would be no number
            self._masks[causal, window] = seen[:, None]
        return self._masks[causal, window]


class _Exchange(torch.autograd.Function):
    """Each rank gives a part of one axis away and gets the parts of another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, give: int, take: int) -> torch.Tensor:
        ctx.group, ctx.give, ctx.take = group, give, take
        return _exchange(x, group, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _exchange(grads[0], ctx.group, ctx.take, ctx.give), None, None, None


def _exchange(x: torch.Tensor, group: Any, give: int, take: int) -> torch.Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), give)).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return torch.cat(got.unbind(), take)


class _Joined(torch.autograd.Function):
    """The parts of all ranks along axis 1, of which each rank goes backward through its own: all compute the same of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.index, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(x) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.size, 1)[ctx.index], None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    twinkle_sequence: Whole | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' ``sdpa``; with ``twinkle_sequence``, over the whole sequence of which the arguments are a part.

    Args:
        query: ``[B, H, T/U, D]``; ``key``, ``value``: ``[B, H or fewer, T/U, D]``.

    Returns:
        ``[B, T/U, H, D]``, and None for the weights.
    """
    whole = twinkle_sequence
    if whole is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    whole.calls += 1
    q, k, v = (_Exchange.apply(x, whole.group, 1, 2) for x in (query, key, value))  # type: ignore[no-untyped-call]
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else causal
    mask = whole.mask(q.shape[2], q.device, causal, kwargs.get("sliding_window"))
    given = {**kwargs, "is_causal": causal and mask is None}
    out, _ = sdpa_attention_forward(module, q, k, v, mask, **given)
    return _Exchange.apply(out, whole.group, 1, 2), None  # type: ignore[no-untyped-call]


class Sequence:
    """A model whose ranks of one data rank share the sequence.

    Args:
        module: its attention is set.
        group: the ranks that share; ``size`` of them.
    """

    def __init__(self, owner: str, module: Any, group: Any, size: int) -> None:
        self.group, self.size = group, size
        how = getattr(module.config, "_attn_implementation", None)
        if how not in ("sdpa", ULYSSES):
            raise BadLayout(owner, f"ulysses_size {size} computes attention as 'sdpa', and this model's is '{how}'")
        AttentionInterface.register(ULYSSES, attention)
        AttentionMaskInterface.register(ULYSSES, sdpa_mask)
        module.set_attn_implementation(ULYSSES)

    def check(self, name: str, needs: frozenset[str]) -> None:
        """Raise NotComputed for what a part of a sequence can't give."""
        if strange := sorted(needs - {*BY_TOKEN}):
            raise NotComputed(name, strange[0], _WAY)

    def cut(
        self, name: str, batch: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], Whole, int]:
        """This rank's part of a batch and of what the model's forward takes; of the whole, and its length.

        Raises:
            NotComputed: the batch holds more than texts.
        """
        ids = inputs.get("input_ids")
        if ids is None or set(inputs) - {"input_ids", "attention_mask", "position_ids", "use_cache"}:
            raise NotComputed(name, "outputs", f"of {', '.join(sorted(inputs))}: only texts can be shared; {_WAY}")
        length = ids.shape[1]
        positions = inputs.get("position_ids")
        hides = inputs.get("attention_mask")
        if (positions is not None and positions.dim() != 2) or (hides is not None and hides.dim() != 2):
            raise NotComputed(name, "outputs", f"of masks or positions of more than two axes; {_WAY}")
        rows = (positions == 0).cumsum(1) if positions is not None and packs(batch) else None
        if positions is None:
            positions = torch.arange(length, device=ids.device).expand_as(ids)
        extra = -length % self.size
        if extra and hides is None and rows is None:
            hides = torch.ones_like(ids)
        whole = Whole(self.group, None if hides is None else padded(hides, extra, 0), padded(rows, extra, -1))
        made = {k: v for k, v in inputs.items() if k == "use_cache"}
        made |= {"input_ids": self._own(ids, 0), "position_ids": self._own(positions, 0), WORD: whole}
        cut: dict[str, Any] = {k: v for k, v in batch.items() if k not in ("attention_mask", "position_ids", "seq_lens")}
        for key, value in cut.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length:
                cut[key] = self._own(value, IGNORE_INDEX if key == "labels" else 0)
        return cut, made, whole, length

    def _own(self, x: torch.Tensor, fill: int) -> torch.Tensor:
        filled = padded(x, -x.shape[1] % self.size, fill)
        assert filled is not None
        return filled.chunk(self.size, 1)[dist.get_rank(self.group)]

    def join(self, name: str, output: ModelOutput, whole: Whole, length: int) -> ModelOutput:
        """Outputs of all parts together. Backward gives each rank the gradient of its own part."""
        if not whole.calls:
            raise NotComputed(name, "outputs", f"its layers do not hand arguments on to their attention; {_WAY}")
        for key in BY_TOKEN:
            if isinstance(value := output.get(key), torch.Tensor):
                output[key] = _Joined.apply(value, self.group)[:, :length]  # type: ignore[no-untyped-call]
        return output


def padded(x: torch.Tensor | None, extra: int, fill: int) -> torch.Tensor | None:
    """``x`` ``[B, T, ...]`` with ``extra`` tokens of the value ``fill`` behind; None stays None."""
    if x is None or not extra:
        return x
    return torch.cat([x, x.new_full((x.shape[0], extra, *x.shape[2:]), fill)], 1)
