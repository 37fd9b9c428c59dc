"""What a DatasetMeta points at, to a table of rows (L1)."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from twinkle_core import hub, settings
from twinkle_core.data import store
from twinkle_core.errors import DataError, NoSuchPath

if TYPE_CHECKING:
    import datasets

_JSON = (".json", ".jsonl", ".ndjson")
_TYPED = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_KNOWN = "json, jsonl, csv, tsv, parquet, arrow, and folders of these"
_OPEN: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """Where a data set is, and which part of it is wanted.

    Args:
        dataset_id: ``hf://org/name``, ``ms://org/name``, a local file (json, jsonl, csv, tsv, parquet, arrow; json also .gz,
            .bz2, .xz), a folder of them, or a folder written by ``save_as`` or ``datasets``' ``save_to_disk``. With ``data``
            only a name.
        subset_name: the configuration of a hub's data set.
        split: ``train``, ``test``, …
        data_slice: indices to take, in this order: a ``range`` or list. One beyond the end starts again at the beginning, with
            a warning.
        data: rows in memory; then nothing is read.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Sequence[int] | None = None
    data: Iterable[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not self.dataset_id and self.data is None:
            raise DataError.argument("dataset_id", self.dataset_id, "give an id or a path, or rows with data=")
        if self.data_slice is not None and not all(isinstance(i, int) for i in self.data_slice):
            raise DataError.argument("data_slice", self.data_slice, "a range or a list of whole numbers")

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.dataset_id or "the data in memory"


def load(meta: DatasetMeta) -> datasets.Dataset:
    """The rows that ``meta`` asks for.

    Raises:
        HubError: it isn't there. DataError: it can't be read, or has no such split or subset.
    """
    table = store.from_rows(meta.data) if meta.data is not None else _read(hub.resolve(meta.dataset_id, kind="dataset"), meta)
    return table if meta.data_slice is None else _take(table, meta)


def check_stream(meta: DatasetMeta) -> None:
    """What can be told of a stream before it is read.

    Raises:
        HubError: a local path that is not there, or an id without its hub. DataError: a slice that a stream can't give.
    """
    if meta.data_slice is not None and not (isinstance(meta.data_slice, range) and _ascends(meta.data_slice)):
        raise DataError.argument("data_slice", meta.data_slice, "a stream can only be cut by an ascending range from 0 up")
    if meta.data is None and not hub.is_hub_id(meta.dataset_id):
        hub.resolve(meta.dataset_id, kind="dataset")


def _ascends(cut: range) -> bool:
    return cut.start >= 0 and cut.step > 0


def stream(meta: DatasetMeta) -> Iterator[dict[str, Any]]:
    """The rows one after the other, read as they are asked for. Errors as for ``load``."""
    rows: Iterable[Mapping[str, Any]]
    if meta.data is not None:
        rows = meta.data
    elif meta.dataset_id.startswith(hub.HF):
        rows = _hub_stream(meta)
    else:
        path = hub.resolve(meta.dataset_id, kind="dataset")
        rows = json_rows(path) if path.is_file() and _is_json(path) else store.read_all(_read(path, meta))
    if meta.data_slice is not None:
        cut = meta.data_slice
        assert isinstance(cut, range)
        rows = itertools.islice(rows, cut.start, cut.stop, cut.step)
    return (dict(row) for row in rows)


def _hub_stream(meta: DatasetMeta) -> Iterable[dict[str, Any]]:
    import datasets

    if settings.offline():  # its own cache then
        return store.read_all(_read(hub.resolve(meta.dataset_id, kind="dataset"), meta))
    name = None if meta.subset_name == "default" else meta.subset_name
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            meta.dataset_id.removeprefix(hub.HF), name, split=meta.split, streaming=True
        )
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as cause:
        raise DataError.loading(meta.name, cause) from cause
    return rows


