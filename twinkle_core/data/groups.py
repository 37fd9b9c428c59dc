"""Rows that stay together (L1): two answers to one question, an anchor with its documents.

A group is a mapping of its members by role, ``{"positive": row, "negative": row}`` for a pair. It is one item of a data set, so
that shuffling and batches keep it whole; a ``DataLoader`` gives out its rows one after the other, as losses over groups read
them. Members are conversations before encoding and encoded rows after it; those of a group with an anchor may be texts,
``{"text": …}``, which are encoded to be embedded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twinkle_core.contracts.template import Template
from twinkle_core.errors import DataError, TwinkleError

#: the roles of members, in the order in which their rows follow one another; a list of rows has them all in this place
ROLES = ("anchor", "positive", "negative", "negatives")


def is_group(row: Any) -> bool:
    """Whether an item of a data set is several rows."""
    return isinstance(row, Mapping) and isinstance(row.get("positive"), Mapping)


def members(row: Mapping[str, Any]) -> list[Any]:
    """The rows of a group in order."""
    found: list[Any] = []
    for role in ROLES:
        value = row.get(role)
        found += [] if value is None else value if isinstance(value, list) else [value]
    return found


def flat(items: Iterable[Any]) -> list[Any]:
    """Items of a data set as rows: each group's members, and other rows as they are."""
    return [row for item in items for row in (members(item) if is_group(item) else [item])]


def encode(template: Template, item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a template makes of one item: rows, or one group; nothing where it drops the row, or a member of the group.

    A text beside an anchor is encoded as an encoder reads it, and its label is 1 for the anchor and 0 for the others, as losses
    over embeddings read them.

    Raises:
        DataError: a member would be cut into several rows. TemplateError: as ``Template.encode``.
    """
    if not is_group(item):
        return _as_list(template.encode(item))  # type: ignore[arg-type]
    group: dict[str, Any] = {}
    one = _text if _of_texts(item) else _one
    for role in ROLES:
        value = item.get(role)
        if value is None:
            continue
        rows = [one(template, role, row) for row in (value if isinstance(value, list) else [value])]
        if any(row is None for row in rows):
            return []
        group[role] = rows if isinstance(value, list) else rows[0]
    return [group]


def check(template: Template, item: Mapping[str, Any]) -> str | None:
    """Why ``encode`` would refuse an item."""
    if not is_group(item):
        return template.check(item)  # type: ignore[arg-type]
    if _of_texts(item):
        try:
            encode(template, item)
        except TwinkleError as refusal:
            return str(refusal)
        return None
    return next((why for row in members(item) if (why := template.check(row)) is not None), None)


def _one(template: Template, role: str, row: Any) -> Mapping[str, Any] | None:
    rows = _as_list(template.encode(row))
    if len(rows) > 1:
        raise DataError.split_group(role, len(rows))
    return rows[0] if rows else None


def _of_texts(item: Mapping[str, Any]) -> bool:
    """Whether a group is to be embedded: an anchor that is no conversation."""
    return "anchor" in item and not (isinstance(item["anchor"], Mapping) and "messages" in item["anchor"])


def _text(template: Template, role: str, row: Any) -> Mapping[str, Any] | None:
    encode_text = getattr(template, "encode_text", None)
    if encode_text is None:
        raise DataError.no_texts(type(template).__name__)
    text = row.get("text") if isinstance(row, Mapping) else None
    if text is None:
        raise DataError.value("a group", f"its '{role}'", row, "a text to be embedded, {'text': …}")
    encoded = encode_text(text)
    return None if encoded is None else {**encoded, "labels": int(role == "anchor")}


def _as_list(encoded: Any) -> list[Mapping[str, Any]]:
    return [] if encoded is None else list(encoded) if isinstance(encoded, list) else [encoded]
