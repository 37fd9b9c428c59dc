"""Rows that are longer than max_length (L1): five strategies, and the one place where labels are shifted."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle_core.errors import NoLabels, RowTooLong, TemplateError
from twinkle_core.types import IGNORE_INDEX, InputFeature

STRATEGIES = ("raise", "left", "right", "split", "delete")


def check_strategy(strategy: str) -> None:
    """Raise TemplateError unless it is one of ``STRATEGIES``."""
    if strategy not in STRATEGIES:
        raise TemplateError.strategy(strategy, STRATEGIES)


def align(targets: Sequence[int]) -> list[int]:
    """From "token t, or -100" to "what logits t must predict, or -100": the shift, which nobody else does."""
    return [*targets[1:], IGNORE_INDEX]


def kept(size: int, max_length: int, strategy: str, whole: Sequence[tuple[int, int]] = ()) -> slice:
    """Which tokens ``left`` or ``right`` keep of ``size``: at most ``max_length`` at one end.

    Args:
        whole: ranges of tokens that are kept or dropped as one, such as those of an image, in order. Where the cut would go
            through one, it is dropped.
    """
    if size <= max_length:
        return slice(0, size)
    if strategy == "left":
        cut = size - max_length
        return slice(next((end for start, end in whole if start < cut < end), cut), size)
    return slice(0, next((start for start, end in whole if start < max_length < end), max_length))


def to_rows(
    ids: list[int], targets: list[int], max_length: int, strategy: str, whole: Sequence[tuple[int, int]] = ()
) -> list[InputFeature]:
    """Cut a row where it is too long, and align its labels.

    Args:
        ids: token ids, n of them.
        targets: for each position its own token where that is trained, else -100.
        max_length: most tokens of a row.
        strategy: ``raise``: a longer row is an error. ``left`` keeps the last ``max_length`` tokens, ``right`` the first (a cut
            answer then has no end token, and none is invented). ``split`` cuts into consecutive rows and loses no label: the
            last position of a piece still predicts the first token of the next; pieces with nothing to learn are left out.
            ``delete`` drops a longer row, and one with nothing to learn.
        whole: see ``kept``, for ``left`` and ``right``.

    Returns:
        The rows: none only with ``delete``; several only with ``split``.

    Raises:
        RowTooLong, NoLabels.
    """
    size = len(ids)
    if not _trained(targets[1:]):
        if strategy == "delete":
            return []
        raise NoLabels.untrained()
    if size <= max_length:
        return [_row(ids, align(targets))]
    if strategy == "raise":
        raise RowTooLong(size, max_length, strategy)
    if strategy == "delete":
        return []
    if strategy == "split":
        labels = align(targets)
        pieces = [(ids[at : at + max_length], labels[at : at + max_length]) for at in range(0, size, max_length)]
        return [_row(piece, part) for piece, part in pieces if _trained(part)]
    keep = kept(size, max_length, strategy, whole)
    labels = align(targets[keep])
    if not _trained(labels):
        raise NoLabels.cut(size, max_length, strategy)
    return [_row(ids[keep], labels)]


def prompt_row(ids: list[int], max_length: int, strategy: str, whole: Sequence[tuple[int, int]] = ()) -> InputFeature | None:
    """A row to generate from: no labels. It can't be cut in pieces, so ``split`` says what ``raise`` says; so do the others
    where nothing would be left."""
    size = len(ids)
    if size > max_length:
        if strategy == "delete":
            return None
        if strategy in ("raise", "split"):
            raise RowTooLong(size, max_length, strategy)
        ids = ids[kept(size, max_length, strategy, whole)]
        if not ids:
            raise RowTooLong(size, max_length, strategy)
    return {"input_ids": ids, "length": len(ids)}


def _row(ids: list[int], labels: list[int]) -> InputFeature:
    return {"input_ids": ids, "labels": labels, "length": len(ids)}


def _trained(labels: Sequence[int]) -> bool:
    return any(label != IGNORE_INDEX for label in labels)
