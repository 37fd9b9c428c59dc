"""Batches of rows, with a position that can be saved and found again (L1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_core.data.groups import flat
from twinkle_core.data.sampler import BatchRule, epoch_order, share
from twinkle_core.errors import DataError
from twinkle_core.runtime.dispatch import remote_class, remote_function
from twinkle_core.runtime.local import current_runtime, default_mesh

if TYPE_CHECKING:
    from twinkle_core.mesh import DeviceMesh


@remote_class(execute="first")
class DataLoader:
    """Yields lists of rows: this data rank's share of each global batch.

    Where models live on workers elsewhere, the process that drives them is no rank: its loader, or one on workers
    (``remote_group=``), yields global batches, which the model's verbs divide.

    Items that are groups (a pair of answers) give their rows one after the other, ``chosen, rejected, chosen, …``; sizes and
    positions count items.

    Each ``iter()`` is a new epoch with its own order, as with torch's loader. All ranks see the same number of batches; the
    rows of a short last batch are divided evenly, and a batch of fewer rows than data ranks leaves the last ranks an empty
    list (a ``min_batch_size`` of at least the number of data ranks prevents it).

    The position is a count of global samples passed: it grows with each batch handed out (rows read ahead by workers don't
    count), and a tail that is left out is passed with the epoch's last batch. Leaving an iterator early passes over the rest
    of its epoch as soon as the next one begins; of two iterators at once only the newer moves the position.

    Args:
        dataset: rows by index with a length, an iterable of rows without (a stream), or a callable that builds one.
        batch_size: rows of a **global** batch, over all data ranks.
        min_batch_size: leave out a last batch of fewer rows than this, with or without a mesh; None: keep any.
        device_mesh: gives this process's data rank; None: that of ``initialize(global_device_mesh=...)``, else one rank.
        shuffle: another order for each epoch, drawn from (seed, epoch) and nothing else.
        seed: of the order.
        num_workers: processes that read ahead (torch's); 0: rows are read when asked for.
        drop_last: leave out any last batch that is not full.

    Raises:
        DataError: an argument that can't be, or a data set that would give no batch at all; in reading, a data set whose
        length has changed since.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        seed: int = 42,
        num_workers: int = 0,
        drop_last: bool = False,
    ) -> None:
        mesh = (device_mesh or default_mesh()) if current_runtime().takes_part else None
        self._rank, self._world_size = (0, 1) if mesh is None else (mesh.data_rank, mesh.data_world_size)
        _whole("batch_size", batch_size, 1)
        _whole("num_workers", num_workers, 0)
        if batch_size < self._world_size:
            way = f"it is the global batch; {self._world_size} data ranks need a row each"
            raise DataError.argument("batch_size", batch_size, way)
        for name, switch in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(switch, bool):
                raise DataError.argument(name, switch, "it must be True or False")
        if min_batch_size is not None:
            _whole("min_batch_size", min_batch_size, 1)
            if min_batch_size > batch_size:
                raise DataError.argument("min_batch_size", min_batch_size, f"batch_size is only {batch_size}")
        self.batch_size, self.shuffle, self.seed, self.num_workers = batch_size, shuffle, seed, num_workers
        self._rule = BatchRule(batch_size, batch_size if drop_last else min_batch_size or 1)
        self.dataset = dataset() if callable(dataset) and not hasattr(dataset, "__getitem__") else dataset
        self._size = _size(self.dataset)
        if self._size is None and shuffle:
            raise DataError.unsized("shuffle=True")
        if self._size is None and num_workers:
            raise DataError.unsized(f"num_workers={num_workers}")
        if self._size is not None and not self._rule.count(self._size):
            rule = "drop_last" if drop_last else f"min_batch_size={self._rule.smallest}"
            if not self._size:
                raise DataError.empty("the data set")
            raise DataError.no_batches(self._size, f"batch_size={batch_size} and {rule}")
        self._position = 0  # global samples passed
        self._fresh = True  # the next iterator starts at the position, not at the epoch after it
        self._reader: object = None  # the newest iterator

    @remote_function(dispatch="all", collect="first")
    def __len__(self) -> int:
        """Batches of a whole epoch (an iteration that resumes within one gives fewer)."""
        if self._size is None:
            raise TypeError(str(DataError.unsized("len()")))
        return self._rule.count(self._size)

    @property
    @remote_function(dispatch="all", collect="first")
    def epoch(self) -> int:
        """The epoch of the position, from 0; exactly at the end of one it is the next."""
        return 0 if not self._size else self._position // self._size

    @remote_function(dispatch="all", collect="first")
    def get_state(self) -> dict[str, int]:
        """``{"consumed_train_samples": global samples passed since the first epoch}``; see the class for what counts."""
        return {"consumed_train_samples": self._position}

    @remote_function(dispatch="all", collect="first")
    def resume_from_checkpoint(self, consumed_train_samples: int) -> None:
        """Go to a position: the next ``iter()`` begins there, once; the epochs after it are whole.

        The number comes from ``get_state()`` of a loader with the same data, seed and ``shuffle``; batch size and number of
        ranks may differ.
        """
        _whole("consumed_train_samples", consumed_train_samples, 0)
        self._position, self._fresh, self._reader = consumed_train_samples, True, None

    @remote_function(dispatch="all", collect="first")
    def __iter__(self) -> Iterator[list[Any]]:
        reader = self._reader = object()
        if self._size is None:
            return self._stream(reader)
        self._check_size()
        if not self._fresh and self._position % self._size:
            self._position += self._size - self._position % self._size  # the rest of an epoch that was left
        if not self._rule.count(self._size - self._position % self._size):
            self._position += self._size - self._position % self._size  # no batch is left of this one
        return self._epoch(reader, *divmod(self._position, self._size))

    def _epoch(self, reader: object, epoch: int, offset: int) -> Iterator[list[Any]]:
        assert self._size is not None
        order = epoch_order(self._size, epoch, self.seed, self.shuffle)
        cuts = list(self._rule.cut(order, offset))
        mine = [list(share(batch, self._rank, self._world_size)) for batch, _ in cuts]
        start = epoch * self._size
        for rows, (_, after) in zip(self._read(mine), cuts, strict=True):
            if self._reader is reader:
                self._position, self._fresh = start + after, False
            yield rows

    def _read(self, batches: Sequence[list[int]]) -> Iterator[list[Any]]:
        if not self.num_workers:
            return (self._rows(batch) for batch in batches)
        import torch
        from torch.utils.data import DataLoader as Workers

        # Without a generator of its own, the workers' seed would be drawn from the global one.
        return iter(
            Workers(
                self.dataset,
                batch_sampler=batches,
                num_workers=self.num_workers,
                collate_fn=_in_order,
                generator=torch.Generator().manual_seed(self.seed),
            )
        )

    def _rows(self, batch: list[int]) -> list[Any]:
        self._check_size()
        return flat(self.dataset[i] for i in batch)

    def _check_size(self) -> None:
        if (now := len(self.dataset)) != self._size:
            raise DataError.resized(self._size or 0, now)

    def _stream(self, reader: object) -> Iterator[list[Any]]:
        """An epoch is one pass. How long it is shows only at its end, so a position is found by reading up to it."""
        skip, self._fresh = (self._position if self._fresh else 0), False
        while True:
            rows, read, yielded = iter(self.dataset), 0, False
            passed = sum(1 for _ in itertools.islice(rows, skip))
            skip -= passed
            read += passed
            while batch := list(itertools.islice(rows, self.batch_size)):
                read += len(batch)
                if self._reader is reader:
                    self._position += len(batch)
                if len(batch) < self._rule.smallest:
                    break
                yielded = True
                yield flat(share(batch, self._rank, self._world_size))
            if yielded:
                return
            if not read:
                raise DataError.empty("the data set")
            if not passed:
                raise DataError.no_batches(read, f"batch_size={self.batch_size} and batches of at least {self._rule.smallest}")
            # The position was at the end of a pass: this epoch is the next one.


def _in_order(items: list[Any]) -> list[Any]:
    return flat(items)


def _size(dataset: Any) -> int | None:
    if isinstance(dataset, Mapping):
        raise DataError.argument("dataset", dataset, "a mapping has no rows by index")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return len(dataset)
    if not hasattr(dataset, "__iter__"):
        raise DataError.argument("dataset", dataset, "it has neither rows by index nor an iterator")
    return None


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError.argument(name, value, f"a whole number from {least} up")
