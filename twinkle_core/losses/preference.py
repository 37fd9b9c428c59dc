"""What losses over pairs of a preferred and a refused answer share (L2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadGroups
from twinkle_core.ops.rows import floats, labelled, row_sums, sums_of
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


class Pairs(NamedTuple):
    """Sums over the labelled tokens of each answer, ``[P]``.

    ``chosen``, ``rejected``: logps of the policy; ``ref_chosen``, ``ref_rejected``: of the reference (0 without one);
    ``chosen_tokens``, ``rejected_tokens``: labelled tokens, at least 1; ``whole``: pairs of which both answers have labels. The
    others count nothing.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    whole: Tensor


class PreferenceLoss(Loss):
    """A loss over pairs: row 2i is the chosen, row 2i + 1 the rejected answer to one prompt, whose tokens have no labels.

    ``log p(y) = sum_t logp_t`` over the labelled tokens of a row. Scope ``group``: sum and number of pairs, so pairs may be cut
    into micro-batches.
    """

    needs = frozenset({"logps"})
    scope = "group"

    def groups(self, rows: Sequence[InputFeature]) -> list[int]:
        """Pairs."""
        return [2] * (len(rows) // 2)

    def pairs(self, inputs: InputFeature, outputs: ModelOutput, ref_logps: Any = None) -> Pairs:
        """The sums of a batch.

        Args:
            ref_logps: of the reference: ``[B, T]``, lists, or ``[B]`` sums over rows; None: zeros.

        Raises:
            BadGroups: the rows are no pairs. BadLossArgument, LabelsMissing.
        """
        name = type(self).__name__
        mask, logps = labelled(name, inputs), floats(outputs.logps)
        sums = row_sums(inputs, torch.where(mask, logps, 0.0))
        if len(sums) % 2:
            raise BadGroups(name, self.groups([{}] * len(sums)), len(sums))
        tokens = row_sums(inputs, mask.long())
        ref = torch.zeros_like(sums) if ref_logps is None else sums_of(name, "ref_logps", ref_logps, inputs, sums)
        whole = (tokens[0::2] > 0) & (tokens[1::2] > 0)
        least = tokens.clamp(min=1)
        return Pairs(sums[0::2], sums[1::2], ref[0::2], ref[1::2], least[0::2], least[1::2], whole)


def added(terms: Tensor, pairs: Pairs, better: Tensor, worse: Tensor, items: int = 1) -> LossOutput:
    """Terms ``[P]`` of the whole pairs added up, with the numbers that the metric ``dpo`` shows.

    Args:
        better, worse: implicit rewards of the chosen and the rejected answers, ``[P]``.
        items: what a pair counts.
    """
    whole, better, worse = pairs.whole, better.detach(), worse.detach()
    count = whole.sum()
    numbers = {
        "reward_chosen": better,
        "reward_rejected": worse,
        "reward_margin": better - worse,
        "reward_accuracy": (better > worse).to(better.dtype),
    }
    metrics = {key: (torch.where(whole, value, 0.0).sum(), count) for key, value in numbers.items()}
    return LossOutput(torch.where(whole, terms, 0.0).sum(), count * items, metrics)
