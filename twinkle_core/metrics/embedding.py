"""How well embeddings find what belongs to them (L2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinkle_core.contracts.metric import Metric
from twinkle_core.ops.contrast import grouped
from twinkle_core.ops.rows import floats
from twinkle_core.types import InputFeature, ModelOutput

#: anchors whose similarities to all documents are there at once
CHUNK = 1024


class EmbeddingMetric(Metric):
    """``recall_at_1``: share of anchors whose most similar document, of **all** since the last reset and of all ranks, is their
    own positive; ``positive_similarity`` and ``negative_similarity``: mean dot products of anchors with their positive,
    and with all other documents.

    Rows come in groups anchor, positive, negatives…, ``labels`` 1 at a group's first row. A positive that ties with n others
    counts 1 / (n + 1), so embeddings that are all alike find nothing. To rank among all of them the embeddings are kept:
    (rows × D) numbers until they are read.
    """

    needs = frozenset({"embeddings"})

    def __init__(self) -> None:
        self._anchors: list[Tensor] = []
        self._documents: list[Tensor] = []
        self._positives: list[Tensor] = []  # indices into all documents
        self._count = 0

    def accumulate(self, inputs: InputFeature, outputs: ModelOutput) -> None:
        groups = grouped(type(self).__name__, inputs, floats(outputs.embeddings.detach()))
        self._add(groups.anchors, groups.documents, groups.positive)

    def _add(self, anchors: Tensor, documents: Tensor, positives: Tensor) -> None:
        if not len(anchors):
            return
        self._anchors.append(anchors)
        self._documents.append(documents)
        self._positives.append(positives + self._count)
        self._count += len(documents)

    def state(self) -> dict[str, Any]:
        if not self._anchors:
            return {}
        anchors, documents, positives = map(torch.cat, (self._anchors, self._documents, self._positives))
        return {"anchors": anchors.cpu(), "documents": documents.cpu(), "positives": positives.cpu()}

    def merge(self, state: dict[str, Any]) -> None:
        if state:
            device = self._anchors[0].device if self._anchors else "cpu"
            self._add(*(state[name].to(device) for name in ("anchors", "documents", "positives")))

    def calculate(self) -> dict[str, float]:
        if not self._anchors:
            return {}
        anchors, documents, positives = map(torch.cat, (self._anchors, self._documents, self._positives))
        found = own = every = 0.0
        for start in range(0, len(anchors), CHUNK):
            scores = anchors[start : start + CHUNK] @ documents.T
            right = scores.gather(1, positives[start : start + CHUNK, None])
            best, ties = (scores > right).sum(1) == 0, (scores == right).sum(1)
            found += float((best / ties).sum())
            own, every = own + float(right.double().sum()), every + float(scores.double().sum())
        count, others = len(anchors), len(anchors) * (len(documents) - 1)
        numbers = {"recall_at_1": found / count, "positive_similarity": own / count}
        return numbers | ({"negative_similarity": (every - own) / others} if others else {})

    def reset(self) -> None:
        self._anchors, self._documents, self._positives, self._count = [], [], [], 0
