"""Dividing the arguments of a call over workers (L0)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import NotCut
from twinkle_core.isolation import attempt

#: rows -> sizes of consecutive groups that stay together
Grouping = Callable[[Sequence[Any]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows were divided. ``lengths``: tokens of each row, where they are encoded; ``left``: rows are padded on the left."""

    ranges: tuple[range, ...]
    count: int
    lengths: tuple[int, ...] = ()
    left: bool = False

    def rows(self, value: Any) -> list[Any]:
        """The rows' own parts."""
        if isinstance(value, Mapping):
            from twinkle_core.train import micro  # a collated batch holds tensors

            return [micro.cut_batch(value, part) if len(part) else [] for part in self.ranges]
        return [value[part.start : part.stop] for part in self.ranges]

    def _of_tokens(self, value: Any, part: range) -> Any:
        """One number for each token, as wide as the widest row of all: zeros where a part's own rows end before."""
        beyond = value.shape[1] - max((self.lengths[i] for i in part), default=0)
        if not beyond:
            return value
        value = value.clone() if hasattr(value, "clone") else value.copy()
        value[:, slice(0, beyond) if self.left else slice(-beyond, None)] = 0
        return value

    def beside(self, value: Any) -> list[Any]:
        """Another argument: divided where it has an entry for each row (or for each token of packed rows), else the same."""
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) > 1 and shape[0] == self.count == len(self.lengths) and shape[1] == max(self.lengths):
            return [self._of_tokens(value[part.start : part.stop], part) for part in self.ranges]
        if (shape and shape[0] == self.count) or (isinstance(value, (list, tuple)) and len(value) == self.count):
            return [value[part.start : part.stop] for part in self.ranges]
        if len(shape) > 1 and shape[0] == 1 and self.lengths and shape[1] == sum(self.lengths):
            ends = [(sum(self.lengths[: part.start]), sum(self.lengths[: part.stop])) for part in self.ranges]
            return [value[:, start:stop] for start, stop in ends]
        return [value] * len(self.ranges)


def of(function: str, rows: Any, shares: int, grouping: Grouping | None = None, *, left: bool = False) -> tuple[Any, Cut]:
    """The rows (a single one as a list) and how they are divided, as a DataLoader divides them over data ranks.

    Raises:
        NotCut: it is nothing that has rows.
    """
    rows = [rows] if isinstance(rows, Mapping) and not _collated(rows) else rows
    count = _count(function, rows)
    sizes = _sizes(rows, count, grouping)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    small, larger = divmod(len(sizes), shares)
    starts = [share * small + min(share, larger) for share in range(shares + 1)]
    ranges = tuple(range(ends[a], ends[b]) for a, b in itertools.pairwise(starts))
    return rows, Cut(ranges, count, _lengths(rows), left)


def _collated(rows: Mapping[str, Any]) -> bool:
    from twinkle_core.train import micro

    return micro.is_collated(rows)


def _count(function: str, rows: Any) -> int:
    if isinstance(rows, Mapping):
        from twinkle_core.train import micro

        return micro.row_count(rows)
    shape = getattr(rows, "shape", None)
    if shape is not None and len(shape):
        return int(shape[0])
    if shape is not None or isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
        raise NotCut(function, type(rows).__name__)
    return len(rows)


def _sizes(rows: Any, count: int, grouping: Grouping | None) -> list[int]:
    """Rows that stay together. Where they can't be grouped, the model says why when it sees them."""
    if grouping is None:
        return [1] * count
    if isinstance(rows, Mapping):
        from twinkle_core.train import micro

        seen: Sequence[Any] = [micro.cut_batch(rows, range(i, i + 1)) for i in range(count)]
    else:
        seen = rows
    found = attempt(lambda: list(grouping(seen))).value
    return found if found is not None and sum(found) == count and min(found, default=1) > 0 else [1] * count


def _lengths(rows: Any) -> tuple[int, ...]:
    if isinstance(rows, Mapping):
        return tuple(rows.get("seq_lens") or ())
    if isinstance(rows, (list, tuple)) and all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
        return tuple(len(row["input_ids"]) for row in rows)
    return ()


#: what is told of an adapter: its name, how its rows are grouped, and whether they are padded on the left
Told = tuple[str, Grouping | None, bool]


@dataclass(frozen=True, slots=True)
class Each:
    """How rows of several adapters were divided over so many ``shares``.

    ``cuts``: by the name that was given with the rows; ``names``: whose each name is that was given anywhere.
    """

    cuts: Mapping[str, Cut]
    names: Mapping[str, str]
    shares: int

    def beside(self, value: Any) -> list[Any]:
        """Another argument. Of one that names adapters each adapter's part is divided as its rows are. Any other is meant for
        all of them: where it has an entry for each row of one of them, each gets its own part."""
        if isinstance(value, Mapping) and any(isinstance(name, str) and name in self.names for name in value):
            by = {self.names[name]: how for name, how in self.cuts.items()}
            parts = {name: self._part(by.get(self.names.get(name, "")), own) for name, own in value.items()}
        else:
            parts = {name: how.beside(value) for name, how in self.cuts.items()}
            if all(part is value for part in itertools.chain.from_iterable(parts.values())):
                return [value] * self.shares
        return [{name: own[share] for name, own in parts.items()} for share in range(self.shares)]

    def _part(self, how: Cut | None, value: Any) -> list[Any]:
        return how.beside(value) if how is not None else [value] * self.shares

    def starts(self, share: int) -> dict[str, int]:
        """The number of the share's first row, by adapter."""
        return {self.names[name]: how.ranges[share].start for name, how in self.cuts.items()}


def each(function: str, rows: Mapping[str, Any], told: Mapping[str, Told], shares: int) -> tuple[list[dict[str, Any]], Each]:
    """Rows of several adapters, those of each divided as ``of`` divides them.

    Args:
        told: of every name among the arguments that an adapter has.

    Raises:
        NotCut
    """
    parts: dict[str, list[Any]] = {}
    cuts: dict[str, Cut] = {}
    for name, own in rows.items():
        _, grouping, left = told[name]
        whole, cuts[name] = of(function, own, shares, grouping, left=left)
        parts[name] = cuts[name].rows(whole)
    names = {name: whose for name, (whose, _, _) in told.items()}
    return [{name: own[share] for name, own in parts.items()} for share in range(shares)], Each(cuts, names, shares)
