"""Rows put together to a fixed length (L1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle_core.data.dataset import Dataset, DatasetMeta, Row
from twinkle_core.data.groups import is_group
from twinkle_core.errors import DataError
from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.types import MEDIA_FIELDS


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` in bins of at most ``capacity``: the longest first, each into the first bin with room.

    At most 11/9 of the fewest bins, and 2/3 of one (Dósa, 2007). Within a bin, and among bins by their first index, the order
    of the rows is kept. A tree over the bins' free room finds the first fit in logarithmic time.
    """
    leaves = 1
    while leaves < max(len(lengths), 1):
        leaves *= 2
    room = [capacity] * (2 * leaves)  # node k has the most room of its bins; all are empty at first
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        bins[node - leaves].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sorted(sorted(b) for b in bins if b)


def _length(index: int, row: Row, capacity: int) -> int:
    if is_group(row):
        raise DataError.packed_group(index)
    length = len(row["input_ids"])
    if length > capacity:
        raise DataError.in_row("a pack", index, f"its {length} tokens are more than max_length={capacity}")
    return length


@remote_class(execute="first")
class PackingDataset(Dataset):
    """Encodes, and puts the rows into packs of at most ``max_length`` tokens, for ``InputProcessor(padding_free=True)``.

    Rows before ``encode`` are conversations, after it packs: ``input_ids``, ``labels`` and ``position_ids`` of several rows
    one after the other (positions restart), with their lengths in ``seq_lens``; and pixels and grids of their images, with
    ``row_counts``. Other fields are left out.

    Args:
        meta: as for ``Dataset``.
        max_length: most tokens of a pack; None: the template's. A longer row is an error.
    """

    def __init__(self, meta: DatasetMeta | str | Path | Iterable[Mapping[str, Any]], max_length: int | None = None) -> None:
        if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
            raise DataError.argument("max_length", max_length, "a whole number from 1 up, or None for the template's")
        super().__init__(meta)
        self.max_length = max_length
        self.packs: list[list[int]] | None = None  # of indices of encoded rows

    def encode(self, num_proc: int | None = None) -> Dataset:
        capacity = self.max_length
        if capacity is None:
            capacity = getattr(self._needs_template(), "max_length", None)
        if not isinstance(capacity, int) or capacity < 1:
            raise DataError.argument("max_length", capacity, "a pack needs a length, and the template has none")
        before, dropped = self._parts, dict(self.dropped)
        super().encode(num_proc)
        try:
            lengths = [_length(index, row, capacity) for index, row in enumerate(super().__iter__())]
        except DataError:
            self._replace(before, self._metas)
            self._encoded, self.dropped = False, dropped
            raise
        self.packs = first_fit_decreasing(lengths, capacity)
        return self

    def __len__(self) -> int:
        return super().__len__() if self.packs is None else len(self.packs)

    def _row(self, index: int) -> Row:
        if self.packs is None:
            return super()._row(index)
        rows = [super(PackingDataset, self)._row(i) for i in self.packs[index]]
        lens = [len(row["input_ids"]) for row in rows]
        names = ["input_ids", "labels", *(["mm_token_type_ids"] if all("mm_token_type_ids" in row for row in rows) else [])]
        pack: Row = {name: [v for row in rows for v in row[name]] for name in names}
        pack.update(position_ids=[p for n in lens for p in range(n)], seq_lens=lens, length=sum(lens))
        counts: dict[str, list[int]] = {}
        for name in MEDIA_FIELDS:
            values = [row.get(name) for row in rows]
            if any(value is not None for value in values):
                pack[name] = _joined([value for value in values if value is not None])
                counts[name] = [0 if value is None else len(value) for value in values]
        return {**pack, "row_counts": counts} if counts else pack

    def __iter__(self) -> Iterator[Row]:
        return super().__iter__() if self.packs is None else (self._row(i) for i in range(len(self)))

    def filter(
        self, function: Callable[[Row], bool], *, num_proc: int | None = None, dataset_meta: DatasetMeta | None = None
    ) -> Dataset:
        """As ``Dataset.filter``, before ``encode``."""
        if self.packs is not None:
            raise DataError.encoded("filter")
        return super().filter(function, num_proc=num_proc, dataset_meta=dataset_meta)

    def mix_dataset(self, interleave: bool = True) -> None:
        if self.packs is not None:
            raise DataError.encoded("mix_dataset")
        super().mix_dataset(interleave)

    def save_as(self, path: str | Path) -> Path:
        """Write the packs."""
        return super().save_as(path) if self.packs is None else Dataset(list(self)).save_as(path)


def _joined(values: Sequence[Any]) -> Any:
    import numpy as np

    return np.concatenate([np.asarray(value) for value in values])
