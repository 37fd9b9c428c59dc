"""InfoNCE (L2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle_core.contracts.loss import Loss
from twinkle_core.losses import settings
from twinkle_core.ops.contrast import Groups, grouped, mark_of, sizes_of
from twinkle_core.ops.rows import floats
from twinkle_core.types import InputFeature, LossOutput, ModelOutput


class InfoNCELoss(Loss):
    """Contrastive training of embeddings (van den Oord et al. 2018, eq. 4; in-batch negatives as Chen et al. 2020, SimCLR).

    Rows come in groups ``anchor, positive, negatives…``, ``labels`` 1 at a group's first row and 0 elsewhere. With anchors q,
    positives p, all documents d, ``s`` the dot product (embeddings come normalised) and t the temperature, for each group i

        L_i = - s(q_i, p_i) / t + log Z_i
        Z_i = exp(s(q_i, p_i) / t) + sum_k m_ik exp(s(q_i, d_k) / t)             own negatives, and documents of other groups
              + sum_j m_ij exp(s(q_i, q_j) / t)                                   (query_query)  anchors of other groups
              + sum_k m_ik exp(s(p_i, d_k) / t)                                   (document_document)  documents of other groups

    m is 0 where a negative is likely none: its s is over ``s(q_i, p_i) + margin`` (Zhang et al. 2025, Qwen3 Embedding, section
    3.1, margin 0.1). The sum is over groups, the weight their number.

    With other groups in it the scope is ``batch``: what is no exact split. ``gather`` makes the documents (and anchors) of all
    data ranks negatives, with the gradient of one process that has all rows. Alone with its own negatives a group's loss
    depends on nothing else: scope ``group``.

    A group's negatives are taken as they are: with fewer than ``hard_negatives`` it is not filled up.

    Needs embeddings.

    Args:
        temperature: t.
        in_batch: documents of other groups are negatives.
        hard_negatives: at most so many of a group's own negatives, the first ones; None: all.
        margin: of the false-negative mask; None: no mask.
        query_query, document_document: the further blocks.
        gather: over the data ranks, where there are several.
    """

    needs = frozenset({"embeddings"})
    scope = "batch"

    def __init__(
        self,
        temperature: float = 0.05,
        in_batch: bool = True,
        hard_negatives: int | None = None,
        margin: float | None = None,
        query_query: bool = False,
        document_document: bool = False,
        gather: bool = True,
    ) -> None:
        self.temperature = settings.number(self, "temperature", temperature, above=0)
        self.in_batch = settings.flag(self, "in_batch", in_batch)
        self.hard_negatives = (
            None if hard_negatives is None else settings.count(self, "hard_negatives", hard_negatives, least=0)
        )
        self.margin = None if margin is None else settings.number(self, "margin", margin)
        self.query_query = settings.flag(self, "query_query", query_query)
        self.document_document = settings.flag(self, "document_document", document_document)
        self.gather = settings.flag(self, "gather", gather)
        mixes = in_batch or query_query or document_document
        self.scope = "batch" if mixes else "group"  # type: ignore[misc, assignment]
        self.collective = gather and mixes  # type: ignore[misc]

    def groups(self, rows: Sequence[InputFeature]) -> list[int]:
        """Anchors with their documents."""
        return sizes_of([mark_of(type(self).__name__, row) for row in rows])

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, *, ranks: Any = None) -> LossOutput:
        """Args: ``embeddings`` ``[B, D]``, ``labels`` ``[B]``; ``ranks`` is filled in by twinkle."""
        embeddings = floats(outputs.embeddings)
        groups = grouped(type(self).__name__, inputs, embeddings, self.hard_negatives)
        over = ranks if self.collective else None
        documents, mine = _everywhere(groups.documents, over)
        anchors, first = _everywhere(groups.anchors, over) if self.query_query else (groups.anchors, 0)
        count = len(groups.anchors)
        if not count:  # a rank without rows: the others wait for its part in backward too
            return LossOutput(embeddings.sum() * 0 + documents.sum() * 0 + anchors.sum() * 0, 0.0)
        right = (groups.anchors * groups.documents[groups.positive]).sum(1)
        scores = torch.cat([right[:, None], *self._negatives(groups, right, documents, mine, anchors, first)], 1)
        terms = torch.logsumexp(scores / self.temperature, 1) - right / self.temperature
        return LossOutput(terms.sum(), float(count), {"positive_similarity": (right.detach().sum(), count)})

    def _negatives(
        self, groups: Groups, right: Tensor, documents: Tensor, mine: int, anchors: Tensor, first: int
    ) -> list[Tensor]:
        """Similarities ``[G, …]`` of each block, -inf where one does not count."""
        count = len(groups.anchors)
        number = torch.arange(count, device=right.device)
        owner = torch.full((len(documents),), -1, device=right.device)  # of other ranks: no group here
        owner[mine : mine + len(groups.owner)] = groups.owner
        own = owner[None] == number[:, None]
        positive = torch.zeros_like(own)
        positive[number, groups.positive + mine] = True
        blocks = [(groups.anchors @ documents.T, ~positive if self.in_batch else own & ~positive)]
        if self.query_query:
            others = torch.ones(count, len(anchors), dtype=torch.bool, device=right.device)
            others[number, number + first] = False
            blocks.append((groups.anchors @ anchors.T, others))
        if self.document_document:
            blocks.append((groups.documents[groups.positive] @ documents.T, ~own))
        if self.margin is not None:
            bound = (right + self.margin).detach()[:, None]
            blocks = [(scores, counts & (scores.detach() <= bound)) for scores, counts in blocks]
        return [scores.masked_fill(~counts, -math.inf) for scores, counts in blocks]


def _everywhere(x: Tensor, ranks: Any) -> tuple[Tensor, int]:
    """The rows of all ranks, and where one's own begin."""
    if ranks is None:
        return x, 0
    parts = ranks.gather(x)
    return torch.cat(parts), sum(len(part) for part in parts[: ranks.index])