def _take(table: datasets.Dataset, meta: DatasetMeta) -> datasets.Dataset:
    indices, total = list(meta.data_slice or ()), len(table)
    if indices and total == 0:
        raise DataError.empty(meta.name)
    beyond = sum(not -total <= i < total for i in indices)
    if beyond:
        warnings.warn(
            f"data_slice asks for {beyond} rows beyond the {total} of {meta.name}; rows from its beginning are repeated",
            UserWarning,
            stacklevel=5,
        )
    return table.select([i % total for i in indices])


def _read(path: Path, meta: DatasetMeta) -> datasets.Dataset:
    if path.is_dir():
        return _read_folder(path, meta)
    if _is_json(path):
        return store.from_rows(json_rows(path))
    if path.suffix not in _TYPED:
        raise DataError.format(path, _KNOWN)
    return _builder(_TYPED[path.suffix], meta, [str(path)], sep="\t" if path.suffix == ".tsv" else None)


def _read_folder(path: Path, meta: DatasetMeta) -> datasets.Dataset:
    import datasets

    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(path))
        if meta.split not in splits:
            raise DataError.choice("split", meta.split, meta.name, map(str, splits))
        return splits[meta.split]
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    try:
        names = datasets.get_dataset_config_names(str(path))
        if meta.subset_name not in names and not (meta.subset_name == "default" and len(names) == 1):
            raise DataError.choice("subset", meta.subset_name, meta.name, names)
        subset = meta.subset_name if meta.subset_name in names else names[0]
        files = datasets.load_dataset_builder(str(path), name=subset).config.data_files
    except (FileNotFoundError, datasets.exceptions.DatasetsError) as cause:  # nothing in the folder is data
        raise NoSuchPath.empty(meta.name, _KNOWN) from cause
    if meta.split not in files:
        raise DataError.choice("split", meta.split, meta.name, map(str, files))
    paths = [Path(str(p)) for p in files[meta.split]]
    if all(_is_json(p) for p in paths):
        return store.from_rows(row for p in paths for row in json_rows(p))
    try:
        return datasets.load_dataset(str(path), name=subset, split=meta.split)
    except (ValueError, TypeError, datasets.exceptions.DatasetsError) as cause:
        raise DataError.loading(meta.name, cause) from cause


def _builder(kind: str, meta: DatasetMeta, files: list[str], sep: str | None) -> datasets.Dataset:
    import datasets

    options = {"sep": sep} if sep else {}
    try:
        return datasets.load_dataset(kind, data_files={meta.split: files}, split=meta.split, **options)
    except (ValueError, TypeError, OSError, datasets.exceptions.DatasetsError) as cause:
        raise DataError.loading(files[0], cause.__cause__ or cause) from cause


def _is_json(path: Path) -> bool:
    inner = path.with_suffix("") if path.suffix in _OPEN else path
    return inner.suffix in _JSON


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON Lines file, or of a JSON file: a list of objects, an object with such a list under ``data`` or ``rows``,
    or JSON Lines under that name.
    """
    inner = path.with_suffix("") if path.suffix in _OPEN else path
    with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
        if inner.suffix != ".json":
            yield from _lines(path, file)
            return
        try:
            value = json.load(file)
        except json.JSONDecodeError as cause:
            if not cause.msg.startswith("Extra data"):
                raise DataError.line(path, cause.lineno, str(cause)) from cause
            file.seek(0)
            yield from _lines(path, file)
            return
    yield from _document(path, value)


def _lines(path: Path, file: IO[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as cause:
            raise DataError.line(path, number, str(cause)) from cause
        if not isinstance(row, dict):
            raise DataError.line(path, number, f"it is a {type(row).__name__}")
        yield row


def _document(path: Path, value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        value = next((value[key] for key in ("data", "rows") if isinstance(value.get(key), list)), [value])
    if not isinstance(value, list):
        raise DataError.loading(path, f"it holds a {type(value).__name__}, not a list of objects")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError.not_rows(index, row)
        yield row
