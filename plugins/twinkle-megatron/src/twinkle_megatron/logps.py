"""Log-probabilities under a vocabulary that is split over tensor ranks, and sequences that are split over context ranks.

No rank ever holds a whole row of logits: a chunk's largest logits, sums of exponentials and logits at the labels are reduced,
three numbers for each token.

    logp_t = z_t[y_t] - m_t - log sum_ranks sum_v exp(z_t[v] - m_t)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinkle_core.types import IGNORE_INDEX
from twinkle_megatron.parallel import Layout
from twinkle_megatron.zigzag import positions

#: local logits that are there at once (128 MiB in float32), but never fewer rows than keep a matmul busy
CHUNK_ELEMENTS, CHUNK_ROWS = 2**25, 256


class _Sum(torch.autograd.Function):
    """Sum over ranks that go on with the same computation: each gets the whole gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    """``[B, T / n, …]`` of each context rank to ``[B, T, …]`` in order; the gradient of a rank is that of its own positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        total = x.shape[1] * size
        order = torch.cat([positions(r, size, total) for r in range(size)]).to(x.device)
        ctx.mine = positions(rank, size, total).to(x.device)
        whole = torch.empty((x.shape[0], total, *x.shape[2:]), dtype=x.dtype, device=x.device)
        whole[:, order] = torch.cat(parts, dim=1)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(1, ctx.mine), None


class _Portion(torch.autograd.Function):
    """A tensor that ``n`` ranks compute the same with, whose gradients are added up: each gives an n-th of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.ranks, None


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """See ``_GatherSequence``; of one context rank, ``x`` itself."""
    return x if group is None or dist.get_world_size(group) == 1 else _GatherSequence.apply(x, group)  # type: ignore[no-untyped-call]


def for_vocabulary(hidden: Tensor, layout: Layout) -> Tensor:
    """Whole rows ``[B, T, D]`` on each tensor rank, which goes on with its part of the vocabulary: gradients are added up."""
    if layout.sp:
        whole = mappings.gather_from_sequence_parallel_region(hidden.transpose(0, 1).contiguous())
        return whole.transpose(0, 1)  # type: ignore[no-any-return]
    return mappings.copy_to_tensor_model_parallel_region(hidden) if layout.tp > 1 else hidden


def for_all(hidden: Tensor, layout: Layout) -> Tensor:
    """Whole rows on each tensor rank, all of which go on alike: each has the whole gradient already."""
    if not layout.sp:
        return hidden
    rows = hidden.transpose(0, 1).contiguous()
    whole = mappings.gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False)
    return whole.transpose(0, 1)  # type: ignore[no-any-return]


