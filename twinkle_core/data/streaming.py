"""Rows read one after the other and never held together (L1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from twinkle_core import registry
from twinkle_core.contracts.template import Template
from twinkle_core.data import sources, store
from twinkle_core.data.dataset import Row, Work, encoded_row, filtering, mapping
from twinkle_core.data.sources import DatasetMeta
from twinkle_core.errors import DataError
from twinkle_core.log import get_logger
from twinkle_core.runtime.dispatch import remote_class, remote_function


@remote_class(execute="first")
class IterableDataset:
    """A stream of rows: what ``map``, ``filter`` and ``encode`` ask for is done when a row is read. Each ``iter()`` starts
    anew.

    It has no length and no order but its own, so a ``DataLoader`` can't shuffle it, and resumes by reading up to the place. A
    data set of Hugging Face's hub is streamed from there, one of ModelScope's is downloaded first. Rows that are dropped are
    counted over a pass and logged at its end.

    Args:
        meta: as for ``Dataset``; ``data_slice`` may only be an ascending ``range``, which a stream that is too short ends
            early.
    """

    def __init__(self, meta: DatasetMeta | str | Path | Iterable[Mapping[str, Any]]) -> None:
        self.template: Template | None = None
        self.dropped: dict[str, int] = {}  # of the last whole pass
        self._parts: list[tuple[DatasetMeta, list[tuple[str, Work]]]] = []
        self._interleave = False
        self._encoded = False
        self.add_dataset(meta)

    @remote_function(dispatch="all", collect="first")
    def add_dataset(self, meta: DatasetMeta | str | Path | Iterable[Mapping[str, Any]]) -> None:
        """Another stream after those there are."""
        if self._encoded:
            raise DataError.encoded("add_dataset")
        meta = DatasetMeta.of(meta)
        sources.check_stream(meta)
        self._parts.append((meta, []))

    @remote_function(dispatch="all", collect="first")
    def mix_dataset(self, interleave: bool = True) -> None:
        """Take a row of each stream in turn while it lasts; False: one stream after the other."""
        store.check_flag("interleave", interleave)
        self._interleave = interleave

    @remote_function(dispatch="all", collect="first")
    def set_template(self, template_cls: Template | type[Template] | str, **kwargs: Any) -> None:
        """As ``Dataset.set_template``."""
        self.template = registry.build("template", template_cls, kwargs, contract=Template)

    @remote_function(dispatch="all", collect="first")
    def map(
        self,
        preprocessor: Callable[[Row], Any] | str | type,
        *,
        dataset_meta: DatasetMeta | None = None,
        **kwargs: Any,
    ) -> IterableDataset:
        """As ``Dataset.map``, when a row is read."""
        if self._encoded:
            raise DataError.encoded("map")
        name, work = mapping(preprocessor, kwargs)
        return self._then(name, work, dataset_meta)

    @remote_function(dispatch="all", collect="first")
    def filter(self, function: Callable[[Row], bool], *, dataset_meta: DatasetMeta | None = None) -> IterableDataset:
        """As ``Dataset.filter``, when a row is read."""
        name, work = filtering(function)
        return self._then(name, work, dataset_meta)

    @remote_function(dispatch="all", collect="first")
    def encode(self) -> IterableDataset:
        """As ``Dataset.encode``, when a row is read."""
        if self._encoded:
            raise DataError.encoded("encode")
        if self.template is None:
            raise DataError.no_template()
        template = self.template
        self._encoded = True
        return self._then("encode", lambda row, index: encoded_row(template, row, index), None)

    def _then(self, name: str, work: Work, meta: DatasetMeta | None) -> IterableDataset:
        chosen = [steps for m, steps in self._parts if meta is None or m is meta or m == meta]
        if not chosen and meta is not None:
            raise DataError.choice("part", meta.name, "the data set", [m.name for m, _ in self._parts])
        for steps in chosen:
            steps.append((name, work))
        return self

    @remote_function(dispatch="all", collect="first")
    def __iter__(self) -> Iterator[Row]:
        dropped: dict[str, int] = {}
        streams = [_through(sources.stream(meta), steps, dropped) for meta, steps in self._parts]
        if self._interleave:
            none = object()
            turns = itertools.chain.from_iterable(itertools.zip_longest(*streams, fillvalue=none))
            yield from (row for row in turns if row is not none)  # type: ignore[misc]
        else:
            yield from itertools.chain.from_iterable(streams)
        self.dropped = dropped
        for name, count in dropped.items():
            get_logger("data").info("%s dropped %d rows", name, count)


def _through(rows: Iterable[Row], steps: list[tuple[str, Work]], dropped: dict[str, int]) -> Iterator[Row]:
    for index, row in enumerate(rows):
        made: list[Mapping[str, Any]] = [row]
        for name, work in steps:
            new = [out for given in made for out in work(dict(given), index)]
            if made and not new:
                dropped[name] = dropped.get(name, 0) + 1
            made = new
        yield from map(dict, made)
