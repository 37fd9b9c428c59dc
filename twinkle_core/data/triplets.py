"""Rows of data sets for embeddings to groups of an anchor, its positive and negatives (L1)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.errors import DataError

#: what data sets call the parts of a group; the first is twinkle's
ANCHORS = ("anchor", "query", "question", "sentence1", "text")
POSITIVES = ("positive", "pos", "positives", "answer", "response", "sentence2", "document")
NEGATIVES = ("negatives", "negative", "neg", "hard_negatives", "hard_negative", "hard_neg", "rejected_response", "rejected")
#: what data sets call the judgement of whether, or how much, two texts belong together
JUDGEMENTS = ("label", "labels", "score", "similarity", "similarity_score", "relatedness_score", "is_duplicate", "gold_label")
#: parts of a name that speak of texts which do not belong to the anchor
_REFUSED = ("neg", "reject")


class TripletProcessor:
    """Rows of a text and one that belongs to it, with or without some that do not, to groups of ``{"text": …}``:
    ``{"anchor", "positive", "negatives"}``.

    Known by their names: ``anchor``, ``query``, ``question``, ``sentence1``, ``text``; ``positive``, ``pos``, ``positives``,
    ``answer``, ``response``, ``sentence2``, ``document``; ``negatives``, ``negative``, ``neg``, ``hard_negatives``,
    ``hard_negative``, ``hard_neg``, ``rejected_response``, ``rejected`` (a text or a list), ``negative_1``, ``negative_2``, …
    A positive in a list stands there alone: a group has one.

    A row with a judgement of its pair (``label``, ``score``, ``is_duplicate``, …) is refused, whatever it says: data sets do
    not agree on which number means that the texts belong together. Keep the right rows with ``filter``, and give them without
    that column. Texts under a name that is nearly one of negatives are refused too, or the group would go without them.

    Args:
        query_prefix: put before each anchor: an instruction (``"Instruct: …\\nQuery: "``), or ``"query: "`` for E5.
        document_prefix: put before positives and negatives, such as ``"passage: "``.
        negatives: at most so many, the first ones; None: all.
    """

    def __init__(self, query_prefix: str = "", document_prefix: str = "", negatives: int | None = None) -> None:
        for name, value in (("query_prefix", query_prefix), ("document_prefix", document_prefix)):
            if not isinstance(value, str):
                raise DataError.argument(name, value, "it must be a text")
        if negatives is not None and (isinstance(negatives, bool) or not isinstance(negatives, int) or negatives < 0):
            raise DataError.argument("negatives", negatives, "a whole number from 0 up, or None")
        self.query_prefix, self.document_prefix, self.negatives = query_prefix, document_prefix, negatives

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One group."""
        judged = next((name for name in JUDGEMENTS if row.get(name) is not None), None)
        if judged is not None:
            raise DataError.judged(type(self).__name__, judged, row[judged])
        anchor, positive = self._one(row, ANCHORS), self._one(row, POSITIVES)
        documents = [{"text": self.document_prefix + text} for text in [positive, *self._negatives(row)[: self.negatives]]]
        return {"anchor": {"text": self.query_prefix + anchor}, "positive": documents[0], "negatives": documents[1:]}

    def _one(self, row: Mapping[str, Any], names: Sequence[str]) -> str:
        name = next((name for name in names if row.get(name) is not None), None)
        if name is None:
            others = f"({' or '.join(map(repr, names[1:]))} would do too.)"
            raise DataError.keys(type(self).__name__, names[:1], row, others)
        texts = _texts(row[name])
        if texts is None or len(texts) != 1:
            raise DataError.value(type(self).__name__, repr(name), row[name], "one text (give a row for each positive)")
        return texts[0]

    def _negatives(self, row: Mapping[str, Any]) -> list[str]:
        numbered = sorted((n for n in row if n.startswith("negative_") and n[9:].isdigit()), key=lambda n: int(n[9:]))
        known = {*ANCHORS, *POSITIVES, *NEGATIVES, *numbered}
        for name in sorted(row.keys() - known):
            near = difflib.get_close_matches(name.lower(), NEGATIVES, 1, 0.8)
            if _texts(row[name]) and (near or any(word in name.lower() for word in _REFUSED)):
                raise DataError.unknown_texts(type(self).__name__, name, near[0] if near else NEGATIVES[0])
        found: list[str] = []
        for name in [*NEGATIVES, *numbered]:
            value = row.get(name)
            texts = [] if value is None or value == "" else _texts(value)
            if texts is None:
                raise DataError.value(type(self).__name__, repr(name), value, "a text or a list of texts")
            found += texts
        return found


def _texts(value: Any) -> list[str] | None:
    """A text or a list of texts as a list; None for anything else."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, str) and v for v in values):
        return None
    return list(values)
