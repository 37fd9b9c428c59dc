"""Which rows come when (L1): a function of numbers given, never of a global generator."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")


def epoch_order(size: int, epoch: int, seed: int, shuffle: bool) -> Sequence[int]:
    """The order of the rows in an epoch: a permutation drawn from (seed, epoch) alone."""
    if not shuffle:
        return range(size)
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a generator of its own; text seeds are hashed, so epochs don't overlap
    return order


def share(batch: Sequence[Row], rank: int, world_size: int) -> Sequence[Row]:
    """A data rank's part of a global batch: contiguous, sizes differ by at most one, the first ranks get the larger ones.

    A batch of fewer rows than ranks leaves the last ranks an empty part, so that all see the same number of batches.
    """
    small, larger = divmod(len(batch), world_size)
    start = rank * small + min(rank, larger)
    return batch[start : start + small + (rank < larger)]


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How an epoch is cut into global batches.

    ``smallest``: a last batch of fewer rows is left out; 1 keeps any, ``batch_size`` is ``drop_last``.
    """

    batch_size: int
    smallest: int = 1

    def count(self, rows: int) -> int:
        """Batches of ``rows`` rows."""
        whole, tail = divmod(rows, self.batch_size)
        return whole + (tail >= self.smallest and tail > 0)

    def cut(self, order: Sequence[int], start: int) -> Iterator[tuple[Sequence[int], int]]:
        """From position ``start`` on: (batch, position after it).

        The position after the last batch is the epoch's end, rows of a tail that is left out included: so a position says where
        in the order one is, whatever the batch size.
        """
        for _ in range(self.count(len(order) - start)):
            batch = order[start : start + self.batch_size]
            start += len(batch)
            yield batch, len(order) if self.count(len(order) - start) == 0 else start
