"""Data sets: rows from somewhere, mapped to conversations, encoded by a template (L1)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from twinkle_core import registry
from twinkle_core.contracts.template import Template
from twinkle_core.data import groups, sources, store
from twinkle_core.data.sources import DatasetMeta
from twinkle_core.errors import DataError, TwinkleError
from twinkle_core.log import get_logger
from twinkle_core.runtime.dispatch import remote_class, remote_function

if TYPE_CHECKING:
    import datasets

__all__ = ["Dataset", "DatasetMeta", "LazyDataset"]

Row = store.Row
#: what a step makes of a row and its index: rows
Work = Callable[[Row, int], "list[Mapping[str, Any]]"]


@remote_class(execute="first")
class Dataset:
    """Rows in memory or memory-mapped, in one or several parts.

    ::

        dataset = Dataset(DatasetMeta("ms://org/name", data_slice=range(1000)))
        dataset.set_template("chat", model_id="ms://Qwen/Qwen3-4B")
        dataset.map("self_cognition", model_name="Twinkle", model_author="us")
        dataset.encode()

    Several sets (``add_dataset``) are read one after the other until ``mix_dataset`` makes one of them. Values survive
    unchanged: what JSON can hold comes back as it went in.

    Args:
        meta: what to load; an id or a path alone, or a list of rows, will do too.
    """

    def __init__(self, meta: DatasetMeta | str | Path | Iterable[Mapping[str, Any]]) -> None:
        self.template: Template | None = None
        self.dropped: dict[str, int] = {}  # verb or preprocessor -> rows dropped
        self._encoded = False
        self._metas: list[DatasetMeta] = []
        self._parts: list[datasets.Dataset] = []
        self._joined: datasets.Dataset | None = None
        self.add_dataset(meta)

    # ------------------------------------------------------------------------------------------------ parts

    @remote_function(dispatch="all", collect="first")
    def add_dataset(self, meta: DatasetMeta | str | Path | Iterable[Mapping[str, Any]]) -> None:
        """Load another set after those there are. ``map(…, dataset_meta=meta)`` treats it alone."""
        if self._encoded:
            raise DataError.encoded("add_dataset")
        meta = DatasetMeta.of(meta)
        self._replace([*self._parts, sources.load(meta)], [*self._metas, meta])

    @remote_function(dispatch="all", collect="first")
    def mix_dataset(self, interleave: bool = True) -> None:
        """Make one set of all parts; every row is kept, none is repeated.

        Args:
            interleave: spread the rows of each part evenly over the whole; False: one part after the other.
        """
        store.check_flag("interleave", interleave)
        sizes = [len(part) for part in self._parts]
        table = store.join(self._parts)
        if interleave and len(sizes) > 1:
            starts = [sum(sizes[:k]) for k in range(len(sizes))]
            order = sorted(((i + 0.5) / n, k, starts[k] + i) for k, n in enumerate(sizes) for i in range(n))
            table = table.select([index for _, _, index in order])
        self._replace([table], self._metas[:1] if len(self._metas) == 1 else [])

    def _replace(self, parts: list[datasets.Dataset], metas: list[DatasetMeta]) -> None:
        self._parts, self._metas, self._joined = parts, metas, None

    def _table(self) -> datasets.Dataset:
        if self._joined is None:
            self._joined = store.join(self._parts)
        return self._joined

    def _chosen(self, meta: DatasetMeta | None) -> list[int]:
        if meta is None:
            return list(range(len(self._parts)))
        found = [k for k, m in enumerate(self._metas) if m is meta] or [k for k, m in enumerate(self._metas) if m == meta]
        if not found:
            raise DataError.choice("part", meta.name, "the data set", [m.name for m in self._metas])
        return found

    # ------------------------------------------------------------------------------------------------ rows to rows

    @remote_function(dispatch="all", collect="first")
    def map(
        self,
        preprocessor: Callable[[Row], Any] | str | type,
        *,
        num_proc: int | None = None,
        dataset_meta: DatasetMeta | None = None,
        **kwargs: Any,
    ) -> Dataset:
        """Replace each row by what a preprocessor makes of it; None drops it (counted in ``dropped``, logged once).

        Args:
            preprocessor: a callable row -> row, or a preprocessor's class or name.
            num_proc: processes; None: this one.
            dataset_meta: map only this part.
            **kwargs: of the preprocessor's constructor.

        Raises:
            DataError: a row lacks what the preprocessor needs (the text names row and keys), or it returns something else.
        """
        if self._encoded:
            raise DataError.encoded("map")
        name, work = mapping(preprocessor, kwargs)
        self._run(work, name, num_proc, dataset_meta)
        return self

    @remote_function(dispatch="all", collect="first")
    def filter(
        self, function: Callable[[Row], bool], *, num_proc: int | None = None, dataset_meta: DatasetMeta | None = None
    ) -> Dataset:
        """Keep the rows for which ``function`` is true."""
        name, work = filtering(function)
        self._run(work, name, num_proc, dataset_meta)
        return self

    def _run(
        self, work: Callable[[Row, int], Any], name: str, num_proc: int | None, meta: DatasetMeta | None, encoded: bool = False
    ) -> None:
        parts, dropped, total = list(self._parts), 0, 0
        for k in self._chosen(meta):
            total += len(parts[k])
            parts[k], lost = store.map_rows(
                parts[k], work, encoded=encoded or self._encoded, num_proc=num_proc, description=name
            )
            dropped += lost
        self._replace(parts, self._metas)
        if dropped:
            self.dropped[name] = self.dropped.get(name, 0) + dropped
            get_logger("data").info("%s dropped %d of %d rows", name, dropped, total)

    # ------------------------------------------------------------------------------------------------ encoding

    @remote_function(dispatch="all", collect="first")
    def set_template(self, template_cls: Template | type[Template] | str, **kwargs: Any) -> None:
        """Which template encodes: an object, a class or a name; ``kwargs`` are its constructor's."""
        self.template = registry.build("template", template_cls, kwargs, contract=Template)

    @remote_function(dispatch="all", collect="first")
    def encode(self, num_proc: int | None = None) -> Dataset:
        """Conversations to rows of token ids and aligned labels. Of a group (``{"positive", "negative"}``: see
        ``twinkle_core.data.groups``) each member is encoded, and it stays one row of the set.

        Rows that the template drops (strategy ``delete``) are counted in ``dropped["encode"]`` and logged once; ``split`` makes
        several rows of one.

        Raises:
            DataError: no template, or a row that it refuses (the text names the row and the reason).
        """
        if self._encoded:
            raise DataError.encoded("encode")
        template = self._needs_template()

        def work(row: Row, index: int) -> list[Mapping[str, Any]]:
            return encoded_row(template, row, index)

        self._run(work, "encode", num_proc, None, encoded=True)
        self._encoded = True
        return self

    @remote_function(dispatch="all", collect="first")
    def check(self) -> dict[int, str]:
        """Which rows the template would refuse, and why."""
        template = self._needs_template()
        found = {i: groups.check(template, row) for i, row in enumerate(store.read_all(self._table()))}
        return {index: reason for index, reason in found.items() if reason is not None}

    def _needs_template(self) -> Template:
        if self.template is None:
            raise DataError.no_template()
        return self.template

    # ------------------------------------------------------------------------------------------------ reading and writing

    @remote_function(dispatch="all", collect="first")
    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    @remote_function(dispatch="all", collect="first")
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a data set of {len(self)} rows")
        return self._row(index % len(self))

    def _row(self, index: int) -> Row:
        return store.read(self._table(), index)

    @remote_function(dispatch="all", collect="first")
    def __iter__(self) -> Iterator[Row]:
        return iter(store.read_all(self._table()))

    @remote_function(dispatch="all", collect="first")
    def save_as(self, path: str | Path) -> Path:
        """Write the rows: ``*.jsonl`` or ``*.json`` as text, ``*.parquet``, anything else as a folder.

        ``DatasetMeta(path)`` reads each of them back to the same rows. What is there is replaced once all rows are written; it
        may be what this data set was read from.

        Raises:
            DataError: a row can't be written, or what is there is no such file or folder.
        """
        target = Path(path).expanduser().absolute()
        single = target.suffix in (".jsonl", ".json", ".parquet")
        if target.exists() and not (target.is_file() if single else (target / "state.json").is_file()):
            raise DataError.in_the_way(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh, old = (target.with_name(f".{target.stem}-{os.getpid()}-{what}{target.suffix}") for what in ("new", "old"))
        try:
            self._write(fresh)
            if not single and target.exists():
                target.replace(old)
            fresh.replace(target)
        finally:
            for rest in (fresh, old):
                shutil.rmtree(rest) if rest.is_dir() else rest.unlink(missing_ok=True)
        return target

    def _write(self, target: Path) -> None:
        if target.suffix in (".jsonl", ".json"):
            lines = (store.dumps(row, index) for index, row in enumerate(self))
            with target.open("w", encoding="utf-8") as file:
                if target.suffix == ".json":
                    file.write("[\n" + ",\n".join(lines) + "\n]\n")
                else:
                    file.writelines(line + "\n" for line in lines)
            return
        table = self._table()
        if not store.is_kept(table):
            table = store.map_rows(table, lambda row, _: [row], encoded=False, num_proc=None, description="saving")[0]
        if target.suffix == ".parquet":
            table.to_parquet(str(target))
        else:
            table.save_to_disk(str(target))

    def __repr__(self) -> str:
        state = "encoded" if self._encoded else "raw"
        return f"{type(self).__name__}({', '.join(m.name for m in self._metas) or 'mixed'}: {len(self)} rows, {state})"


class LazyDataset(Dataset):
    """Encodes a row when it is read: ``encode`` returns at once, and no encoded copy of the data is kept.

    The number of rows must be known before any is read, so the template's strategies ``delete`` and ``split`` are refused.
    """

    def encode(self, num_proc: int | None = None) -> Dataset:
        if self._encoded:
            raise DataError.encoded("encode")
        strategy = getattr(self._needs_template(), "truncation_strategy", "raise")
        if strategy in ("delete", "split"):
            raise DataError.lazy(strategy)
        self._encoded = True
        return self

    def filter(
        self, function: Callable[[Row], bool], *, num_proc: int | None = None, dataset_meta: DatasetMeta | None = None
    ) -> Dataset:
        """As ``Dataset.filter``, before ``encode``."""
        if self._encoded:
            raise DataError.encoded("filter")
        return super().filter(function, num_proc=num_proc, dataset_meta=dataset_meta)

    def _row(self, index: int) -> Row:
        row = super()._row(index)
        if not self._encoded:
            return row
        encoded = encoded_row(self._needs_template(), row, index)
        if len(encoded) != 1:
            raise DataError.lazy("delete" if not encoded else "split")
        return dict(encoded[0])

    def __iter__(self) -> Iterator[Row]:
        return (self._row(i) for i in range(len(self)))


def called(name: str, value: Any) -> Any:
    """The value, if it can be called with a row."""
    if not callable(value):
        raise DataError.argument(name, value, "it must be something to call with a row")
    return value


def mapping(preprocessor: Any, kwargs: Mapping[str, Any]) -> tuple[str, Work]:
    """What ``map`` is called in messages, and what it makes of a row: one row, or none."""
    function = called("preprocessor", registry.build("preprocessor", preprocessor, kwargs))
    name = getattr(function, "__name__", None) or type(function).__name__

    def work(row: Row, index: int) -> list[Mapping[str, Any]]:
        new = in_row(name, index, function, row)
        if new is not None and not isinstance(new, Mapping):
            raise DataError.returned(name, new)
        return [] if new is None else [new]

    return name, work


def filtering(function: Any) -> tuple[str, Work]:
    """What ``filter`` is called in messages, and what it makes of a row: the row, or none."""
    called("function", function)
    name = getattr(function, "__name__", None) or type(function).__name__
    return f"filter {name}", lambda row, index: [row] if in_row(name, index, function, row) else []


def in_row(what: str, index: int, function: Callable[[Row], Any], row: Row) -> Any:
    """Call it; twinkle's own errors get the row's number. Others keep their traceback, which says more."""
    try:
        return function(row)
    except TwinkleError as cause:
        raise DataError.in_row(what, index, cause) from cause


def encoded_row(template: Template, row: Row, index: int) -> list[Mapping[str, Any]]:
    """What a template makes of one row; its errors get the row's number."""
    rows: list[Mapping[str, Any]] = in_row("encode", index, lambda given: groups.encode(template, given), row)
    return rows