class Vocabulary(nn.Module):
    """An output layer whose rows lie on several ranks. As a module it gives whole logits, gathered: for who asks for them.

    Args:
        weight: gives this rank's rows ``[V / n (+ padding), D]``: the layer's own, or the embedding's where they are tied.
        size: tokens of the model, without padding.
        group: the tensor ranks; None: one.
    """

    def __init__(self, weight: Any, size: int, group: Any) -> None:
        super().__init__()
        self._weight, self.size, self.group = weight, size, group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def local(self, rows: Tensor, temperature: float) -> Tensor:
        """This rank's logits in float32; rows of padding are -inf."""
        weight = self._weight()
        z = F.linear(rows, weight).float()
        z = z if temperature == 1.0 else z / temperature
        beyond = (self.rank + 1) * weight.shape[0] - self.size
        if beyond > 0:
            real = max(0, weight.shape[0] - beyond)
            hidden = torch.arange(weight.shape[0], device=z.device) >= real
            z = z.masked_fill(hidden, torch.finfo(z.dtype).min)
        return z

    def forward(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """``[…, D]`` to whole logits ``[…, V]``."""
        z = self.local(hidden, temperature)
        if self.ranks > 1:
            z = mappings.gather_from_tensor_model_parallel_region(z, group=self.group)
        return z[..., : self.size]

    def _total(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Sum.apply(x, self.group)  # type: ignore[no-untyped-call]

    def _chunk(self, rows: Tensor, labels: Tensor, temperature: float, entropies: bool) -> tuple[Tensor, ...]:
        """logps and entropies ``[n]`` (zeros where not asked for) and predictions of one chunk."""
        z = self.local(rows, temperature)
        start, count = self.rank * z.shape[1], z.shape[1]
        with torch.no_grad():
            top, where = z.max(1)
            guess = where + start
            if self.ranks > 1:
                tops = [torch.empty_like(top) for _ in range(self.ranks)]
                guesses = [torch.empty_like(guess) for _ in range(self.ranks)]
                dist.all_gather(tops, top, group=self.group)
                dist.all_gather(guesses, guess, group=self.group)
                best = torch.stack(tops).argmax(0)
                top = torch.stack(tops).amax(0)
                guess = torch.stack(guesses).gather(0, best[None])[0]
        z = z - top[:, None]
        mine = (labels >= start) & (labels < start + count)
        at = z.gather(1, (labels - start).clamp(0, count - 1)[:, None]).squeeze(1)
        at_label = self._total(torch.where(mine, at, torch.zeros_like(at)))
        weights = z.exp()
        total = self._total(weights.sum(1))
        logps = at_label - total.log()
        entropy = torch.zeros_like(logps)
        if entropies:
            entropy = total.log() - self._total((weights * z.clamp(min=-1e30)).sum(1)) / total
        return logps, entropy, guess

    def token_logps(
        self, hidden: Tensor, labels: Tensor, temperature: float, *, entropies: bool, predictions: bool
    ) -> dict[str, Tensor]:
        """Of labelled positions alone, a chunk at a time; logits are computed again in backward.

        Args:
            hidden: ``[B, T, D]``, the same on all tensor ranks. ``labels``: ``[B, T]``, aligned.

        Returns:
            logps (0 where nothing is labelled), and as asked entropies (0) and predictions (-100), ``[B, T]``.
        """
        flat, marks = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        index = (marks != IGNORE_INDEX).nonzero().squeeze(1)
        rows, chosen = flat.index_select(0, index), marks.index_select(0, index)
        size = max(CHUNK_ROWS, CHUNK_ELEMENTS // max(1, self._weight().shape[0]))
        found: list[tuple[Tensor, ...]] = []
        for part, wanted in zip(torch.split(rows, size), torch.split(chosen, size), strict=True):
            how: Any = (part, wanted, temperature, entropies)
            if torch.is_grad_enabled():
                found.append(checkpoint(self._chunk, *how, use_reentrant=False, preserve_rng_state=False))
            else:
                found.append(self._chunk(*how))
        if not found:  # nothing here is labelled: zeros, with a graph, so that all ranks go through backward alike
            nothing = rows.sum(-1).float()
            found.append((nothing, nothing.detach(), index))
        logps, entropy, guess = (torch.cat(parts) for parts in zip(*found, strict=True))
        zeros = torch.zeros_like(marks, dtype=logps.dtype)
        result = {"logps": zeros.index_put((index,), logps).view_as(labels)}
        if entropies:
            result["entropies"] = zeros.index_put((index,), entropy).view_as(labels)
        if predictions:
            result["predictions"] = torch.full_like(marks, IGNORE_INDEX).index_put((index,), guess).view_as(labels)
        return result


class Tempered(nn.Module):
    """A vocabulary at a temperature, as the output layer of hidden states that all tensor and context ranks have whole.

    Args:
        contexts: how many context ranks there are, each of which goes through it with all of the sequence.
    """

    def __init__(self, vocabulary: Vocabulary, temperature: float, contexts: int) -> None:
        super().__init__()
        weight = vocabulary._weight
        if contexts > 1:
            vocabulary = Vocabulary(lambda: _Portion.apply(weight(), contexts), vocabulary.size, vocabulary.group)  # type: ignore[no-untyped-call]
        self.vocabulary, self.temperature = vocabulary, temperature
        self.out_features = vocabulary.size

    def forward(self, hidden: Tensor) -> Tensor:
        """``[…, D]`` to whole logits ``[…, V]``."""
        if self.vocabulary.ranks > 1:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.vocabulary.group)
        return self.vocabulary(hidden, self.temperature)  # type: ignore[no-any-return]
